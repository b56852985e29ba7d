"""What a process needs to attempt deliveries, and what it says came of one."""

from __future__ import annotations

import random as random_module
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from durable_core.claims.claim import Holder
from durable_core.claims.heartbeat import Heartbeat
from durable_core.database.connections import Database


class Outcome(StrEnum):
    """What became of one hint."""

    SENT = "sent"
    DONE = "done"
    NOTHING_TO_DO = "nothing to do"
    RETRY = "will be tried again"
    FAILED = "failed"
    DEAD = "dead"
    CLAIM_LOST = "claim lost"
    INTERRUPTED = "interrupted"
    SNOOZED = "snoozed"
    WAITING = "waits for a handler that takes its arguments"
    ISSUED = "issued"
    POLLED = "still running"
    SUCCEEDED = "succeeded"
    CANCELED = "asked to cancel"
    PUT_OFF = "nothing came of it, will be asked again"
    UNAVAILABLE = "no answer from the database, will be hinted again"
    UNKNOWN = "unknown, left to its lease"


@dataclass(frozen=True)
class Attempted:
    """The outcome of one hint, for whoever carried it."""

    outcome: Outcome
    id: str
    kind: str
    attempt: int = 0
    max_attempts: int = 0
    error_code: str | None = None
    error_message: str | None = None
    due_at: datetime | None = None


@dataclass
class Worker:
    """
    One process as a worker.

    `time_limits` are the exceptions that mean "out of time"; `random` draws from [0, 1). `told_to_end` is true once
    a parent ends this process and will give back what it holds: then an attempt that breaks off says nothing itself.
    """

    database: Database
    holder: Holder = field(default_factory=Holder)
    time_limits: tuple[type[BaseException], ...] = ()
    random: Callable[[], float] = random_module.random
    told_to_end: Callable[[], bool] = lambda: False
    heartbeat: Heartbeat = field(init=False)
    quiet_until: float = field(default=0.0, init=False)
    """`time.monotonic()` before which this process says nothing more of hints without a row."""

    def __post_init__(self) -> None:
        # Of its own transactions none waits for an answer without end.
        self.database = self.database.bounded(self.holder.answer_seconds)
        self.heartbeat = Heartbeat(self.database, self.holder)

    def pause(self, again: int) -> float:
        """Seconds before the machine room is asked once more: a little longer each time, and never in step."""
        return 0.05 * again * (1 + self.random())
