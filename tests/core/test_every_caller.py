"""The same promises to every sort of caller: whatever it hands over, and at every isolation level."""

import asyncio
from contextlib import ExitStack, suppress

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import durable_core
from durable_core import IdempotencyConflict, KeyInFlight, deliveries
from durable_core.deliveries.attempt import claim_due, perform_due
from durable_core.deliveries.sweep import dispatch
from tests.core.callers import CALLERS, LEVELS, caller, kept, plain, written

every_caller = pytest.mark.parametrize("name", CALLERS)


@every_caller
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_caller_enqueues_commits_or_vanishes_with_its_own_rows(engine, kind, name, level):
    with caller(engine, name, level) as tx:
        for ends in (tx.rollback, tx.commit):
            assert tx.execute("show transaction_isolation") == level.lower()
            tx.write("own")
            tx.enqueue(kind, 1)
            tx.enqueue(kind.options(key="a"), 2)
            tx.many([kind.options(key="b").new(3), kind.options().new(4)])
            tx.by_name("elsewhere.kind", {"n": 5}, key="c")
            assert kept(engine) == written(engine) == [], "nothing is committed behind the caller's back"
            ends()
    assert len(kept(engine)) == 5
    assert {"a", "b", "c"} < set(kept(engine))
    assert written(engine) == ["own"]


@every_caller
@pytest.mark.parametrize("level", LEVELS)
def test_a_savepoint_in_a_savepoint_takes_back_its_own_deliveries_and_no_others(engine, kind, name, level):
    with caller(engine, name, level) as tx:
        tx.enqueue(kind.options(key="outside"), 1)
        tx.execute("savepoint one")
        tx.enqueue(kind.options(key="in one"), 1)
        tx.execute("savepoint two")
        tx.enqueue(kind.options(key="in two"), 1)
        tx.enqueue(kind.options(key="outside"), 1)
        with pytest.raises(IdempotencyConflict):
            tx.enqueue(kind.options(key="in one"), 2)
        tx.execute("rollback to savepoint two")
        assert tx.enqueue(kind.options(key="in two"), 2).created
        tx.execute("rollback to savepoint one")
        tx.enqueue(kind.options(key="after"), 1)
        tx.commit()
    assert kept(engine) == ["after", "outside"]


@pytest.mark.field("R45")
@every_caller
@pytest.mark.parametrize("level", LEVELS)
def test_a_caller_that_repeats_a_key_and_catches_nothing_keeps_its_own_row_and_is_told_which_delivery_has_it(
    engine, kind, make, name, level
):
    there = make(key="k", arguments={"n": 1})
    with caller(engine, name, level) as tx:
        tx.write("before")
        ref = tx.enqueue(kind.options(key="k"), 1)
        tx.write("after")
        tx.commit()
    assert (ref.id, ref.created) == (there.id, False)
    assert kept(engine) == ["k"]
    assert written(engine) == ["before", "after"]


@every_caller
def test_in_autocommit_each_call_is_one_transaction(engine, kind, name):
    """SQLAlchemy's as well as psycopg's: a key needs a savepoint, which needs a transaction."""
    with caller(engine, name, "AUTOCOMMIT") as tx:
        first = tx.enqueue(kind.options(key="a"), 1)
        assert kept(engine) == ["a"]
        assert tx.enqueue(kind.options(key="a"), 1).id == first.id
        with pytest.raises(IdempotencyConflict):
            tx.enqueue(kind.options(key="a"), 2)
        tx.many([kind.options(key="b").new(1), kind.options(key="c").new(1)])
        assert kept(engine) == ["a", "b", "c"]
        with Session(engine) as other:
            kind.options(key="d").enqueue(other, 1)
            with pytest.raises(KeyInFlight):
                tx.enqueue(kind.options(key="d"), 1)
        tx.enqueue(kind.options(key="d"), 1)
        assert tx.execute("show lock_timeout") == "0"
    assert kept(engine) == ["a", "b", "c", "d"]


@every_caller
@pytest.mark.parametrize("key", [None, "k"])
def test_a_carrier_that_raises_never_reaches_a_caller_of_any_sort(engine, kind, carrier, name, key):
    carrier.refuses = ConnectionError("broker down")
    with caller(engine, name) as tx:
        tx.enqueue(kind.options(key=key), 1)
        tx.commit()
        durable_core.wake()
    assert len(kept(engine)) == 1


def test_a_carrier_that_raises_keeps_no_listener_of_the_host_from_its_turn(engine, kind, carrier):
    carrier.refuses = ConnectionError("broker down")
    told = []
    with Session(engine) as session:
        event.listen(session, "after_commit", lambda _: told.append("before"))
        kind.enqueue(session, 1)
        event.listen(session, "after_commit", lambda _: told.append("after"))
        session.commit()
    assert told == ["before", "after"]


@pytest.mark.parametrize("registered", ["before ours", "after ours"])
def test_a_listener_of_the_host_that_raises_costs_at_most_the_hint(engine, database, kind, carrier, worker, registered):
    """SQLAlchemy ends the round at the first that raises: ours may be left out, and then dispatch finds the row."""

    def broken(_):
        raise LookupError("the host's own")

    with Session(engine) as session:
        if registered == "before ours":
            event.listen(session, "after_commit", broken)
        ref = kind.enqueue(session, 1)
        if registered == "after ours":
            event.listen(session, "after_commit", broken)
        with pytest.raises(LookupError):
            session.commit()
    assert [hint.id for hint in carrier.offered] == ([ref.id] if registered == "after ours" else [])
    assert dispatch(database) == 1
    assert [hint.id for hint in carrier.published] == [ref.id]


@every_caller
def test_no_row_that_commits_depends_on_the_hint_of_one_that_does_not(engine, database, kind, carrier, name):
    """Savepoints undone, transactions undone, hints offered or not: dispatch finds exactly what stands."""
    with caller(engine, name) as tx:
        tx.enqueue(kind.options(key="undone"), 1)
        tx.rollback()
        tx.execute("savepoint one")
        tx.enqueue(kind.options(key="undone"), 1)
        tx.execute("savepoint two")
        tx.enqueue(kind.options(key="undone too"), 1)
        tx.execute("rollback to savepoint one")
        ref = tx.enqueue(kind.options(key="stands"), 1)
        tx.commit()
    dispatch(database)
    assert [hint.id for hint in carrier.published] == [ref.id]


def test_an_async_session_hints_once_for_what_stands_after_savepoints_undone(engine, kind, carrier):
    async def act():
        asynchronous = create_async_engine(engine.url)
        async with AsyncSession(asynchronous) as session:
            kept_ref = await kind.aenqueue(session, 1)
            with suppress(LookupError):
                async with session.begin_nested():
                    await kind.aenqueue(session, 2)
                    async with session.begin_nested():
                        await kind.aenqueue(session, 3)
                    raise LookupError
            assert carrier.offered == []
            await session.commit()
            await kind.aenqueue(session, 4)
            await session.rollback()
            await session.commit()
        await asynchronous.dispose()
        return kept_ref

    ref = asyncio.run(act())

    assert [hint.id for hint in carrier.offered if hint.id in kept(engine)] == [ref.id]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
@pytest.mark.parametrize("decides", ["commit", "rollback"])
def test_an_async_session_joined_to_an_outer_transaction_decides_no_more_than_its_mode_says(
    engine, database, kind, carrier, mode, decides
):
    async def act():
        asynchronous = create_async_engine(engine.url)
        async with asynchronous.connect() as outer:
            transaction = await outer.begin()
            session = AsyncSession(outer, join_transaction_mode=mode)
            await kind.options(key="k").aenqueue(session, 1)
            await session.commit()
            await session.close()
            offered = len(carrier.offered)
            if transaction.is_active:
                await (transaction.commit() if decides == "commit" else transaction.rollback())
        await asynchronous.dispose()
        return offered

    offered = asyncio.run(act())

    stands = mode == "control_fully" or decides == "commit"
    assert offered == (1 if mode == "control_fully" else 0), "while the outer transaction had not decided"
    assert dispatch(database) == (1 if stands else 0)


# --- psycopg's connections of other make ------------------------------------------------------------

CURSORS = {
    "psycopg": [psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor],
    "psycopg async": [psycopg.AsyncCursor, psycopg.AsyncClientCursor, psycopg.AsyncRawCursor],
}


@pytest.mark.parametrize(
    ("name", "factory"), [(name, factory) for name, made in CURSORS.items() for factory in made],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_the_connections_own_sort_of_cursor_and_rows_is_no_matter_of_ours(engine, kind, row, name, factory):
    with caller(engine, name, cursor_factory=factory, row_factory=psycopg.rows.scalar_row) as tx:
        one = tx.enqueue(kind, 1)
        two = tx.enqueue(kind.options(key="k"), 2)
        assert tx.enqueue(kind.options(key="k"), 2).id == two.id
        with pytest.raises(IdempotencyConflict):
            tx.enqueue(kind.options(key="k"), 3)
        tx.commit()
    assert [row(ref.id).arguments for ref in (one, two)] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("level", [None, "AUTOCOMMIT"])
def test_in_a_pipeline_a_key_is_answered_as_elsewhere(engine, kind, level):
    with Session(engine) as other, caller(engine, "psycopg", level) as tx, tx.tx.pipeline():
        kind.options(key="in flight").enqueue(other, 1)
        tx.tx.execute("insert into effects (row_id) values ('before')")
        ref = tx.enqueue(kind.options(key="k"), 1)
        assert tx.enqueue(kind.options(key="k"), 1).id == ref.id
        with pytest.raises(IdempotencyConflict):
            tx.enqueue(kind.options(key="k"), 2)
        with pytest.raises(KeyInFlight):
            tx.enqueue(kind.options(key="in flight"), 1)
        tx.tx.execute("insert into effects (row_id) values ('after')")
        tx.commit()
    assert kept(engine) == ["k"]
    assert written(engine) == ["before", "after"]


@pytest.mark.parametrize("level", [False, True], ids=["in a transaction", "in autocommit"])
def test_in_an_async_pipeline_a_key_is_answered_as_elsewhere(engine, kind, level):
    async def act():
        async with await psycopg.AsyncConnection.connect(plain(engine), autocommit=level) as tx, tx.pipeline():
            await tx.execute("insert into effects (row_id) values ('before')")
            await kind.options(key="k").aenqueue(tx, 1)
            with pytest.raises(IdempotencyConflict):
                await kind.options(key="k").aenqueue(tx, 2)
            with pytest.raises(KeyInFlight):
                await kind.options(key="in flight").aenqueue(tx, 1)
            await tx.execute("insert into effects (row_id) values ('after')")
            await tx.commit()

    with Session(engine) as other:
        kind.options(key="in flight").enqueue(other, 1)
        asyncio.run(act())
    assert kept(engine) == ["k"]
    assert written(engine) == ["before", "after"]


# --- long transactions ------------------------------------------------------------------------------


@pytest.mark.full_size
@pytest.mark.field("R88")
def test_what_a_long_transaction_enqueues_at_its_end_is_not_late_by_its_length(engine, kind, row, worker, sized):
    """Instants are those of the statement, and not of the transaction's start."""
    with ExitStack() as open_, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watch:
        callers = [open_.enter_context(caller(engine, name, level)) for name in CALLERS for level in LEVELS]
        for tx in callers:
            tx.write("the snapshot, and the start of now()")
        watch.execute(text(f"select pg_sleep({sized(0.1, 30)})"))
        before = watch.scalar(text("select clock_timestamp()"))
        ids = []
        for n, tx in enumerate(callers):
            assert tx.execute("select now()") < before
            ids.append(tx.enqueue(kind.options(key=f"k{n}" if n % 2 else None), n).id)
            tx.commit()
    for row_id in ids:
        assert before <= row(row_id).created_at == row(row_id).due_at
    done = perform_due(worker, len(ids))
    assert {attempted.id for attempted in done} == set(ids), "all due at once"


@pytest.mark.field("R88")
def test_a_claim_takes_no_lease_from_the_start_of_an_old_transaction(engine, kind, make, clock):
    clock.freeze()
    made = make()
    with engine.connect() as tx:
        tx.execute(text("select 1"))
        clock.advance(seconds=30)
        (claim,) = claim_due(tx, 1)
        tx.commit()
        there = deliveries.get(tx, made.id)
        assert claim.id == made.id
        assert (there.lease_expires_at - clock.now()).total_seconds() == 30
        assert (there.deadline_at - clock.now()).total_seconds() == kind.timeout
