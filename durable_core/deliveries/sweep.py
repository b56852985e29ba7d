"""What beat drives for deliveries: dispatch, reap, prune. Bounded, safe to run any number of at once."""

from __future__ import annotations

import json
import logging
import random as random_module
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection

from durable_core import wakes
from durable_core.claims.each import each, holding
from durable_core.claims.prune import Prune, Pruned
from durable_core.claims.shares import Counted, Share, allot
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, run
from durable_core.deliveries.declare import registry
from durable_core.deliveries.ended import tell_dead
from durable_core.errors import NotInstalled
from durable_core.retry import Backoff, Verdict, after_failure, after_interruption, rescue_seconds
from durable_core.states import DeliveryState

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)
_OLD, _DISCARDED = (
    Prune(which, _statements.prune, _statements.prune_journal) for which in (_statements.old, _statements.discarded)
)

HINTS_PER_QUEUE = 1000
"""Most hints that dispatch lets lie in one queue; rows beyond are hinted as these are worked off."""
IDLE_SECONDS = 5.0
"""A due row that nobody may take now, paused or behind another of its line, is looked at again after so long."""
REAP_LIMIT = 500
EXPIRE_LIMIT = 1000
PRUNE_LIMIT = 1000
PRUNE_SECONDS = 10.0
"""One run of the prune sweep begins no further batch after so long: the sweeps of rescue share its worker."""
RETENTION_SECONDS = 14 * 24 * 3600.0
"""Sent, canceled and expired rows are kept so long, and so is their key; design, section 7."""


def due_queues(connection: Connection) -> list[str]:
    """The queues that have a due row."""
    return [row["queue"] for row in run(connection, _statements.due_queues)]


def due(connection: Connection, cap: int, queues: Collection[str] | None = None) -> Mapping[str, int]:
    """How many deliveries are due in each queue, or in each of these, counted up to `cap`."""
    names = due_queues(connection) if queues is None else list(queues)
    return {row["queue"]: row["rows"] for row in run(connection, _statements.due, queues=names, limit=cap)}


def pick(connection: Connection, depths: Mapping[str, int], cap: int = HINTS_PER_QUEUE) -> list[wakes.Hint]:
    """
    The hints that bring each queue to min(due, cap), the longest unhinted rows first; marked as hinted now.

    `depths` says how many hints lie in each queue. A queue never holds more hints than due
    rows. A row that cannot be marked is held back, and the rest are hinted all the same.
    """
    wanted = json.dumps([{"queue": queue, "depth": depth, "cap": cap} for queue, depth in depths.items()])
    rows = run(connection, _statements.unhinted, depths=wanted)

    def mark(some: list[Row]) -> list[Row]:
        idle = [row["id"] for row in some if row["idle"]]
        run(connection, _statements.mark, ids=[row["id"] for row in some], idle=idle, idle_seconds=IDLE_SECONDS)
        return some

    marked = each(connection, rows, mark, "dispatch", holding(connection, _statements.hold, state="pending"))
    return [
        wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], row["attempt"], row["first"])
        for row in marked
        if not row["idle"]
    ]


class Hinting(Counted, Protocol):
    """What another contract has to be hinted in the queues of deliveries, or in its own."""

    def pick(self, connection: Connection, shares: Mapping[str, Share], cap: int) -> list[wakes.Hint]:
        """The hints of those that were not hinted lately, as many as its share allows; now marked."""


def dispatch(
    database: Database,
    carrier: wakes.Carrier | None = None,
    cap: int = HINTS_PER_QUEUE,
    others: Sequence[Hinting] = (),
) -> int:
    """
    Top up the queues with hints of due rows; how many were published.

    This is what makes a lost hint cost one interval and no more: after FLUSHALL the depth
    is 0 and the next run refills the queue. What `others` have to be hinted lies in the same
    queues: each contract has a share of its own in each. Raises what the broker raises.
    """
    carrier = carrier or wakes.carrier()
    if carrier is None:
        raise NotInstalled("no carrier for hints: call durable_core.celery_binding.install(app) first.")
    with database.autocommit() as connection:
        queues = due_queues(connection)
        theirs = [other.due(connection, cap) for other in others]
        shared = [queue for queue in queues if any(queue in counts for counts in theirs)]
        ours = due(connection, cap, shared) if shared else {}
    wanted = {*queues, *(queue for counts in theirs for queue in counts)}
    if not wanted:
        return 0
    depths = carrier.depths(wanted)
    with database.transaction() as connection:
        hints = []
        for other, own in zip(others, theirs, strict=True):
            if own:
                rest = [ours, *(counts for counts in theirs if counts is not own)]
                hints += other.pick(connection, allot(depths, own, rest, cap), cap)
        left = {queue: max(depths[queue] - sum(counts.get(queue, 0) for counts in theirs), 0) for queue in queues}
        hints += pick(connection, left, cap) if left else []
    return carrier.publish(hints)


@dataclass(frozen=True)
class _Cause:
    """Why rows are taken from an owner: the move and the code in the journal, the count, and a sentence for people."""

    move: str
    code: str
    counted: str
    says: str


_FELL_SILENT = _Cause("reap", "CLAIM_EXPIRED", "interruption", "the worker that held this delivery fell silent")
_CHILD_DIED = _Cause("release", "CHILD_LOST", "interruption", "the process that ran this delivery died")
_SHUT_DOWN = _Cause("release", "SHUTDOWN", "shutdown", "the worker was shut down before the handler had ended")


def reap(
    database: Database,
    *,
    limit: int = REAP_LIMIT,
    heartbeat_seconds: float = 8.0,
    random: Callable[[], float] = random_module.random,
) -> int:
    """
    Take back what lost workers hold, oldest lease first, at most `limit` rows; how many moved.

    An attempt whose owner beat up to its deadline is a failure (`TIMEOUT`), one whose owner
    fell silent an interruption (`CLAIM_EXPIRED`, at the end of that budget `WORKER_LOST`).
    The fence stays: a late report on a row that nobody took since still lands.
    """
    with database.transaction() as connection:
        lapsed = run(connection, _statements.lapsed, limit=limit, heartbeat_seconds=heartbeat_seconds)
        return _take_back(database, connection, lapsed, _FELL_SILENT, random)


def holding_pids(database: Database, owner: str) -> set[int]:
    """The process ids of this owner under which a delivery is being carried out."""
    with database.autocommit() as connection:
        return {row["pid"] for row in run(connection, _statements.holding_pids, owner=owner)}


def give_back(
    database: Database,
    owner: str,
    pids: Collection[int],
    *,
    shutdown: bool = False,
    random: Callable[[], float] = random_module.random,
) -> int:
    """
    Take back at once what dead processes of this owner held, as their parent asks; how many rows moved.

    Counted as `reap` counts, and once: whoever comes second finds another state. A row that
    is still locked by the dead process's backend is left for the next call, or to its lease.
    At a `shutdown` of the worker it costs the row nothing and is due at once; only a kind
    that may not be interrupted at all ends dead, for nobody knows what its handler had done.
    """
    with database.transaction() as connection:
        owned = run(connection, _statements.owned, owner=owner, pids=list(pids))
        return _take_back(database, connection, owned, _SHUT_DOWN if shutdown else _CHILD_DIED, random)


def _take_back(
    database: Database, connection: Connection, rows: list[Row], cause: _Cause, random: Callable[[], float]
) -> int:
    """Move rows that are locked in this transaction; how many moved. One that cannot be moved is held back."""

    def move(some: list[Row]) -> list[Row]:
        verdicts = json.dumps([_verdict(row, cause, random) for row in some])
        moved = run(connection, _statements.reap, verdicts=verdicts, move=cause.move)
        for row in moved:
            if row["state"] == DeliveryState.DEAD:
                tell_dead(database, connection, row["kind"], row["id"])
        return moved

    moved = each(connection, rows, move, "reap", holding(connection, _statements.hold, state="processing"))
    for row in moved:
        facts = {"row_id": row["id"], "kind": row["kind"], "outcome": row["state"], "error_code": row["error_code"]}
        log.warning("lease_expired" if cause is _FELL_SILENT else "claim_released", extra=facts)
    return len(moved)


def _verdict(row: Row, cause: _Cause, random: Callable[[], float]) -> dict[str, Any]:
    """Where a row goes whose owner is gone, and what that counts as."""
    kind = registry.find(row["kind"])
    counted, code, message = cause.counted, cause.code, f"{cause.says}; its outcome is unknown"
    if row["timed_out"]:
        backoff = kind.backoff if kind is not None else Backoff()
        verdict = after_failure(row["attempt"], row["max_attempts"], backoff.jittered(row["attempt"], random))
        counted, code, message = "failure", "TIMEOUT", "the attempt was still running at its deadline"
    elif cause is _SHUT_DOWN and row["max_interruptions"] > 0:
        verdict = Verdict(DeliveryState.PENDING)  # a deploy costs nothing: no attempt, no delay, no limit
    else:
        counted, count = "interruption", row["interruptions"] + 1
        verdict = after_interruption(count, row["max_interruptions"], rescue_seconds(count, random))
        code = "WORKER_LOST" if verdict.state is DeliveryState.DEAD else code
    return {
        "id": str(row["id"]), "fence": row["fence"], "state": verdict.state.value,
        "delay_seconds": verdict.delay_seconds, "counted": counted,
        "error_code": code, "error_message": message,
    }  # fmt: skip


def expire(database: Database, *, limit: int = EXPIRE_LIMIT) -> int:
    """
    End waiting deliveries whose time to be useful is over, at most `limit`, the longest over first; how many moved.

    One that is being carried out goes on; if it is to be tried again, it ends here. The next of its line is left to
    dispatch.
    """
    with database.transaction() as connection:
        overdue = run(connection, _statements.overdue, limit=limit)

        def move(some: list[Row]) -> list[Row]:
            return run(connection, _statements.expire, ids=[row["id"] for row in some])

        moved = each(connection, overdue, move, "expire", holding(connection, _statements.hold, state="pending"))
    return len(moved)


def prune(database: Database, *, retention_seconds: float = RETENTION_SECONDS, limit: int = PRUNE_LIMIT) -> int:
    """
    Delete finished rows older than the retention, and then their history; at most `limit`, how many went.

    Sent, canceled and expired rows go, by the instant at which they ended; failed and dead
    ones wait for a person, and go by the instant at which one discarded them. A deleted row's
    key may be used again. A row that the database does not let go, for one of the host's still
    refers to it, is passed over.
    """
    gone = _OLD.batch(database, retention_seconds, limit, Pruned()).gone
    return gone + _DISCARDED.batch(database, retention_seconds, limit - gone, Pruned()).gone


def prune_all(
    database: Database, *, retention_seconds: float = RETENTION_SECONDS, seconds: float = PRUNE_SECONDS
) -> int:
    """
    Prune batch after batch, each committed, until nothing is left or the time is up; how many went.

    A batch that takes longer than the host's statement time-out is tried again in smaller ones.
    """
    until = time.monotonic() + seconds
    return sum(
        which.all(database, retention_seconds=retention_seconds, until=until, limit=PRUNE_LIMIT)
        for which in (_DISCARDED, _OLD)
    )
