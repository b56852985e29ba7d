"""The log: every event is documented with its facts, and an attempt's ids are added to the lines of its handler."""

import contextvars
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from durable_core import GiveUp, Retry, deliveries
from durable_core import logging as durable_logging
from durable_core.deliveries.attempt import perform
from tests.core.log_events import events

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "logging.md").read_text(encoding="utf-8")
BY_OUTCOME = {
    "delivery_retry_scheduled": "warning", "delivery_failed": "error", "delivery_dead": "error",
    "operation_polled": "info", "operation_succeeded": "info",
}  # fmt: skip
"""Those whose level is decided as they are logged."""
RESERVED = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def table(first: str) -> list[list[str]]:
    lines = PAGE.split(f"\n| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_event_that_the_source_logs_is_in_the_table_and_no_other():
    shown = {name: (words(logger), level, words(facts)) for (cell, logger, level, facts) in table("event")
             for name in words(cell)}  # fmt: skip
    logged = {
        name: (one.loggers, ", ".join(sorted(one.levels)) or BY_OUTCOME[name], one.facts)
        for name, one in events().items()
    }
    assert shown == logged


def test_every_fact_of_an_event_is_explained_and_no_other():
    explained = set().union(*(words(row[0]) for row in table("fact")))
    assert explained == set().union(*(one.facts for one in events().values()))


@pytest.mark.parametrize("name", sorted(events()))
def test_an_event_has_a_name_and_facts_that_logging_takes(name):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)+", name)
    assert not events()[name].facts & RESERVED
    assert all(logger.startswith("durable.") for logger in events()[name].loggers)


def test_the_formatter_of_the_page_shows_the_facts_of_our_lines_alone():
    block = next(part for part in PAGE.split("```python\n") if "after_setup_logger" in part).split("```")[0]
    shown: dict[str, type[logging.Formatter]] = {}
    exec(block, shown)
    form = shown["WithFacts"]("%(levelname)s %(message)s").format
    facts = {"row_id": "0198", "error": "OSError: gone"}

    ours = logging.getLogger("durable.run").makeRecord(
        "durable.run", logging.ERROR, __file__, 1, "delivery_dead", (), None, extra=facts
    )
    theirs = logging.getLogger("celery").makeRecord(
        "celery", logging.INFO, __file__, 1, "received", (), None, extra={"data": "payload"}
    )
    assert form(ours) == "ERROR delivery_dead row_id=0198 error=OSError: gone"
    assert form(theirs) == "INFO received"


def test_the_page_names_what_the_filter_adds():
    told = PAGE.split("It adds ")[1].split("all None")[0]
    assert words(told) == set(durable_logging.FIELDS)


def said(caplog, name):
    (record,) = [record for record in caplog.records if record.message == name]
    return record


def test_an_attempt_that_fails_says_when_it_is_tried_again_and_one_that_ends_says_so_louder(
    caplog, worker, make, declare, row
):
    def asks(step):
        raise Retry(after=60)

    def gives_up(step):
        raise GiveUp("no such address")

    with caplog.at_level(logging.DEBUG, "durable"):
        asking = declare(asks)
        made = make(asking)
        perform(worker, asking, made.id)
        for kind in (declare(gives_up), declare(lambda step: 1 / 0, max_attempts=1)):
            perform(worker, kind, make(kind).id)
    retried = said(caplog, "delivery_retry_scheduled")
    assert retried.next_attempt_at == row(made.id).due_at
    assert (retried.row_id, retried.levelname) == (made.id, "WARNING")
    assert {said(caplog, name).levelname for name in ("delivery_failed", "delivery_dead")} == {"ERROR"}
    assert not hasattr(said(caplog, "delivery_dead"), "next_attempt_at")


def test_an_enqueue_is_logged_for_who_debugs_and_an_act_for_everybody(caplog, engine, declare):
    kind = declare(lambda step, name: None)
    with caplog.at_level(logging.DEBUG, "durable"), engine.begin() as tx:
        ref = kind.options(key="a secret").enqueue(tx, "a secret")
        kind.options(key="a secret").enqueue(tx, "a secret")
        deliveries.cancel(tx, ref.id, by="dana", reason="a secret")
    told = [(one.row_id, one.kind, one.is_new) for one in caplog.records if one.message == "delivery_enqueued"]
    assert told == [(ref.id, kind.name, True), (ref.id, kind.name, False)]
    act = said(caplog, "operator_action")
    assert (act.levelname, act.act, act.actor, act.rows, act.row_id) == ("INFO", "cancel", "dana", 1, ref.id)
    assert "secret" not in "".join(str(vars(record)) for record in caplog.records)


def test_an_act_that_does_nothing_is_not_logged(caplog, engine, make):
    made = make(state="sent")
    with caplog.at_level(logging.DEBUG, "durable"), engine.begin() as tx, pytest.raises(Exception, match="sent"):
        deliveries.cancel(tx, made.id, by="dana", reason="too late")
    assert "operator_action" not in [record.message for record in caplog.records]


# --- the filter --------------------------------------------------------------------------------------


@pytest.fixture
def lines():
    """The records of the host's own logger, with the filter on its handler."""
    records = []

    class Keeping(logging.Handler):
        def emit(self, record):
            records.append(record)

    logger, handler = logging.getLogger("shop.orders"), Keeping()
    handler.addFilter(durable_logging.ContextFilter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)


def facts(record):
    return {name: getattr(record, name) for name in durable_logging.FIELDS}


def test_lines_of_a_handler_have_the_ids_of_its_attempt_and_others_have_none(lines, worker, make, declare):
    shop = logging.getLogger("shop.orders")
    kind = declare(lambda step: shop.info("charged"))
    made = make(kind)
    shop.info("before")
    perform(worker, kind, made.id)
    shop.info("after")
    before, charged, after = map(facts, lines)
    assert charged == {"delivery_id": made.id, "kind": kind.name, "attempt": 1, "max_attempts": 5, "fence": 1}
    assert before == after == dict.fromkeys(durable_logging.FIELDS)


def test_what_a_line_has_of_its_own_stays(lines, worker, make, declare):
    kind = declare(lambda step: logging.getLogger("shop.orders").info("charged", extra={"kind": "card", "fence": None}))
    made = make(kind)
    perform(worker, kind, made.id)
    assert (lines[0].kind, lines[0].fence, lines[0].delivery_id) == ("card", None, made.id)


def test_an_async_handler_and_a_thread_with_its_context_have_the_ids_and_a_bare_thread_has_none(
    lines, worker, make, declare
):
    shop = logging.getLogger("shop.orders")

    async def handler(step):
        shop.info("async")
        for target in (contextvars.copy_context().run, lambda say: say()):
            thread = threading.Thread(target=target, args=(lambda: shop.info("thread"),))
            thread.start()
            thread.join()

    kind = declare(handler)
    made = make(kind)
    perform(worker, kind, made.id)
    assert [record.delivery_id for record in lines] == [made.id, made.id, None]


def test_an_attempt_that_raises_leaves_no_ids_behind(lines, worker, make, declare):
    def leaves(step):
        raise SystemExit(3)

    kind = declare(leaves)
    with pytest.raises(SystemExit):
        perform(worker, kind, make(kind).id)
    assert durable_logging.ids() == {}


def test_a_process_that_imports_us_has_no_handler_of_ours():
    code = (
        "import json, logging, durable_core, durable_core.logging, durable_core.deliveries.attempt;"
        "print(json.dumps([name for name, one in logging.root.manager.loggerDict.items()"
        " if name.startswith('durable') and (getattr(one, 'handlers', []) or getattr(one, 'level', 0))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
