"""`durable cron`: the schedules as people and programs read them, and the acts on them."""

import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core import deliveries, periodic
from durable_core.database.connections import Database
from durable_core.periodic.sweep import fire
from durable_core.testing import MovableClock
from tests.cli.conftest import error_of, value_of

Run = Callable[..., Result]


@pytest.fixture
def kind(declare: Callable[..., Any], database: Database) -> Any:
    kind = declare(lambda step: None, name="report.daily", cron="0 8 * * *", timezone="Europe/Prague")
    fire(database)
    return kind


@pytest.fixture
def app(engine: Engine, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's app; what it declares is declared in this process by the fixture `kind`."""
    url = engine.url.render_as_string(hide_password=False)
    (tmp_path / "cron_app.py").write_text(
        textwrap.dedent(f"""
            from celery import Celery
            from sqlalchemy import create_engine
            from durable_core.celery_binding import install
            app = Celery("cron_app", broker="memory://", set_as_current=False)
            app.conf.durable_engine = create_engine({url!r})
            install(app)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cron_app", raising=False)
    return "cron_app"


def test_the_list_says_when_each_is_due_next(durable: Run, kind: Any) -> None:
    (shown,) = value_of(durable("cron", "list", "--json"))["schedules"]
    assert (shown["kind"], shown["cron"], shown["timezone"]) == ("report.daily", "0 8 * * *", "Europe/Prague")
    assert shown["next_slot"].endswith("Z")
    assert (shown["declared"], shown["why"]) == (None, "")
    heading, line = durable("cron", "list").stdout.splitlines()
    assert heading.split()[0] == "KIND"
    assert line.split()[0] == "report.daily"


def test_a_schedule_that_nobody_fires_is_named(durable: Run, kind: Any, clock: MovableClock) -> None:
    clock.advance(seconds=2 * 24 * 3600)
    (shown,) = value_of(durable("cron", "list", "--json"))["schedules"]
    assert shown["why"].endswith("no process that declares it runs the sweep")


def test_with_the_app_a_kind_that_no_code_declares_is_named(run: Run, app: str, kind: Any, engine: Engine) -> None:
    with engine.begin() as tx:
        tx.execute(text("update durable.schedules set kind = 'report.removed'"))
    (shown,) = value_of(run("-A", app, "cron", "list", "--json"))["schedules"]
    assert (shown["declared"], shown["why"]) == (False, "no code declares it; it never runs")


def test_pause_and_resume_are_told_and_keep_who_and_why(durable: Run, kind: Any, engine: Engine) -> None:
    line = ("report.daily", "--by", "dana", "--reason", "the bank is closed")
    until = "2100-01-01T08:00:00+0100"
    assert value_of(durable("cron", "pause", *line, "--until", until, "--json"))["outcome"] == "paused"
    (shown,) = value_of(durable("cron", "list", "--json"))["schedules"]
    assert shown["why"] == "paused until 2100-01-01T07:00:00Z by dana: the bank is closed"
    assert durable("cron", "resume", "report.daily", "--by", "erin").stdout == "report.daily resumed\n"
    again = durable("cron", "resume", "report.daily", "--by", "erin")
    assert (again.exit_code, again.stdout) == (5, "report.daily was not paused\n")
    with engine.connect() as tx:
        (schedule,) = periodic.schedules(tx)
        assert [(n.move, n.by) for n in deliveries.journal(tx, schedule.id)] == [("pause", "dana"), ("resume", "erin")]


def test_run_now_enqueues_one_by_the_code_of_the_app(run: Run, app: str, kind: Any, engine: Engine) -> None:
    told = value_of(run("-A", app, "cron", "run-now", "report.daily", "--by", "dana", "--json"))
    with engine.connect() as tx:
        (row,) = deliveries.page(tx)
    assert (told["outcome"], told["id"]) == ("enqueued", row.id)


@pytest.mark.parametrize("act", ["pause", "resume"])
def test_a_kind_without_a_schedule_is_not_found(durable: Run, act: str) -> None:
    result = durable("cron", act, "nobody", "--by", "dana", "--reason", "x", "--json")
    assert (result.exit_code, error_of(result)) == (4, "NOT_FOUND")


def test_an_act_without_a_name_is_refused(durable: Run, kind: Any) -> None:
    assert durable("cron", "pause", "report.daily", "--reason", "x").exit_code == 2
    assert durable("cron", "pause", "report.daily", "--by", " ", "--reason", "x").exit_code == 2
    assert durable("cron", "pause", "report.daily", "--by", "dana", "--reason", "x", "--until", "soon").exit_code == 2
