"""What beat drives for deliveries: dispatch, reap, prune. Bounded, safe to run any number of at once."""

from __future__ import annotations

import json
import logging
import random as random_module
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable_core import wakes
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, is_infrastructure, run, said
from durable_core.deliveries.declare import registry
from durable_core.errors import NotInstalled
from durable_core.retry import Backoff, Verdict, after_failure, after_interruption, rescue_seconds
from durable_core.states import DeliveryState

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)

HINTS_PER_QUEUE = 1000
"""Most hints that dispatch lets lie in one queue; rows beyond are hinted as these are worked off."""
REAP_LIMIT = 500
PRUNE_LIMIT = 1000
PRUNE_SECONDS = 10.0
"""One run of the prune sweep begins no further batch after so long: the sweeps of rescue share its worker."""
RETENTION_SECONDS = 14 * 24 * 3600.0
"""Sent, canceled and expired rows are kept so long, and so is their key; design, section 7."""


def due_queues(connection: Connection) -> list[str]:
    """The queues that have a due row."""
    return [row["queue"] for row in run(connection, _statements.due_queues)]


def pick(connection: Connection, depths: Mapping[str, int], cap: int = HINTS_PER_QUEUE) -> list[wakes.Hint]:
    """
    The hints that bring each queue to min(due, cap), the longest unhinted rows first; marked as hinted now.

    `depths` says how many hints lie in each queue. A queue never holds more hints than due rows.
    """
    wanted = json.dumps([{"queue": queue, "depth": depth, "cap": cap} for queue, depth in depths.items()])
    return [
        wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], row["attempt"], row["first"])
        for row in run(connection, _statements.hint, depths=wanted)
    ]


def dispatch(database: Database, carrier: wakes.Carrier | None = None, cap: int = HINTS_PER_QUEUE) -> int:
    """
    Top up the queues with hints of due rows; how many were published.

    This is what makes a lost hint cost one interval and no more: after FLUSHALL the depth
    is 0 and the next run refills the queue. Raises what the broker raises.
    """
    carrier = carrier or wakes.carrier()
    if carrier is None:
        raise NotInstalled("no carrier for hints: call durable_core.celery_binding.install(app) first.")
    with database.autocommit() as connection:
        queues = due_queues(connection)
    if not queues:
        return 0
    depths = carrier.depths(queues)
    with database.autocommit() as connection:
        hints = pick(connection, depths, cap)
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
    wanted = {"limit": limit, "heartbeat_seconds": heartbeat_seconds}
    try:
        with database.transaction() as connection:
            return _take_back(connection, run(connection, _statements.lapsed, **wanted), _FELL_SILENT, random)
    except (DBAPIError, psycopg.Error) as error:
        if is_infrastructure(error):
            raise
        log.warning("reap_goes_row_by_row", extra={"error": said(error)})
    # One raising row must not keep the rest from rescue: a savepoint each, and the offender is held back.
    moved = 0
    with database.transaction() as connection:
        for row in run(connection, _statements.lapsed, **wanted):
            try:
                with connection.begin_nested():
                    moved += _take_back(connection, [row], _FELL_SILENT, random)
            except (DBAPIError, psycopg.Error) as error:
                if is_infrastructure(error):
                    raise
                _hold(connection, row, f"reap failed: {said(error)}")
    return moved


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
        return _take_back(connection, owned, _SHUT_DOWN if shutdown else _CHILD_DIED, random)


def _take_back(connection: Connection, rows: list[Row], cause: _Cause, random: Callable[[], float]) -> int:
    """Move rows that are locked in this transaction; how many moved."""
    if not rows:
        return 0
    verdicts = json.dumps([_verdict(row, cause, random) for row in rows])
    moved = run(connection, _statements.reap, verdicts=verdicts, move=cause.move)
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


def _hold(connection: Connection, row: Row, reason: str) -> None:
    """Keep a row where it is and out of every sweep, with the reason, until an operator releases it."""
    facts = {"row_id": str(row["id"]), "error": reason}
    log.error("row_held", extra=facts)
    try:
        with connection.begin_nested():
            run(connection, _statements.hold, id=row["id"], fence=row["fence"], reason=reason)
    except (DBAPIError, psycopg.Error):
        log.error("row_not_held", extra=facts, exc_info=True)


def prune(database: Database, *, retention_seconds: float = RETENTION_SECONDS, limit: int = PRUNE_LIMIT) -> int:
    """
    Delete finished rows older than the retention, and then their history; at most `limit`, how many went.

    Sent, canceled and expired rows go; failed and dead ones wait for a person. A deleted
    row's key may be used again.
    """
    with database.transaction() as connection:
        gone = run(connection, _statements.prune, retention_seconds=retention_seconds, limit=limit)
        if gone:
            run(connection, _statements.prune_journal, ids=[row["id"] for row in gone])
        return len(gone)


def prune_all(
    database: Database, *, retention_seconds: float = RETENTION_SECONDS, seconds: float = PRUNE_SECONDS
) -> int:
    """Prune batch after batch until nothing is left to prune or the time is up; how many went."""
    gone, until = 0, time.monotonic() + seconds
    while True:
        batch = prune(database, retention_seconds=retention_seconds)
        gone += batch
        if batch < PRUNE_LIMIT or time.monotonic() >= until:
            return gone
