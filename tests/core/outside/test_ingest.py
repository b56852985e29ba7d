"""Events of other systems: executed once, or kept as dead letters; and brought to their end when a process was lost."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from durable_core import deliveries
from durable_core.cases import later, passing, sweep
from durable_core.cases.event import Event
from durable_core.cases.inbox import PostgresInbox
from durable_core.cases.ingest import Ingested
from durable_core.deliveries.attempt import perform
from durable_core.errors import InvalidArguments, InvalidOption
from durable_core.kinds import deliveries as registry
from durable_core.refusals import CaseBusy
from durable_core.sweeps import SWEEPS, Bounds, named, run_sweep
from tests.core.outside.desk import Desk, events


def scanned(name="P1", place="Oslo", **more):
    return Event("carrier", name, "scanned", {"place": place}, **more)


def test_an_event_becomes_an_execution_with_its_system_as_the_actor(either):
    case_id = either.made("P1")
    done = either.cases.ingest(scanned())
    assert (done.status, done.case_id, done.step) == ("executed", case_id, "scan")
    (ctx,) = either.ran
    assert (done.execution_id, ctx.actor, ctx.input.place) == (ctx.execution_id, {"system": "carrier"}, "Oslo")
    assert ctx.key == done.id, "the same over all executions of this event"
    assert either.case(case_id).state.places == ["Oslo"]
    assert either.entries(case_id) == ["claimed", "completed"]


def test_the_application_says_who_acts(engine):
    mapped = Desk(engine, external_actor=lambda event: {"system": "carrier", "of": event.type})
    try:
        mapped.made("P1")
        mapped.cases.ingest(scanned())
        assert mapped.ran[0].actor == {"system": "carrier", "of": "scanned"}
    finally:
        mapped.forget()


def test_an_event_may_come_as_json_and_what_is_none_is_refused(either):
    either.made("P1")
    said = {"system": "carrier", "external_id": "P1", "type": "scanned", "payload": {"place": "Oslo"}}
    assert either.cases.ingest(said).status == "executed"
    with pytest.raises(InvalidArguments):
        either.cases.ingest({"system": "carrier"})


@pytest.mark.spec("cases", 29)
def test_of_one_event_three_times_at_once_one_is_executed(desk, engine):
    case_id = desk.made("P1")
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: desk.cases.ingest(scanned()), range(3)))
    assert sorted(one.status for one in done) == ["duplicate", "duplicate", "executed"]
    assert len({one.id for one in done}) == 1
    assert desk.entries(case_id) == ["claimed", "completed"]
    assert len(desk.ran) == 1


def test_a_duplicate_says_how_the_first_stands(either):
    either.made("P1")
    first = either.cases.ingest(scanned())
    again = either.cases.ingest(scanned())
    assert (again.status, again.was, again.execution_id) == ("duplicate", "executed", first.execution_id)
    assert len(either.ran) == 1


@pytest.mark.spec("cases", 31)
def test_without_an_id_the_same_payload_is_the_same_event_whatever_the_order_of_its_keys(either):
    either.made("P1")
    one = {"place": "Oslo", "at": {"hour": 1, "minute": 2}}
    same = {"at": {"minute": 2, "hour": 1}, "place": "Oslo"}
    other = {"place": "Oslo", "at": {"hour": 1, "minute": 3}}
    came = [either.cases.ingest(Event("carrier", "P1", "scanned", payload)) for payload in (one, same, other)]
    assert [one.status for one in came] == ["executed", "duplicate", "executed"]


@pytest.mark.spec("cases", 30)
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Event("carrier", "P9", "scanned", {"place": "Oslo"}), "unrouted"),
        (Event("other", "P1", "scanned", {"place": "Oslo"}), "unrouted"),
        (Event("carrier", "P2", "scanned", {"place": "Oslo"}), "no-step"),
        (Event("carrier", "P3", "scanned", {"place": "Oslo"}), "step-not-available"),
        (Event("carrier", "P1", "scanned", {"plaice": "\x00"}), "invalid-input"),
        (Event("carrier", "P1", "scanned", None), "invalid-input"),
        (Event("carrier", "P1", "scanned", {"place": "Oslo"}, step="jump"), "bad-request"),
        (Event("carrier", "P1", "handed over", None, step="deliver", scope_key="x"), "bad-request"),
    ],
)
def test_what_cannot_be_executed_is_a_dead_letter_with_its_reason_and_stays_one(either, event, reason):
    either.made("P1", items={"a": False})
    either.made("P2", step=None)
    either.made("P3", lost=True)
    done = either.cases.ingest(event)
    assert (done.status, done.reason) == ("dead-lettered", reason)
    assert done.detail
    (letter,) = either.dead()
    assert (letter.id, letter.reason, letter.detail) == (done.id, reason, done.detail)
    assert letter.event == Event.read(event.text()), "as it came"
    assert either.cases.ingest(event).status == "duplicate"
    assert either.ran == []
    assert [one.id for one in either.dead(reason=reason, system=event.system)] == [done.id]
    assert either.dead(reason="case-busy") == either.dead(system="nobody") == []


def test_the_events_own_words_come_before_the_correlations(either):
    either.made("P1", step="scan", scope_key="nothing", items={"a": False})
    done = either.cases.ingest(Event("carrier", "P1", "handed over", None, step="deliver", scope_key="a"))
    assert (done.status, done.step, done.scope_key) == ("executed", "deliver", "a")


def test_the_correlation_says_which_element_it_is(either):
    case_id = either.made("P1", step="deliver", scope_key="a", items={"a": False, "b": False})
    assert either.cases.ingest(Event("carrier", "P1", "handed over")).status == "executed"
    assert either.case(case_id).state.items == {"a": True, "b": False}


@pytest.mark.spec("cases", 30)
def test_an_event_that_met_a_busy_case_runs_when_it_is_brought_again(either):
    case_id = either.made("P1")
    met = []

    def meanwhile(state, ctx):
        either.act = lambda state, ctx: None
        met.append(either.cases.ingest(scanned(place="Rome")))

    either.act = meanwhile
    assert either.cases.ingest(scanned(place="Oslo")).status == "executed"
    assert [(one.status, one.reason) for one in met] == [("dead-lettered", "case-busy")]
    again = either.cases.ingest(scanned(place="Rome"))
    assert (again.status, again.id) == ("executed", met[0].id)
    assert either.case(case_id).state.places == ["Oslo", "Rome"]
    assert either.dead() == []
    assert either.cases.ingest(scanned(place="Rome")).status == "duplicate"


@pytest.mark.spec("cases", 30)
def test_of_two_who_bring_a_failed_event_again_one_runs_it(desk, engine):
    case_id = desk.made("P1", step="tell")
    desk.act = lambda state, ctx: 1 / 0
    event = Event("carrier", "P1", "told")
    failed = desk.cases.ingest(event)
    assert (failed.status, failed.reason) == ("dead-lettered", "execution-failed")
    assert "division" not in (failed.detail or ""), "what a handler raises may hold anything"
    both_in = threading.Barrier(2)
    desk.ran.clear()
    desk.act = lambda state, ctx: None

    def again(_):
        both_in.wait(5)
        return desk.cases.ingest(event)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(again, range(2)))
    assert sorted(one.status for one in done) == ["duplicate", "executed"]
    assert len(desk.ran) == 1
    assert desk.entries(case_id) == ["claimed", "failed", "claimed", "completed"]


def test_a_reopened_event_is_run_as_it_first_came(either):
    case_id = either.made("P1")
    either.act = lambda state, ctx: 1 / 0
    either.cases.ingest(scanned(place="Oslo", event_id="e1"))
    either.act = lambda state, ctx: None
    assert either.cases.ingest(scanned(place="Rome", event_id="e1")).status == "executed"
    assert either.case(case_id).state.places == ["Oslo"]


# --- correlations --------------------------------------------------------------------------------


@pytest.mark.spec("cases", 32)
def test_a_correlation_of_a_failed_attempt_is_absent_and_one_registered_again_keeps_its_id(either):
    case_id = either.made("P1", items={"a": False})
    other = either.made("P2")

    def named(state, ctx):
        ctx.correlate("customs", f"C{ctx.attempt}", step="scan")
        if ctx.attempt == 1:
            raise ValueError("not yet")

    either.act = named
    assert either.cases.ingest(scanned()).status == "executed"
    with either.tx() as tx:
        assert either.cases.correlation_of(tx, "customs", "C1") is None
        first = either.cases.correlation_of(tx, "customs", "C2")
        assert (first.case_id, first.step, first.scope_key) == (case_id, "scan", None)
        moved = either.cases.correlate(tx, other, "customs", "C2", scope_key="x", metadata={"a": [1]})
        assert (moved.id, moved.case_id, moved.step, moved.scope_key) == (first.id, other, None, "x")
        assert moved.metadata == {"a": [1]}
    with either.tx() as tx:
        assert [one.external_id for one in either.cases.correlations(tx, other)] == ["P2", "C2"]
        assert [one.external_id for one in either.cases.correlations(tx, case_id)] == ["P1"]


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("system", None),
        ("system", "x" * 201),
        ("external_id", 7),
        ("external_id", "a\x00"),
        ("external_id", "\ud800"),
        ("external_id", "\u00e9" * 501),
        ("step", ""),
        ("step", "a\x00"),
        ("step", 7),
        ("scope_key", ""),
        ("scope_key", "a\x00"),
    ],
)
def test_a_name_that_no_correlation_can_have_is_refused_at_the_call(either, option, name):
    case_id = either.made("P1")
    named = {"system": "customs", "external_id": "C1", option: name}
    met = []

    def correlates(state, ctx):
        with pytest.raises(ValueError, match=f"correlate: {option}: ") as refused:
            ctx.correlate(**named)
        met.append(refused.value)

    either.act = correlates
    assert either.cases.ingest(scanned()).status == "executed"
    assert len(met) == 1
    with either.tx() as tx:
        with pytest.raises(InvalidOption, match=option):
            either.cases.correlate(tx, case_id, **named)
        assert [one.external_id for one in either.cases.correlations(tx, case_id)] == ["P1"]


# --- lost on the way -----------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here: nothing of it is caught, nothing is written any more."""


def killed_after_the_gate(desk, event):
    with desk.cases.store.transaction() as transaction:
        return PostgresInbox(transaction.tx).admit(event)


def recovered(desk, worker, engine, count=1):
    """The sweep runs, and a worker carries out what it enqueued."""
    assert run_sweep(desk.cases.store.database, named("ingest"), Bounds())["moved"] == count
    with engine.connect() as tx:
        waiting = [row for row in deliveries.page(tx, state="pending") if row.kind == later.EVENT_KIND]
    return [perform(worker, registry.get(row.kind), row.id).outcome.value for row in waiting]


@pytest.mark.spec("cases", 33)
def test_killed_after_the_gate_a_sweep_brings_the_event_to_its_end(desk, engine, worker, clock):
    case_id = desk.made("P1")
    killed_after_the_gate(desk, scanned())
    assert desk.cases.ingest(scanned()).was == "pending", "every redelivery is told that it is there"
    clock.advance(59)
    assert run_sweep(desk.cases.store.database, named("ingest"), Bounds())["moved"] == 0
    clock.advance(16)
    assert recovered(desk, worker, engine) == ["sent"]
    (row,) = events(engine)
    assert (row.status, row.tries) == ("executed", 2)
    assert desk.case(case_id).state.places == ["Oslo"]
    assert desk.cases.ingest(scanned()).was == "executed"


@pytest.mark.spec("cases", 33)
def test_killed_right_after_the_commit_it_is_not_executed_again(desk, engine, worker, clock):
    """State and event moved together: there is no moment between them to be killed in."""
    case_id = desk.made("P1")

    def execute(request):
        execute_as_ever(request)
        raise Killed

    lifecycle = desk.cases.lifecycle
    execute_as_ever, lifecycle.execute = lifecycle.execute, execute
    with pytest.raises(Killed):
        desk.cases.ingest(scanned())
    del lifecycle.execute
    (row,) = events(engine)
    assert row.status == "executed"
    clock.advance(3600)
    assert run_sweep(desk.cases.store.database, named("ingest"), Bounds())["moved"] == 0
    assert desk.cases.ingest(scanned()).status == "duplicate"
    assert desk.entries(case_id) == ["claimed", "completed"]


@pytest.mark.spec("cases", 33)
def test_killed_inside_the_handler_its_claim_lapses_and_the_event_is_executed_once(desk, engine, worker, clock):
    case_id = desk.made("P1")

    def kill(state, ctx):
        raise Killed

    desk.act = kill
    with pytest.raises(Killed):
        desk.cases.ingest(scanned())
    desk.act = lambda state, ctx: None
    clock.advance(75)
    assert recovered(desk, worker, engine) == ["sent"]
    assert desk.entries(case_id) == ["claimed", "expired", "claimed", "completed"]
    assert desk.case(case_id).state.places == ["Oslo"]
    first, second = desk.ran
    assert first.execution_id != second.execution_id
    assert first.key == second.key


class TimeIsUp(Exception):
    """As the soft time limit of a task is: an Exception, and no outcome of a handler."""


@pytest.mark.parametrize("where", ["in the handler", "before it"])
def test_what_ends_the_task_passes_and_the_event_waits(either, monkeypatch, where):
    monkeypatch.setattr(passing, "_passing", (TimeIsUp,))
    case_id = either.made("P1")

    def end(*_):
        raise TimeIsUp

    if where == "in the handler":
        either.act = end
    else:
        monkeypatch.setattr(type(either.cases.lifecycle), "execute", end)
    with pytest.raises(TimeIsUp):
        either.cases.ingest(scanned())
    assert either.dead() == []
    assert (either.cases.ingest(scanned()).was, either.case(case_id).state.places) == ("pending", [])


def test_an_event_whose_execution_lives_is_left_alone(desk, engine, clock):
    """A handler may need longer than a minute; its claim says that it lives."""
    desk.made("P1")
    swept = []

    def slow(state, ctx):
        clock.advance(61)
        with engine.begin() as connection:  # its heartbeat
            connection.execute(
                text("update durable.case_claims set expires_at = durable.durable_now() + interval '30 s'")
            )
        swept.append(sweep.recover(desk.cases.store.database))

    desk.act = slow
    assert desk.cases.ingest(scanned()).status == "executed"
    assert swept == [0]


def test_whoever_comes_second_with_an_event_that_was_taken_up_commits_nothing(desk, engine, worker, clock):
    """A process that was frozen behind its claim's back, or before it: its commit finds another `tries`."""
    case_id = desk.made("P1")

    def taken(state, ctx):
        with engine.begin() as connection:
            connection.execute(text("update durable.case_events set tries = tries + 1"))

    desk.act = taken
    done = desk.cases.ingest(scanned())
    assert done.status == "pending", "as it stands: somebody else's now"
    assert desk.case(case_id).state.places == []
    assert desk.entries(case_id) == ["claimed", "failed"]
    assert len(desk.ran) == 1, "no attempt can mend that"


def test_an_outage_is_raised_and_the_event_waits(engine, far, relay, worker, clock):
    away = Desk(far)
    try:
        case_id = away.made("P1")
        relay.cut_before(b"case_correlations")
        with pytest.raises(OperationalError):
            away.cases.ingest(scanned())
        assert [row.status for row in events(engine)] == ["pending"]
        clock.advance(75)
        away.cases = away.cases.on(worker.database)
        assert recovered(away, worker, engine) == ["sent"]
        assert entries_of(engine, case_id)[-1] == "completed"
    finally:
        away.forget()


def test_an_outage_of_the_execution_is_no_dead_letter(desk, engine, nowhere, worker, clock):
    """It was over before anybody could have written one."""
    case_id = desk.made("P1")
    lifecycle = desk.cases.lifecycle

    def away(request):
        with nowhere.connect():
            raise AssertionError("nobody is there")

    lifecycle.execute = away
    with pytest.raises(OperationalError):
        desk.cases.ingest(scanned())
    del lifecycle.execute
    assert [row.status for row in events(engine)] == ["pending"]
    clock.advance(75)
    assert recovered(desk, worker, engine) == ["sent"]
    assert desk.case(case_id).state.places == ["Oslo"]


def entries_of(engine, case_id):
    with engine.connect() as tx:
        found = text("select entry from durable.case_journal where case_id = :id order by number")
        return list(tx.scalars(found, {"id": case_id}))


def test_what_no_case_is_correlated_with_is_buried_by_the_sweep(desk, engine, clock):
    killed_after_the_gate(desk, scanned("P9"))
    clock.advance(75)
    assert run_sweep(desk.cases.store.database, named("ingest"), Bounds())["moved"] == 1
    assert [letter.reason for letter in desk.dead()] == ["unrouted"]


def test_an_event_that_ends_its_processes_is_given_up(desk, engine, worker, clock):
    desk.made("P1")
    waiting = killed_after_the_gate(desk, scanned())
    with engine.begin() as connection:
        connection.execute(text("update durable.case_events set tries = :n"), {"n": sweep.MOST_TRIES})
    clock.advance(75)
    assert run_sweep(desk.cases.store.database, named("ingest"), Bounds())["moved"] == 1
    assert [(letter.id, letter.reason) for letter in desk.dead()] == [(waiting.id, "execution-failed")]
    assert desk.cases.ingest(scanned()).status == "executed", "by hand it can be brought again"


def test_a_process_that_does_not_know_the_type_leaves_the_event_to_others(desk, engine, clock):
    desk.made("P1")
    killed_after_the_gate(desk, scanned())
    clock.advance(75)
    known = later._carried.pop(desk.type.name)
    try:
        assert sweep.recover(desk.cases.store.database) == 0
    finally:
        later._carried[desk.type.name] = known
    assert sweep.recover(desk.cases.store.database) == 1


def test_a_delivery_whose_event_was_taken_up_again_has_nothing_to_do(desk, engine, worker, clock, row):
    desk.made("P1")
    killed_after_the_gate(desk, scanned())
    for _ in range(2):
        clock.advance(75)
        assert sweep.recover(desk.cases.store.database) == 1
        with engine.begin() as tx:
            tries = tx.scalar(text("update durable.case_events set tries = tries + 1 returning tries"))
    clock.advance(75)
    assert sweep.recover(desk.cases.store.database) == 1
    with engine.connect() as tx:
        third, second, first = [one.id for one in deliveries.page(tx)]
    came = [perform(worker, registry.get(later.EVENT_KIND), row_id).outcome for row_id in (first, second, third)]
    assert came == ["sent"] * 3
    assert [row(one).result for one in (first, second, third)] == ["nothing to do", "nothing to do", "executed"]
    assert (len(desk.ran), events(engine)[0].tries) == (1, tries + 1)


@pytest.mark.spec("cases", 33)
def test_an_event_waits_for_as_long_as_no_worker_comes_and_loses_nothing(desk, engine, worker, clock):
    case_id = desk.made("P1")
    killed_after_the_gate(desk, scanned())
    clock.advance(75)
    database = desk.cases.store.database
    assert sweep.recover(database) == 1
    for _ in range(sweep.MOST_TRIES + 5):
        clock.advance(75)
        assert run_sweep(database, named("ingest"), Bounds())["moved"] == 0
    assert [(one.status, one.tries) for one in events(engine)] == [("pending", 2)]
    with engine.connect() as tx:
        (request,) = deliveries.page(tx)
    assert perform(worker, registry.get(later.EVENT_KIND), request.id).outcome == "sent"
    assert desk.case(case_id).state.places == ["Oslo"]


def test_an_event_whose_delivery_ended_without_it_is_taken_up_again(desk, engine, worker, clock):
    desk.made("P1")
    killed_after_the_gate(desk, scanned())
    clock.advance(75)
    assert sweep.recover(desk.cases.store.database) == 1
    with engine.begin() as tx:
        (request,) = deliveries.page(tx)
        deliveries.cancel(tx, request.id, by="dana", reason="a mistake")
    clock.advance(75)
    assert recovered(desk, worker, engine) == ["sent"]
    assert [(one.status, one.tries) for one in events(engine)] == [("executed", 3)]


def test_a_worker_that_does_not_know_the_type_leaves_the_event_for_later(desk, engine, worker, clock, row):
    desk.made("P1")
    killed_after_the_gate(desk, scanned())
    clock.advance(75)
    sweep.recover(desk.cases.store.database)
    with engine.connect() as tx:
        (request,) = [one.id for one in deliveries.page(tx)]
    known = later._carried.pop(desk.type.name)
    try:
        attempted = perform(worker, registry.get(later.EVENT_KIND), request)
    finally:
        later._carried[desk.type.name] = known
    assert (attempted.outcome, attempted.error_code) == ("snoozed", "UNKNOWN_HANDLER")
    clock.advance(11)
    assert perform(worker, registry.get(later.EVENT_KIND), request).outcome == "sent"


def test_of_two_sweeps_at_once_one_takes_an_event(desk, engine, clock):
    for number in range(30):
        desk.made(f"P{number}")
        killed_after_the_gate(desk, scanned(f"P{number}"))
    clock.advance(75)
    with ThreadPoolExecutor(3) as pool:
        taken = list(pool.map(lambda _: sweep.recover(desk.cases.store.database), range(3)))
    assert sum(taken) == 30
    assert {row.tries for row in events(engine)} == {2}


def test_the_sweep_is_one_of_those_that_beat_drives():
    ingest = named("ingest")
    assert ingest in SWEEPS
    assert (ingest.interval, sweep.STUCK_SECONDS) == (15.0, 60.0)


def test_busy_is_what_the_lifecycle_says(desk):
    """The reason in the inbox is the refusal's own."""
    assert CaseBusy.reason.lower().replace("_", "-") == "case-busy"
    assert Ingested("executed", "x").reason is None
