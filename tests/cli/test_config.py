"""`durable config`: every setting with its value and its source, and names that nothing reads."""

import ast
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from durable_core.celery_binding import known
from durable_core.celery_binding.known import defaults
from durable_core.cli.config import OWN, PLAIN, variables
from tests.cli.conftest import error_of, process, value_of

Run = Callable[..., Result]
PACKAGE = Path(known.__file__).parents[1]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A user's app with these lines in its set-up; its database does not answer, and nobody asks it."""

    def _app(*lines: str) -> str:
        text = """
            from celery import Celery
            from sqlalchemy import create_engine
            from durable_core.celery_binding import install
            app = Celery("config_app", broker="memory://", set_as_current=False)
            app.conf.durable_engine = create_engine("postgresql+psycopg://shop:hunter2secret@127.0.0.1:1/shop")
        """
        (tmp_path / "config_app.py").write_text(textwrap.dedent(text) + "\n".join([*lines, "install(app)"]))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "config_app", raising=False)
        return "config_app"

    return _app


def settings(result: Result, of: str = "settings") -> dict[str, tuple[Any, str]]:
    return {one["name"]: (one["value"], one["source"]) for one in value_of(result)[of]}


def test_every_setting_is_there_and_a_default_says_so(run: Run, app: Callable[..., str]) -> None:
    found = settings(run("config", "-A", app("app.conf.durable_lease_seconds = 60"), "--json"))
    assert list(found) == list(defaults())
    assert found["durable_lease_seconds"] == (60, "app")
    assert found["durable_heartbeat_seconds"] == (8.0, "default")
    assert found["durable_retention_days"] == (14.0, "default")
    assert found["durable_sessionmaker"] == (None, "default")
    assert found["durable_engine"] == ("postgresql+psycopg://shop:***@127.0.0.1:1/shop", "app")
    assert found["durable_schema"] == ("durable", "default")

    told = run("config", "-A", app("app.conf.durable_beat = False")).stdout.splitlines()
    assert told[0].split() == ["SETTING", "VALUE", "SOURCE"]
    assert ["durable_beat", "off", "app"] in [line.split() for line in told]


def test_a_namespace_of_celery_is_the_app_too(run: Run, app: Callable[..., str]) -> None:
    lines = (
        "class Own: CELERY_BROKER_URL = 'memory://'; CELERY_DURABLE_RETENTION_DAYS = 3; CELERY_DURABLE_LEASES = 4",
        "engine = app.conf.durable_engine",
        "app = Celery('config_app', set_as_current=False)",
        "Own.CELERY_DURABLE_ENGINE = engine",
        "app.config_from_object(Own, namespace='CELERY')",
    )
    result = run("config", "-A", app(*lines), "--json")
    assert settings(result)["durable_retention_days"] == (3, "app")
    assert value_of(result)["unknown"] == [{"name": "durable_leases", "nearest": "durable_lease_seconds"}]


def test_a_flag_and_a_variable_say_so(run: Run, app: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = app("app.conf.durable_schema = 'work'")
    assert settings(run("config", "-A", name, "--json"))["durable_schema"] == ("work", "app")
    assert settings(run("config", "-A", name, "--schema", "other", "--json"))["durable_schema"] == ("other", "flag")
    monkeypatch.setenv("DURABLE_SCHEMA", "third")
    # The app has a mind of its own: the variable is not asked.
    assert settings(run("config", "-A", name, "--json"))["durable_schema"] == ("work", "app")
    assert settings(run("config", "--json"))["durable_schema"] == ("third", "environment")
    monkeypatch.setenv("DURABLE_DATABASE_URL", "postgresql://shop:hunter2secret@db.internal/shop")
    found = run("config", "--json")
    assert settings(found)["durable_engine"] == ("postgresql+psycopg://shop:***@db.internal/shop", "environment")
    assert settings(found, "variables")["DURABLE_SCHEMA"] == ("third", "environment")
    on_the_line = run("config", "--database-url", "postgresql://a@b/c", "--json")
    assert settings(on_the_line)["durable_engine"] == ("postgresql+psycopg://a@b/c", "flag")


def test_the_deployable_app_takes_its_database_from_the_environment(tmp_path: Path) -> None:
    env = {"DURABLE_DATABASE_URL": "postgresql://shop:hunter2secret@db.internal/shop", "DURABLE_SCHEMA": "work"}
    done = process("-A", "tasks", "config", "--json", cwd=PACKAGE.parent, env=env)
    assert done.returncode == 0, done.stderr
    import json

    found = {one["name"]: (one["value"], one["source"]) for one in json.loads(done.stdout)["settings"]}
    assert found["durable_engine"] == ("engine_from_environment", "environment")
    assert found["durable_schema"] == ("work", "environment")
    assert "hunter2" not in done.stdout


@pytest.mark.parametrize("key", ["'hunter2secret'", "b'hunter2secret'", "['hunter2secret']"])
def test_the_key_of_journals_is_masked_also_where_it_is_refused(run: Run, app: Callable[..., str], key: str) -> None:
    result = run("config", "-A", app(f"app.conf.durable_journal_key = {key}"), "--json")
    assert settings(result)["durable_journal_key"] == ("***", "app")
    assert "hunter2secret" not in result.output
    assert bool(value_of(result)["problems"]) == (not key.startswith("'"))


def test_no_secret_is_shown(run: Run, app: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables():
        # Of its own: a password that was met once is masked everywhere.
        monkeypatch.setenv(name, "hunter2-of-a-variable")
    monkeypatch.setenv("DURABLE_SCHEMA", "durable")
    monkeypatch.setenv("DURABLE_DATABASE_URL", "postgresql://shop:hunter2secret@db/shop")
    monkeypatch.setenv("DURABLE_REDIS_URL", "redis://:hunter2secret@cache:6379/0")
    for name in PLAIN:
        monkeypatch.setenv(name, "plain")
    for line in (("config",), ("config", "--json"), ("config", "-A", app())):
        result = run(*line)
        assert result.exit_code == 0, result.stderr
        assert "hunter2" not in result.stdout + result.stderr
    found = settings(run("config", "--json"), "variables")
    assert set(found) == set(variables())
    assert found["DURABLE_REDIS_URL"] == ("redis://:***@cache:6379/0", "environment")
    assert found["DURABLE_SMTP_URL"] == ("***", "environment")


def test_a_name_that_nothing_reads_is_said_with_the_nearest(
    run: Run, app: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABSE_URL", "postgresql://shop:hunter2secret@db/shop")
    name = app("app.conf.durable_lease_second = 5", "app.conf.durable_xyzzy = 'hunter2secret'")
    result = run("config", "-A", name, "--json")
    assert value_of(result)["unknown"] == [
        {"name": "durable_lease_second", "nearest": "durable_lease_seconds"},
        {"name": "durable_xyzzy", "nearest": None},
        {"name": "DURABLE_DATABSE_URL", "nearest": "DURABLE_DATABASE_URL"},
    ]
    told = run("config", "-A", name)
    assert "nothing reads durable_lease_second; did you mean durable_lease_seconds?" in told.stderr
    assert told.exit_code == 0
    assert "hunter2" not in told.stdout + told.stderr


def test_a_setting_that_is_refused_is_shown_as_it_was_given(run: Run, app: Callable[..., str]) -> None:
    result = run("config", "-A", app("app.conf.durable_lease_seconds = 'long'"), "--json")
    assert settings(result)["durable_lease_seconds"] == ("long", "app")
    (problem,) = value_of(result)["problems"]
    assert problem.startswith("durable_lease_seconds='long'")


def test_a_value_that_json_has_no_word_for_is_shown_as_text(run: Run, app: Callable[..., str]) -> None:
    lines = ("from datetime import timedelta", "app.conf.durable_lease_seconds = timedelta(seconds=45)")
    result = run("config", "-A", app(*lines), "--json")
    assert result.exit_code == 0, result.stderr
    assert settings(result)["durable_lease_seconds"] == ("datetime.timedelta(seconds=45)", "app")


def test_an_app_without_durable_work_says_so(run: Run, app: Callable[..., str]) -> None:
    name = app("install = lambda app: None")
    result = run("config", "-A", name, "--json")
    assert (result.exit_code, error_of(result)) == (2, "NOT_INSTALLED")


# --- the tables are complete -------------------------------------------------------------------------


def texts(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_setting_that_the_binding_reads_is_known() -> None:
    """One that is read and not known would be told to be a misspelling."""
    read = {
        found
        for path in (PACKAGE / "celery_binding").glob("*.py")
        for text in texts(path)
        for found in re.findall(r"^durable_[a-z_]+$", text)
    } - {"durable_core", "durable_kind"}
    assert read <= set(defaults())
    assert {"durable_lease_seconds", "durable_engine"} <= read


def test_every_variable_that_the_package_reads_is_known() -> None:
    read = {
        found
        for path in PACKAGE.rglob("*.py")
        for text in texts(path)
        for found in re.findall(r"^DURABLE_[A-Z_]+$", text)
        if not found.startswith(OWN)
    } - {"DURABLE_ERROR"}
    assert read == set(variables())
