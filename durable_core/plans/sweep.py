"""What beat drives for plans: hints of steps that wait, the end of those that were left alone, expiry, prune."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

from sqlalchemy import Connection

from durable_core import wakes
from durable_core.claims.each import each, holding
from durable_core.claims.prune import Prune
from durable_core.claims.shares import Share, as_written
from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, run
from durable_core.plans.heal import HEAL
from durable_core.plans.heal import statements as _healing

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)
_OLD = Prune(_statements.old, _statements.prune, _statements.prune_journal)

IDLE_SECONDS = 5.0
"""A step that nobody may take now, for a pause or the clock, is looked at again after so long."""
HINTS_PER_QUEUE = 1000
HEAL_LIMIT = 500
PRUNE_LIMIT = 500
PRUNE_SECONDS = 10.0


def due(connection: Connection, cap: int, queues: Collection[str] | None = None) -> Mapping[str, int]:
    """How many plans wait for a worker in each queue, or in each of these; of at most `cap` looked at."""
    rows = run(connection, _statements.due, limit=cap, queues=None if queues is None else list(queues))
    return {row["queue"]: row["waiting"] for row in rows}


def pick(connection: Connection, shares: Mapping[str, Share], cap: int = HINTS_PER_QUEUE) -> list[wakes.Hint]:
    """
    The hints of steps that wait and were not hinted lately, as many as each queue has room for; marked as hinted now.

    Where a queue is empty, also of those that were. Each hint of a step that nobody takes doubles the time to the next,
    up to ten minutes; a claim begins anew. `cap` is how many of each queue are looked at.
    """
    rows = run(connection, _statements.unhinted, shares=as_written(shares), window=cap)

    def mark(some: list[Row]) -> list[Row]:
        run(
            connection, _statements.mark, ids=[row["id"] for row in some], idle_seconds=IDLE_SECONDS,
            idle=[row["id"] for row in some if row["idle"]],
            unsure=[row["id"] for row in some if shares[row["queue"]].unsure],
        )  # fmt: skip
        return some

    marked = each(connection, rows, mark, "dispatch", holding(connection, _healing.hold))
    return [
        wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], row["step"], first=False)
        for row in marked
        if not row["idle"]
    ]


def reap(database: Database, *, heartbeat_seconds: float = 8.0, limit: int = HEAL_LIMIT) -> int:
    """
    End the plans that were left alone: a step's owner fell silent, or nobody went on in time; how many moved.

    Failed, interrupted; or executed, where all receipts are there. No step runs again. A plan whose row is locked is
    alive, however old its lease.
    """
    with database.transaction() as connection:
        stale = run(connection, _healing.stale, limit=limit)
        return len(_healed(connection, stale, HEAL))


def expire(database: Database, *, limit: int = HEAL_LIMIT) -> int:
    """Expire the plans that nobody approved in time, and those that were approved and did not start; how many moved."""
    with database.transaction() as connection:
        overdue = run(connection, _healing.overdue, limit=limit)
        return len(_moved(connection, overdue, _healing.expire, "expire"))


def holding_pids(database: Database, owner: str) -> set[int]:
    """The process ids of this owner that are inside a step."""
    with database.autocommit() as connection:
        return {row["pid"] for row in run(connection, _statements.holding_pids, owner=owner)}


def give_back(database: Database, owner: str, pids: Collection[int], *, shutdown: bool = False) -> int:
    """
    End at once what dead processes of this owner held, as their parent asks; how many rows moved.

    A plan whose step was killed has failed, interrupted. At a `shutdown` of the worker it goes on: the row is free, so
    the step's transaction is rolled back, and another worker runs that step from the start. A row that is still locked
    by the dead process's backend is left for the next call, or to its lease.
    """
    with database.transaction() as connection:
        owned = run(connection, _statements.owned, owner=owner, pids=list(pids))
        if shutdown:
            return len(_moved(connection, owned, _statements.give_back, "reap"))
        return len(_healed(connection, owned, "release"))


def prune_all(database: Database, *, retention_seconds: float, seconds: float = PRUNE_SECONDS) -> int:
    """Delete plans that ended longer ago than the retention, with receipts and history; how many went."""
    until = time.monotonic() + seconds
    return _OLD.all(database, retention_seconds=retention_seconds, until=until, limit=PRUNE_LIMIT)


def _healed(connection: Connection, rows: list[Row], move: str) -> list[Row]:
    return _moved(connection, rows, _healing.heal, "reap", move=move)


def _moved(connection: Connection, rows: list[Row], how: Statement, sweep: str, **more: object) -> list[Row]:
    """Move rows that are locked in this transaction. One that cannot be moved is held back."""

    def move(some: list[Row]) -> list[Row]:
        return run(connection, how, ids=[row["id"] for row in some], **more)

    moved = each(connection, rows, move, sweep, holding(connection, _healing.hold))
    for row in moved:
        log.warning("plan_left_alone", extra={"row_id": row["id"], "sweep": sweep})
    return moved
