"""What beat drives for operations: hints, polls, reap, expire, prune. None of it issues a call."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from functools import partial

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable_core import wakes
from durable_core.claims.each import each
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, run
from durable_core.errors import NotInstalled
from durable_core.operations.attempt import OUTAGE_SECONDS
from durable_core.states import OperationState

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)

HINT_SECONDS = 10.0
"""A row that is due is hinted again after so long, and after twice as long each time."""
LONGEST_HINT_SECONDS = 600.0
PRECHECK_SECONDS = 30.0
"""So long a queued row is left to the worker that looks at it, however empty its queue is."""
ASK_SECONDS = 60.0
"""So long after a cancel workers are hinted to ask the other side to stop; then it is given up."""
ASK_LIMIT = 100
HINT_LIMIT = 500
DUE_LIMIT = 1000
REAP_LIMIT = 500
EXPIRE_LIMIT = 500
PRUNE_LIMIT = 500
PRUNE_SECONDS = 5.0


def due(connection: Connection) -> Mapping[str, int]:
    """How many operations wait for a worker in each queue, to be issued or polled; of the first thousand."""
    return {row["queue"]: row["rows"] for row in run(connection, _statements.due, limit=DUE_LIMIT)}


def pick(connection: Connection, empty: Collection[str]) -> list[wakes.Hint]:
    """The hints of queued operations that were not hinted lately, and of all whose queue is empty; now marked."""
    return _picked(connection, OperationState.QUEUED, empty)


def poll(database: Database, carrier: wakes.Carrier | None = None) -> int:
    """
    Hint the operations whose poll is due, and the canceled ones of which the other side is to hear; how many hints.

    A row has one hint at a time: it is hinted again only after a while, or where its queue is empty. Raises what the
    broker raises.
    """
    carrier = carrier or wakes.carrier()
    if carrier is None:
        raise NotInstalled("no carrier for hints: call durable_core.celery_binding.install(app) first.")
    with database.autocommit() as connection:
        queues = due(connection)
        canceled = run(connection, _statements.to_ask, ask_seconds=ASK_SECONDS, limit=ASK_LIMIT)
    wanted = {*queues, *(row["queue"] for row in canceled)}
    if not wanted:
        return 0
    empty = [queue for queue, depth in carrier.depths(wanted).items() if not depth]
    with database.transaction() as connection:
        hints = _picked(connection, OperationState.RUNNING, empty)
    # Of a row that ended nothing can be marked: where hints lie already, one of them may be its own.
    hints += [_hint(row) for row in canceled if row["queue"] in empty]
    return carrier.publish(hints) if hints else 0


def _picked(connection: Connection, state: OperationState, empty: Collection[str]) -> list[wakes.Hint]:
    rows = run(
        connection, _statements.unhinted, state=state.value, empty=list(empty), limit=HINT_LIMIT,
        precheck_seconds=PRECHECK_SECONDS, hint_seconds=HINT_SECONDS, longest_seconds=LONGEST_HINT_SECONDS,
    )  # fmt: skip

    def mark(some: list[Row]) -> list[Row]:
        run(
            connection, _statements.mark, ids=[row["id"] for row in some], hint_seconds=HINT_SECONDS,
            longest_seconds=LONGEST_HINT_SECONDS,
        )  # fmt: skip
        return some

    marked = each(connection, rows, mark, "poll", partial(_hold, connection))
    # Never by the row's own id: its caller's commit has hinted it by that, and it is hinted many times.
    return [_hint(row) for row in marked]


def _hint(row: Row) -> wakes.Hint:
    return wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], first=False)


def reap(database: Database, *, heartbeat_seconds: float = 8.0, limit: int = REAP_LIMIT) -> int:
    """
    Take back what lost workers hold, and end what the other side was silent about; at most `limit`, how many moved.

    A call that was under way ends as failed, outcome unknown, or is looked for; a poll is due again. A row whose
    patience is over because our own polls were not made has it renewed once.
    """
    with database.transaction() as connection:
        lapsed = run(connection, _statements.lapsed, limit=limit)
        return _take_back(connection, lapsed, "reap", "CLAIM_EXPIRED")


def holding_pids(database: Database, owner: str) -> set[int]:
    """The process ids of this owner under which an operation is called or polled."""
    with database.autocommit() as connection:
        return {row["pid"] for row in run(connection, _statements.holding_pids, owner=owner)}


def give_back(database: Database, owner: str, pids: Collection[int], *, shutdown: bool = False) -> int:
    """
    Take back at once what dead processes of this owner held, as their parent asks; how many rows moved.

    A call that was under way is an outcome that nobody knows, a deploy's shutdown or not.
    """
    with database.transaction() as connection:
        owned = run(connection, _statements.owned, owner=owner, pids=list(pids))
        return _take_back(connection, owned, "release", "SHUTDOWN" if shutdown else "CHILD_LOST")


def _take_back(connection: Connection, rows: list[Row], move: str, code: str) -> int:
    def act(some: list[Row]) -> list[Row]:
        ids = [row["id"] for row in some]
        return run(connection, _statements.take_back, ids=ids, move=move, code=code, outage_seconds=OUTAGE_SECONDS)

    moved = each(connection, rows, act, "reap", partial(_hold, connection))
    for row in moved:
        facts = {"row_id": row["id"], "kind": row["kind"], "outcome": row["came_to"], "error_code": row["error_code"]}
        log.warning("operation_taken_back", extra=facts)
    return len(moved)


def expire(database: Database, *, limit: int = EXPIRE_LIMIT) -> int:
    """Fail queued operations that nobody issued in time, at most `limit`; how many. Their slots are free then."""
    with database.transaction() as connection:
        overdue = run(connection, _statements.overdue, limit=limit)

        def act(some: list[Row]) -> list[Row]:
            return run(connection, _statements.expire, ids=[row["id"] for row in some])

        return len(each(connection, overdue, act, "expire", partial(_hold, connection)))


def prune_all(database: Database, *, retention_seconds: float, seconds: float = PRUNE_SECONDS) -> int:
    """Delete ended operations older than the retention, and then their history, batch after batch; how many went."""
    until = time.monotonic() + seconds
    gone, refused = 0, list[str]()
    while True:
        with database.transaction() as connection:
            old = run(
                connection, _statements.old, retention_seconds=retention_seconds, limit=PRUNE_LIMIT, without=refused
            )

            def act(some: list[Row], connection: Connection = connection) -> list[Row]:
                ids = [row["id"] for row in some]
                run(connection, _statements.prune, ids=ids)
                run(connection, _statements.prune_journal, ids=ids)
                return some

            def passed_over(row: Row, reason: str) -> None:
                log.warning("row_not_pruned", extra={"row_id": row["id"], "error": reason})
                refused.append(row["id"])

            gone += len(each(connection, old, act, "prune", passed_over))
        if len(old) < PRUNE_LIMIT or time.monotonic() >= until:
            return gone


def _hold(connection: Connection, row: Row, reason: str) -> None:
    """Keep a row where it is and out of every sweep, with the reason, until an operator releases it."""
    facts = {"row_id": row["id"], "error": reason}
    log.error("row_held", extra=facts)
    try:
        with connection.begin_nested():
            run(connection, _statements.hold, id=row["id"], fence=row["fence"], reason=reason)
    except (DBAPIError, psycopg.Error):
        log.error("row_not_held", extra=facts, exc_info=True)
