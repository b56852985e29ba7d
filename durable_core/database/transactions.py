"""What a caller may hand us as `tx`, and how a statement runs in it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import dict_row
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session

from durable_core.arguments import clean_text
from durable_core.database.statements import Statement
from durable_core.errors import UnsupportedTransaction

T = TypeVar("T")

Transaction: TypeAlias = "Session | scoped_session[Session] | Connection | psycopg.Connection[Any]"
"""The caller's own open transaction. We run statements in it; we never commit it and never roll it back."""

AsyncTransaction: TypeAlias = "AsyncSession | AsyncConnection | psycopg.AsyncConnection[Any]"
"""The same in asyncio, for the functions whose names begin with an a."""

Row: TypeAlias = Mapping[str, Any]


def run(tx: Transaction, statement: Statement, /, **parameters: object) -> list[Row]:
    """Run one named statement in the caller's transaction; its rows, as mappings."""
    if isinstance(tx, psycopg.Connection):
        return run_raw(tx, statement, parameters)
    result = connection_of(tx).execute(statement.clause, parameters, execution_options=_AT_ONCE)
    rows: list[Row] = [dict(row) for row in result.mappings()] if result.returns_rows else []
    return rows


_AT_ONCE: dict[str, Any] = {"stream_results": False, "yield_per": None}
"""A caller may stream its own rows, and say so for its whole connection: by a cursor that only SELECT can have."""


def run_raw(connection: psycopg.Connection[Any], statement: Statement, parameters: Mapping[str, object]) -> list[Row]:
    """The same on a bare psycopg connection."""
    with _by_name(connection) as cursor:
        with connection.pipeline() if _in_pipeline(connection) else nullcontext():
            cursor.execute(statement.driver, parameters)
        rows: list[Row] = [*cursor.fetchall()] if _has_rows(cursor) else []
        return rows


def _by_name(connection: psycopg.Connection[Any]) -> psycopg.Cursor[dict[str, Any]]:
    """The caller's kind of cursor, but a raw one: that counts its parameters, and ours have names."""
    if issubclass(connection.cursor_factory, psycopg.RawCursor):
        return psycopg.Cursor(connection, row_factory=dict_row)
    return connection.cursor(row_factory=dict_row)


def _in_pipeline(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """A caller's pipeline holds answers back, and the state of its transaction; a block of ours inside it has them."""
    return connection.pgconn.pipeline_status != PipelineStatus.OFF


def _has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    """Whether the statement gives rows, if only none. The driver's `description` makes an object of each column."""
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def connection_of(tx: Session | scoped_session[Session] | Connection) -> Connection:
    """The SQLAlchemy connection on which this transaction runs; a Session takes part in its own."""
    connection = tx.connection() if isinstance(tx, Session | scoped_session) else tx
    if not isinstance(connection, Connection):
        raise UnsupportedTransaction(type(tx).__name__)
    if connection.dialect.name != "postgresql":
        raise UnsupportedTransaction(f"a {type(tx).__name__} on {connection.dialect.name}")
    return connection


Steps: TypeAlias = "Generator[tuple[Statement, dict[str, object]], list[Row], T]"
"""A sequence of statements that does not know whether its transaction is sync or async: it yields each, and is sent
its rows, or the error thrown in where it stands."""


SAVEPOINT = Statement("savepoint", "savepoint durable_enqueue")
RELEASE_SAVEPOINT = Statement("release_savepoint", "release savepoint durable_enqueue")
ROLLBACK_TO_SAVEPOINT = Statement("rollback_to_savepoint", "rollback to savepoint durable_enqueue")
"""Transaction control for steps that may be refused. Not `begin_nested` and its kin: psycopg's transaction block
commits at its end when it is the first of the connection."""


def carried(tx: Transaction, steps: Steps[T]) -> T:
    """Run the steps in the caller's transaction. A connection in autocommit gets one transaction for them."""
    if isinstance(tx, psycopg.Connection):
        with tx.pipeline() if _in_pipeline(tx) else nullcontext():
            alone = _alone(tx)
        with tx.transaction() if alone else nullcontext():
            return _through(steps, lambda statement, parameters: run_raw(tx, statement, parameters))
    connection = connection_of(tx)
    driver = connection.connection.driver_connection
    alone = isinstance(driver, psycopg.Connection | psycopg.AsyncConnection) and _alone(driver)
    with _begun(connection) if alone else nullcontext():
        return _through(steps, lambda statement, parameters: run(connection, statement, **parameters))


@contextmanager
def _begun(connection: Connection) -> Iterator[None]:
    """A transaction on a connection in autocommit, sync or under an async one; SQLAlchemy itself begins none there."""
    connection.exec_driver_sql("begin", execution_options=_AT_ONCE)
    try:
        yield
    except BaseException:
        with suppress(DBAPIError):  # of a connection that is gone: the first error is the news
            connection.exec_driver_sql("rollback", execution_options=_AT_ONCE)
        raise
    connection.exec_driver_sql("commit", execution_options=_AT_ONCE)


def _through(steps: Steps[T], execute: Callable[[Statement, dict[str, object]], list[Row]]) -> T:
    try:
        request = next(steps)
        while True:
            try:
                rows = execute(*request)
            except Exception as error:
                request = steps.throw(error)
            else:
                request = steps.send(rows)
    except StopIteration as done:
        value: T = done.value
        return value


async def acarried(tx: AsyncTransaction, steps: Steps[T]) -> T:
    """The same in an async transaction."""
    if isinstance(tx, AsyncSession | AsyncConnection):
        return await tx.run_sync(lambda sync: carried(sync, steps))
    async with tx.pipeline() if _in_pipeline(tx) else nullcontext():
        alone = _alone(tx)
    async with tx.transaction() if alone else nullcontext():
        return await _athrough(tx, steps)


async def _athrough(tx: psycopg.AsyncConnection[Any], steps: Steps[T]) -> T:
    try:
        request = next(steps)
        while True:
            statement, parameters = request
            try:
                async with _by_name_too(tx) as cursor:
                    async with tx.pipeline() if _in_pipeline(tx) else nullcontext():
                        await cursor.execute(statement.driver, parameters)
                    rows: list[Row] = [*await cursor.fetchall()] if _has_rows(cursor) else []
            except Exception as error:
                request = steps.throw(error)
            else:
                request = steps.send(rows)
    except StopIteration as done:
        value: T = done.value
        return value


def _by_name_too(connection: psycopg.AsyncConnection[Any]) -> psycopg.AsyncCursor[dict[str, Any]]:
    if issubclass(connection.cursor_factory, psycopg.AsyncRawCursor):
        return psycopg.AsyncCursor(connection, row_factory=dict_row)
    return connection.cursor(row_factory=dict_row)


def _alone(driver: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """In autocommit and outside a transaction: each statement would be committed by itself."""
    return driver.autocommit and driver.info.transaction_status == TransactionStatus.IDLE


def checked(tx: object) -> Transaction:
    """The transaction, or a refusal before anything is written. Raises UnsupportedTransaction."""
    if isinstance(tx, Session | scoped_session | Connection | psycopg.Connection):
        return tx
    raise UnsupportedTransaction(f"{type(tx).__module__}.{type(tx).__qualname__}")


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of a database error, however wrapped; None for a connection that is simply gone."""
    if isinstance(error, DBAPIError):
        return sqlstate(error.orig) if error.orig is not None else None
    return getattr(error, "sqlstate", None)


def achecked(tx: object) -> AsyncTransaction:
    """The async transaction, or a refusal before anything is written. Raises UnsupportedTransaction."""
    if isinstance(tx, AsyncSession | AsyncConnection | psycopg.AsyncConnection):
        return tx
    raise UnsupportedTransaction(f"{type(tx).__module__}.{type(tx).__qualname__}")


SERIALIZATION, DEADLOCK, LOCK_TIMEOUT, CANCELED, READ_ONLY = "40001", "40P01", "55P03", "57014", "25006"

PREPARED_TWICE, PREPARED_ELSEWHERE = "42P05", "26000"

INFRASTRUCTURE = frozenset(
    {SERIALIZATION, DEADLOCK, LOCK_TIMEOUT, CANCELED, READ_ONLY, PREPARED_TWICE, PREPARED_ELSEWHERE}
)
"""Raised by the machine room, not by the handler's logic: tried again, no attempt spent. A read-only server is one
that was just demoted; prepared statements get mixed up by a pooler in transaction mode."""

DATABASE_ERRORS = (DBAPIError, psycopg.Error, PoolExhausted)
"""What a statement of ours may raise, a pool without a free connection included."""

_CONNECTION_TROUBLE = ("08", "57P", "53", "25P03", "25P04", "58")
"""Lost, ended or refused connections, room that ran out, and sessions that the server ended for their time (25P0x)."""


def is_infrastructure(error: BaseException) -> bool:
    """Whether this database error says something about the machine room only."""
    if isinstance(error, PoolExhausted):
        return True
    if not isinstance(error, DBAPIError | psycopg.Error):
        return False
    state = sqlstate(error)
    if state is None:
        return isinstance(error, psycopg.OperationalError) or (
            isinstance(error, DBAPIError) and isinstance(error.orig, psycopg.OperationalError)
        )
    return state in INFRASTRUCTURE or state.startswith(_CONNECTION_TROUBLE)


def said(error: BaseException) -> str:
    """What a database error says, in one line and without the statement's parameters: they are payload."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    first = str(cause).strip().split("\n", 1)[0]
    return clean_text(f"{type(cause).__name__}: {first}" if first else type(cause).__name__, 500)
