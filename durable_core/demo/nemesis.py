"""What goes wrong in the demo, on purpose and one after the other: workers killed and frozen, Redis emptied."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import redis
from sqlalchemy import Engine

from durable_core.database.environment import REDIS_VARIABLE
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, run
from durable_core.demo.processes import Process
from durable_core.errors import DurableError

_statements = beside(__file__)

LOOKS_FOR_A_VICTIM = 15.0
"""Seconds to wait for a row whose handler runs; without one the fault is left out, and not counted."""
FROZEN_AT_MOST = 25.0
REFUSAL_WITHIN = 10.0
COMMITS_WITHIN = 0.05
"""Seconds for the server to finish a commit that was on its way when its owner was frozen."""


@dataclass(frozen=True)
class Victim:
    """A row whose handler runs now, and the child and worker that run it."""

    id: str
    fence: int
    pid: int
    worker: Process


@dataclass
class Nemesis:
    """
    Does its plan, in a random order, and counts what it really did.

    A kill counts when the dead process still held a delivery. A freeze counts when the
    delivery was taken by somebody else meanwhile; what the frozen owner then tried is the
    journal's and the log's to tell.
    """

    engine: Engine
    workers: list[Process]
    start_worker: Callable[[], Process]
    kill_worker: Callable[[Process], None]
    empty_redis: Callable[[], object]
    plan: list[Callable[[Nemesis], bool]]
    rng: random.Random
    tell: Callable[[str], None]
    stop: threading.Event
    kills: int = 0
    freezes: int = 0
    flushes: int = 0
    done: int = 0
    looking: bool = False
    frozen: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        """The whole plan. Whatever happens, nothing stays frozen."""
        try:
            for fault in self.plan:
                if self.stop.wait(self.rng.uniform(0.3, 0.9)):
                    return
                if not fault(self) and not self.stop.is_set():
                    self.tell("no handler was running when one was wanted; that fault is left out")
                self.done += 1
        finally:
            self.looking = False
            for thaw in self.frozen:
                thaw()

    def kill_a_child(self) -> bool:
        """SIGKILL a pool child inside a handler. The worker starts another; the row waits for its lease."""
        for victim in self._victims():
            _kill(victim.pid, signal.SIGKILL)
            if self._until(partial(self._child_is_gone, victim), 5.0) and self._inside(victim):
                self.kills += 1
                self.tell(f"killed child {victim.pid} inside delivery {victim.id}")
                return True
        return False

    def kill_a_worker(self) -> bool:
        """SIGKILL a worker and its whole pool, one of them inside a handler, and start a fresh worker."""
        for victim in self._victims():
            self.workers.remove(victim.worker)
            self.kill_worker(victim.worker)
            inside = self._inside(victim)
            self.workers.append(self.start_worker())
            if inside:
                self.kills += 1
                self.tell(f"killed {victim.worker.name} and its children, one inside delivery {victim.id}")
                return True
        return False

    def freeze(self) -> bool:
        """SIGSTOP an owner until somebody else has its row, then SIGCONT: it comes back with a write that is stale."""
        whole = self.rng.random() < 0.5
        for victim in self._victims():
            with self._frozen(victim, whole):
                time.sleep(COMMITS_WITHIN)
                if not self._inside(victim):
                    continue  # it had just ended, or is in its commit: that one would come back with nothing stale
                self.tell(f"froze {'worker and ' if whole else ''}child {victim.pid} inside delivery {victim.id}")
                self._until(partial(self._is_taken_or_ended, victim), FROZEN_AT_MOST)
                if self._row(victim)["fence"] == victim.fence:
                    self.tell(f"delivery {victim.id} was not taken over while its owner was frozen")
                    continue
            self.freezes += 1
            self._until(partial(self._refused, victim), REFUSAL_WITHIN)
            return True
        return False

    def flush(self) -> bool:
        """FLUSHALL: every hint and every sweep's message is gone."""
        self.empty_redis()
        self.flushes += 1
        self.tell("emptied Redis")
        return True

    # --- looking -----------------------------------------------------------------------------------

    def _victims(self) -> Iterator[Victim]:
        """Rows whose handler runs now in a pool of ours, as they turn up, for a while."""
        self.looking, until = True, time.monotonic() + LOOKS_FOR_A_VICTIM
        try:
            while time.monotonic() < until and not self.stop.is_set():
                pools = {pid: worker for worker in self.workers for pid in worker.children()}
                owned = (row for row in self._ask(_statements.victims) if row["owner_pid"] in pools)
                if (row := next(owned, None)) is None:
                    time.sleep(0.005)
                    continue
                self.looking, found = False, time.monotonic()
                yield Victim(row["id"], row["fence"], row["owner_pid"], pools[row["owner_pid"]])
                # What was done with a victim that slipped away is not time spent looking.
                self.looking, until = True, until + time.monotonic() - found
        finally:
            self.looking = False

    def _inside(self, victim: Victim) -> bool:
        return bool(self._ask(_statements.still_inside, id=victim.id, fence=victim.fence))

    def _child_is_gone(self, victim: Victim) -> bool:
        return victim.pid not in victim.worker.children()

    def _row(self, victim: Victim) -> Row:
        return self._ask(_statements.row, id=victim.id)[0]

    def _is_taken_or_ended(self, victim: Victim) -> bool:
        row = self._row(victim)
        return bool(row["fence"] > victim.fence or row["settled"])

    def _refused(self, victim: Victim) -> bool:
        return bool(self._ask(_statements.refused, id=victim.id, fence=victim.fence)[0]["here"])

    def _ask(self, statement: Statement, **parameters: object) -> list[Row]:
        with self.engine.connect() as connection:
            return run(connection, statement, **parameters)

    def _until(self, seen: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not seen():
            if time.monotonic() > until or self.stop.wait(0.02):
                return False
        return True

    @contextmanager
    def _frozen(self, victim: Victim, whole: bool) -> Iterator[None]:
        def thaw() -> None:
            if whole:
                victim.worker.signal_group(signal.SIGCONT)
            else:
                _kill(victim.pid, signal.SIGCONT)

        self.frozen.append(thaw)
        if whole:
            victim.worker.signal_group(signal.SIGSTOP)
        else:
            _kill(victim.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            thaw()
            self.frozen.remove(thaw)


def planned(kills: int, freezes: int, flushes: int, rng: random.Random) -> list[Callable[[Nemesis], bool]]:
    """The faults in their order: children and whole workers killed in turn."""
    plan: list[Callable[[Nemesis], bool]] = [
        Nemesis.kill_a_worker if number % 2 else Nemesis.kill_a_child for number in range(kills)
    ]
    plan += [Nemesis.freeze] * freezes + [Nemesis.flush] * flushes
    rng.shuffle(plan)
    return plan


class RedisInUse(DurableError):
    """The Redis that was named holds something, and the demo would empty it."""

    reason = "REDIS_IN_USE"

    def __str__(self) -> str:
        return (
            f"the Redis database that {REDIS_VARIABLE} names is not empty, "
            "and the demo empties it: name an empty one, such as …/9, or unset the variable."
        )


MARK = "durable.demo"
"""Stands in a Redis database that was empty when a demo began, so that the next knows what may go."""


class Broker:
    """The Redis of the demo, to be emptied: the whole server if it is our own, one database if it was named."""

    def __init__(self, url: str, *, ours: bool) -> None:
        self._client = redis.Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=5.0)
        self._ours = ours

    def begin(self) -> None:
        """Empty it of what an earlier demo left. Raises RedisInUse where anything else is in it."""
        if not self._ours and self._client.dbsize() and not self._client.exists(MARK):
            raise RedisInUse
        self.empty()

    def empty(self) -> None:
        """FLUSHALL, or FLUSHDB."""
        if self._ours:
            self._client.flushall()
        else:
            with self._client.pipeline() as both:
                both.flushdb()
                both.set(MARK, 1)
                both.execute()

    def end(self) -> None:
        """Leave a database that was named as it was: empty."""
        if not self._ours and self._client.exists(MARK):
            self._client.flushdb()
        self._client.close()


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended by itself a moment ago
