"""What a COMMIT has come to whose answer was lost: the exception is the same whether it stands or not."""

from __future__ import annotations

import logging
from enum import StrEnum

import psycopg
from sqlalchemy.exc import DBAPIError

from durable_core.database.connections import Database
from durable_core.database.statements import Statement
from durable_core.database.transactions import DATABASE_ERRORS, Row, run, said, sqlstate

log = logging.getLogger("durable.commit")


class Resolved(StrEnum):
    """What the row itself says, once the doubtful transaction has ended."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"
    LOST = "lost"
    NOT_ASKED = "not asked"
    UNKNOWN = "unknown"


class CommitUnknown(Exception):
    """The answer to a COMMIT did not come: it may stand, it may not, it may still be under way."""


def answer_lost(error: BaseException) -> bool:
    """Whether a database error leaves open what became of a COMMIT. With a SQLSTATE of its own the server said no."""
    if not isinstance(error, DBAPIError | psycopg.Error):
        return False
    state = sqlstate(error)
    # 57P01 and kin end the session: also after a local commit that waited for its standby.
    return state is None or state.startswith("57P")


def resolve(
    database: Database, statement: Statement, row_id: str, fence: int, lock_wait: str
) -> tuple[Resolved, Row | None]:
    """
    Ask the row itself, holding its lock: that waits for the doubtful backend to end. With the row as it is now.

    The lock is a write, so the answer counts only once a COMMIT of our own was acknowledged,
    by a synchronous standby too where there is one.
    UNKNOWN means that it could not be told now, a standby that cannot lock included: do
    nothing, say so, leave it to the lease. NOT_ASKED: no connection was to be had; a
    statement that guards itself may be tried again.
    """
    try:
        with database.transaction() as connection:
            rows = run(connection, statement, id=row_id, lock_timeout=lock_wait)
    except DATABASE_ERRORS as error:
        log.warning("commit_outcome_unknown", extra={"row_id": row_id, "fence": fence, "error": said(error)})
        # Of a call that failed SQLAlchemy knows no statement.
        unasked = isinstance(error, DBAPIError) and error.statement is None
        return Resolved.NOT_ASKED if unasked else Resolved.UNKNOWN, None
    if not rows or rows[0]["fence"] != fence:
        return Resolved.LOST, rows[0] if rows else None
    return Resolved.COMMITTED if rows[0]["settled_fence"] == fence else Resolved.NOT_COMMITTED, rows[0]
