"""What beat drives for operations: hints, polls, reap, expire, prune. None of it issues a call."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection

from durable_core import wakes
from durable_core.claims.each import each, holding
from durable_core.claims.prune import Prune
from durable_core.claims.shares import Counted, Share, allot, as_written
from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, run
from durable_core.errors import NotInstalled
from durable_core.operations.attempt import OUTAGE_SECONDS
from durable_core.states import OperationState

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)
_OLD = Prune(_statements.old, _statements.prune, _statements.prune_journal)

IDLE_SECONDS = 5.0
"""One whose call is paused is looked at again after so long."""
PRECHECK_SECONDS = 30.0
"""So long a queued row is left to the worker that looks at it, however empty its queue is."""
ASK_SECONDS = 60.0
"""So long after a cancel workers are hinted to ask the other side to stop; then it is given up."""
ASK_AGAIN_SECONDS = 10.0
"""Until then they are hinted again after so long, however much lies in the queue."""
ASK_LIMIT = 100
HINTS_PER_QUEUE = 1000
REAP_LIMIT = 500
EXPIRE_LIMIT = 500
PRUNE_LIMIT = 500
PRUNE_SECONDS = 5.0


def due(connection: Connection, cap: int, queues: Collection[str] | None = None) -> Mapping[str, int]:
    """How many queued ones wait for a worker in each queue, or in each of these; of at most `cap` looked at."""
    return _counted(connection, _statements.due, cap, queues)


class Polls:
    """
    The polls that are due, as the contracts count them whose hints lie in the same queues.

    They count beside the queued ones, not with them: else the polls behind many queued ones would have no share.
    """

    def due(self, connection: Connection, cap: int, queues: Collection[str] | None = None) -> Mapping[str, int]:
        """How many are due in each queue, or in each of these; of at most `cap` looked at."""
        return _counted(connection, _statements.polls_due, cap, queues)

    def pick(self, connection: Connection, shares: Mapping[str, Share], cap: int) -> list[wakes.Hint]:
        """None: `poll` hints them, and dispatch counts them."""
        return []


POLLS = Polls()


def _counted(
    connection: Connection, statement: Statement, cap: int, queues: Collection[str] | None
) -> Mapping[str, int]:
    rows = run(connection, statement, limit=cap, queues=None if queues is None else list(queues))
    return {row["queue"]: row["rows"] for row in rows}


def pick(connection: Connection, shares: Mapping[str, Share], cap: int = HINTS_PER_QUEUE) -> list[wakes.Hint]:
    """
    The hints of queued operations that were not hinted lately, as many as each queue has room for; now marked.

    Where a queue is empty, also of those that were. `cap` is how many of each queue are looked at.
    """
    return _picked(connection, OperationState.QUEUED, shares, cap)


def poll(
    database: Database,
    carrier: wakes.Carrier | None = None,
    cap: int = HINTS_PER_QUEUE,
    others: Sequence[Counted] = (),
) -> int:
    """
    Hint the operations whose poll is due, and the canceled ones of which the other side is to hear; how many hints.

    A row has one hint at a time: it is hinted again only after a while, or where its queue is empty, and while its
    queue holds fewer hints than rows wait there, queued ones and those of the `others` too. A canceled one is hinted
    whatever lies there.
    Raises what the broker raises.
    """
    carrier = carrier or wakes.carrier()
    if carrier is None:
        raise NotInstalled("no carrier for hints: call durable_core.celery_binding.install(app) first.")
    with database.autocommit() as connection:
        own = POLLS.due(connection, cap)
        theirs = [due(connection, cap, own), *(other.due(connection, cap, own) for other in others)] if own else []
    depths = carrier.depths(own) if own else {}
    with database.transaction() as connection:
        canceled = run(
            connection, _statements.to_ask, ask_seconds=ASK_SECONDS, again_seconds=ASK_AGAIN_SECONDS, limit=ASK_LIMIT
        )
        hints = [_hint(row) for row in canceled]
        if own:
            hints += _picked(connection, OperationState.RUNNING, allot(depths, own, theirs, cap), cap)
    return carrier.publish(hints) if hints else 0


def _picked(connection: Connection, state: OperationState, shares: Mapping[str, Share], cap: int) -> list[wakes.Hint]:
    rows = run(
        connection, _statements.unhinted, state=state.value, shares=as_written(shares), window=cap,
        precheck_seconds=PRECHECK_SECONDS,
    )  # fmt: skip

    def mark(some: list[Row]) -> list[Row]:
        run(
            connection, _statements.mark, ids=[row["id"] for row in some], idle_seconds=IDLE_SECONDS,
            idle=[row["id"] for row in some if row["idle"]],
            unsure=[row["id"] for row in some if shares[row["queue"]].unsure],
        )  # fmt: skip
        return some

    marked = each(connection, rows, mark, "poll", holding(connection, _statements.hold))
    # Never by the row's own id: its caller's commit has hinted it by that, and it is hinted many times.
    return [_hint(row) for row in marked if not row["idle"]]


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

    moved = each(connection, rows, act, "reap", holding(connection, _statements.hold))
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

        return len(each(connection, overdue, act, "expire", holding(connection, _statements.hold)))


def prune_all(database: Database, *, retention_seconds: float, seconds: float = PRUNE_SECONDS) -> int:
    """Delete ended operations older than the retention, and then their history, batch after batch; how many went."""
    until = time.monotonic() + seconds
    return _OLD.all(database, retention_seconds=retention_seconds, until=until, limit=PRUNE_LIMIT)
