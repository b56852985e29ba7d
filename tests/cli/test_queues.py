"""`durable queues` and `durable kinds`: counts by state, pauses, and what the code declares."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine

from durable_core import Backoff, Retry, enqueue_by_name
from durable_core.deliveries.attempt import Worker, perform
from durable_core.deliveries.declare import Step
from durable_core.testing import Made, MovableClock
from tests.cli.conftest import value_of
from tests.core.plan_shop import Shop

Run = Callable[..., Result]
PAUSED = ("--by", "dana", "--reason", "the printer is away")


def retries(step: Step) -> None:
    raise Retry("busy")


@pytest.fixture
def backlog(make: Callable[..., Made], declare: Callable[..., Any], worker: Worker, clock: MovableClock) -> None:
    """Mail: two due, one later, one that retries, one dead, two sent. Letters: one that runs, one failed."""
    clock.freeze()
    mail = declare(retries, name="mail.send", queue="mail", max_attempts=4, backoff=Backoff(base=600, factor=2))
    letter = declare(name="letter.print", queue="letters", cron="0 8 * * *", formerly=("letter.old",))
    for state in ("dead", "sent", "sent", "canceled"):
        make(mail, state=state)
    make(letter, state="processing", queue="letters")
    make(letter, state="failed", queue="letters")
    clock.advance(seconds=100)
    perform(worker, mail, make(mail).id)
    make(mail)
    clock.advance(seconds=60)
    make(mail)
    make(mail, countdown=3600)


def lines(durable: Run, command: str, *line: str) -> dict[str, dict[str, Any]]:
    """What it says of each name, with the counts as plain numbers where all were counted."""
    name = command.removesuffix("s")
    found = {one[name]: one for one in value_of(durable(command, *line, "--json"))[command]}
    for one in found.values():
        one["rows"] = {
            state: f"{count['rows']}+" if count["at_least"] else count["rows"]
            for state, count in one["counts"].items()
            if count["rows"]
        }
    return found


MAIL = {"due": 2, "later": 2, "retrying": 1, "dead": 1, "sent": 2, "canceled": 1}


def test_each_queue_says_how_many_are_in_which_state(durable: Run, backlog: None) -> None:
    found = lines(durable, "queues")
    assert list(found) == ["letters", "mail"]
    assert found["mail"]["rows"] == MAIL
    assert found["letters"]["rows"] == {"processing": 1, "failed": 1}
    assert found["mail"]["oldest_due_age_seconds"] == 60
    assert found["mail"]["kinds"] == ["mail.send"]
    assert found["letters"]["oldest_due_at"] is None
    assert found["letters"]["last_finished_at"].endswith("Z")

    heading, letters, mail = durable("queues").stdout.splitlines()
    assert heading.split()[:3] == ["QUEUE", "OLDEST", "DUE"]
    assert mail.split() == [
        "mail", "1m", "2", "2", "1", "0", "0", "1", "2", "0", "0", "2m", "40s", "ago",
        "-",
    ]  # fmt: skip
    assert letters.split()[:2] == ["letters", "-"]


def test_a_pause_says_by_whom_and_why_and_a_paused_queue_is_listed_though_empty(durable: Run, backlog: None) -> None:
    for queue in ("mail", "empty"):
        assert durable("pause", "--queue", queue, *PAUSED).exit_code == 0
    assert durable("pause", "--kind", "letter.print", "--for", "2h", *PAUSED).exit_code == 0
    found = lines(durable, "queues")
    assert list(found) == ["empty", "letters", "mail"]
    assert (found["mail"]["pause"]["by"], found["mail"]["pause"]["until"]) == ("dana", None)
    assert found["letters"]["pause"] is None
    told = durable("queues").stdout.splitlines()
    assert told[3].endswith("  dana: the printer is away")
    printed = next(line for line in durable("kinds").stdout.splitlines() if line.startswith("letter.print"))
    assert "dana: the printer is away, until 2" in printed
    assert lines(durable, "kinds")["letter.print"]["pause"]["until"].endswith("Z")


def test_names_page(durable: Run, make: Callable[..., Made]) -> None:
    for queue in ("a", "b", "c"):
        make(queue=queue)
    first = value_of(durable("queues", "--limit", "2", "--json"))
    assert [one["queue"] for one in first["queues"]] == ["a", "b"]
    assert first["next_after"] == "b"
    second = value_of(durable("queues", "--limit", "2", "--after", "b", "--json"))
    assert ([one["queue"] for one in second["queues"]], second["next_after"]) == (["c"], None)
    assert "--after b" in durable("queues", "--limit", "2").stderr
    assert value_of(durable("queues", "--limit", "3", "--json"))["next_after"] is None
    assert value_of(durable("kinds", "--limit", "1", "--json"))["next_after"] is None


def test_what_was_not_counted_to_its_end_says_at_least(
    durable: Run, backlog: None, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable_core.deliveries.survey.COUNT_LIMIT", 2)
    monkeypatch.setattr("durable_core.deliveries.survey.LEAST_SHARE", 1)
    make(queue="bills")
    make(queue="mail", state="dead")
    found = lines(durable, "queues")
    assert found["mail"]["rows"] == {
        "due": "2+", "later": "2+", "retrying": "1+", "dead": "2+", "sent": "1+", "canceled": "1+",
    }  # fmt: skip
    assert found["bills"]["rows"] == {"due": 1}
    # Of a kind nobody can tell in which of the queues that were cut it may be.
    assert lines(durable, "kinds")["letter.print"]["counts"]["due"] == {"rows": 0, "at_least": True}
    assert durable("queues").stdout.splitlines()[3].split()[2] == "2+"


def test_steps_and_operations_that_wait_for_a_worker_are_counted_by_queue_and_kind(
    durable: Run, shop: Shop, declare_operation: Callable[..., Any], start: Any, look: Any, make: Callable[..., Made]
) -> None:
    step, other = shop.step(queue="mail"), shop.step(queue="mail")
    call = declare_operation(one_in_flight=False, queue="calls")
    for plan in (step.planned(), other.planned(), other.planned()):
        shop.approved(plan)
    shop.propose(step.planned())
    shop.claim(shop.approved(step.planned()))
    start(call)
    look(call, start(call).id)
    make(queue="mail")
    found = lines(durable, "queues")
    assert found["mail"]["rows"] == {"due": 1, "steps": 3}
    assert found["calls"]["rows"] == {"operations": 2}
    kinds = lines(durable, "kinds")
    assert (kinds[step.name]["rows"], kinds[other.name]["rows"]) == ({"steps": 1}, {"steps": 2})
    assert (kinds[call.name]["rows"], kinds[call.name]["queues"]) == ({"operations": 2}, ["calls"])


def test_waiting_steps_and_operations_that_were_not_all_counted_say_at_least(
    durable: Run, shop: Shop, declare_operation: Callable[..., Any], start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable_core.plans.survey.SHARE", 1)
    monkeypatch.setattr("durable_core.operations.survey.SHARE", 1)
    call = declare_operation(one_in_flight=False)
    for _ in range(2):
        shop.approved(shop.step().planned())
        start(call)
    assert lines(durable, "queues")["durable"]["rows"] == {"steps": "1+", "operations": "1+"}


def test_steps_and_operations_of_the_app_are_declared(
    run: Run, app: str, shop: Shop, declare_operation: Callable[..., Any]
) -> None:
    step, call = shop.step(queue="letters", formerly=("step.old",)), declare_operation(queue="calls")
    found = lines(run, "kinds", "-A", app)
    assert (found[step.name]["declared"], found[call.name]["declared"]) == (True, True)
    assert found[step.name]["policy"] is None
    assert {"letters", "calls"} <= set(lines(run, "queues", "-A", app))


def test_many_queues_share_what_is_read(
    durable: Run, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable_core.deliveries.survey.MOST_PENDING", 4)
    monkeypatch.setattr("durable_core.deliveries.survey.LEAST_SHARE", 1)
    for queue in ("a", "b"):
        for _ in range(3):
            make(queue=queue)
    assert {name: one["rows"] for name, one in lines(durable, "queues").items()} == {
        "a": {"due": "2+"}, "b": {"due": "2+"},
    }  # fmt: skip


@pytest.fixture
def app(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's app; what it declares is declared in this process by the fixture `backlog`."""
    url = engine.url.render_as_string(hide_password=False)
    (tmp_path / "kinds_app.py").write_text(
        textwrap.dedent(f"""
            from celery import Celery
            from sqlalchemy import create_engine
            from durable_core.celery_binding import install
            app = Celery("kinds_app", broker="memory://", set_as_current=False)
            app.conf.durable_engine = create_engine({url!r})
            install(app)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kinds_app", raising=False)
    return "kinds_app"


def test_without_an_app_nobody_can_say_what_is_declared(durable: Run, backlog: None) -> None:
    found = lines(durable, "kinds")
    assert found["mail.send"]["rows"] == MAIL
    assert found["mail.send"]["queues"] == ["mail"]
    assert {one["declared"] for one in found.values()} == {None}
    assert {one["policy"] for one in found.values()} == {None}
    assert "BACKOFF" not in durable("kinds").stdout


def test_with_an_app_each_kind_has_its_terms(run: Run, backlog: None, app: str) -> None:
    found = lines(run, "kinds", "-A", app)
    assert found["mail.send"]["declared"] is True
    policy = found["mail.send"]["policy"]
    assert (policy["max_attempts"], policy["queue"], policy["timeout_seconds"]) == (4, "mail", 300.0)
    assert (policy["backoff"]["base"], policy["cron"]) == (600, None)
    letter = found["letter.print"]["policy"]
    assert (letter["cron"], letter["timezone"], letter["formerly"]) == ("0 8 * * *", "UTC", ["letter.old"])
    told = run("kinds", "-A", app).stdout.splitlines()
    (terms,) = [line for line in told if line.startswith("mail.send") and "300" not in line and "10m" in line]
    assert terms.split(None, 4)[4].startswith("10m, 20m, 40m")


@pytest.fixture
def strangers(engine: Engine) -> None:
    """Deliveries enqueued before the code of today: one of a kind that was renamed, one of a kind that is gone."""
    with engine.begin() as tx:
        enqueue_by_name(tx, "letter.old", {})
        enqueue_by_name(tx, "no.code", {})


def test_a_kind_that_no_code_declares_is_named_and_one_of_a_former_name_is_not(
    run: Run, strangers: None, backlog: None, app: str
) -> None:
    found = lines(run, "kinds", "-A", app)
    assert {name: one["declared"] for name, one in found.items() if not name.startswith("test.")} == {
        "letter.old": True, "letter.print": True, "mail.send": True, "no.code": False,
    }  # fmt: skip
    told = run("kinds", "-A", app).stdout
    assert next(line for line in told.splitlines() if "no code declares it" in line).startswith("no.code")
    assert "as letter.print" in told


def test_a_declared_kind_and_its_queue_are_listed_without_a_row(
    run: Run, declare: Callable[..., Any], app: str, durable: Run
) -> None:
    declare(name="quiet.kind", queue="quiet")
    assert lines(run, "kinds", "-A", app)["quiet.kind"]["rows"] == {}
    assert "quiet" in lines(run, "queues", "-A", app)
    assert "quiet" not in lines(durable, "queues")


def test_modules_that_do_not_load_are_said_and_do_not_end_the_command(
    run: Run, app: str, tmp_path: Path, backlog: None
) -> None:
    (tmp_path / "broken_tasks.py").write_text("raise ZeroDivisionError")
    with (tmp_path / "kinds_app.py").open("a") as file:
        file.write("app.conf.imports = ['broken_tasks']\n")
    result = run("kinds", "-A", app, "--json")
    assert result.exit_code == 0
    assert "did not load (ZeroDivisionError)" in result.stderr
