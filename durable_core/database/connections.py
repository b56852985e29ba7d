"""Our own connections: made by the host's engine, used in short transactions whose isolation is READ COMMITTED."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry, Pool, PoolProxiedConnection

from durable_core.database.watch import Watch
from durable_core.errors import DefinitionError

_SESSION_DEFAULT, _RESTED_SINCE = "durable_session_default_isolation", "durable_rested_since"
_READ_COMMITTED = "read committed"
_ASKED = "select current_setting('default_transaction_isolation')"

PING_AFTER_SECONDS = 1.0
"""A connection that was used so lately is taken to be alive."""


class Database:
    """
    Where the durable rows live, as the host configured it: an engine, and the maker of its sessions.

    The engine must speak psycopg 3, whose connections ours are: claim, lock and receipt go to the driver. Its pool,
    its events and its connect arguments are used as they are, but a claim and a receipt without effects fire none of
    SQLAlchemy's events but the pool's.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        sessions: sessionmaker[Session] | None = None,
    ) -> None:
        if sessions is not None and not isinstance(sessions, sessionmaker):
            raise DefinitionError(f"sessions is a sessionmaker; got {type(sessions).__name__}.")
        bind = sessions.kw.get("bind") if sessions is not None else None
        engine = engine or (bind if isinstance(bind, Engine) else None)
        if engine is None:
            raise DefinitionError(
                "set durable_engine to a SQLAlchemy Engine, or durable_sessionmaker to a sessionmaker bound to one."
            )
        if engine.dialect.name != "postgresql" or engine.dialect.driver != "psycopg":
            raise DefinitionError(
                f"the engine speaks {engine.dialect.name}+{engine.dialect.driver}; "
                "durable work needs postgresql+psycopg (psycopg 3)."
            )
        self.engine = engine
        self.sessions: sessionmaker[Session] = sessions if sessions is not None else sessionmaker(engine)
        self.watch = Watch()
        self._within: float | None = None

    def bounded(self, seconds: float) -> Database:
        """The same database, whose short transactions wait so long for an answer, COMMIT's too; see `Watch.over`."""
        bounded = copy.copy(self)
        bounded._within = seconds
        return bounded

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """
        A connection on which each statement is its own READ COMMITTED transaction; for claims and sweeps.

        Where the session's default is another level, a lone statement would run at that
        level and meet 40001: there each use runs in one explicit READ COMMITTED transaction.
        """
        with self.engine.connect() as connection:
            _one_statement_at_a_time(connection)
            with self._watched(connection), connection.begin():
                yield connection

    @contextmanager
    def driver(self) -> Iterator[psycopg.Connection[Any]]:
        """
        The same as the driver's connection, for what each delivery does: SQLAlchemy's costs more than the statement.

        The driver's errors come unwrapped, the pool's as SQLAlchemy makes them. A connection that was lost, or is not
        at rest at the end, does not go back to the pool; of one that was lost, the pool's others go with it.
        """
        pool = self.engine.pool
        pooled = self.engine.raw_connection()
        driver = cast("psycopg.Connection[Any]", pooled.dbapi_connection)
        try:
            if _default_isolation(pooled, driver) == _READ_COMMITTED:
                if not driver.autocommit:
                    # Undone wherever it goes back to the pool, also where nobody is left to give it back.
                    record: Any = getattr(pooled, "_connection_record")  # noqa: B009  # as SQLAlchemy's own levels do it
                    record.finalize_callback.append(_no_autocommit)
                    driver.autocommit = True
                with self._watch_over(driver):
                    yield driver
                return
        finally:
            if driver.info.transaction_status == TransactionStatus.IDLE:
                pooled.close()
            else:
                self._lost(driver, pool, pooled)
        with self.autocommit() as connection:
            driver = raw(connection)
            try:
                yield driver
            finally:
                self._lost(driver, pool)

    def _lost(self, driver: psycopg.Connection[Any], pool: Pool, pooled: PoolProxiedConnection | None = None) -> None:
        """
        Keep it from its next user. What took a connection has most often taken all: the pool begins anew, once.

        Whatever the host's events make of that, the error on its way is the news.
        """
        all_are = driver.closed and self.engine.pool is pool
        with suppress(Exception):
            if pooled is not None:
                pooled.invalidate()
        with suppress(Exception):
            if all_are:
                self.renew()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One explicit READ COMMITTED transaction, committed at the end, rolled back by an exception."""
        with self.connect() as connection, self._watched(connection), connection.begin():
            yield connection

    def _watched(self, connection: Connection) -> AbstractContextManager[object]:
        return self._watch_over(raw(connection))

    def _watch_over(self, driver: psycopg.Connection[Any]) -> AbstractContextManager[object]:
        return nullcontext() if self._within is None else self.watch.over(driver, self._within)

    def connect(self) -> Connection:
        """A connection whose transactions are READ COMMITTED, whatever the host's default; the caller closes it."""
        return self.engine.connect().execution_options(isolation_level="READ COMMITTED")

    def detached(self) -> Connection:
        """
        As `autocommit`, on a connection of its own; the caller begins each use and closes it.

        It is made as the host's engine makes them, but never taken from its pool: where that is
        exhausted, heartbeats must still go out.
        """
        connection = self.background().engine.connect()
        # The level first: a detached connection has no record in the pool on which SQLAlchemy could note it.
        _one_statement_at_a_time(connection)
        connection.detach()
        return connection

    def background(self) -> Database:
        """The same database by connections made alike, in a pool of their own; for threads beside the host's work."""
        return Database(Engine(self.engine.pool.recreate(), self.engine.dialect, self.engine.url))

    def renew(self) -> None:
        """Leave the pool as it is to those who hold its connections, and begin with a new one."""
        self.engine.dispose()

    def forget_connections(self) -> None:
        """In a forked child: drop the parent's sockets without closing them."""
        self.engine.dispose(close=False)


def ping_rested_connections(engine: Engine, *, seconds: float = PING_AFTER_SECONDS) -> None:
    """
    As `pool_pre_ping=True`, for connections that rested in the pool so long: a busy worker pays no round trip for it.

    One that died within this time is met by a statement. Of ours, a claim is hinted again and a commit is asked of
    the row.
    """

    def rests(driver: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
        record.info[_RESTED_SINCE] = time.monotonic()

    def ping(driver: DBAPIConnection, record: ConnectionPoolEntry, proxy: PoolProxiedConnection) -> None:
        if time.monotonic() - record.info.get(_RESTED_SINCE, math.inf) < seconds:
            return
        try:
            engine.dialect.do_ping(driver)
        except psycopg.Error as error:
            # The pool drops what is as old, and makes this one anew.
            raise InvalidatePoolError from error

    event.listen(engine, "checkin", rests)
    event.listen(engine, "checkout", ping)


def raw(connection: Connection) -> psycopg.Connection[Any]:
    """The psycopg connection under a SQLAlchemy one, a detached one's too."""
    return cast("psycopg.Connection[Any]", connection.connection.dbapi_connection)


def _no_autocommit(driver: psycopg.Connection[Any]) -> None:
    if not driver.closed:
        driver.autocommit = False


def _one_statement_at_a_time(connection: Connection) -> None:
    """Each statement its own transaction, where that is READ COMMITTED by default: then `begin` sends nothing."""
    connection.execution_options(isolation_level="AUTOCOMMIT")
    if _default_isolation(connection, raw(connection)) != _READ_COMMITTED:
        connection.execution_options(isolation_level="READ COMMITTED")


def _default_isolation(connection: Connection | PoolProxiedConnection, driver: psycopg.Connection[Any]) -> str:
    """The session's default isolation level, asked once per database connection, of the driver that is under it."""
    level = connection.info.get(_SESSION_DEFAULT)
    if level is None:
        with driver.cursor(row_factory=tuple_row) as cursor:
            (level,) = cursor.execute(_ASKED).fetchone() or (None,)
        driver.rollback()
        connection.info[_SESSION_DEFAULT] = level
    return str(level)
