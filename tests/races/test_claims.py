"""Claims, heartbeats, reaps and settles that meet on the same rows, on connections that really block."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from durable_core import ClaimLost, IllegalMove, Retry, deliveries
from durable_core.claims.claim import Holder
from durable_core.claims.heartbeat import Heartbeat
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, _statements, carry_out, claim_due, claim_one, perform
from durable_core.errors import RowBusy
from durable_core.testing import wait_until_blocked, wait_until_somebody_blocks
from tests.conftest import effects_of, record

LOCK = text("select from durable.deliveries where id = :id for no key update")


def pid_of(connection):
    return connection.scalar(text("select pg_backend_pid()"))


@pytest.mark.spec("deliveries", 6)
def test_eight_connections_claim_fifty_rows_each_exactly_once_and_nobody_blocks(other_engine, make, row):
    made = {make().id for _ in range(50)}
    start = threading.Barrier(8)

    def claimant(_):
        taken = []
        with other_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
            tx.execute(text("set lock_timeout = '1ms'"))  # so that waiting for a lock would raise
            start.wait()
            while claims := claim_due(tx, 3):
                assert len(claims) <= 3
                taken.extend(claims)
            tx.execute(text("reset lock_timeout"))
        return taken

    with ThreadPoolExecutor(8) as pool:
        everything = [claim for taken in pool.map(claimant, range(8)) for claim in taken]
    assert {claim.id for claim in everything} == made
    assert len(everything) == 50
    assert {(row(row_id).attempts, row(row_id).fence) for row_id in made} == {(1, 1)}


@pytest.mark.spec("deliveries", 7)
def test_a_row_locked_elsewhere_is_skipped_and_not_waited_for(engine, other_engine, kind, make):
    locked, free = make(), make()
    with other_engine.begin() as other:
        other.execute(LOCK, {"id": locked.id})
        with engine.begin() as tx:
            tx.execute(text("set local lock_timeout = '1ms'"))
            assert [claim.id for claim in claim_due(tx, 10)] == [free.id]
            assert claim_one(tx, kind, locked.id, Holder()) is None


@pytest.mark.spec("deliveries", 8)
def test_twenty_hints_at_once_start_one_send(other_engine, declare, make, make_worker):
    sends, start = [], threading.Barrier(20)
    kind = declare(lambda step: sends.append(step.fence))
    made = make(kind)
    worker = make_worker(on=Database(other_engine))

    def hinted(_):
        start.wait()
        return perform(worker, kind, made.id).outcome

    with ThreadPoolExecutor(20) as pool:
        outcomes = list(pool.map(hinted, range(20)))
    assert sends == [1]
    assert sorted(outcomes).count(Outcome.SENT) == 1
    assert outcomes.count(Outcome.NOTHING_TO_DO) == 19


def test_the_heartbeat_of_a_process_goes_on_while_one_of_its_steps_has_its_row_locked(
    database, other_engine, make, row, clock
):
    made = [make(state="processing") for _ in range(8)]
    heartbeat = Heartbeat(database, Holder())
    for m in made:
        heartbeat.hold(m.held, _statements)
    clock.advance(20)
    before = {m.id: row(m.id).lease_expires_at for m in made}
    with other_engine.begin() as step:
        step.execute(LOCK, {"id": made[3].id})
        heartbeat.beat()
        renewed = [row(m.id).lease_expires_at > before[m.id] for m in made]
    heartbeat.stop()
    assert renewed == [True, True, True, False, True, True, True, True]


def test_a_row_that_its_step_has_locked_is_not_reaped_however_old_its_lease(database, other_engine, make, row, clock):
    made = make(state="processing")
    clock.advance(31)
    with other_engine.begin() as step:
        step.execute(LOCK, {"id": made.id})
        assert sweep.reap(database) == 0
    assert row(made.id).state == "processing"
    assert sweep.reap(database) == 1


def test_a_lease_renewed_while_the_reaper_looks_is_not_taken(database, engine, other_engine, make, row, clock):
    """The beat is uncommitted when the reaper runs: the row is skipped, and afterwards its lease is fresh."""
    made = make(state="processing")
    clock.advance(31)
    with other_engine.connect() as beating:
        beating.execute(_statements.keep.clause, {"ids": [made.id], "fences": [made.held.fence], "lease_seconds": 30.0})
        assert sweep.reap(database) == 0
        beating.commit()
    assert sweep.reap(database) == 0
    assert row(made.id).state == "processing"


def test_a_beat_behind_a_reap_finds_that_the_row_is_still_its_own_until_taken(
    database, engine, other_engine, kind, make, row, clock
):
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder())
    held = heartbeat.hold(made.held, _statements)
    clock.advance(31)
    sweep.reap(database)
    heartbeat.beat()
    assert not held.lost.is_set(), "reaped, but its report would still land"
    assert row(made.id).lease_expires_at is None
    with engine.begin() as tx:
        assert claim_one(tx, kind, made.id, Holder()) is not None
    heartbeat.beat()
    assert held.lost.is_set()
    heartbeat.stop()


def test_a_settle_that_waits_for_the_new_owners_claim_is_refused(
    database, engine, other_engine, worker, declare, make, row, clock
):
    """The old owner's commit blocks behind the claim that takes the row over, and then matches nothing."""
    kind = declare(lambda step: step.in_commit(lambda session: record(session, step, "zombie")))
    made = make(kind, state="processing")
    clock.advance(31)
    sweep.reap(database)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as taking:
        new = claim_one(taking, kind, made.id, Holder())
        assert new is not None
        old = pool.submit(carry_out, worker, kind, made.held)
        wait_until_blocked(engine, wait_until_somebody_blocks(engine), by=pid_of(taking))
        taking.commit()
        assert old.result(30).outcome is Outcome.CLAIM_LOST
    assert effects_of(engine, made.id) == []
    assert (row(made.id).state, row(made.id).fence, row(made.id).settled_fence) == ("processing", new.fence, 0)
    assert carry_out(worker, kind, new).outcome is Outcome.SENT
    assert effects_of(engine, made.id) == [(2, "zombie")]


def test_a_settle_that_waits_for_a_claim_that_rolls_back_lands(
    database, engine, other_engine, worker, kind, make, row, clock
):
    made = make(state="processing")
    clock.advance(31)
    sweep.reap(database)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as taking:
        assert claim_one(taking, kind, made.id, Holder()) is not None
        old = pool.submit(carry_out, worker, kind, made.held)
        wait_until_blocked(engine, wait_until_somebody_blocks(engine), by=pid_of(taking))
        taking.rollback()
        assert old.result(30).outcome is Outcome.SENT
    assert effects_of(engine, made.id) == [(1, "0")]


def test_a_failure_report_that_waits_for_the_new_owners_claim_writes_nothing(
    database, engine, other_engine, worker, declare, make, row, clock
):
    def handler(step):
        raise RuntimeError("from the dead")

    kind = declare(handler)
    made = make(kind, state="processing")
    clock.advance(31)
    sweep.reap(database)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as taking:
        claim_one(taking, kind, made.id, Holder())
        old = pool.submit(carry_out, worker, kind, made.held)
        wait_until_blocked(engine, wait_until_somebody_blocks(engine), by=pid_of(taking))
        taking.commit()
        assert old.result(30).outcome is Outcome.CLAIM_LOST
    assert row(made.id).error_code == "CLAIM_EXPIRED", "what the reap wrote, not what the old owner said"
    assert "from the dead" not in row(made.id).error_message


def take_over(database, engine, kind, row_id, clock):
    clock.advance(31)
    sweep.reap(database)
    with engine.begin() as tx:
        claim = claim_one(tx, kind, row_id, Holder())
    assert claim is not None
    return claim


def test_an_old_owner_that_opens_its_session_after_a_takeover_gets_claim_lost_and_nothing_stands(
    database, other_engine, worker, declare, make, row, clock
):
    new, seen = [], []

    def handler(step):
        new.append(take_over(database, other_engine, kind, step.id, clock))
        try:
            record(step.session, step, "stale")
        except ClaimLost as lost:
            seen.append((lost.held, lost.current))
            raise

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.CLAIM_LOST
    assert seen == [(1, 2)]
    assert effects_of(other_engine, made.id) == []
    assert row(made.id).fence == new[0].fence == 2


def test_a_handler_that_swallows_claim_lost_still_cannot_settle(
    database, other_engine, worker, declare, make, row, clock
):
    def handler(step):
        take_over(database, other_engine, kind, step.id, clock)
        for _ in range(2):
            try:
                record(step.session, step, "stale")
            except ClaimLost:
                pass
        step.in_commit(lambda session: record(session, step, "stale too"))
        return "swallowed"

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.CLAIM_LOST
    assert effects_of(other_engine, made.id) == []
    assert (row(made.id).state, row(made.id).result) == ("processing", None)


def test_an_owner_with_its_session_open_cannot_lose_the_row(database, other_engine, worker, declare, make, row, clock):
    def handler(step):
        record(step.session, step)
        clock.advance(1000)
        assert sweep.reap(database) == 0
        with other_engine.begin() as tx:
            assert claim_one(tx, kind, step.id, Holder()) is None

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert effects_of(other_engine, made.id) == [(1, "")]


def test_two_reapers_at_once_take_each_row_once(other_engine, make, row, clock):
    made = [make(state="processing") for _ in range(30)]
    clock.advance(31)
    start = threading.Barrier(4)

    def reaper(_):
        start.wait()
        return sweep.reap(Database(other_engine), limit=20)

    with ThreadPoolExecutor(4) as pool:
        moved = sum(pool.map(reaper, range(4)))
    moved += sweep.reap(Database(other_engine))
    assert moved == 30
    assert {(row(m.id).state, row(m.id).interruptions) for m in made} == {("pending", 1)}


def test_two_redrives_at_once_make_one_and_neither_waits(engine, other_engine, make, row, lines):
    made = make(state="dead")
    with other_engine.connect() as one:
        deliveries.redrive(one, made.id, by="dana", reason="fixed")
        with other_engine.begin() as two, pytest.raises(RowBusy):
            deliveries.redrive(two, made.id, by="eve", reason="fixed too")
        one.commit()
    with other_engine.begin() as two, pytest.raises(IllegalMove, match="it is pending"):
        deliveries.redrive(two, made.id, by="eve", reason="fixed too")
    assert [line.by for line in lines(made.id)] == ["dana"]
    assert row(made.id).fence == 2


def test_a_late_failure_that_waits_for_the_reaper_is_journalled_behind_it(
    engine, database, other_engine, declare, make, worker, row, lines, clock
):
    """Both write a line under the row's lock; the one that waited must not stumble over the other's."""
    reaping = other_engine.connect()

    def handler(step):
        clock.advance(seconds=31)
        reaping.begin()
        lapsed = run(reaping, sweep._statements.lapsed, limit=10, heartbeat_seconds=8.0)
        assert [str(one["id"]) for one in lapsed] == [step.id]
        threading.Thread(target=reap_once_somebody_waits, args=(lapsed,)).start()
        raise Retry("late")

    def reap_once_somebody_waits(lapsed):
        wait_until_blocked(engine, wait_until_somebody_blocks(engine), by=pid_of(reaping))
        sweep._take_back(database, reaping, lapsed, sweep._FELL_SILENT, lambda: 0.5)
        reaping.commit()
        reaping.close()

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert [line.move for line in lines(made.id)] == ["reap", "fail late"]
    assert (row(made.id).failures, row(made.id).interruptions, row(made.id).error_code) == (1, 0, "RETRY_ASKED")


def test_a_claim_judges_the_row_it_locked_and_not_the_one_it_saw(engine, other_engine, kind, make, row):
    """A failed attempt moves the due time into the future while a claim is on its way: the claim finds nothing."""
    made = make()
    with other_engine.connect() as other:
        other.execute(
            text("update durable.deliveries set due_at = due_at + interval '1 hour' where id = :id"), {"id": made.id}
        )
        with engine.begin() as tx:
            assert claim_one(tx, kind, made.id, Holder()) is None
        other.commit()
    with engine.begin() as tx:
        assert claim_one(tx, kind, made.id, Holder()) is None


def test_a_lock_wait_of_ours_is_bounded_and_costs_no_attempt(
    engine, other_engine, worker, declare, make, row, monkeypatch
):
    """Somebody holds the row longer than we wait: the commit is tried again, and the attempt lands."""
    from durable_core.claims import claim as protocol

    monkeypatch.setattr(protocol, "LOCK_WAIT", "50ms")
    release = threading.Event()

    def hold(row_id):
        with other_engine.begin() as other:
            other.execute(LOCK, {"id": row_id})
            held.set()
            release.wait(20)

    calls, held = [], threading.Event()

    def handler(step):
        calls.append(1)
        holder = threading.Thread(target=hold, args=(step.id,))
        holder.start()
        held.wait(20)
        threading.Thread(target=lambda: (time.sleep(0.08), release.set())).start()

    kind = declare(handler)
    made = make(kind)
    done = perform(worker, kind, made.id)
    assert done.outcome is Outcome.SENT
    assert len(calls) == 1
    assert row(made.id).attempts == 1
