"""A caller of every sort, sync or async, as one object: its statements, its enqueues, the end of its transaction."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from durable_core import Ref, deliveries

SYNC = ("Session", "scoped_session", "Connection", "psycopg")
ASYNC = ("AsyncSession", "AsyncConnection", "psycopg async")
CALLERS = SYNC + ASYNC
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


def plain(engine: Engine) -> str:
    """The URL as psycopg reads it."""
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


class Caller:
    """An open transaction of one sort. Of an async one each call is run to its end."""

    def __init__(self, tx: Any, runner: asyncio.Runner | None = None) -> None:
        self.tx, self._runner = tx, runner

    def _run(self, result: Any) -> Any:
        return result if self._runner is None else self._runner.run(result)

    def enqueue(self, kind: Any, *args: Any, **kwargs: Any) -> Ref:
        how = kind.enqueue if self._runner is None else kind.aenqueue
        ref: Ref = self._run(how(self.tx, *args, **kwargs))
        return ref

    def many(self, rows: Any) -> list[Ref]:
        how = deliveries.enqueue_many if self._runner is None else deliveries.aenqueue_many
        refs: list[Ref] = self._run(how(self.tx, rows))
        return refs

    def by_name(self, kind: Any, arguments: Any, **options: Any) -> Ref:
        how = deliveries.enqueue_by_name if self._runner is None else deliveries.aenqueue_by_name
        ref: Ref = self._run(how(self.tx, kind, arguments, **options))
        return ref

    def execute(self, sql: str) -> Any:
        """The first value, where there is one."""
        if isinstance(self.tx, psycopg.Connection | psycopg.AsyncConnection):
            cursor = self._run(self.tx.execute(sql))
            row = self._run(cursor.fetchone()) if cursor.description else None
        else:
            result = self._run(self.tx.execute(text(sql)))
            row = result.fetchone() if result.returns_rows else None
        return row[0] if row else None

    def write(self, note: str) -> None:
        """A row of the caller's own."""
        self.execute(f"insert into effects (row_id) values ('{note}')")

    def commit(self) -> None:
        self._run(self.tx.commit())

    def rollback(self) -> None:
        self._run(self.tx.rollback())


@contextmanager
def caller(engine: Engine, name: str, level: str | None = None, **connect: Any) -> Iterator[Caller]:
    """A caller of this sort on the engine's database. `level` may be AUTOCOMMIT; `connect` is for psycopg's own."""
    how = {} if level is None else {"isolation_level": level}
    if name in SYNC:
        own = create_engine(engine.url, poolclass=NullPool, **how)
        if name == "psycopg":
            with psycopg.connect(plain(engine), autocommit=level == "AUTOCOMMIT", **connect) as connection:
                if level is not None and level != "AUTOCOMMIT":
                    connection.isolation_level = psycopg.IsolationLevel[level.replace(" ", "_")]
                yield Caller(connection)
        elif name == "Connection":
            with own.connect() as tx:
                yield Caller(tx)
        else:
            session = Session(own) if name == "Session" else scoped_session(sessionmaker(own))
            try:
                yield Caller(session)
            finally:
                session.close()
        return
    with asyncio.Runner() as runner:
        if name == "psycopg async":
            opening = psycopg.AsyncConnection.connect(plain(engine), autocommit=level == "AUTOCOMMIT", **connect)
            tx = runner.run(opening)
            if level is not None and level != "AUTOCOMMIT":
                runner.run(tx.set_isolation_level(psycopg.IsolationLevel[level.replace(" ", "_")]))
        else:
            asynchronous = create_async_engine(engine.url, poolclass=NullPool, **how)
            tx = AsyncSession(asynchronous) if name == "AsyncSession" else runner.run(_open(asynchronous))
        try:
            yield Caller(tx, runner)
        finally:
            runner.run(tx.close())


async def _open(asynchronous: Any) -> Any:
    return await asynchronous.connect()


def kept(engine: Engine) -> list[str]:
    """The keys, or ids where there is none, of all committed deliveries."""
    with engine.connect() as connection:
        return list(connection.scalars(text("select coalesce(key, id::text) from durable.deliveries order by 1")))


def written(engine: Engine) -> list[str]:
    """What callers have written and committed of their own."""
    with engine.connect() as connection:
        return list(connection.scalars(text("select row_id from effects order by id")))
