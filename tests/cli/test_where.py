"""Where the database is, how a command ends when that is unclear, and that no password is ever printed."""

import os
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core.database.migrate import newest
from durable_core.local.services import Addresses
from durable_core.testing import create_database, drop_database
from tests.cli.conftest import DURABLE, error_of, process, value_of

APP = """
import os
from celery import Celery
from sqlalchemy import create_engine
from durable_core.celery_binding import install

app = Celery("proj", broker="memory://")
app.conf.durable_engine = lambda: create_engine(os.environ["PROJ_DATABASE"])
app.conf.durable_sweep_intervals = {"reap": 7.0}
install(app)
"""


@pytest.fixture
def url(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def test_without_a_database_the_ways_to_name_one_are_said(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("--directory", str(tmp_path), "status", "--json")

    assert (result.exit_code, error_of(result)) == (2, "NO_DATABASE")
    for way in ("-A", "--database-url", "DURABLE_DATABASE_URL", "durable up"):
        assert way in result.stderr


def test_the_option_may_stand_before_or_after_the_command(run: Callable[..., Result], url: str) -> None:
    assert run("--database-url", url, "status").exit_code == 0
    assert run("status", "--database-url", url).exit_code == 0


def test_what_is_on_the_line_wins_over_the_variable(
    run: Callable[..., Result], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    assert run("--database-url", url, "status").exit_code == 0
    assert error_of(run("status", "--json")) == "DATABASE_UNREACHABLE"
    monkeypatch.setenv("DURABLE_DATABASE_URL", url.replace("+psycopg", ""))
    assert run("status").exit_code == 0


def test_the_variable_is_named_in_the_help(run: Callable[..., Result]) -> None:
    assert "DURABLE_DATABASE_URL" in run("status", "--help").stdout
    assert "DURABLE_SCHEMA" in run("--help").stdout


def test_the_app_says_where_the_database_is_and_wins(url: str, tmp_path: Path) -> None:
    (tmp_path / "proj.py").write_text(textwrap.dedent(APP))
    env = {"PROJ_DATABASE": url, "DURABLE_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}

    done = process("-A", "proj", "status", "--json", cwd=tmp_path, env=env)

    assert done.returncode == 0, done.stderr
    assert '"interval_seconds": 7.0' in done.stdout


@pytest.mark.parametrize("content", ["", "raise ImportError('no such driver')", "app = 1"])
def test_an_app_that_cannot_be_loaded_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "proj.py").write_text(content)
    done = process("-A", "proj", "status", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert '"APP_NOT_LOADED"' in done.stdout
    assert "Traceback" not in done.stderr


def test_an_app_that_misses_an_address_is_told_where_to_take_it_from(tmp_path: Path) -> None:
    """The second terminal of `durable up` in which nobody said `eval` yet."""
    (tmp_path / "proj.py").write_text("import os\nos.environ['DURABLE_REDIS_URL']\n")
    without = subprocess.run(
        [*DURABLE, "-A", "proj", "status", "--json"], cwd=tmp_path, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("DURABLE_")},
    )  # fmt: skip
    assert without.returncode == 2
    assert "it needs DURABLE_REDIS_URL, which is not set" in without.stderr
    assert 'eval "$(durable env)"' in without.stderr


def test_an_app_of_another_kind_is_told_how_to_name_the_celery_app_beside_it(tmp_path: Path, url: str) -> None:
    """As in a module that has a web app called `app`."""
    celery_app = re.sub(r"\bapp\b", "celery_app", APP)
    (tmp_path / "proj.py").write_text(f"{celery_app}\napp = object()\n")
    done = process("-A", "proj", "status", cwd=tmp_path)
    assert done.returncode == 2
    assert "-A proj:celery_app" in done.stderr
    assert process("-A", "proj:celery_app", "status", cwd=tmp_path, env={"PROJ_DATABASE": url}).returncode == 0


def test_an_app_without_durable_work_is_told_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "proj.py").write_text("from celery import Celery\napp = Celery('proj')\n")
    done = process("-A", "proj", "status", cwd=tmp_path)
    assert done.returncode == 2
    assert "install(app)" in done.stderr


@pytest.mark.parametrize("address", ["postgresql://a:topsecret@127.0.0.1:1/x", "mysql://a:topsecret@h/x", "topsecret"])
def test_no_password_is_printed_when_the_address_is_no_good(run: Callable[..., Result], address: str) -> None:
    result = run("--database-url", address, "status", "--json")
    assert result.exit_code in (1, 2)
    assert "topsecret" not in result.stdout + result.stderr


def test_a_wrong_password_is_not_printed(run: Callable[..., Result], services: Addresses) -> None:
    address = services.database_url.replace("//durable:", "//durable:wrong-and-long-")
    result = run("--database-url", address, "status", "--json")
    assert result.exit_code == 1
    assert "wrong-and-long-" not in result.stdout + result.stderr


def test_a_usage_error_is_json_too(run: Callable[..., Result]) -> None:
    result = run("deliveries", "show", "--json")
    assert (result.exit_code, error_of(result)) == (2, "USAGE")


def test_a_schema_name_that_needs_quoting_is_a_usage_error(run: Callable[..., Result]) -> None:
    for name in ('x"; drop', "order"):
        result = run("--schema", name, "status", "--json")
        assert (result.exit_code, error_of(result)) == (2, "USAGE")
        assert name in result.stderr


@pytest.fixture
def empty(services: Addresses, worker_id: str) -> object:
    name = f"durable_cli_{worker_id}_{os.getpid()}"
    yield create_database(services.database_url, name).render_as_string(hide_password=False)
    drop_database(services.database_url, name)


class TestMigrate:
    def test_brings_an_empty_database_up_and_then_has_nothing_to_do(
        self, run: Callable[..., Result], empty: str
    ) -> None:
        behind = run("--database-url", empty, "status", "--json")
        assert (behind.exit_code, error_of(behind)) == (1, "SCHEMA_BEHIND")
        assert "durable migrate" in behind.stderr

        looked = value_of(run("--database-url", empty, "migrate", "--dry-run", "--json"))
        assert looked["dry_run"] is True
        assert looked["revisions"]
        assert error_of(run("--database-url", empty, "status", "--json")) == "SCHEMA_BEHIND"

        ran = value_of(run("--database-url", empty, "migrate", "--json"))
        assert ran["revisions"] == looked["revisions"]
        assert run("--database-url", empty, "status").exit_code == 0
        again = run("--database-url", empty, "migrate")
        assert (again.exit_code, "nothing to do" in again.stdout) == (0, True)

    def test_the_printed_sql_makes_the_same_schema(self, run: Callable[..., Result], empty: str) -> None:
        import psycopg

        printed = run("--schema", "elsewhere", "migrate", "--sql")
        assert printed.exit_code == 0
        with psycopg.connect(empty.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(printed.stdout.encode())
        assert run("--database-url", empty, "--schema", "elsewhere", "status").exit_code == 0
        assert run("--database-url", empty, "status").exit_code == 1

    def test_a_schema_from_the_future_is_not_called_behind(self, run: Callable[..., Result], empty: str) -> None:
        from sqlalchemy import create_engine

        assert run("--database-url", empty, "migrate").exit_code == 0
        engine = create_engine(empty)
        with engine.begin() as connection:
            connection.execute(text("update durable.schema_version set version_num = '9999'"))
        engine.dispose()
        result = run("--database-url", empty, "migrate", "--json")
        assert (result.exit_code, error_of(result)) == (1, "SCHEMA_AHEAD")

    @pytest.mark.parametrize("line", [("--sql", "--dry-run"), ("--from", "0001"), ("--sql", "--from", "77")])
    def test_options_that_do_not_fit_are_a_usage_error(self, run: Callable[..., Result], line: tuple[str, ...]) -> None:
        assert run("migrate", *line).exit_code == 2


def test_a_read_cannot_write_and_ends_within_its_time(engine: Engine) -> None:
    from durable_core.cli.database import reading
    from durable_core.database.connections import Database

    with reading(Database(engine)) as (connection, revision):
        assert revision == newest()
        assert connection.scalar(text("show transaction_read_only")) == "on"
        assert connection.scalar(text("show statement_timeout")) == "5s"
    with engine.connect() as connection:
        assert connection.scalar(text("show statement_timeout")) == "0"
