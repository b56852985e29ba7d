"""Sweeps, operators and owners that meet on the same rows, on two connections whose transactions are both open."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from durable_core import IllegalMove, NotFound, deliveries
from durable_core.claims.claim import Holder
from durable_core.claims.heartbeat import Heartbeat
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, _statements, carry_out, claim_one, perform
from durable_core.deliveries.enqueue import enqueue_many
from durable_core.deliveries.report import _statements as report_statements
from durable_core.errors import RowBusy
from durable_core.sweeps import SWEEPS, Bounds, loops, run_sweep
from durable_core.testing import wait_until_blocked, wait_until_somebody_blocks
from tests.poison import poisoned

AGES = 15 * 24 * 3600
CHILD = Holder(owner="this-worker", pid=4711)


def pid_of(connection):
    return connection.scalar(text("select pg_backend_pid()"))


def impatient(connection):
    """Waiting for any lock would raise here."""
    connection.execute(text("set local lock_timeout = '1ms'"))
    return connection


def redrive(tx, made):
    deliveries.redrive(tx, made.id, by="dana", reason="mended")


def take_back(tx, *, heartbeat_seconds=8.0):
    """A reap, in a transaction that its caller ends."""
    lapsed = run(tx, sweep._statements.lapsed, limit=100, heartbeat_seconds=heartbeat_seconds)
    return sweep._take_back(Database(tx.engine), tx, lapsed, sweep._FELL_SILENT, lambda: 0.5)


# --- an owner's report and a redrive ---------------------------------------------------------------


def test_a_redrive_does_not_wait_for_a_report_that_is_ending_the_row(engine, other_engine, kind, make, row, worker):
    made = make(state="processing")
    report = {
        **made.held.naming, "lock_timeout": "5s", "to_state": "dead", "delay_seconds": 0.0, "counted": "failure",
        "move": "fail", "error_code": "WORKER_ERROR", "error_message": "no", "waiting_for": None,
    }  # fmt: skip
    with other_engine.connect() as reporting:
        assert run(reporting, report_statements.release, **report)
        with engine.begin() as tx, pytest.raises(RowBusy):
            redrive(impatient(tx), made)
        reporting.commit()
    with engine.begin() as tx:
        redrive(tx, made)
        assert not run(tx, report_statements.release, **report), "the same claim reports no second time"
    assert (row(made.id).state, row(made.id).fence, row(made.id).attempts) == ("pending", 2, 0)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT


def test_a_late_report_that_waits_for_a_redrive_finds_its_fence_raised(
    database, engine, other_engine, declare, make, row, worker, clock
):
    def handler(step):
        raise RuntimeError("from the dead")

    kind = declare(handler, max_interruptions=0)
    made = make(kind, state="processing")
    clock.advance(31)
    assert sweep.reap(database) == 1
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as operator:
        redrive(operator, made)
        late = pool.submit(carry_out, worker, kind, made.held)
        wait_until_blocked(engine, wait_until_somebody_blocks(engine), by=pid_of(operator))
        operator.commit()
        assert late.result(30).outcome is Outcome.CLAIM_LOST
    after = row(made.id)
    assert (after.state, after.fence, after.attempts, after.error_message) == ("pending", 2, 0, None)


# --- a redrive and dispatch ------------------------------------------------------------------------


def test_dispatch_hints_a_redriven_row_once_it_is_committed_and_not_before(database, other_engine, make, row, carrier):
    made = make(state="dead")
    with other_engine.connect() as operator:
        redrive(operator, made)
        assert sweep.dispatch(database) == 0
        operator.commit()
    assert sweep.dispatch(database) == 1
    assert sweep.dispatch(database) == 0
    assert [hint.id for hint in carrier.published] == [made.id]


def test_a_claim_does_not_wait_for_the_dispatch_that_is_marking_its_row(engine, other_engine, kind, make, row, worker):
    made = make()
    with other_engine.connect() as dispatching:
        (hint,) = sweep.pick(dispatching, {"durable": 0})
        with engine.begin() as tx:
            assert claim_one(impatient(tx), kind, made.id, Holder()) is None, "its hint is not even out"
        dispatching.commit()
    assert hint.id == made.id
    assert perform(worker, kind, made.id).outcome is Outcome.SENT


def test_two_dispatches_at_once_hint_each_row_once(engine, other_engine, kind, make):
    with engine.begin() as tx:
        made = {ref.id for ref in enqueue_many(tx, [kind.options().new(n) for n in range(30)])}
    with engine.connect() as one, other_engine.connect() as two:
        first = [hint.id for hint in sweep.pick(one, {"durable": 0}, cap=20)]
        second = [hint.id for hint in sweep.pick(impatient(two), {"durable": 0}, cap=20)]
        one.commit()
        two.commit()
    assert len(first) == 20
    assert sorted([*first, *second]) == sorted(made)


# --- prune -----------------------------------------------------------------------------------------


def test_a_redrive_does_not_wait_for_the_prune_that_takes_the_row(engine, other_engine, make, clock):
    made = make(state="sent")
    clock.advance(AGES)
    with other_engine.connect() as pruning:
        (old,) = run(
            pruning, sweep._statements.old, retention_seconds=sweep.RETENTION_SECONDS, limit=10, since=None, without=[]
        )
        run(pruning, sweep._statements.prune, ids=[old["id"]])
        with engine.begin() as tx, pytest.raises(RowBusy):
            redrive(impatient(tx), made)
        pruning.commit()
    with engine.begin() as tx, pytest.raises(NotFound):
        redrive(tx, made)


@pytest.mark.parametrize("state", ["dead", "failed"])
def test_prune_takes_nothing_that_is_being_redriven_or_was(database, other_engine, make, row, clock, state):
    made = make(state=state)
    clock.advance(AGES)
    with other_engine.connect() as operator:
        redrive(operator, made)
        assert sweep.prune(database) == 0
        operator.commit()
    assert sweep.prune(database) == 0
    assert row(made.id).state == "pending"


def test_a_row_that_is_pruned_while_a_late_report_is_refused_leaves_no_line_behind(
    database, engine, other_engine, kind, make, worker, clock
):
    made = make(state="processing")
    assert carry_out(worker, kind, made.held).outcome is Outcome.SENT
    clock.advance(AGES)
    with other_engine.connect() as pruning:
        old = run(
            pruning, sweep._statements.old, retention_seconds=sweep.RETENTION_SECONDS, limit=10, since=None, without=[]
        )
        assert [one["id"] for one in old] == [made.id]
        for statement in (sweep._statements.prune, sweep._statements.prune_journal):
            run(pruning, statement, ids=[made.id])
        assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
        pruning.commit()
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.journal")) == 0


# --- two observers of one death --------------------------------------------------------------------


@pytest.mark.parametrize("first", ["the reaper", "the parent"])
def test_two_observers_of_one_death_at_once_count_it_once(database, other_engine, make, row, lines, clock, first):
    made = make(state="processing", holder=CHILD)
    clock.advance(31)
    with other_engine.connect() as one:
        if first == "the reaper":
            assert take_back(one) == 1
            assert sweep.give_back(database, CHILD.owner, {CHILD.pid}) == 0
        else:
            owned = run(one, sweep._statements.owned, owner=CHILD.owner, pids=[CHILD.pid])
            assert sweep._take_back(Database(one.engine), one, owned, sweep._CHILD_DIED, lambda: 0.5) == 1
            assert sweep.reap(database) == 0
        one.commit()
    assert sweep.give_back(database, CHILD.owner, {CHILD.pid}) == 0
    assert sweep.reap(database) == 0
    assert (row(made.id).interruptions, row(made.id).attempts) == (1, 1)
    assert [line.move for line in lines(made.id)] == ["reap" if first == "the reaper" else "release"]


def test_a_beat_under_a_reap_neither_waits_nor_takes_the_row_for_lost(database, other_engine, make, row, clock):
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder())
    held = heartbeat.hold(made.held, _statements)
    clock.advance(31)
    with other_engine.connect() as reaping:
        assert take_back(reaping) == 1
        heartbeat.beat()
        assert not held.lost.is_set()
        reaping.commit()
    heartbeat.beat()
    assert not held.lost.is_set(), "its report would still land"
    assert (row(made.id).state, row(made.id).lease_expires_at) == ("pending", None)
    heartbeat.stop()


# --- a held row ------------------------------------------------------------------------------------


def test_a_release_does_not_wait_for_the_reap_that_is_holding_the_row_back(engine, other_engine, make, row, clock):
    made = make(state="processing")
    clock.advance(31)
    with poisoned(engine, made.id, "update", "new.state = 'pending'"):
        with other_engine.connect() as reaping:
            assert take_back(reaping) == 0
            with engine.begin() as tx, pytest.raises(RowBusy):
                deliveries.release(impatient(tx), made.id, by="dana", reason="mended")
            reaping.commit()
        assert "host says no" in row(made.id).held_reason
    with engine.begin() as tx:
        deliveries.release(tx, made.id, by="dana", reason="mended")
    with engine.begin() as tx, pytest.raises(IllegalMove):
        deliveries.release(tx, made.id, by="eve", reason="mended too")


def test_a_reap_passes_over_a_row_that_is_being_released_and_takes_it_next_time(
    database, engine, other_engine, make, row, lines, clock
):
    made = make(state="processing")
    clock.advance(31)
    with poisoned(engine, made.id, "update", "new.state = 'pending'"):
        assert sweep.reap(database) == 0
    with other_engine.connect() as operator:
        deliveries.release(operator, made.id, by="dana", reason="mended")
        assert sweep.reap(database) == 0
        operator.commit()
    assert sweep.reap(database) == 1
    assert [line.move for line in lines(made.id)] == ["hold", "unhold", "reap"]


def test_four_reapers_over_a_row_that_cannot_be_moved_hold_it_once_and_move_the_rest(
    engine, other_engine, make, row, lines, clock
):
    made = [make(state="processing") for _ in range(20)]
    clock.advance(31)
    start = threading.Barrier(4)

    def reaper(_):
        start.wait()
        return sum(sweep.reap(Database(other_engine)) for _ in range(3))

    with poisoned(engine, made[7].id, "update", "new.state = 'pending'"), ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(reaper, range(4))) == 19
    assert [line.move for line in lines(made[7].id)] == ["hold"]
    rest = [row(m.id) for m in made if m is not made[7]]
    assert {(r.state, r.interruptions, r.held_reason) for r in rest} == {("pending", 1, None)}


# --- many beats ------------------------------------------------------------------------------------


def test_two_reapers_and_three_dispatches_at_once_take_and_hint_each_row_once(
    engine, other_engine, kind, make, row, carrier, clock
):
    lost = [make(state="processing") for _ in range(40)]
    clock.advance(31)
    with engine.begin() as tx:
        due = {ref.id for ref in enqueue_many(tx, [kind.options(queue="mail").new(n) for n in range(60)])}
    start = threading.Barrier(5)

    def reaper():
        start.wait()
        return sweep.reap(Database(other_engine), limit=30)

    def dispatcher():
        start.wait()
        connection = other_engine.connect().execution_options(isolation_level="READ COMMITTED")
        with connection, connection.begin():
            return [hint.id for hint in sweep.pick(connection, {"mail": 0}, cap=60)]

    with ThreadPoolExecutor(5) as pool:
        reapers = [pool.submit(reaper) for _ in range(2)]
        dispatchers = [pool.submit(dispatcher) for _ in range(3)]
        moved = sum(one.result(30) for one in reapers)
        hints = [hint for one in dispatchers for hint in one.result(30)]
    assert moved + sweep.reap(Database(other_engine)) == 40
    assert {(row(m.id).state, row(m.id).interruptions) for m in lost} == {("pending", 1)}
    # One that looked only after another had marked finds the same rows due: the turns in `durable.loops` forbid it.
    assert set(hints) <= due
    assert max(hints.count(one) for one in due) <= 3


def test_five_beats_get_the_result_of_one(engine, other_engine, kind, make, row, carrier, clock):
    """Each sweep is offered five times at once: one run of it, each loss counted once, each due row hinted once."""
    lost = [make(state="processing") for _ in range(20)]
    clock.advance(31)
    clock.freeze()  # however slow this machine, no sweep's rest is over meanwhile
    with engine.begin() as tx:
        due = {ref.id for ref in enqueue_many(tx, [kind.options(queue="mail").new(n) for n in range(30)])}
    start = threading.Barrier(5)

    def beat(_):
        start.wait()
        return [(one.name, run_sweep(Database(other_engine), one, Bounds())) for one in SWEEPS]

    with ThreadPoolExecutor(5) as pool:
        answers = [answer for answers in pool.map(beat, range(5)) for answer in answers]
    ran = sorted(name for name, answer in answers if "skipped" not in answer)
    assert ran == sorted(one.name for one in SWEEPS)
    assert {(row(m.id).state, row(m.id).interruptions) for m in lost} == {("pending", 1)}
    hinted = [hint.id for hint in carrier.published]
    assert len(hinted) == len(set(hinted))
    assert due <= set(hinted)
    with engine.connect() as tx:
        assert {line["error"] for line in loops(tx)} == {None}
