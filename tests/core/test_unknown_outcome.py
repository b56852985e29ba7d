"""The answer to a COMMIT is lost on the way: whether it committed is asked of the row, never guessed."""

import pytest
from sqlalchemy import create_engine, text

from durable_core import Retry
from durable_core.database.commits import Resolved, resolve
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Outcome, _statements, perform
from tests.conftest import effects_of, record
from tests.relay import Relay

COMMIT = b"COMMIT\x00"
"""The statement alone: comments of other statements, which travel with them, use the word too."""


@pytest.fixture
def relay(engine):
    relay = Relay(engine.url.host, engine.url.port)
    yield relay
    relay.close()


@pytest.fixture
def far(engine, relay):
    """The same database, seen through the relay."""
    far = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    yield Database(far)
    far.dispose()


def test_a_commit_that_arrived_is_found_committed_and_nothing_runs_twice(
    make_worker, far, relay, declare, make, row, engine
):
    runs, cuts = [], []

    def handler(step):
        runs.append(1)
        record(step.session, step)
        cuts.append(relay.cut_after(COMMIT))

    kind = declare(handler)
    made = make(kind)
    assert perform(make_worker(on=far), kind, made.id).outcome is Outcome.SENT
    assert cuts[0].done
    assert len(runs) == 1
    assert (row(made.id).state, effects_of(engine, made.id)) == ("sent", [(1, "")])


def test_a_commit_that_never_arrived_repeats_the_attempt_when_it_used_its_session(
    make_worker, far, relay, declare, make, row, engine
):
    runs, cuts = [], []

    def handler(step):
        runs.append(step.attempt)
        record(step.session, step)
        if len(runs) == 1:
            cuts.append(relay.cut_before(COMMIT))

    kind = declare(handler)
    made = make(kind)
    assert perform(make_worker(on=far), kind, made.id).outcome is Outcome.SENT
    assert cuts[0].done
    assert runs == [1, 1]
    assert (row(made.id).attempts, effects_of(engine, made.id)) == (1, [(1, "")])


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("effect", [True, False])
def test_a_lost_commit_of_a_handler_without_session_never_calls_the_handler_again(
    make_worker, far, relay, declare, make, row, engine, arrives, effect
):
    calls, cuts = [], []

    def handler(step):
        calls.append(1)
        if effect:
            step.in_commit(lambda session: record(session, step))
        cuts.append(relay.cut_after(COMMIT) if arrives else relay.cut_before(COMMIT))

    kind = declare(handler)
    made = make(kind)
    assert perform(make_worker(on=far), kind, made.id).outcome is Outcome.SENT
    assert cuts[0].done
    assert len(calls) == 1
    assert effects_of(engine, made.id) == ([(1, "")] if effect else [])
    assert row(made.id).state == "sent"


@pytest.mark.parametrize("arrives", [True, False])
def test_a_failure_report_whose_answer_was_lost_is_booked_once(
    make_worker, far, relay, declare, make, row, lines, arrives
):
    cuts = []

    def handler(step):
        words = b"released as ("
        cuts.append(relay.cut_after(words) if arrives else relay.cut_before(words))
        raise Retry("busy")

    kind = declare(handler)
    made = make(kind)
    assert perform(make_worker(on=far), kind, made.id).outcome is Outcome.RETRY
    assert cuts[0].done
    assert (row(made.id).state, row(made.id).failures) == ("pending", 1)
    assert [line.move for line in lines(made.id)] == ["fail"]


def test_a_connection_lost_inside_the_session_costs_no_attempt(make_worker, far, relay, declare, make, row, engine):
    runs = []

    def handler(step):
        runs.append(1)
        record(step.session, step)
        if len(runs) == 1:
            relay.cut_before(b"lost on the way")
        step.session.execute(text("select 'lost on the way'"))

    kind = declare(handler)
    made = make(kind)
    assert perform(make_worker(on=far), kind, made.id).outcome is Outcome.SENT
    assert len(runs) == 2
    assert (row(made.id).attempts, effects_of(engine, made.id)) == (1, [(1, "")])


def test_a_backend_ended_inside_the_session_costs_no_attempt(worker, declare, make, row, engine, other_engine):
    runs = []

    def handler(step):
        runs.append(1)
        record(step.session, step)
        if len(runs) == 1:
            pid = step.session.scalar(text("select pg_backend_pid()"))
            with other_engine.connect() as other:
                other.execute(text("select pg_terminate_backend(:pid, 5000)"), {"pid": pid})

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert len(runs) == 2
    assert (row(made.id).attempts, row(made.id).failures) == (1, 0)
    assert effects_of(engine, made.id) == [(1, "")]


def test_the_row_tells_what_became_of_a_fence(database, engine, make, clock):
    processing, sent = make(state="processing"), make(state="sent")

    def answer(row_id, fence):
        return resolve(database, _statements.resolve, row_id, fence, "1s")[0]

    assert answer(processing.id, 1) is Resolved.NOT_COMMITTED
    assert answer(sent.id, 1) is Resolved.COMMITTED
    assert answer(sent.id, 2) is Resolved.LOST
    assert answer("00000000-0000-7000-8000-000000000000", 1) is Resolved.LOST


def test_a_row_still_locked_by_the_doubtful_transaction_is_unknown_and_left_alone(database, other_engine, make, row):
    made = make(state="processing")
    before = row(made.id)
    with other_engine.begin() as doubtful:
        doubtful.execute(text("select from durable.deliveries where id = :id for no key update"), {"id": made.id})
        assert resolve(database, _statements.resolve, made.id, 1, "100ms")[0] is Resolved.UNKNOWN
    assert row(made.id) == before
