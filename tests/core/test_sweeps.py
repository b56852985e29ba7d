"""Dispatch, prune, and the turns of the sweeps: any number of beats may drive them."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError

from durable_core import deliveries, wakes
from durable_core.database.connections import Database
from durable_core.database.statements import Statement
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, perform
from durable_core.deliveries.enqueue import enqueue_many
from durable_core.errors import NotInstalled
from durable_core.sweeps import PATIENCE_SECONDS, SWEEPS, Bounds, Sweep, loops, named, run_sweep
from durable_core.testing import wait_until_somebody_blocks
from tests.poison import poisoned

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


def test_a_row_that_cannot_be_marked_is_held_back_and_the_rest_are_hinted(
    database, engine, kind, make, carrier, row, worker
):
    made = [make() for _ in range(3)]
    offender = made[1].id
    with poisoned(engine, offender, "update", "new.hint_at > old.hint_at"):
        assert sweep.dispatch(database) == 2
        carrier.lying.clear()
        assert sweep.dispatch(database) == 2
    assert offender not in {hint.id for hint in carrier.published}
    assert "dispatch failed" in row(offender).held_reason
    assert "host says no" in row(offender).held_reason
    with engine.begin() as tx:
        deliveries.release(tx, offender, by="dana", reason="the trigger is gone")
    sweep.dispatch(database)
    assert offender in {hint.id for hint in carrier.published}
    assert perform(worker, kind, offender).outcome is Outcome.SENT


def test_a_row_that_cannot_even_be_held_does_not_stop_dispatch(database, engine, make, carrier, row):
    made = [make() for _ in range(3)]
    with poisoned(engine, made[0].id, "update"):
        assert sweep.dispatch(database) == 2
    assert row(made[0].id).held_reason is None


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


@pytest.mark.parametrize("checked", ["not deferrable", "deferrable initially deferred"])
def test_a_row_that_a_row_of_the_hosts_still_needs_stays_until_it_is_free_and_keeps_no_other(
    database, engine, make, clock, row, checked, monkeypatch
):
    made = [make(state="sent").id for _ in range(7)]
    clock.advance(15 * 24 * 3600)
    monkeypatch.setattr(sweep, "PRUNE_LIMIT", 2)
    with engine.begin() as tx:
        tx.execute(
            text(f"create table public.notes (id int, delivery uuid references durable.deliveries (id) {checked})")
        )
        for n in (0, 1, 4):  # the first batch is nothing but such rows
            tx.execute(text("insert into public.notes values (:n, :id)"), {"n": n, "id": made[n]})
    try:
        assert sweep.prune_all(database) == 4
        assert {row(made[n]).state for n in (0, 1, 4)} == {"sent"}
        with engine.begin() as tx:
            tx.execute(text("delete from public.notes where id = 4"))
        assert sweep.prune_all(database) == 1
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop table public.notes"))


OLD = """
    insert into durable.deliveries (id, kind, queue, priority, arguments, digest, state, due_at, hint_at, fence,
        settled_fence, attempts, max_attempts, max_interruptions, created_at, finished_at)
    select cast(lpad(to_hex(n), 32, '0') as uuid), :kind, 'durable', 5, '{}', repeat('0', 64), 'sent', ended, ended,
        1, 1, 1, 5, 20, ended - interval '1 minute', ended
    from generate_series(1, :rows) as n,
        lateral (select now() - interval '30 days' + n * interval '1 second' as ended) as instant
"""
HISTORY = """
    insert into durable.journal (row_id, contract, move, fence)
    select d.id, 'delivery', 'reap', 1 from durable.deliveries d, generate_series(1, 2)
"""
PRUNE = """
import sys
from sqlalchemy import create_engine
from durable_core.database.connections import Database
from durable_core.database.statements import Statement
from durable_core.deliveries import sweep
sweep.prune_all(Database(create_engine(sys.argv[1])), seconds=600)
"""


@pytest.mark.field("R64")
@pytest.mark.full_size
def test_a_long_overdue_prune_commits_batch_by_batch_survives_a_kill_and_takes_only_what_is_old(
    database, engine, kind, make, row, worker, sized
):
    """Under load, and under a statement time-out of two seconds. The kill strikes in the middle of a batch."""
    rows = sized(5000, 500_000)
    middle = rows * 7 // 10
    unfinished = {state: make(state=state).id for state in ("pending", "processing", "failed", "dead")}
    recent = make(state="sent").id
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text("update durable.deliveries set created_at = created_at - interval '400 days'"))
        tx.execute(text(OLD), {"kind": kind.name, "rows": rows})
        tx.execute(text(HISTORY))
        tx.execute(text(
            "create function wait_here() returns trigger language plpgsql as $$ begin"
            " perform pg_advisory_xact_lock_shared(64); return old; end $$;"
            "create trigger wait_here before delete on durable.deliveries for each row"
            f" when (old.id = '{middle:032x}') execute function wait_here()"
        ))  # fmt: skip
        tx.execute(text("alter table durable.deliveries enable always trigger wait_here"))
    url = engine.url.update_query_dict({"options": "-c statement_timeout=2s"})
    old = text("select count(*) from durable.deliveries where created_at < now() - interval '20 days'")
    loaded, end_of_load = [], threading.Event()

    def load():
        while not end_of_load.is_set():
            with engine.begin() as tx:
                row_id = kind.options().enqueue(tx, 1).id
            assert perform(worker, kind, row_id).outcome is Outcome.SENT
            loaded.append(row_id)

    under_load = threading.Thread(target=load)
    under_load.start()
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as holder:
            holder.execute(text("select pg_advisory_lock(64)"))
            pruning = subprocess.Popen(
                [sys.executable, "-c", PRUNE, url.render_as_string(hide_password=False)], cwd=os.getcwd()
            )
            wait_until_somebody_blocks(engine, seconds=sized(120, 600))
            assert pruning.poll() is None
            pruning.send_signal(signal.SIGKILL)
            pruning.wait(30)
            left = holder.scalar(old) - len(unfinished) - 1
            holder.execute(text("select pg_advisory_unlock(64)"))
        assert left <= rows - middle + sweep.PRUNE_LIMIT, "the batches before the kill are committed"
        assert left > rows - middle, "the batch that was killed is not"
        own = create_engine(url)
        try:
            while sweep.prune_all(Database(own)):
                pass
        finally:
            own.dispose()
    finally:
        end_of_load.set()
        under_load.join()
        with engine.begin() as tx:
            tx.execute(text("drop function wait_here() cascade"))
    assert {state: row(row_id).state for state, row_id in unfinished.items()} == {state: state for state in unfinished}
    assert row(recent).state == "sent", "age counts from the end and not from the creation"
    assert loaded
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.deliveries")) == len(loaded) + len(unfinished) + 1
        keepers = {str(line) for line in tx.scalars(text("select row_id from durable.journal"))}
        assert keepers == {*unfinished.values(), recent}, "history goes with its row, and only with it"


def test_a_batch_too_long_for_the_hosts_statement_timeout_is_pruned_in_smaller_ones(engine, make, clock, monkeypatch):
    for _ in range(40):
        make(state="sent")
    clock.advance(15 * 24 * 3600)
    monkeypatch.setattr(sweep, "PRUNE_LIMIT", 40)
    with engine.begin() as tx:
        tx.execute(text(
            "create function dawdle() returns trigger language plpgsql as $$ begin perform pg_sleep(0.06); return old;"
            " end $$; create trigger dawdle before delete on durable.deliveries for each row execute function dawdle()"
        ))  # fmt: skip
    own = create_engine(engine.url.update_query_dict({"options": "-c statement_timeout=2s"}))
    try:
        assert sweep.prune_all(Database(own), seconds=60) == 40
    finally:
        own.dispose()
        with engine.begin() as tx:
            tx.execute(text("drop function dawdle() cascade"))


def test_a_long_transaction_elsewhere_does_not_make_each_batch_of_prune_read_those_before_it_again(
    engine, other_engine, kind, monkeypatch
):
    """It keeps the dead rows in the index: without a place to go on from, ten batches would read them 55 times."""
    monkeypatch.setattr(sweep, "PRUNE_LIMIT", 100)
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text(OLD), {"kind": kind.name, "rows": 1000})
    read = text("select idx_tup_read from pg_stat_user_indexes where indexrelname = 'deliveries_finished'")
    others = text(
        "select state, query from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )

    def read_by_now(looking):
        """What all who have left had read: a session tells its numbers when it ends."""
        until = time.monotonic() + 20
        while left := looking.execute(others).all():
            assert time.monotonic() < until, f"a test before this one left sessions open: {left}"
            time.sleep(0.02)
        return looking.scalar(read)

    engine.dispose()
    # In order of the index, as at full size (test_query_plans sees to that); so few rows a planner may as well sort.
    in_order = "-c enable_bitmapscan=off -c enable_sort=off"
    own = create_engine(engine.url.update_query_dict({"options": in_order}))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking:
        looking.execute(text("vacuum durable.deliveries"))
        before = read_by_now(looking)
        with other_engine.connect() as report:
            report.execute(text("set transaction isolation level repeatable read"))
            report.execute(text("select 1 from durable.loops"))
            assert sweep.prune_all(Database(own)) == 1000
        own.dispose()
        other_engine.dispose()
        entries = read_by_now(looking) - before
    assert 1000 <= entries < 2 * 1000


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


def test_a_reap_that_had_to_wait_for_a_lock_on_the_table_lets_owners_beat_first(
    database, engine, other_engine, make, row, clock
):
    """A careless migration: no beat came through either, so every lease may be over although every worker lives."""
    clock.freeze()
    run_sweep(database, named("reap"), BOUNDS)
    made = make(state="processing")
    clock.advance(5)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as migration:
        migration.execute(text("lock table durable.deliveries in access exclusive mode"))
        waiting = pool.submit(run_sweep, database, named("reap"), Bounds(heartbeat_seconds=0.05))
        wait_until_somebody_blocks(engine)
        assert not threading.Event().wait(0.06)  # a heartbeat
        clock.advance(27)
        migration.commit()
        assert waiting.result(30)["moved"] == 0
    assert row(made.id).state == "processing"
    clock.advance(5)
    assert "skipped" in run_sweep(database, named("reap"), Bounds(lease_seconds=100)), "not all have beaten yet"
    clock.advance(9)
    assert run_sweep(database, named("reap"), BOUNDS) == {"moved": 1}


@pytest.mark.parametrize("how", ["raised", "never ended"])
def test_after_a_reap_that_failed_owners_may_beat_first(database, engine, make, row, clock, how):
    """What stopped it may have stopped their beats."""

    def no(_database, _bounds):
        raise TimeoutError("the table is locked")

    made = make(state="processing")
    clock.advance(25)
    with pytest.raises(TimeoutError):
        run_sweep(database, Sweep("reap", 5.0, "nothing", no, takes_from_owners=True), BOUNDS)
    if how == "never ended":
        with engine.begin() as tx:
            tx.execute(text("update durable.loops set ended_at = null, error = null"))
    clock.advance(16)
    assert run_sweep(database, named("reap"), BOUNDS)["skipped"] == "after an outage owners may beat first"
    assert row(made.id).state == "processing"
    clock.advance(9)
    assert run_sweep(database, named("reap"), BOUNDS) == {"moved": 1}


@pytest.mark.field("R31")
def test_a_reap_whose_session_is_ended_in_its_pass_says_so_and_the_next_takes_every_row(
    database, engine, other_engine, make, row, lines, clock
):
    """Nothing is left half done: it is held where it writes the journal, all rows moved already."""
    orphans = [make(state="processing").id for _ in range(60)]
    clock.advance(31)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as gate:
        gate.execute(text("lock table durable.journal in exclusive mode"))
        failing = pool.submit(run_sweep, database, named("reap"), BOUNDS)
        pid = wait_until_somebody_blocks(engine)
        with engine.begin() as operator:
            assert operator.scalar(text("select pg_terminate_backend(:pid)"), {"pid": pid})
        with pytest.raises(DBAPIError, match="terminat"):
            failing.result(30)
        gate.rollback()
    with engine.connect() as tx:
        (line,) = loops(tx)
    assert "terminat" in line["error"]
    assert {(row(row_id).state, len(lines(row_id))) for row_id in orphans} == {("processing", 0)}
    clock.advance(5)
    assert run_sweep(database, named("reap"), BOUNDS)["skipped"] == "after an outage owners may beat first"
    clock.advance(9)
    assert run_sweep(database, named("reap"), BOUNDS) == {"moved": len(orphans)}
    assert {(row(row_id).interruptions, len(lines(row_id))) for row_id in orphans} == {(1, 1)}


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


@pytest.mark.full_size
def test_a_backlog_of_stale_sweep_messages_costs_one_statement_each_and_moves_nothing(
    database, engine, make, row, clock, carrier, sized
):
    clock.freeze()
    for one in SWEEPS:
        run_sweep(database, one, BOUNDS)
    lost, due = make(state="processing"), make()
    clock.advance(0.4)
    statements = []

    def count(_connection, _cursor, statement, *_):
        statements.append(statement)

    stale = sized(300, 10_000)
    event.listen(engine, "before_cursor_execute", count)
    try:
        answers = [run_sweep(database, SWEEPS[n % len(SWEEPS)], BOUNDS) for n in range(stale)]
    finally:
        event.remove(engine, "before_cursor_execute", count)
    assert {tuple(answer.items()) for answer in answers} == {(("moved", 0), ("skipped", "one just ran"))}
    assert len(statements) == stale
    assert row(lost.id).state == "processing"
    assert carrier.published == []
    assert due.id


@pytest.mark.parametrize("name", ["dispatch", "reap", "cron", "expire"])
def test_a_sweep_with_nothing_to_do_costs_one_statement_and_has_run(database, engine, make, clock, carrier, name):
    clock.freeze()
    run_sweep(database, named(name), BOUNDS)
    make(state="processing")
    make(countdown=120, expires=300)
    clock.advance(20)
    statements = []

    def count(_connection, _cursor, statement, *_):
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", count)
    try:
        assert run_sweep(database, named(name), BOUNDS) == {"moved": 0}
    finally:
        event.remove(engine, "before_cursor_execute", count)
    assert len(statements) == 1
    with engine.connect() as tx:
        (line,) = (loop for loop in loops(tx) if loop["name"] == name)
    assert line["began_at"] == line["ended_at"]
    assert line["age_seconds"] == 0


def test_a_run_that_ended_at_this_very_instant_is_not_taken_for_one_with_nothing_to_do(
    database, engine, make, clock, carrier
):
    """As under a clock that stands still, and was moved while the sweep before ran."""
    clock.freeze()
    run_sweep(database, named("dispatch"), BOUNDS)
    make()
    clock.advance(10)
    with engine.begin() as tx:
        tx.execute(text("update durable.loops set ended_at = durable.durable_now()"))
    assert run_sweep(database, named("dispatch"), BOUNDS) == {"moved": 1}


@pytest.mark.parametrize("name", ["dispatch", "reap"])
def test_while_somebody_has_the_table_locked_one_sweep_waits_and_no_other_of_its_name(
    database, engine, other_engine, make, carrier, clock, name
):
    """A careless migration, shorter than a lease: not every slot of a worker is to wait for it."""
    run_sweep(database, named(name), BOUNDS)
    make()
    clock.advance(6)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as migration:
        migration.execute(text("lock table durable.deliveries in access exclusive mode"))
        first = pool.submit(run_sweep, database, named(name), BOUNDS)
        deadline = time.monotonic() + 30
        while has_ended(engine, name):
            assert time.monotonic() < deadline
            assert not threading.Event().wait(0.05)
        clock.advance(6)
        assert run_sweep(database, named(name), BOUNDS) == {"moved": 0, "skipped": "one just ran"}
        assert not first.done()
        migration.commit()
        assert first.result(30) == {"moved": int(name == "dispatch")}


def has_ended(engine, name):
    with engine.connect() as tx:
        return next(loop["ended_at"] >= loop["began_at"] for loop in loops(tx) if loop["name"] == name)


def test_a_look_that_fails_leaves_it_to_the_sweep_to_say_what_is_wrong(database, engine, clock, carrier):
    run_sweep(database, named("expire"), BOUNDS)
    clock.advance(20)
    broken = replace(named("expire"), look=lambda: (Statement("broken", "select from nowhere"), {}))
    assert run_sweep(database, broken, BOUNDS) == {"moved": 0}
    with engine.connect() as tx:
        (line,) = (loop for loop in loops(tx) if loop["name"] == "expire")
    assert line["age_seconds"] < 20, "it has begun all the same"


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
