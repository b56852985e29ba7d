"""Dispatch, prune, and the turns of the sweeps: any number of beats may drive them."""

import threading

import pytest
from sqlalchemy import text

from durable_core import deliveries, wakes
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import perform
from durable_core.deliveries.enqueue import enqueue_many
from durable_core.errors import NotInstalled
from durable_core.sweeps import PATIENCE_SECONDS, SWEEPS, Bounds, Sweep, loops, named, run_sweep

BOUNDS = Bounds()


@pytest.mark.spec("deliveries", 25)
def test_a_broker_that_lost_every_hint_is_filled_again_by_one_dispatch(database, engine, kind, carrier):
    """No row waits longer than one tick past its due time."""
    with engine.begin() as tx:
        refs = enqueue_many(tx, [kind.options().new(n) for n in range(30)])
    assert sweep.dispatch(database) == 30
    assert sweep.dispatch(database) == 0, "the hints still lie there"
    carrier.lying.clear()  # FLUSHALL
    carrier.published.clear()
    assert sweep.dispatch(database) == 30
    assert {hint.id for hint in carrier.published} == {ref.id for ref in refs}


@pytest.mark.spec("deliveries", 25)
def test_a_row_is_hinted_at_the_first_dispatch_after_it_is_due_and_not_before(database, make, carrier, clock):
    made = make(countdown=60)
    assert sweep.dispatch(database) == 0
    clock.advance(61)
    assert sweep.dispatch(database) == 1
    (hint,) = carrier.published
    assert (hint.id, hint.attempt, hint.first) == (made.id, 1, True)


def test_a_queue_never_holds_more_hints_than_due_rows_nor_than_its_cap(database, engine, kind, carrier):
    with engine.begin() as tx:
        enqueue_many(tx, [kind.options(queue="mail" if n % 2 else "durable").new(n) for n in range(40)])
    assert sweep.dispatch(database, cap=15) == 30
    assert carrier.lying == {"mail": 15, "durable": 15}
    for _ in range(5):
        sweep.dispatch(database, cap=15)
    assert carrier.lying == {"mail": 15, "durable": 15}


def test_dispatch_tops_up_with_the_rows_hinted_longest_ago(database, engine, kind, carrier, clock):
    with engine.begin() as tx:
        enqueue_many(tx, [kind.options().new(n) for n in range(10)])
    clock.advance(1)
    sweep.dispatch(database, cap=5)
    first = [hint.id for hint in carrier.published]
    clock.advance(1)
    carrier.lying["durable"] = 0
    sweep.dispatch(database, cap=5)
    second = [hint.id for hint in carrier.published[5:]]
    assert len({*first, *second}) == 10


def test_held_and_locked_rows_do_not_stop_dispatch(database, engine, other_engine, make, carrier):
    locked, free = make(), make()
    with other_engine.begin() as other:
        other.execute(text("select from durable.deliveries where id = :id for no key update"), {"id": locked.id})
        sweep.dispatch(database)
    assert free.id in {hint.id for hint in carrier.published}


def test_a_hint_after_a_failure_is_not_the_first(database, worker, declare, make, carrier, clock):
    def handler(step):
        raise RuntimeError

    kind = declare(handler)
    made = make(kind)
    perform(worker, kind, made.id)
    clock.advance(60)
    sweep.dispatch(database)
    (hint,) = carrier.published
    assert (hint.attempt, hint.first) == (2, False)


def test_dispatch_without_a_carrier_says_what_is_missing(database, make, carrier):
    wakes.use_carrier(None)  # the fixture puts back what was there
    make()
    with pytest.raises(NotInstalled):
        sweep.dispatch(database)


def test_a_broker_that_is_down_fails_dispatch_and_loses_nothing(database, make, carrier):
    make()
    carrier.refuses = ConnectionError("down")
    with pytest.raises(ConnectionError):
        sweep.dispatch(database)
    carrier.refuses = None
    assert sweep.dispatch(database) == 1


# --- prune -----------------------------------------------------------------------------------------


def test_finished_rows_go_after_their_retention_with_their_history(database, engine, make, clock, row):
    kept = {state: make(state=state).id for state in ("failed", "dead", "pending", "processing")}
    gone = [make(state=state, key=state).id for state in ("sent", "canceled", "expired")]
    with engine.begin() as tx:
        for row_id in (*gone, *kept.values()):
            tx.execute(
                text("insert into durable.journal (row_id, contract, move, fence) values (:id, 'x', 'x', 0)"),
                {"id": row_id},
            )
    clock.advance(14 * 24 * 3600 - 60)
    assert sweep.prune(database) == 0
    clock.advance(120)
    assert sweep.prune(database, limit=2) == 2
    assert sweep.prune(database) == 1
    with engine.connect() as tx:
        lines = {str(line) for line in tx.scalars(text("select row_id from durable.journal"))}
        rows = {str(found) for found in tx.scalars(text("select id from durable.deliveries"))}
    assert lines == rows == set(kept.values())


def test_a_pruned_rows_key_may_be_used_again(database, engine, kind, make, clock):
    old = make(state="sent", key="k")
    clock.advance(15 * 24 * 3600)
    sweep.prune(database)
    with engine.begin() as tx:
        ref = kind.options(key="k").enqueue(tx)
    assert ref.created
    assert ref.id != old.id


def test_a_late_report_on_a_pruned_row_is_a_lost_race(database, worker, kind, make, clock, engine):
    from durable_core.deliveries.attempt import Outcome, carry_out

    made = make(state="processing")
    carry_out(worker, kind, made.held)
    clock.advance(15 * 24 * 3600)
    assert sweep.prune(database) == 1
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST


# --- turns -----------------------------------------------------------------------------------------


def test_a_sweep_that_just_ran_returns_at_once(database, engine, make, clock):
    make(state="processing")
    assert run_sweep(database, named("reap"), BOUNDS) == {"moved": 0}
    clock.advance(1)
    assert "skipped" in run_sweep(database, named("reap"), BOUNDS)
    clock.advance(2)
    assert run_sweep(database, named("reap"), BOUNDS) == {"moved": 0}
    with engine.connect() as tx:
        (line,) = loops(tx)
    assert (line["name"], line["moved"], line["error"]) == ("reap", 0, None)


def test_after_a_gap_longer_than_a_lease_owners_may_beat_before_anything_is_taken(database, make, row, clock):
    """Every lease may be over although every worker lives."""
    run_sweep(database, named("reap"), BOUNDS)
    made = make(state="processing")
    clock.advance(40)
    assert run_sweep(database, named("reap"), BOUNDS)["skipped"] == "after an outage owners may beat first"
    clock.advance(5)
    assert "skipped" in run_sweep(database, named("reap"), BOUNDS)
    assert row(made.id).state == "processing"
    clock.advance(5)
    assert run_sweep(database, named("reap"), BOUNDS) == {"moved": 1}
    assert row(made.id).state == "pending"


def test_a_sweep_that_raises_is_noted_with_its_error(database, engine, make, carrier):
    make()
    carrier.refuses = ConnectionError("broker is down")
    with pytest.raises(ConnectionError):
        run_sweep(database, named("dispatch"), BOUNDS)
    with engine.connect() as tx:
        (line,) = loops(tx)
    assert "broker is down" in line["error"]
    assert line["ended_at"] is not None


def test_a_clock_set_back_does_not_stop_the_sweeps(database, clock):
    run_sweep(database, named("prune"), BOUNDS)
    clock.advance(-1000)
    assert run_sweep(database, named("prune"), BOUNDS) == {"moved": 0}


def test_each_sweep_says_what_it_heals_and_has_a_name_of_its_own():
    assert len({one.name for one in SWEEPS}) == len(SWEEPS)
    assert all(one.heals and one.interval > 0 and one.task == f"durable.{one.name}" for one in SWEEPS)


# --- reading ---------------------------------------------------------------------------------------


def test_queues_tell_what_waits_the_oldest_due_first(engine, make, clock):
    make(countdown=10, queue="mail")
    make(countdown=20)
    make(countdown=5000)
    make(state="processing", queue="slow")
    clock.advance(60)
    with engine.connect() as tx:
        told = [(q.queue, q.due, q.later, q.processing) for q in deliveries.queues(tx)]
    assert told == [("mail", 1, 0, 0), ("durable", 1, 1, 0), ("slow", 0, 0, 1)]


def test_pages_go_from_new_to_old_without_gap_or_overlap(engine, make, kind):
    made = [make(state=state).id for state in ("sent", "dead", "pending", "dead", "dead")]
    with engine.connect() as tx:
        first = deliveries.page(tx, limit=2)
        rest = deliveries.page(tx, limit=10, after=first[-1].id)
        dead = deliveries.page(tx, state="dead", kind=kind.name)
    assert [d.id for d in (*first, *rest)] == made[::-1]
    assert [d.id for d in dead] == [made[4], made[3], made[1]]


def test_a_row_reads_as_json(engine, make, row):
    import json

    told = row(make(state="dead").id).as_json()
    assert json.loads(json.dumps(told))["state"] == "dead"


def test_a_sweep_that_still_runs_is_not_joined_by_another_until_it_must_be_dead(database, clock):
    """Two dispatches at once would each fill the same gap, and a queue would hold more hints than due rows."""
    started, finish = threading.Event(), threading.Event()

    def run(_database, _bounds):
        started.set()
        assert finish.wait(30)
        return 7

    slow, quick = (Sweep("dispatch", 1.0, "nothing", act) for act in (run, lambda _database, _bounds: 1))
    first = threading.Thread(target=run_sweep, args=(database, slow, BOUNDS))
    first.start()
    try:
        assert started.wait(30)
        clock.advance(seconds=PATIENCE_SECONDS - 1)
        assert run_sweep(database, quick, BOUNDS)["skipped"] == "one just ran"
        clock.advance(seconds=2)
        assert run_sweep(database, quick, BOUNDS) == {"moved": 1}
    finally:
        finish.set()
        first.join()


def test_a_row_that_its_callers_commit_has_hinted_is_not_hinted_by_its_own_id_again(database, make, carrier):
    """Two tasks of one id would hide each other in Flower."""
    at_once = make()
    assert sweep.dispatch(database, carrier) == 1
    assert [(hint.id, hint.first) for hint in carrier.published] == [(at_once.id, False)]
