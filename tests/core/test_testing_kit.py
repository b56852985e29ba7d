"""What `durable_core.testing` promises whoever tests their own handlers."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.orm import Session

from durable_core import (
    GiveUp,
    InvalidArguments,
    NotFound,
    Retry,
    Snooze,
    deliveries,
    enqueue_by_name,
    enqueue_many,
)
from durable_core.claims.claim import Holder
from durable_core.testing import (
    MovableClock,
    WorkerProcess,
    assert_enqueued,
    clear,
    cloned_database,
    create_database,
    databases,
    drain,
    drop_database,
    empty,
    fresh_database,
    make_delivery,
    migrated,
    refute_enqueued,
    run_one,
    wait_for,
    wait_until_blocked,
    wait_until_somebody_blocks,
    worker,
)
from durable_core.testing.servers import _own_database


def greet(step, name: str, *, loud: bool = False, times: int = 1) -> str:
    return name.upper() if loud else name


# --- assert_enqueued, refute_enqueued -----------------------------------------------------------------


def test_what_this_transaction_enqueued_is_found_before_it_commits(conn, declare):
    kind = declare(greet)
    refute_enqueued(conn, kind)
    first = kind.enqueue(conn, "Ann", times=2)
    kind.enqueue(conn, "Bob")

    (row,) = assert_enqueued(conn, kind, "Ann")
    assert row.id == first.id
    assert len(assert_enqueued(conn, kind)) == 2
    assert [row.arguments["name"] for row in assert_enqueued(conn, kind)] == ["Ann", "Bob"]
    refute_enqueued(conn, kind, "Ann", times=3)


def test_an_argument_equal_to_its_default_matches_a_row_that_left_it_out_and_no_other(conn, declare):
    kind = declare(greet)
    kind.enqueue(conn, "Ann")
    kind.enqueue(conn, "Bob", loud=True)
    assert [row.arguments["name"] for row in assert_enqueued(conn, kind, loud=False)] == ["Ann"]
    assert [row.arguments["name"] for row in assert_enqueued(conn, kind, loud=True)] == ["Bob"]


def test_options_asked_for_must_be_the_rows(conn, declare):
    kind = declare(greet)
    eta = datetime(2050, 1, 1, tzinfo=UTC)
    kind.options(queue="mail", key="k", priority=2, countdown=300).enqueue(conn, "Ann")
    kind.options(eta=eta).enqueue(conn, "Bob")
    for options in ({"queue": "mail"}, {"key": "k"}, {"priority": 2}, {"countdown": 300}):
        assert [row.arguments["name"] for row in assert_enqueued(conn, kind.options(**options))] == ["Ann"]
    assert [row.arguments["name"] for row in assert_enqueued(conn, kind.options(eta=eta))] == ["Bob"]
    for options in ({"queue": "post"}, {"key": "l"}, {"priority": 3}, {"countdown": 302}):
        refute_enqueued(conn, kind.options(**options))
    refute_enqueued(conn, kind.options(eta=eta + timedelta(seconds=1)))


def test_the_message_says_what_is_there_instead(conn, declare):
    kind = declare(greet)
    with pytest.raises(AssertionError, match="of this kind there is none"):
        assert_enqueued(conn, kind, "Ann")
    kind.enqueue(conn, "Bob")
    with pytest.raises(AssertionError) as told:
        assert_enqueued(conn, kind.options(queue="mail"), "Ann", times=1)
    assert "unlike: name is \"Bob\"; queue is 'durable'" in str(told.value)
    with pytest.raises(AssertionError, match=rf"no pending delivery of {kind.name} with countdown 60 s\n"):
        assert_enqueued(conn, kind.options(countdown=60))
    with pytest.raises(AssertionError, match='name="Bob"'):
        refute_enqueued(conn, kind)


def test_an_argument_that_the_handler_does_not_take_is_refused_not_refuted(conn, declare):
    with pytest.raises(InvalidArguments):
        refute_enqueued(conn, declare(greet), nmae="Ann")


def test_only_what_is_pending_counts(conn, declare, make):
    made = make(kind := declare(greet), {"name": "Ann"}, state="sent")
    refute_enqueued(conn, kind)
    with pytest.raises(AssertionError, match=f"{made.id} sent"):
        assert_enqueued(conn, kind)


def test_a_kind_whose_code_is_elsewhere_is_asked_for_by_name(conn):
    enqueue_by_name(conn, "elsewhere.kind", {"n": 1, "m": [1, 2]})
    assert_enqueued(conn, "elsewhere.kind", m=[1, 2])
    refute_enqueued(conn, "elsewhere.kind", n=True)


def test_a_psycopg_connection_and_a_session_are_transactions_too(engine, conn, declare):
    kind = declare(greet)
    with Session(engine) as session:
        kind.enqueue(session, "Ann")
        assert_enqueued(session, kind, "Ann")
        driver = session.connection().connection.driver_connection
        assert_enqueued(driver, kind, "Ann")
        refute_enqueued(conn, kind)


def test_the_oldest_of_many_is_found(conn, declare):
    kind = declare(greet)
    oldest = kind.enqueue(conn, "Ann")
    enqueue_many(conn, [kind.options().new("Bob") for _ in range(1001)])
    assert [row.id for row in assert_enqueued(conn, kind, "Ann")] == [oldest.id]
    assert len(assert_enqueued(conn, kind)) == 1002


# --- drain --------------------------------------------------------------------------------------------


def test_drain_carries_out_what_is_due_in_every_queue_and_what_that_enqueues(engine, declare, row):
    leaf = declare(greet)

    def plant(step, name: str) -> None:
        leaf.options(queue="leaves").enqueue(step.session, name)

    root = declare(plant)
    with engine.begin() as tx:
        root.options(queue="roots").enqueue(tx, "Ann")
        later = leaf.options(countdown=60).enqueue(tx, "Bob")
    assert [(one.kind, one.outcome) for one in drain(engine)] == [(root.name, "sent"), (leaf.name, "sent")]
    assert row(later.id).state == "pending"
    assert drain(engine) == []


def test_drain_keeps_to_the_queue_it_is_given(engine, declare, row):
    kind = declare(greet)
    with engine.begin() as tx:
        there, here = kind.options(queue="there").enqueue(tx, "Ann"), kind.enqueue(tx, "Bob")
    assert [one.id for one in drain(engine, queue="there")] == [there.id]
    assert row(here.id).state == "pending"


def test_drain_says_when_it_stops_with_more_to_do(engine, declare):
    def again(step) -> None:
        kind.enqueue(step.session)

    kind = declare(again)
    with engine.begin() as tx:
        kind.enqueue(tx)
    with pytest.raises(AssertionError, match=f"stopped after 5 attempts and more is due; the last were of {kind.name}"):
        drain(engine, limit=5)
    with engine.connect() as tx:
        assert_enqueued(tx, kind)


def test_a_limit_that_is_just_enough_is_no_failure(engine, declare):
    kind = declare(greet)
    with engine.begin() as tx:
        kind.enqueue(tx, "Ann")
    assert len(drain(engine, limit=1)) == 1


def test_drain_goes_through_time_from_retry_to_retry_and_no_further(engine, clock, declare):
    def fail(step) -> None:
        raise Retry("again", after=600)

    kind = declare(fail, max_attempts=9)
    with engine.begin() as tx:
        kind.enqueue(tx)
    clock.freeze()
    before = clock.now()
    assert len(drain(engine, through=timedelta(minutes=25))) == 3
    # Freezing stops the clock, so what it moved by is what drain moved it by.
    assert clock.now() - before == timedelta(minutes=25)


def test_drain_passes_over_a_row_that_another_connection_has_locked(engine, conn, declare):
    kind = declare(greet)
    with engine.begin() as tx:
        locked, free = kind.enqueue(tx, "Ann"), kind.options(queue="free").enqueue(tx, "Bob")
    conn.execute(text("select from durable.deliveries where id = :id for update"), {"id": locked.id})
    assert [one.id for one in drain(engine)] == [free.id]


def test_drain_refuses_a_transaction_that_is_not_its_own(conn):
    with pytest.raises(TypeError, match="give an Engine"):
        drain(conn)


def test_drain_takes_the_most_overdue_first_whatever_its_queue(engine, clock, declare):
    kind = declare(greet)
    clock.freeze()
    with engine.begin() as tx:
        third, first, second = (
            kind.options(queue=queue, countdown=countdown).enqueue(tx, "Ann").id
            for queue, countdown in (("a", 3), ("b", 1), ("a", 2))
        )
    clock.advance(10)
    assert [one.id for one in drain(engine)] == [first, second, third]


def test_drain_leaves_alone_what_is_of_a_kind_unknown_here_or_paused_or_held_by_a_lost_worker(
    engine, clock, declare, make
):
    lost = make(kind := declare(greet), {"name": "Ann"}, state="processing")
    with engine.begin() as tx:
        enqueue_by_name(tx, "elsewhere.kind", {})
        kind.options(queue="shut").enqueue(tx, "Ann")
        deliveries.pause(tx, "queue", "shut", by="dana", reason="a test")
    assert drain(engine, through=timedelta(days=1)) == []
    with engine.connect() as tx:
        assert deliveries.get(tx, lost.id).state == "processing"


def test_under_a_frozen_clock_what_is_put_off_is_due_to_the_microsecond(engine, clock, declare, row):
    def put_off(step) -> None:
        if step.attempt == 1:
            raise Retry("later", after=600)

    kind = declare(put_off)
    clock.freeze()
    start = clock.now()
    with engine.begin() as tx:
        ref = kind.options(countdown=60).enqueue(tx)
    assert row(ref.id).due_at == start + timedelta(seconds=60)
    clock.advance(59.999)
    assert drain(engine) == []
    clock.advance(0.001)
    (one,) = drain(engine)
    assert (one.outcome, one.due_at) == ("will be tried again", start + timedelta(seconds=660))
    clock.advance(599.999)
    assert drain(engine) == []
    clock.advance(0.001)
    assert [one.outcome for one in drain(engine)] == ["sent"]


def test_drain_through_time_carries_out_what_is_enqueued_for_later_in_its_turn(engine, clock, declare):
    def bill(step, days: int) -> None:
        if days > 0:
            kind.options(countdown=86400).enqueue(step.session, days - 1)

    kind = declare(bill)
    clock.freeze()
    with engine.begin() as tx:
        kind.enqueue(tx, 5)
    assert len(drain(engine, through=timedelta(days=3))) == 3 + 1
    with pytest.raises(AssertionError, match="stopped after 1 attempts and more is due"):
        drain(engine, through=timedelta(days=3), limit=1)


def test_drain_through_time_carries_each_out_at_its_own_due_time(engine, clock, declare):
    ran = []

    def look(step) -> None:
        ran.append(clock.now() - start)

    kind = declare(look)
    clock.freeze()
    start = clock.now()
    with engine.begin() as tx:
        for seconds in (120, 60, 180):
            kind.options(countdown=seconds).enqueue(tx)
        enqueue_by_name(tx, "elsewhere.kind", {}, countdown=30)
    drain(engine, through=timedelta(seconds=150))
    assert ran == [timedelta(seconds=60), timedelta(seconds=120)]


def test_what_drain_cannot_take_is_not_more_that_is_due(engine, declare):
    def fail(step) -> None:
        raise Retry("again", after=600)

    kind = declare(fail)
    with engine.begin() as tx:
        for _ in range(2):
            kind.options(ordering_key="a line").enqueue(tx)
        enqueue_by_name(tx, "elsewhere.kind", {})
        kind.options(queue="shut").enqueue(tx)
        deliveries.pause(tx, "queue", "shut", by="dana", reason="a test")
    assert [one.outcome for one in drain(engine, limit=1)] == ["will be tried again"]


def test_drain_leaves_no_heartbeat_behind(engine, declare):
    with engine.begin() as tx:
        declare(greet).enqueue(tx, "Ann")
    assert len(drain(engine)) == 1
    assert "durable-heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_a_retry_by_the_back_off_is_due_at_the_same_time_in_every_run(engine, clock, declare):
    def fail(step) -> None:
        raise LookupError

    clock.freeze()
    for _ in range(3):
        with engine.begin() as tx:
            declare(fail).enqueue(tx)
    assert len({one.due_at for one in drain(engine)}) == 1


def test_what_a_handler_raises_under_drain_is_its_rows_outcome_and_told_in_the_log(engine, declare, caplog):
    def fail(step) -> None:
        raise LookupError("no such order")

    def put_off(step) -> None:
        raise Snooze(600)

    failing = declare(fail, max_attempts=1)
    with engine.begin() as tx:
        failing.enqueue(tx)
        declare(put_off).enqueue(tx)
        declare(greet).enqueue(tx, "Ann")
    assert [one.outcome for one in drain(engine)] == ["dead", "snoozed", "sent"]
    (told,) = (one.getMessage() for one in caplog.records if one.name == "durable_core.testing.drain")
    assert told.startswith(f"{failing.name}, attempt 1: dead: LookupError: no such order")
    assert "in fail" in told, "the handler's own lines are in it"


# --- run_one ------------------------------------------------------------------------------------------


def test_run_one_enqueues_commits_and_runs(engine, declare):
    row = run_one(engine, declare(greet).options(key="k"), "Ann", loud=True)
    assert (row.state, row.result, row.key) == ("sent", "ANN", "k")


def test_run_one_runs_a_delivery_that_is_there_and_no_other(engine, declare):
    kind = declare(greet)
    with engine.begin() as tx:
        kind.enqueue(tx, "first")
        ref = kind.enqueue(tx, "second")
    assert run_one(engine, ref).result == "second"
    with engine.connect() as tx:
        assert len(assert_enqueued(tx, kind)) == 1
    with pytest.raises(AssertionError, match=f"nothing to claim: delivery {ref.id} of {kind.name} is sent"):
        run_one(engine, ref.id)


def test_run_one_raises_what_the_handler_raised_once_the_failure_is_committed(engine, declare):
    def fail(step) -> None:
        raise LookupError("no such order")

    async def fail_async(step) -> None:
        raise LookupError("no such order")

    for handler in (fail, fail_async):
        kind = declare(handler)
        with pytest.raises(LookupError, match="no such order"):
            run_one(engine, kind)
        with engine.connect() as tx:
            (row,) = deliveries.page(tx, kind=kind.name)
        assert (row.attempts, row.error_code) == (1, "WORKER_ERROR")
    assert run_one(engine, kind, raises=False).state == "pending"


def test_run_one_does_not_raise_an_outcome_that_the_handler_asked_for(engine, declare):
    def give_up(step) -> None:
        raise GiveUp("never")

    assert run_one(engine, declare(give_up)).state == "failed"


def test_run_one_raises_for_an_effect_that_failed(engine, declare):
    def fail_late(step) -> None:
        step.in_commit(lambda session: 1 / 0)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_one(engine, declare(fail_late))


def test_run_one_refuses_arguments_for_a_delivery_that_has_its_own_and_an_id_that_is_none(engine, declare, make):
    with pytest.raises(TypeError, match="has its arguments already"):
        run_one(engine, make(declare(greet), {"name": "Ann"}), "Bob")
    with pytest.raises(NotFound):
        run_one(engine, "00000000-0000-7000-8000-000000000000")


def test_run_one_takes_an_argument_called_raises_by_new(engine, declare):
    def say(step, raises: str) -> str:
        return raises

    assert run_one(engine, declare(say).options().new(raises="hands")).result == "hands"


# --- wait_for, make_delivery --------------------------------------------------------------------------


def test_wait_for_says_what_the_delivery_is_instead(engine, declare, make):
    made = make(kind := declare(greet), {"name": "Ann"})
    with pytest.raises(TimeoutError, match=rf"not within 0\.1 s: {kind.name} {made.id} canceled or .*; it is pending"):
        wait_for(engine, made, seconds=0.1)
    assert wait_for(engine, made, state="pending", seconds=0).id == made.id
    with pytest.raises(ValueError, match="asleep"):
        wait_for(engine, made, state="asleep")
    run_one(engine, made.id)
    assert wait_for(engine, made.id, seconds=0).state == "sent"


def test_wait_for_says_what_went_wrong_last(engine, declare):
    def fail(step) -> None:
        raise LookupError("no such order")

    with engine.begin() as tx:
        ref = declare(fail).enqueue(tx)
    drain(engine)
    with pytest.raises(TimeoutError, match="it is pending, last error: LookupError: no such order"):
        wait_for(engine, ref, seconds=0)


def test_wait_for_does_not_wait_for_what_was_not_committed(engine, conn, declare):
    ref = declare(greet).enqueue(conn, "Ann")
    with pytest.raises(NotFound):
        wait_for(engine, ref)


@pytest.mark.parametrize("state", ["pending", "processing", "sent", "failed", "dead", "canceled", "expired"])
def test_a_delivery_is_made_in_every_state(conn, declare, state):
    made = make_delivery(conn, declare(greet), {"name": "Ann"}, state=state, key="k")
    row = deliveries.get(conn, made.id)
    assert (row.state, row.key) == (state, "k")
    if state in ("pending", "canceled", "expired"):
        with pytest.raises(AssertionError, match="was never claimed"):
            _ = made.held
    else:
        assert made.held.fence == row.fence == 1


def test_a_delivery_is_made_under_the_lease_asked_for(conn, clock, declare):
    clock.freeze()
    made = make_delivery(conn, declare(greet), {"name": "Ann"}, state="processing", holder=Holder(lease_seconds=77))
    lease = text("select lease_expires_at from durable.deliveries where id = :id")
    assert conn.scalar(lease, {"id": made.id}) == clock.now() + timedelta(seconds=77)


def test_no_delivery_is_made_in_a_state_that_there_is_not_or_that_it_could_not_have(conn, declare):
    with pytest.raises(ValueError, match="asleep"):
        make_delivery(conn, declare(greet), {"name": "Ann"}, state="asleep")
    with pytest.raises(ValueError, match="is not due, so it cannot be processing"):
        make_delivery(conn, declare(greet), {"name": "Ann"}, state="processing", countdown=60)


# --- MovableClock -------------------------------------------------------------------------------------


def test_the_clock_goes_both_ways_stands_still_and_is_real_again(clock):
    def off() -> float:
        return round((clock.now() - datetime.now(UTC)).total_seconds(), -1)

    clock.advance(3600)
    assert off() == 3600
    clock.advance(-7200)
    assert off() == -3600
    clock.freeze()
    assert clock.now() == (frozen := clock.now())
    clock.advance(60)
    assert clock.now() == frozen + timedelta(seconds=60)
    clock.reset()
    assert clock.now() < clock.now()
    assert off() == 0


def test_no_migration_installs_the_movable_clock_and_a_role_that_does_not_own_the_schema_cannot(services):
    engine = migrated(create_database(services.database_url, "durable_test_clock"))
    try:
        with engine.begin() as tx:
            assert tx.scalar(text("select to_regclass('durable.test_clock')")) is None
            tx.execute(text("drop role if exists durable_test_runtime"))
            tx.execute(text("create role durable_test_runtime login password 'x'"))
            tx.execute(text("grant usage on schema durable to durable_test_runtime"))
        runtime = create_engine(engine.url.set(username="durable_test_runtime", password="x"))
        with pytest.raises(ProgrammingError, match="permission denied"):
            MovableClock(runtime).install()
        runtime.dispose()
        MovableClock(engine).install()
        MovableClock(engine).advance(3600)
        MovableClock(engine).uninstall()
        with engine.begin() as tx:
            tx.execute(text("revoke usage on schema durable from durable_test_runtime"))
            tx.execute(text("drop role durable_test_runtime"))
            assert tx.scalar(text("select to_regclass('durable.test_clock')")) is None
            assert tx.scalar(text("select durable.durable_now() - clock_timestamp() < '1 minute'"))
    finally:
        engine.dispose()
        drop_database(services.database_url, "durable_test_clock")


# --- locks --------------------------------------------------------------------------------------------


def test_waiting_for_a_lock_that_nobody_waits_for_ends(engine, conn):
    pid = conn.connection.driver_connection.info.backend_pid
    with pytest.raises(TimeoutError, match=f"backend {pid} did not block within 0.1 s"):
        wait_until_blocked(engine, pid, seconds=0.1)
    with pytest.raises(TimeoutError, match=r"no backend blocked within 0\.1 s"):
        wait_until_somebody_blocks(engine, seconds=0.1)


# --- databases ----------------------------------------------------------------------------------------


def test_empty_takes_the_hosts_rows_too_and_starts_their_identities_anew(engine, declare):
    with engine.begin() as tx:
        tx.execute(text("insert into effects (note) values ('x')"))
        declare(greet).enqueue(tx, "Ann")
    empty(engine)
    with engine.begin() as tx:
        assert deliveries.page(tx) == []
        assert tx.scalar(text("insert into effects (note) values ('y') returning id")) == 1
        assert tx.scalar(text("select count(*) from effects")) == 1
        assert tx.scalar(text("select count(*) from durable.schema_version")) == 1


def test_empty_finds_the_hosts_tables_in_every_schema_and_under_any_name_but_no_extensions(engine):
    with engine.begin() as tx:
        tx.exec_driver_sql("""
            create schema other;
            create table other."a%%b ""c" (n integer);
            create table other.parted (n integer) partition by list (n);
            create table other.part partition of other.parted for values in (1);
            insert into other."a%%b ""c" values (1);
            insert into other.parted values (1);
            create table other.of_an_extension as select 1 as n;
            alter extension plpgsql add table other.of_an_extension;
        """)
    try:
        empty(engine)
        with engine.begin() as tx:
            assert tx.exec_driver_sql('select count(*) from other."a%%b ""c"').scalar() == 0
            assert tx.exec_driver_sql("select count(*) from other.parted").scalar() == 0
            assert tx.exec_driver_sql("select count(*) from other.of_an_extension").scalar() == 1
    finally:
        with engine.begin() as tx:
            tx.execute(text("alter extension plpgsql drop table other.of_an_extension"))
            tx.execute(text("drop schema other cascade"))


def test_clear_leaves_the_hosts_rows(engine, declare):
    with engine.begin() as tx:
        tx.execute(text("insert into effects (note) values ('x')"))
        declare(greet).enqueue(tx, "Ann")
    clear(engine)
    with engine.begin() as tx:
        assert deliveries.page(tx) == []
        assert tx.scalar(text("select count(*) from effects")) == 1


@pytest.mark.parametrize("emptying", [clear, empty])
def test_a_transaction_left_open_is_told_and_ended_and_the_rows_go(
    engine, other_engine, declare, monkeypatch, emptying
):
    monkeypatch.setattr(databases, "LOCK_SECONDS", 0.2)
    with engine.begin() as tx:
        ref = declare(greet).enqueue(tx, "Ann")
    with other_engine.connect() as forgotten:
        forgotten.execute(text("insert into effects (note) values ('x')"))
        forgotten.execute(text("select 'mine' from durable.deliveries for update"))
        with pytest.raises(AssertionError, match=r"a transaction was left open, .* it last said: select 'mine'"):
            emptying(engine)
        with pytest.raises(OperationalError):
            forgotten.execute(text("select 1"))
    with engine.connect() as tx, pytest.raises(NotFound):
        deliveries.get(tx, ref.id)


def test_a_fresh_database_has_what_the_host_prepares_and_is_dropped_at_the_end(services, worker_id):
    def prepare(engine) -> None:
        with engine.begin() as tx:
            tx.execute(text("create table shop (n integer)"))

    with fresh_database(services.database_url, prepare) as database:
        name = database.engine.url.database
        MovableClock(database.engine).advance(3600)
        with database.engine.connect() as tx:
            assert tx.scalar(text("select count(*) from shop")) == 0
        left_open = create_engine(database.engine.url).connect()
    assert not _there(services, name)
    left_open.invalidate()

    with pytest.raises(ZeroDivisionError), fresh_database(services.database_url, lambda engine: 1 / 0):
        pass
    assert not _there(services, f"durable_test_{worker_id}_%")


def test_a_database_is_cloned_with_its_rows_and_dropped_at_the_end(services, declare):
    create_database(services.database_url, "durable_test_template")  # what a killed run left there
    template = migrated(create_database(services.database_url, "durable_test_template"))
    with template.begin() as tx:
        ref = declare(greet).enqueue(tx, "Ann")
    template.dispose()
    try:
        for _ in range(2):
            with cloned_database(services.database_url, "durable_test_template", "durable_test_clone") as database:
                assert run_one(database, ref).result == "Ann"
        assert not _there(services, "durable_test_clone")
    finally:
        drop_database(services.database_url, "durable_test_template")


def _there(services, name: str) -> bool:
    engine = create_engine(services.database_url)
    try:
        with engine.connect() as tx:
            return tx.scalar(text("select exists (select from pg_database where datname like :name)"), {"name": name})
    finally:
        engine.dispose()


# --- WorkerProcess ------------------------------------------------------------------------------------


def test_a_worker_that_does_not_start_says_so_in_a_sentence_with_what_it_wrote_this_time(tmp_path):
    process = WorkerProcess("nowhere:app", (), tmp_path, os.environ)
    for _ in range(2):
        with pytest.raises(RuntimeError) as told:
            process.start()
        assert str(told.value).startswith("the worker of nowhere:app ended with 2 and took no work; it wrote:\n")
        assert str(told.value).count("ModuleNotFoundError: No module named 'nowhere'") == 1
    assert not process.alive


def test_a_worker_that_takes_no_work_in_time_is_ended_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "READY_SECONDS", 6)
    (tmp_path / "deaf.py").write_text("from celery import Celery\napp = Celery('deaf', broker='redis://127.0.0.1:1')\n")
    process = WorkerProcess("deaf:app", (), tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(RuntimeError, match="of deaf:app was not ready within 6 s and took no work; it wrote:") as told:
        process.start()
    assert "Cannot connect to redis://" in str(told.value)
    assert not process.alive


def test_each_process_of_xdist_has_a_redis_database_of_its_own():
    assert _own_database("redis://:pw@host:1/2", "gw3") == "redis://:pw@host:1/5"
    assert _own_database("redis://host?x=1", "gw1") == "redis://host/1?x=1"
    assert _own_database("redis://host/2", "") == "redis://host/2"
