"""`durable report`: what one pastes into a bug report, and what must never be in it."""

import socket
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core.database.migrate import newest
from durable_core.deliveries.attempt import Worker, perform
from durable_core.deliveries.declare import Step
from durable_core.testing import Made
from tests.cli.conftest import value_of

Run = Callable[..., Result]


@pytest.fixture
def app(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = engine.url.render_as_string(hide_password=False)
    (tmp_path / "report_app.py").write_text(
        textwrap.dedent(f"""
            from celery import Celery
            from sqlalchemy import create_engine
            from durable_core.celery_binding import install
            app = Celery("report_app", broker="durable-redis://:brokersecret@cache.internal/0", set_as_current=False)
            app.conf.durable_engine = create_engine({url!r})
            app.conf.durable_lease_seconds = 45
            app.conf.durable_webhok_secret = "settingsecret"
            install(app)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "report_app", raising=False)
    return "report_app"


@pytest.fixture
def trouble(
    engine: Engine, make: Callable[..., Made], declare: Callable[..., Any], worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows and a sweep whose texts hold what must not get out."""

    def fails(step: Step, card: str) -> None:
        raise ValueError(f"card {card} of anna@example.com was refused")

    kind = declare(fails, name="payment.of_anna", queue="annas-queue", max_attempts=1)
    perform(worker, kind, make(kind, arguments={"card": "4111-payload"}, key="annas-key").id)
    make(state="sent")
    with engine.begin() as tx:
        tx.execute(
            text(
                "insert into durable.loops (name, began_at, moved, error, host) values"
                " ('reap', durable.durable_now(), 3, 'OperationalError: no route to db.internal', :host)"
            ),
            {"host": f"{socket.gethostname()} (a worker)"},
        )
    monkeypatch.setenv("DURABLE_SMTP_URL", "smtp://user:mailsecret@mail.internal")


def test_it_says_what_runs_where_and_how_it_stands(run: Run, app: str, trouble: None) -> None:
    seen = value_of(run("report", "-A", app, "--json"))
    assert seen["versions"]["durable-core"] == "0.1.0"
    assert seen["versions"]["celery"]
    assert seen["platform"]["python"].startswith("CPython 3.")
    assert seen["app"]["settings"]["durable_lease_seconds"] == {"value": 45, "source": "app"}
    assert seen["app"]["settings"]["durable_engine"] == {"value": "set", "source": "app"}
    assert (seen["app"]["transport"], seen["app"]["unknown_names"]) == ("durable-redis", 1)
    assert seen["app"]["variables"]["DURABLE_SMTP_URL"] == "set"
    database = seen["database"]
    assert database["server"]["version"][0].isdigit()
    assert database["schema"]["revision"] == newest()
    assert (database["deliveries"]["dead"], database["deliveries"]["sent"]) == ("1", "1")
    assert (database["queues"], database["kinds"], database["error_codes"]) == (2, 2, {"WORKER_ERROR": 1})
    assert database["sweeps"]["reap"]["error"] == "OperationalError"
    assert database["sweeps"]["reap"]["by_a_worker"] is True

    told = run("report", "-A", app).stdout
    assert "durable_lease_seconds" in told
    assert "45 (app)" in told
    assert "## database" in told


def test_nothing_that_is_private_is_in_it(run: Run, app: str, trouble: None, engine: Engine) -> None:
    """No payload, no error text, no name of a kind, a queue or a host, no address, no password."""
    url = engine.url
    private = (
        "4111", "anna", "refused", "internal", "secret", str(url.password), str(url.host), str(url.port),
        str(url.database), socket.gethostname(),
    )  # fmt: skip
    for line in (("report", "-A", app), ("report", "-A", app, "--json")):
        result = run(*line)
        assert result.exit_code == 0, result.stderr
        said = result.stdout.lower()
        assert [word for word in private if word and word.lower() in said] == []


def test_without_a_server_the_rest_is_told(run: Run, tmp_path: Path) -> None:
    seen = run("report", "--database-url", "postgresql://a:hunter2secret@127.0.0.1:1/x", "--json")
    assert seen.exit_code == 0
    assert value_of(seen)["database"] == {"error": "DATABASE_UNREACHABLE"}
    assert "127.0.0.1" not in seen.stdout
    nowhere = value_of(run("--directory", str(tmp_path), "report", "--json"))
    assert nowhere["database"] == {"error": "NO_DATABASE"}
    assert nowhere["versions"]["durable-core"]


def test_an_app_that_does_not_load_is_told(run: Run) -> None:
    seen = value_of(run("report", "-A", "no_such_app", "--json"))
    assert seen["app"] == {"error": "APP_NOT_LOADED"}
    assert seen["database"] == {"error": "APP_NOT_LOADED"}
