"""What beat drives for deliveries: dispatch, reap, prune. Bounded, safe to run any number of at once."""

from __future__ import annotations

import json
import logging
import random as random_module
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable_core import wakes
from durable_core.arguments import clean_text
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, is_infrastructure, run
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
    decide = _Decision(heartbeat_seconds, random)
    try:
        with database.transaction() as connection:
            lapsed = decide.lapsed(connection, limit)
            return decide.reap(connection, lapsed) if lapsed else 0
    except (DBAPIError, psycopg.Error) as error:
        if is_infrastructure(error):
            raise
        log.warning("reap_goes_row_by_row", exc_info=True)
        return _reap_one_by_one(database, decide, limit)


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
    heartbeat_seconds: float = 8.0,
    random: Callable[[], float] = random_module.random,
) -> int:
    """
    Take back at once what dead processes of this owner held, as their parent asks; how many rows moved.

    Counted as `reap` counts, and once: whoever comes second finds another state. A row that
    is still locked by the dead process's backend is left for the next call, or to its lease.
    At a `shutdown` of the worker it costs the row neither an interruption nor a delay.
    """
    decide = _Decision(
        heartbeat_seconds,
        random,
        move="release",
        code="CHILD_LOST",
        says="the process that ran this delivery died",
        shutdown=shutdown,
    )
    with database.transaction() as connection:
        owned = run(connection, _statements.owned, owner=owner, pids=list(pids))
        return decide.reap(connection, owned) if owned else 0


def _reap_one_by_one(database: Database, decide: _Decision, limit: int) -> int:
    """One raising row must not keep the rest from rescue: a savepoint each, and the offender is held back."""
    moved = 0
    with database.transaction() as connection:
        for row in decide.lapsed(connection, limit):
            try:
                with connection.begin_nested():
                    moved += decide.reap(connection, [row])
            except (DBAPIError, psycopg.Error) as error:
                if is_infrastructure(error):
                    raise
                hold(connection, str(row["id"]), f"reap failed: {error}")
    return moved


def hold(connection: Connection, row_id: str, reason: str) -> None:
    """Keep a row where it is and out of every sweep, with the reason, until an operator releases it."""
    log.error("row_held", extra={"row_id": row_id, "error": clean_text(reason, 500)})
    try:
        with connection.begin_nested():
            run(connection, _statements.hold, id=row_id, reason=clean_text(reason, 500))
    except (DBAPIError, psycopg.Error):
        log.error("row_not_held", extra={"row_id": row_id}, exc_info=True)


class _Decision:
    """What a lapsed lease means for each row."""

    def __init__(
        self,
        heartbeat_seconds: float,
        random: Callable[[], float],
        *,
        move: str = "reap",
        code: str = "CLAIM_EXPIRED",
        says: str = "the worker that held this delivery fell silent",
        shutdown: bool = False,
    ) -> None:
        self.heartbeat_seconds, self.random, self.shutdown = heartbeat_seconds, random, shutdown
        self.move, self.code, self.says = move, code, says

    def lapsed(self, connection: Connection, limit: int) -> list[Row]:
        return run(connection, _statements.lapsed, limit=limit, heartbeat_seconds=self.heartbeat_seconds)

    def reap(self, connection: Connection, lapsed: list[Row]) -> int:
        verdicts = json.dumps([self._verdict(row) for row in lapsed])
        reaped = run(connection, _statements.reap, verdicts=verdicts, move=self.move)
        for row in reaped:
            log.warning(
                "lease_expired" if self.move == "reap" else "claim_released",
                extra={
                    "row_id": row["id"],
                    "kind": row["kind"],
                    "outcome": row["state"],
                    "error_code": row["error_code"],
                },
            )
        return len(reaped)

    def _verdict(self, row: Row) -> dict[str, Any]:
        kind = registry.find(row["kind"])
        if row["timed_out"]:
            backoff = kind.backoff if kind is not None else Backoff()
            verdict = after_failure(row["attempt"], row["max_attempts"], backoff.jittered(row["attempt"], self.random))
            counted, code, message = "failure", "TIMEOUT", "the attempt was still running at its deadline"
        elif self.shutdown:
            # A deploy costs nothing: no attempt, no delay, no limit.
            verdict, counted, code = Verdict(DeliveryState.PENDING), "shutdown", "SHUTDOWN"
            message = "the worker was shut down before the handler had ended; its outcome is unknown"
        else:
            counted, interruptions = "interruption", row["interruptions"] + 1
            verdict = after_interruption(
                interruptions, row["max_interruptions"], rescue_seconds(interruptions, self.random)
            )
            code = self.code if verdict.state is DeliveryState.PENDING else "WORKER_LOST"
            message = f"{self.says}; its outcome is unknown"
        return {
            "id": str(row["id"]), "fence": row["fence"], "state": verdict.state.value,
            "delay_seconds": verdict.delay_seconds, "counted": counted,
            "error_code": code, "error_message": message,
        }  # fmt: skip


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
