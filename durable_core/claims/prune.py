"""What ended long ago goes, with its history: batch by batch, each in a transaction of its own, until time is up."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import datetime

import psycopg
from sqlalchemy.exc import DBAPIError

from durable_core.claims.each import each
from durable_core.database.connections import Database
from durable_core.database.statements import Statement
from durable_core.database.transactions import CANCELED, Row, run, sqlstate

log = logging.getLogger("durable.sweep")


@dataclass(frozen=True)
class Pruned:
    """How far one run has come: how many rows went, when the last one seen had ended, and which had to stay."""

    gone: int = 0
    since: datetime | None = None
    refused: tuple[str, ...] = ()
    all_of_it: bool = False


@dataclass(frozen=True)
class Prune:
    """The statements of one contract: which rows are old, what deletes them, and what their history."""

    old: Statement
    """The oldest first, from `since` on; each with the instant that it went by, as `finished_at`."""
    rows: Statement
    history: Statement

    def all(self, database: Database, *, retention_seconds: float, until: float, limit: int) -> int:
        """
        Batch after batch, until nothing is left or `until`, by `time.monotonic`; how many rows went.

        A batch that takes longer than the host's statement time-out is tried again in smaller ones. A row that the
        database does not let go is passed over.
        """
        so_far = Pruned()
        while not so_far.all_of_it and time.monotonic() < until:
            try:
                so_far = self.batch(database, retention_seconds, limit, so_far)
            except (DBAPIError, psycopg.Error) as error:
                if sqlstate(error) != CANCELED or limit == 1:
                    raise
                limit = max(limit // 10, 1)
        return so_far.gone

    def batch(self, database: Database, retention_seconds: float, limit: int, so_far: Pruned) -> Pruned:
        """One batch more, in a transaction of its own: a run that is killed has done what it did."""
        refused: list[str] = []
        with database.transaction() as connection:
            old = run(
                connection, self.old, retention_seconds=retention_seconds, limit=limit,
                since=so_far.since, without=list(so_far.refused),
            )  # fmt: skip

            def delete(some: list[Row]) -> list[Row]:
                ids = [row["id"] for row in some]
                run(connection, self.rows, ids=ids)
                run(connection, self.history, ids=ids)
                return some

            def passed_over(row: Row, reason: str) -> None:
                log.warning("row_not_pruned", extra={"row_id": row["id"], "error": reason})
                refused.append(row["id"])

            gone = each(connection, old, delete, "prune", passed_over)
        return Pruned(
            gone=so_far.gone + len(gone),
            since=old[-1]["finished_at"] if old else so_far.since,
            refused=(*so_far.refused, *refused),
            all_of_it=len(old) < limit,
        )
