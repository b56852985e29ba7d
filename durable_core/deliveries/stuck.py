"""
The end of a holder that keeps its row locked past all its time: frozen inside its commit, or fetching without reading.

While a row is locked its holder is taken to be alive, however old its lease: reap skips it. So
a process that is stopped inside its transaction would keep the row for ever. Past the deadline and a grace its
session is ended; the next reap finds the row free.
"""

from __future__ import annotations

import logging

from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import DATABASE_ERRORS, Row, Transaction, checked, run, said

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)


def stuck(tx: Transaction, *, grace_seconds: float) -> list[Row]:
    """
    Rows so long past their deadline, each with the session (`pid`) that says it holds it. `commits`: it waits for a
    synchronous standby. A look: it ends nobody.
    """
    return run(checked(tx), _statements.stuck, grace_seconds=grace_seconds)


def cut_off(database: Database, *, grace_seconds: float) -> int:
    """
    End the sessions that hold a row's lock so long past its deadline; how many were ended.

    Only a session that names itself by the row and its fence is ended, and only while it
    holds the row's lock. One that waits for a synchronous standby is left alone: it has
    committed here, and ending it would show what a failover may still take back. What the
    role may not end, or see, stays; a log line names it where it can be seen.
    """
    with database.autocommit() as connection:
        found = stuck(connection, grace_seconds=grace_seconds)
    ended = 0
    for row in found:
        facts = {"row_id": row["id"], "kind": row["kind"], "fence": row["fence"], "backend": row["pid"]}
        if row["commits"]:
            log.error("commit_waits_for_standby", extra=facts)
            continue
        try:
            if row["alone"] or _shares(database, row):
                with database.autocommit() as connection:
                    gone = run(connection, _statements.cut_off, id=row["id"], fence=row["fence"], pid=row["pid"])
                if gone:
                    ended += 1
                    log.error("lock_holder_ended", extra=facts)
        except DATABASE_ERRORS as error:
            log.error("lock_holder_not_ended", extra={**facts, "error": said(error)})
    return ended


def _shares(database: Database, row: Row) -> bool:
    """Whether this session holds the lock together with others, as with a foreign key that points at the row."""
    try:
        with database.autocommit() as connection:
            (answer,) = run(connection, _statements.shares, locker=row["locker"], pid=row["pid"])
    except DATABASE_ERRORS as error:
        log.debug("lock_is_not_shared", extra={"row_id": row["id"], "error": said(error)})
        return False
    return bool(answer["shares"])
