"""Every caller: asyncio's sessions and connections, autocommit, and each isolation level."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import durable_core
from durable_core import IdempotencyConflict, KeyInFlight, UnsupportedTransaction, deliveries
from durable_core.database.transactions import SERIALIZATION, sqlstate

DOORS = ["AsyncSession", "AsyncConnection", "psycopg"]


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("select count(*) from durable.deliveries")) or 0


def plain(engine: Engine) -> str:
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


@asynccontextmanager
async def door(engine: Engine, name: str):
    """`tx, commit, rollback` of an open async transaction."""
    if name == "psycopg":
        async with await psycopg.AsyncConnection.connect(plain(engine)) as connection:
            yield connection, connection.commit, connection.rollback
        return
    asynchronous = create_async_engine(engine.url)
    try:
        if name == "AsyncSession":
            async with AsyncSession(asynchronous) as session:
                yield session, session.commit, session.rollback
        else:
            async with asynchronous.connect() as connection:
                yield connection, connection.commit, connection.rollback
    finally:
        await asynchronous.dispose()


def in_asyncio(engine: Engine, name: str, act: Callable[..., Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        async with door(engine, name) as (tx, commit, rollback):
            return await act(tx, commit, rollback)

    return asyncio.run(whole())


@pytest.mark.parametrize("name", DOORS)
def test_an_async_enqueue_commits_with_its_caller(engine, kind, name):
    async def act(tx, commit, rollback):
        refs = [await kind.aenqueue(tx, 1), await kind.options(key="k").aenqueue(tx, 2)]
        assert count(engine) == 0
        await commit()
        return refs

    refs = in_asyncio(engine, name, act)

    with engine.connect() as tx:
        assert [deliveries.get(tx, ref.id).arguments for ref in refs] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("key", [None, "k"])
def test_an_async_enqueue_vanishes_with_its_caller(engine, kind, name, key):
    async def act(tx, commit, rollback):
        await kind.options(key=key).aenqueue(tx, 1)
        await rollback()

    in_asyncio(engine, name, act)

    assert count(engine) == 0


@pytest.mark.parametrize("name", DOORS)
def test_a_refused_key_leaves_an_async_transaction_alive_and_its_lock_timeout_as_it_was(engine, kind, name):
    async def act(tx, commit, rollback):
        first = await kind.options(key="k").aenqueue(tx, 1)
        again = await kind.options(key="k").aenqueue(tx, 1)
        with pytest.raises(IdempotencyConflict):
            await kind.options(key="k").aenqueue(tx, 2)
        shown = await tx.execute(text("show lock_timeout") if name != "psycopg" else "show lock_timeout")
        timeout = (await shown.fetchone() if name == "psycopg" else shown.one())[0]
        await commit()
        return first, again, timeout

    first, again, timeout = in_asyncio(engine, name, act)

    assert (again.id, again.created, timeout) == (first.id, False, "0")
    assert count(engine) == 1


@pytest.mark.parametrize("name", DOORS)
def test_a_twin_in_flight_is_answered_to_an_async_caller_too(engine, kind, name):
    with Session(engine) as other:
        kind.options(key="k").enqueue(other, 1)

        async def act(tx, commit, rollback):
            with pytest.raises(KeyInFlight):
                await kind.options(key="k").aenqueue(tx, 1)
            await kind.aenqueue(tx, 2)
            await commit()

        in_asyncio(engine, name, act)
        other.rollback()

    assert count(engine) == 1


def test_an_async_session_hints_after_its_root_commit(engine, kind, carrier):
    async def act(tx, commit, rollback):
        async with tx.begin_nested():
            ref = await kind.aenqueue(tx, 1)
        assert carrier.offered == []
        await commit()
        return ref

    ref = in_asyncio(engine, "AsyncSession", act)

    assert [hint.id for hint in carrier.offered] == [ref.id]


@pytest.mark.parametrize("name", ["AsyncConnection", "psycopg"])
def test_on_a_bare_async_connection_hints_wait_for_wake(engine, kind, carrier, name):
    async def act(tx, commit, rollback):
        await kind.aenqueue(tx, 1)
        await commit()
        assert carrier.offered == []
        return durable_core.wake()

    assert in_asyncio(engine, name, act) == 1
    assert len(carrier.offered) == 1


def test_many_and_by_name_have_their_async_forms(engine, kind):
    async def act(tx, commit, rollback):
        refs = await deliveries.aenqueue_many(tx, (kind.options(key=f"k{n}").new(n) for n in range(1500)))
        refs.append(await deliveries.aenqueue_by_name(tx, "elsewhere.kind", {"any": "thing"}))
        await commit()
        return refs

    refs = in_asyncio(engine, "AsyncConnection", act)

    assert len({ref.id for ref in refs}) == count(engine) == 1501


@pytest.mark.parametrize("wrong", ["text", None, object()])
def test_what_is_no_async_transaction_is_refused(kind, wrong):
    with pytest.raises(UnsupportedTransaction):
        asyncio.run(kind.aenqueue(wrong, 1))


def test_a_keyed_enqueue_as_the_first_statement_of_a_psycopg_connection_is_not_committed(engine, kind):
    with psycopg.connect(plain(engine)) as connection:
        kind.options(key="k").enqueue(connection, 1)
        assert count(engine) == 0
        connection.rollback()

    assert count(engine) == 0


@pytest.mark.parametrize("key", [None, "k"])
def test_in_autocommit_an_enqueue_is_a_transaction_of_its_own(engine, kind, key):
    with psycopg.connect(plain(engine), autocommit=True) as connection:
        kind.options(key=key).enqueue(connection, 1)
        assert count(engine) == 1
        kind.options(key="other").enqueue(connection, 1)
        with pytest.raises(IdempotencyConflict):
            kind.options(key="other").enqueue(connection, 2)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        kind.options(key="third").enqueue(connection, 1)
        assert count(engine) == 3


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_key_is_answered_at_every_isolation_level_unless_it_is_newer_than_the_snapshot(engine, kind, level):
    strict = create_engine(engine.url, isolation_level=level)
    try:
        with Session(strict) as session:
            first = kind.options(key="k").enqueue(session, 1)
            session.commit()
            assert kind.options(key="k").enqueue(session, 1).id == first.id
            with pytest.raises(IdempotencyConflict):
                kind.options(key="k").enqueue(session, 2)
            session.rollback()
            session.execute(text("select 1"))
            with Session(engine) as other, other.begin():
                kind.options(key="newer").enqueue(other, 1)
            if level == "READ COMMITTED":
                assert kind.options(key="newer").enqueue(session, 1).created is False
            else:
                with pytest.raises(DBAPIError) as refused:
                    kind.options(key="newer").enqueue(session, 1)
                assert sqlstate(refused.value) == SERIALIZATION
                session.rollback()
                assert kind.options(key="newer").enqueue(session, 1).created is False
    finally:
        strict.dispose()
