"""The answer to a COMMIT is lost on the way: whether it committed is asked of the row, never guessed."""

import time

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from durable_core import Retry
from durable_core.claims.claim import Holder
from durable_core.database.commits import Resolved, resolve
from durable_core.database.connections import Database
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, perform
from durable_core.deliveries.report import _statements
from tests.conftest import effects_of, record
from tests.relay import COMMIT, Cut


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
        # Without an effect the receipt is a transaction of one statement.
        words = COMMIT if effect else b"settled as ("
        cuts.append(relay.cut_after(words) if arrives else relay.cut_before(words))

    kind = declare(handler)
    made = make(kind)
    assert perform(make_worker(on=far), kind, made.id).outcome is Outcome.SENT
    assert cuts[0].done
    assert len(calls) == 1
    assert effects_of(engine, made.id) == ([(1, "")] if effect else [])
    assert row(made.id).state == "sent"


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_is_tried_again_where_the_server_does_not_even_let_the_row_be_asked(
    make_worker, relay, declare, make, row, engine, arrives
):
    # Without trying TLS first, so that the second cut is the whole call.
    far = create_engine(engine.url.set(host="127.0.0.1", port=relay.port), connect_args={"sslmode": "disable"})
    calls, cuts = [], []

    def handler(step):
        calls.append(1)
        words = b"settled as ("
        receipt = relay.cut_after(words) if arrives else relay.cut_before(words)
        receipt.then = Cut(b"user\x00", arrives=False)
        cuts.extend([receipt, receipt.then])

    kind = declare(handler)
    made = make(kind)
    assert perform(make_worker(on=Database(far)), kind, made.id).outcome is Outcome.SENT
    assert [cut.done for cut in cuts] == [True, True]
    assert len(calls) == 1
    assert (row(made.id).state, row(made.id).attempts) == ("sent", 1)
    far.dispose()


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


# --- the same for every other statement whose answer may be lost ------------------------------------


def cut(relay, words, arrives):
    return relay.cut_after(words) if arrives else relay.cut_before(words)


def settled(engine):
    """Return once the server has noticed that the lost connection is gone, and ended its transaction."""
    for _ in range(600):
        with engine.connect() as tx:
            if not tx.scalar(text("select count(*) from pg_stat_activity where state like 'idle in transaction%'")):
                return
        time.sleep(0.02)
    raise AssertionError("a lost transaction is still open")


@pytest.mark.parametrize("arrives", [True, False])
def test_a_claim_whose_answer_was_lost_runs_nothing_and_spends_no_attempt(
    make_worker, far, relay, declare, make, row, database, engine, clock, arrives
):
    """It may stand, held by nobody: then its lease runs out, and that is one interruption."""
    runs = []

    def handler(step):
        runs.append(step.attempt)
        record(step.session, step)

    kind = declare(handler)
    made = make(kind)
    worker = make_worker(on=far)
    lost = cut(relay, b"attempts = d.attempts + 1", arrives)
    assert perform(worker, kind, made.id).outcome is Outcome.UNAVAILABLE
    assert lost.done
    settled(engine)
    assert runs == []
    assert (row(made.id).state, row(made.id).fence) == (("processing", 1) if arrives else ("pending", 0))
    clock.advance(31)
    assert sweep.reap(database) == int(arrives)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert runs == [1]
    assert (row(made.id).failures, row(made.id).interruptions) == (0, int(arrives))
    assert effects_of(engine, made.id) == [(1 + int(arrives), "")]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_caller_whose_commit_got_no_answer_enqueues_again_under_its_key_and_has_one_row(
    far, relay, kind, engine, database, carrier, row, arrives
):
    """The caller hears the error and cannot know; the key makes its second try safe either way."""
    session = Session(far.engine)
    ref = kind.options(key="order-1").enqueue(session, 7)
    lost = cut(relay, COMMIT, arrives)
    with pytest.raises(OperationalError):
        session.commit()
    session.close()
    assert lost.done
    settled(engine)
    assert carrier.offered == []
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.deliveries")) == int(arrives)
    with Session(engine) as again, again.begin():
        second = kind.options(key="order-1").enqueue(again, 7)
    assert second.created is not arrives
    assert (second.id == ref.id) is arrives
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.deliveries")) == 1
    assert sweep.dispatch(database) == 1
    assert [hint.id for hint in carrier.published] == [second.id]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_row_given_back_by_a_leaving_worker_whose_answer_was_lost_is_given_back_once(
    make_worker, far, relay, declare, make, row, lines, arrives
):
    cuts = []

    def handler(step):
        cuts.append(cut(relay, b"released as (", arrives))
        raise SystemExit

    kind = declare(handler)
    made = make(kind)
    with pytest.raises(SystemExit):
        perform(make_worker(on=far), kind, made.id)
    assert cuts[0].done
    assert (row(made.id).state, row(made.id).failures, row(made.id).interruptions) == ("pending", 0, 1)
    assert [line.move for line in lines(made.id)] == ["release"]


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("healer", ["reap", "give back"])
def test_a_rescue_whose_commit_got_no_answer_counts_its_loss_once(
    far, relay, make, database, engine, row, lines, clock, healer, arrives
):
    made = make(state="processing", holder=Holder(owner="gone", pid=4711))

    def heal(by):
        return sweep.reap(by) if healer == "reap" else sweep.give_back(by, "gone", {4711})

    clock.advance(31)
    lost = cut(relay, COMMIT, arrives)
    with pytest.raises(OperationalError):
        heal(far)
    assert lost.done
    settled(engine)
    assert row(made.id).state == ("pending" if arrives else "processing")
    assert heal(database) == int(not arrives)
    assert (row(made.id).state, row(made.id).interruptions) == ("pending", 1)
    assert len(lines(made.id)) == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_hints_whose_marks_got_no_answer_are_published_by_the_next_dispatch(
    far, relay, make, database, engine, carrier, arrives
):
    made = make()
    lost = cut(relay, COMMIT, arrives)
    with pytest.raises(OperationalError):
        sweep.dispatch(far)
    assert lost.done
    settled(engine)
    assert carrier.published == []
    assert sweep.dispatch(database) == 1
    assert [hint.id for hint in carrier.published] == [made.id]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_pruning_whose_commit_got_no_answer_is_whole_or_did_not_happen(
    far, relay, make, database, engine, clock, arrives
):
    make(state="sent")
    clock.advance(sweep.RETENTION_SECONDS + 1)
    lost = cut(relay, COMMIT, arrives)
    with pytest.raises(OperationalError):
        sweep.prune(far)
    assert lost.done
    settled(engine)
    assert sweep.prune(database) == int(not arrives)
