"""What a COMMIT has come to whose answer was lost: the exception is the same whether it stands or not."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any

import psycopg
from sqlalchemy.exc import DBAPIError

from durable_core.database.connections import Database
from durable_core.database.statements import Statement
from durable_core.database.transactions import run, sqlstate

log = logging.getLogger("durable.commit")


class Resolved(StrEnum):
    """What the row itself says, once the doubtful transaction has ended."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"
    LOST = "lost"
    UNKNOWN = "unknown"


class CommitUnknown(Exception):
    """The answer to a COMMIT did not come: it may stand, it may not, it may still be under way."""


def answer_lost(error: BaseException, driver: psycopg.Connection[Any]) -> bool:
    """Whether an error at COMMIT leaves its outcome open. With a SQLSTATE of its own the server said no."""
    if isinstance(error, DBAPIError | psycopg.Error):
        state = sqlstate(error)
        # 57P01 and kin end the session: also after a local commit that waited for its standby.
        return driver.closed or state is None or state.startswith("57P")
    return driver.closed


def resolve(database: Database, statement: Statement, row_id: str, fence: int, lock_timeout: str) -> Resolved:
    """
    Ask the primary, on a connection of its own, holding the row's lock: that waits for the old backend to end.

    UNKNOWN means that it could not be told now: do nothing, say so, leave it to the lease.
    """
    try:
        with database.transaction() as connection:
            rows = run(connection, statement, id=row_id, lock_timeout=lock_timeout)
    except (DBAPIError, psycopg.Error):
        log.warning("commit_outcome_unknown", extra={"row_id": row_id, "fence": fence}, exc_info=True)
        return Resolved.UNKNOWN
    if not rows:
        return Resolved.LOST
    row = rows[0]
    if row["replica"]:
        return Resolved.UNKNOWN
    if row["fence"] != fence:
        return Resolved.LOST
    return Resolved.COMMITTED if row["settled_fence"] == fence else Resolved.NOT_COMMITTED
