"""What a caller may hand us as `tx`, and how a statement runs in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import psycopg
from psycopg.rows import dict_row
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from durable_core.database.statements import Statement
from durable_core.errors import UnsupportedTransaction

Transaction: TypeAlias = "Session | scoped_session[Session] | Connection | psycopg.Connection[Any]"
"""The caller's own open transaction. We run statements in it; we never commit it and never roll it back."""

Row: TypeAlias = Mapping[str, Any]


def run(tx: Transaction, statement: Statement, /, **parameters: object) -> list[Row]:
    """Run one named statement in the caller's transaction; its rows, as mappings."""
    if isinstance(tx, psycopg.Connection):
        return run_raw(tx, statement, parameters)
    result = connection_of(tx).execute(statement.clause, parameters)
    rows: list[Row] = [dict(row) for row in result.mappings()] if result.returns_rows else []
    return rows


def run_raw(connection: psycopg.Connection[Any], statement: Statement, parameters: Mapping[str, object]) -> list[Row]:
    """The same on a bare psycopg connection."""
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(statement.driver, parameters)
        rows: list[Row] = [*cursor.fetchall()] if cursor.description else []
        return rows


def connection_of(tx: Session | scoped_session[Session] | Connection) -> Connection:
    """The SQLAlchemy connection on which this transaction runs; a Session takes part in its own."""
    if isinstance(tx, Connection):
        return tx
    if isinstance(tx, Session | scoped_session):
        return tx.connection()
    raise UnsupportedTransaction(type(tx).__name__)


def savepoint(tx: Transaction) -> AbstractContextManager[object]:
    """A SAVEPOINT in the caller's transaction: released on success, rolled back to when an exception leaves it."""
    if isinstance(tx, psycopg.Connection):
        return tx.transaction()
    return connection_of(tx).begin_nested()


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


SERIALIZATION, DEADLOCK, LOCK_TIMEOUT, CANCELED = "40001", "40P01", "55P03", "57014"

INFRASTRUCTURE = frozenset({SERIALIZATION, DEADLOCK, LOCK_TIMEOUT, CANCELED})
"""Raised by the machine room, not by the handler's logic: tried again, no attempt spent."""

_CONNECTION_TROUBLE = ("08", "57P", "53", "25P03", "58")


def is_infrastructure(error: BaseException) -> bool:
    """Whether this database error says something about the machine room only."""
    if not isinstance(error, DBAPIError | psycopg.Error):
        return False
    state = sqlstate(error)
    if state is None:
        return isinstance(error, psycopg.OperationalError) or (
            isinstance(error, DBAPIError) and isinstance(error.orig, psycopg.OperationalError)
        )
    return state in INFRASTRUCTURE or state.startswith(_CONNECTION_TROUBLE)
