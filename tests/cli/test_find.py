"""`durable find` and `durable why`: an id from a log or a mail, at three in the morning."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine

from durable_core import deliveries
from durable_core.celery_binding.transport import guarded
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker, perform
from durable_core.deliveries.declare import Step
from durable_core.deliveries.find import MOST
from durable_core.local.services import Addresses
from durable_core.periodic.sweep import fire
from durable_core.testing import Made, MovableClock
from durable_core.testing.worker import WorkerProcess
from tests.cli.conftest import error_of, value_of
from tests.core.plan_shop import Shop

Run = Callable[..., Result]
NOBODY = "01900000-0000-7000-8000-000000000000"
SAID = ("--by", "dana", "--reason", "the order was withdrawn")


def named(durable: Run, text: str) -> list[tuple[str, str]]:
    """What a text names: the id of each row, and what of it the text is."""
    return [(one["id"], one["by"]) for one in value_of(durable("find", text, "--json"))["found"]]


def test_a_delivery_is_found_by_all_that_names_it(
    durable: Run, make: Callable[..., Made], declare: Callable[..., Any]
) -> None:
    kind, other = declare(name="invoice.send"), declare(name="invoice.print")
    made = make(kind, key="invoice:7", ordering_key="customer:9")
    twin = make(other, key="invoice:7")
    make(key="invoice:8", ordering_key="customer:8")

    assert named(durable, made.id) == [(made.id, "id")]
    assert named(durable, made.id.replace("-", "").upper()) == [(made.id, "id")]
    assert named(durable, f"invoice.send:{made.id}") == [(made.id, "step.key")]
    assert named(durable, "invoice:7") == [(twin.id, "key"), (made.id, "key")]
    assert named(durable, "customer:9") == [(made.id, "ordering key")]

    (line,) = durable("find", made.id).stdout.splitlines()[1:]
    assert line.split() == [
        "delivery", "id", "invoice.send", "durable", "pending", "durable", "deliveries", "show", made.id,
    ]  # fmt: skip


def test_the_beginning_of_an_id_is_enough_and_a_shorter_one_is_none(durable: Run, make: Callable[..., Made]) -> None:
    made, later = make(), make()
    beginning = made.id[:23]
    assert (made.id, "beginning of an id") in named(durable, beginning)
    assert named(durable, made.id[:35]) == [(made.id, "beginning of an id")]
    both = named(durable, made.id[:8])
    assert both == [(later.id, "beginning of an id"), (made.id, "beginning of an id")]
    assert durable("find", made.id[:7]).exit_code == 4


@pytest.mark.parametrize("command", ["find", "why", "journal"])
def test_a_beginning_that_is_too_short_is_told_how_long_it_has_to_be(
    durable: Run, make: Callable[..., Made], command: str
) -> None:
    made = make()
    for text in ("01a", made.id[:7], "4"):
        result = durable(command, text, "--json")
        assert (result.exit_code, error_of(result)) == (4, "NOT_FOUND")
        said = f"{text!r} is too short for the beginning of an id, of which 8 characters are needed. Nothing is named"
        assert said in value_of(result)["error"]["message"]
    for text in ("0198aaaa", "mail"):
        assert "too short" not in value_of(durable(command, text, "--json"))["error"]["message"]


def test_a_plan_is_found_by_all_that_names_it(durable: Run, shop: Shop) -> None:
    kind = shop.step()
    plan, later = (shop.propose(kind.planned(), origin="chat:7") for _ in range(2))
    shop.propose(kind.planned(), origin="chat:8")
    assert named(durable, plan.id) == [(plan.id, "id")]
    assert named(durable, f"{plan.id}:0") == [(plan.id, "step.key")]
    assert named(durable, plan.id[:35]) == [(plan.id, "beginning of an id")]
    assert named(durable, "chat:7") == [(later.id, "origin"), (plan.id, "origin")]
    (found,) = value_of(durable("find", plan.id, "--json"))["found"]
    assert (found["what"], found["kind"], found["state"]) == ("plan", kind.name, "pending")
    assert found["look"] == f"durable plans show {plan.id}"


def test_a_beginning_that_several_contracts_have_names_them_all(
    durable: Run, make: Callable[..., Made], shop: Shop, start: Callable[..., Any], reset: Any
) -> None:
    ids = {make().id, shop.propose(shop.step().planned()).id, start(reset).id}
    assert {row_id for row_id, _ in named(durable, min(ids)[:8])} == ids


def test_more_rows_than_are_shown_are_said_to_be_more(durable: Run, make: Callable[..., Made]) -> None:
    for _ in range(MOST + 1):
        made = make(ordering_key="long")
    assert len(named(durable, "long")) == MOST
    assert "there may be more" in durable("find", "long").stderr
    assert "there may be more" not in durable("find", made.id).stderr


def test_a_schedule_is_found_by_its_id_and_its_journal_is_where_to_look(
    durable: Run, declare: Callable[..., Any], database: Database
) -> None:
    declare(lambda step: None, name="report.daily", cron="0 8 * * *")
    fire(database)
    (schedule,) = value_of(durable("cron", "list", "--json"))["schedules"]
    (found,) = value_of(durable("find", schedule["id"], "--json"))["found"]
    assert (found["what"], found["kind"], found["state"]) == ("schedule", "report.daily", None)
    assert found["look"] == f"durable journal {schedule['id']}"
    assert durable("journal", schedule["id"]).exit_code == 0
    assert durable("why", schedule["id"]).exit_code == 4


@pytest.mark.parametrize("text", [NOBODY, "41", "%s", "no.such:key", f"test.kind:{NOBODY}", "'; select 1"])
@pytest.mark.parametrize("command", ["find", "why", "journal"])
def test_what_names_nothing_is_not_found_and_task_ids_are_explained(durable: Run, command: str, text: str) -> None:
    result = durable(command, text, "--json")
    assert (result.exit_code, error_of(result)) == (4, "NOT_FOUND")
    assert "the first hint of a row has the row's own" in result.stderr


def test_a_step_key_of_another_kind_names_nothing(durable: Run, make: Callable[..., Made]) -> None:
    assert durable("find", f"other.kind:{make().id}").exit_code == 4


# --- why -----------------------------------------------------------------------------------------------


def why(durable: Run, text: str) -> str:
    """The one line that it says, to people and to programs alike."""
    (line,) = durable("why", text).stdout.splitlines()
    assert value_of(durable("why", text, "--json"))["why"] == line
    return line


@pytest.fixture
def frozen(clock: MovableClock) -> MovableClock:
    clock.freeze()
    return clock


def test_what_a_person_has_to_act_on_comes_first_and_the_rest_is_named_as_more(
    durable: Run, engine: Engine, make: Callable[..., Made], frozen: MovableClock
) -> None:
    first = make(ordering_key="line")
    made = make(ordering_key="line", key="the key", countdown=90)
    behind = f"behind delivery {first.id} of the same ordering key line, which is pending."
    assert why(durable, made.id) == behind
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "durable", by="dana", reason="away")
    assert why(durable, "the key").startswith("queue durable is paused by dana (away), until somebody resumes it")
    seen = value_of(durable("why", made.id, "--json"))
    assert seen["also"] == [behind, "it is not due before 1m 30s have passed."]
    assert [one["cause"] for one in seen["waits"]] == ["paused", "behind", "not_due"]
    assert "and more" in durable("why", made.id).stderr


def test_a_back_off_a_run_and_each_end_have_their_sentence(
    durable: Run, make: Callable[..., Made], declare: Callable[..., Any], worker: Worker, frozen: MovableClock
) -> None:
    def fails(step: Step) -> None:
        raise RuntimeError("no")

    kind = declare(fails)
    failing = make(kind)
    perform(worker, kind, failing.id)
    assert why(durable, failing.id) == "its last attempt ended with WORKER_ERROR; the next is due in 30s."

    running, sent, dead = make(state="processing"), make(state="sent"), make(state="dead")
    expired, failed, canceled = make(state="expired"), make(state="failed"), make()
    assert durable("deliveries", "cancel", canceled.id, *SAID, "--yes").exit_code == 0
    at = frozen.now().isoformat().replace("+00:00", "Z")
    frozen.advance(5)
    assert why(durable, running.id).startswith("running for 5s in process ")
    assert why(durable, sent.id) == f"done at {at}, 5s ago: its handler returned and its receipt was committed."
    assert why(durable, dead.id).startswith(f"its budget was spent at {at}, 5s ago by ")
    assert why(durable, failed.id).startswith(f"given up for good at {at}, 5s ago (")
    assert why(durable, expired.id).startswith(f"expired at {at}, 5s ago: ")
    assert why(durable, canceled.id) == (
        f"canceled at {at}, 5s ago by dana (the order was withdrawn): it was taken back before it was done."
    )


def test_a_text_that_names_several_is_refused_and_lists_the_way_to_all(durable: Run, make: Callable[..., Made]) -> None:
    make(ordering_key="line 1")
    make(ordering_key="line 1")
    for command in ("why", "journal"):
        result = durable(command, "line 1", "--json")
        assert (result.exit_code, error_of(result)) == (2, "AMBIGUOUS")
        assert "`durable find 'line 1'` lists them" in result.stderr


@pytest.fixture
def app(engine: Engine, services: Addresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's app that reads a queue no delivery of these tests is in, on the real broker."""
    url = engine.url.render_as_string(hide_password=False)
    (tmp_path / "why_app.py").write_text(
        textwrap.dedent(f"""
            from celery import Celery
            from sqlalchemy import create_engine
            from durable_core.celery_binding import install
            app = Celery("why_app", broker={guarded(services.redis_url)!r}, set_as_current=False)
            app.conf.durable_engine = create_engine({url!r})
            install(app)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "why_app", raising=False)
    yield "why_app"
    sys.modules.pop("why_app", None)


@pytest.mark.serial
def test_the_workers_are_asked_who_reads_the_queue(
    run: Run, durable: Run, app: str, make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(queue="mail")
    assert why(durable, made.id).endswith("it waits for a free worker that reads queue mail.")
    asked = run("-A", app, "why", made.id)
    assert asked.stdout.endswith("; no worker answered: none runs, or they take no remote control.\n"), asked.stderr

    worker = WorkerProcess(app, ["-Q", "durable.letters,durable.bills", "--pool", "solo"], tmp_path, os.environ)
    worker.start()
    try:
        result = run("-A", app, "why", made.id)
        assert "none of the 1 that answered reads it: start one with `-Q durable.mail`." in result.stdout
        seen = value_of(run("-A", app, "why", made.id, "--json"))
        assert seen["readers"] == []
        from durable_core.celery_binding.readers import readers

        assert list((readers(sys.modules[app].app) or {}).values()) == [{"letters", "bills"}]
    finally:
        worker.stop()


def test_a_broker_that_does_not_answer_is_said_within_seconds(
    run: Run, app: str, make: Callable[..., Made], shop: Shop, start: Callable[..., Any], reset: Any
) -> None:
    made, plan, ref = make(queue="mail"), shop.approved(shop.step().planned()), start(reset)
    waits_for_a_person = shop.propose(shop.step().planned())
    __import__(app)
    sys.modules[app].app.conf.broker_url = "redis://127.0.0.1:1/0"
    for row_id in (made.id, plan.id, ref.id):
        asked = run("-A", app, "why", row_id, "--json")
        assert value_of(asked)["readers"] is None
        assert value_of(asked)["why"].endswith("the broker did not answer, so which worker reads it is not known.")
    assert "broker" not in value_of(run("-A", app, "why", waits_for_a_person.id, "--json"))["why"]
