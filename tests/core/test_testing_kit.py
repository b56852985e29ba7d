"""What `durable_core.testing` promises whoever tests their own handlers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from durable_core import GiveUp, InvalidArguments, Retry, deliveries, enqueue_by_name
from durable_core.testing import assert_enqueued, drain, empty, refute_enqueued, run_one
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


def test_each_process_of_xdist_has_a_redis_database_of_its_own():
    assert _own_database("redis://:pw@host:1/2", "gw3") == "redis://:pw@host:1/5"
    assert _own_database("redis://host?x=1", "gw1") == "redis://host/1?x=1"
    assert _own_database("redis://host/2", "") == "redis://host/2"
