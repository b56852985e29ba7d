"""Executions that are asked for in a transaction and carried out by a worker."""

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from durable_core import deliveries
from durable_core.cases.clock import VirtualClock
from durable_core.cases.later import MOST_SNOOZE, MOST_WAITS, UNKNOWN_SECONDS, kind_of
from durable_core.cases.memory import MemoryStore
from durable_core.cases.schema import Schema
from durable_core.deliveries.attempt import perform
from durable_core.errors import InvalidArguments, InvalidOption, UnsupportedTransaction
from durable_core.refusals import CaseNotFound, InvalidInput, UnknownCaseType, UnknownStep
from tests.core.outside.desk import Desk, Parcel

CARRIER = {"system": "carrier"}


@pytest.fixture
def asked(desk, engine):
    """A request, committed: `asked(case_id, "scan", ...)` gives its id."""

    def _asked(case_id, step="scan", *, actor=CARRIER, input=None, **more):
        with Session(engine) as session, session.begin():
            return desk.cases.execute_later(session, case_id, step, actor=actor, input=input, **more).id

    return _asked


@pytest.fixture
def carried(desk, worker):
    """What a worker makes of a request."""
    return lambda request: perform(worker, kind_of(desk.type), request)


def test_a_request_commits_or_vanishes_with_its_callers_rows(desk, engine, asked):
    case_id = desk.made()
    with Session(engine) as session:
        desk.cases.execute_later(session, case_id, "scan", actor=CARRIER, input={"place": "Oslo"})
        session.rollback()
    with engine.connect() as tx:
        assert deliveries.page(tx) == []
    request = asked(case_id, input={"place": "Oslo"})
    with engine.connect() as tx:
        (row,) = deliveries.page(tx)
    assert (row.id, row.kind, row.queue) == (request, f"case.{desk.type.name}", "durable")


def test_a_worker_executes_it_under_the_requests_key(desk, asked, carried, row):
    case_id = desk.made()
    request = asked(case_id, input={"place": "Oslo"})
    assert carried(request).outcome == "sent"
    (ctx,) = desk.ran
    assert (ctx.key, ctx.actor) == (request, CARRIER)
    assert row(request).result == {"execution_id": ctx.execution_id, "seq": 1}
    assert desk.case(case_id).state.places == ["Oslo"]
    assert carried(request).outcome == "nothing to do"
    assert len(desk.ran) == 1


@pytest.mark.spec("cases", 42)
def test_what_was_committed_for_a_request_is_never_executed_again(desk, asked, carried, row):
    """The worker died between the commit of the case and the receipt of the delivery."""
    case_id = desk.made()
    request = asked(case_id, input={"place": "Oslo"})
    first = desk.cases.carry_out(
        case_id, "scan", scope_key=None, actor=CARRIER, input={"place": "Oslo"}, request_id=request
    )
    assert carried(request).outcome == "sent"
    assert len(desk.ran) == 1
    assert row(request).result == first
    assert desk.entries(case_id) == ["claimed", "completed"]


def test_a_spawned_child_of_a_pool_imports_the_module_of_the_steps(desk):
    assert kind_of(desk.type).__module__ == "tests.core.outside.desk"


def test_two_requests_are_two_executions(desk, asked, carried):
    case_id = desk.made()
    for _ in range(2):
        assert carried(asked(case_id, input={"place": "Oslo"})).outcome == "sent"
    assert desk.case(case_id).state.places == ["Oslo", "Oslo"]


def test_a_key_makes_two_calls_one_request(desk, asked):
    case_id = desk.made()
    first, second = (asked(case_id, input={"place": "Oslo"}, key="scan 1") for _ in range(2))
    assert first == second


def test_a_busy_case_is_waited_for_at_no_cost(desk, engine, asked, carried, row, clock):
    case_id = desk.made()
    request = asked(case_id, input={"place": "Rome"})
    waited = []

    def meanwhile(state, ctx):
        desk.act = lambda state, ctx: None
        waited.append(carried(request))

    desk.act = meanwhile
    desk.cases.execute(case_id, "scan", actor=CARRIER, input={"place": "Oslo"})
    (attempted,) = waited
    assert (attempted.outcome, attempted.error_code) == ("snoozed", "CASE_BUSY")
    waits = row(request)
    assert (waits.state, waits.snoozes) == ("pending", 1)
    clock.advance(MOST_SNOOZE + 0.1)
    assert carried(request).outcome == "sent"
    assert desk.case(case_id).state.places == ["Oslo", "Rome"]


@pytest.mark.parametrize(
    ("step", "input", "more", "code"),
    [
        ("scan", {"place": "Oslo"}, {}, "STEP_NOT_AVAILABLE"),
        ("deliver", None, {"scope_key": "gone"}, "BAD_REQUEST"),
    ],
)
def test_a_refusal_ends_the_request_with_its_reason(desk, asked, carried, row, step, input, more, code):
    case_id = desk.made(lost=True, items={"a": False})
    request = asked(case_id, step, input=input, **more)
    assert carried(request).outcome == "failed"
    assert (row(request).state, row(request).error_code) == ("failed", code)
    assert desk.entries(case_id) == []


class Weighed(Parcel):
    grams: int


def forgets_the_step(desk, monkeypatch):
    monkeypatch.delitem(desk.type._steps, "tell")


def forgets_the_type(desk, monkeypatch):
    monkeypatch.setattr(desk.cases.lifecycle, "types", {})


def has_another_schema(desk, monkeypatch):
    monkeypatch.setattr(desk.type, "state", Schema(Weighed, "a parcel"))


ANOTHER_DEPLOY = [
    (forgets_the_step, "BAD_REQUEST"),
    (forgets_the_type, "NOT_FOUND"),
    (has_another_schema, "INVALID_STATE"),
]


@pytest.mark.parametrize(("other", "code"), ANOTHER_DEPLOY)
def test_a_worker_of_another_deploy_leaves_the_request_to_one_that_knows(
    desk, asked, carried, row, clock, monkeypatch, other, code
):
    request = asked(desk.made(), "tell")
    with monkeypatch.context() as deployed:
        other(desk, deployed)
        attempted = carried(request)
    assert (attempted.outcome, attempted.error_code) == ("snoozed", code)
    assert (row(request).state, row(request).snoozes) == ("pending", 1)
    clock.advance(UNKNOWN_SECONDS + 0.1)
    assert carried(request).outcome == "sent"
    assert len(desk.ran) == 1


@pytest.mark.parametrize(("other", "code"), ANOTHER_DEPLOY)
def test_what_nobody_knows_for_an_hour_ends_the_request(desk, engine, asked, carried, row, monkeypatch, other, code):
    request = asked(desk.made(), "tell")
    other(desk, monkeypatch)
    with engine.begin() as tx:
        most = text("update durable.deliveries set attempts = :most, snoozes = :most")
        tx.execute(most, {"most": MOST_WAITS})
    assert carried(request).outcome == "failed"
    assert (row(request).state, row(request).error_code) == ("failed", code)
    with engine.begin() as tx:
        deliveries.redrive(tx, request, by="dana", reason="deployed")
    assert carried(request).outcome == "snoozed", "the hour begins anew"


def test_an_execution_that_failed_ends_the_request_without_what_its_handler_said(desk, asked, carried, row):
    case_id = desk.made()

    def secret(state, ctx):
        raise ValueError("the card is 4111-1111")

    desk.act = secret
    request = asked(case_id, "tell")
    attempted = carried(request)
    assert (attempted.outcome, attempted.error_code) == ("failed", "EXECUTION_FAILED")
    assert "4111" not in (row(request).error_message or "")
    assert "4111" not in (attempted.error_message or "")


def test_a_redriven_request_is_executed_anew(desk, engine, asked, carried):
    case_id = desk.made()
    desk.act = lambda state, ctx: 1 / 0
    request = asked(case_id, "tell")
    carried(request)
    desk.act = lambda state, ctx: None
    with engine.begin() as tx:
        deliveries.redrive(tx, request, by="dana", reason="mended")
    assert carried(request).outcome == "sent"
    first, second = desk.ran
    assert first.key == second.key
    assert first.execution_id != second.execution_id


def test_what_can_be_refused_at_once_is_and_nothing_is_written(desk, engine, asked):
    case_id = desk.made()
    loop: list[object] = []
    loop.append(loop)
    for error, how in (
        (CaseNotFound, {"case_id": "0198c0de-0000-7000-8000-000000000000"}),
        (CaseNotFound, {"case_id": "no id"}),
        (UnknownStep, {"step": "jump"}),
        (InvalidInput, {"input": {"plaice": 1}}),
        (InvalidInput, {"step": "tell", "input": 1}),
        (InvalidArguments, {"input": {"place": "Oslo"}, "actor": loop}),
        (InvalidOption, {"input": {"place": "Oslo"}, "priority": 11}),
    ):
        with pytest.raises(error):
            asked(**{"case_id": case_id, **how})
    with engine.connect() as tx:
        assert deliveries.page(tx) == []


@pytest.mark.parametrize("caller", ["session", "connection", "psycopg"])
def test_whatever_transaction_its_caller_has_open(desk, engine, carried, caller):
    case_id = desk.made()
    if caller == "psycopg":
        address = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(address) as tx:
            request = desk.cases.execute_later(tx, case_id, "tell").id
    else:
        with Session(engine) if caller == "session" else engine.connect() as tx, tx.begin():
            request = desk.cases.execute_later(tx, case_id, "tell").id
    assert carried(request).outcome == "sent"


def test_cases_in_memory_have_no_worker():
    store = MemoryStore(VirtualClock())
    desk = Desk(store)
    try:
        case_id = desk.made()
        with store.transaction() as tx, pytest.raises(UnsupportedTransaction):
            desk.cases.execute_later(tx, case_id, "tell")
    finally:
        desk.forget()


def test_cases_that_do_not_know_the_type_ask_for_nothing(desk, engine):
    case_id = desk.made()
    other = Desk(engine)
    try:
        with Session(engine) as session, session.begin(), pytest.raises(UnknownCaseType):
            other.cases.execute_later(session, case_id, "scan")
    finally:
        other.forget()


def test_a_worker_uses_connections_of_its_own(desk, nowhere, asked, carried):
    """Those of the module's engine may be its parent's."""
    request = asked(desk.made(), "tell")
    desk.cases.store.database = nowhere
    assert carried(request).outcome == "sent"


def test_on_a_workers_database_the_cases_are_made_once(desk, nowhere, worker):
    """Each store has a connection of its own for its heartbeats: one per request would use them up."""
    desk.cases.store.database = nowhere
    assert desk.cases.on(worker.database) is desk.cases.on(worker.database) is not desk.cases
    assert desk.cases.on(nowhere) is desk.cases


def test_the_request_has_its_place_in_the_callers_own_transaction(desk, engine, asked):
    """It sees a case that was created there."""
    with Session(engine) as session, session.begin():
        case = desk.cases.create(session, desk.type, {})
        ref = desk.cases.execute_later(session, case.id, "tell", actor=CARRIER)
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.deliveries where id = :id"), {"id": ref.id}) == 1
