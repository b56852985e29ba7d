"""
What a pooler in transaction mode, such as PgBouncer, may stand between: everything but prepared statements.

We set nothing for a session, hold no session's lock and listen to nothing, so any connection will do for any
transaction. psycopg alone prepares what it runs often, under names that such a pooler mixes up.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from durable_core.database.connections import Database, raw
from durable_core.errors import UnsafePooler

_PROBE = "select 1 as durable_asks_the_pooler"


def refuse_unsafe_pooler(database: Database) -> None:
    """
    Ask, once at a start, whether prepared statements would get mixed up. Raises UnsafePooler when they surely would.

    A pooler gives each client a process number of its own; one in transaction mode lends the
    same server session to two clients that are both connected. Where it is busy the two may
    meet different sessions: then nothing is said, and the statements fail when they run.
    """
    with database.engine.connect() as connection:
        driver = raw(connection)
        if driver.prepare_threshold is None or _session(driver) == driver.info.backend_pid:
            return
    one, other = database.detached(), database.detached()
    try:
        if _session(raw(one)) == _session(raw(other)) and _names_go_through(raw(one)):
            raise UnsafePooler
    finally:
        one.close()
        other.close()


def behind_pooler(database: Database) -> bool:
    """Whether something stands between that gives its clients process numbers of its own, as PgBouncer does."""
    with database.engine.connect() as connection:
        driver = raw(connection)
        return _session(driver) != driver.info.backend_pid


def _session(driver: psycopg.Connection[Any]) -> int:
    """The process of the server session that happens to run this."""
    with driver.transaction():
        return int(driver.execute("select pg_backend_pid()", prepare=False).fetchall()[0][0])


def _names_go_through(driver: psycopg.Connection[Any]) -> bool:
    """Whether the server knows a prepared statement by the driver's own name; a pooler that can tell them apart
    gives it another."""
    with driver.transaction():
        try:
            with driver.transaction():
                driver.execute(_PROBE, prepare=True)
        except (psycopg.errors.DuplicatePreparedStatement, psycopg.errors.InvalidSqlStatementName):
            return True
        asked = driver.execute(
            "select name from pg_prepared_statements where statement = %s", [_PROBE], prepare=False
        ).fetchall()
        through = [name for (name,) in asked if name.startswith("_pg3_")]
        for name in through:
            driver.execute(sql.SQL("deallocate {}").format(sql.Identifier(name)), prepare=False)
        return bool(through)
