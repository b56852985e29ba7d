"""Time as the lifecycle knows it: instants for guards, sleeps between attempts, and the beat of a heartbeat."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

log = logging.getLogger("durable.heartbeat")


class Clock(Protocol):
    """Injected. Leases are judged by the store's own clock, never by this one."""

    def now(self) -> datetime:
        """The instant that guards are evaluated at."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def every(self, seconds: float, act: Callable[[], object]) -> Callable[[], None]:
        """Act so often, on a thread of the clock's own; what this gives ends it. What the act raises is swallowed."""
        ...


class SystemClock:
    """Real time. One daemon thread per process beats for all executions in it, begun with the first."""

    def __init__(self) -> None:
        self._beats = _Beats()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def every(self, seconds: float, act: Callable[[], object]) -> Callable[[], None]:
        if self._beats.pid != os.getpid():  # a forked child has none of its parent's threads
            self._beats = _Beats()
        return self._beats.every(seconds, act)


class _Beats:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, float, Callable[[], object]]] = []
        self._ended: set[int] = set()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def every(self, seconds: float, act: Callable[[], object]) -> Callable[[], None]:
        with self._changed:
            number = next(self._numbers)
            heapq.heappush(self._due, (time.monotonic() + seconds, number, seconds, act))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="durable-case-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

        def end() -> None:
            with self._changed:
                self._ended.add(number)
                self._changed.notify()

        return end

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._due and self._due[0][1] in self._ended:
                    self._ended.discard(heapq.heappop(self._due)[1])
                if not self._due:
                    self._ended.clear()
                    self._changed.wait()
                    continue
                at, number, seconds, act = self._due[0]
                wait = at - time.monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
                heapq.heapreplace(self._due, (max(at + seconds, time.monotonic()), number, seconds, act))
            beat(act)


def beat(act: Callable[[], object]) -> None:
    """One beat. It proves that the process lives; that it fails is no business of the handler."""
    try:
        act()
    except Exception as error:
        log.warning("heartbeat_failed", extra={"error": type(error).__name__})


class VirtualClock:
    """
    Time that stands still until it is moved: for tests. Sleeping moves it, and beats come due as it goes.

    `slept` keeps the sleeps. Of one thread at a time.
    """

    def __init__(self, now: datetime | None = None) -> None:
        self._now = now or datetime(2030, 1, 1, tzinfo=UTC)
        self._beats: dict[int, tuple[datetime, timedelta, Callable[[], object]]] = {}
        self._numbers = itertools.count()
        self.slept: list[float] = []

    def now(self) -> datetime:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move it; each beat that comes due meanwhile is at its own instant."""
        until = self._now + timedelta(seconds=seconds)
        while due := [(at, number) for number, (at, _, _) in self._beats.items() if at <= until]:
            at, number = min(due)
            _, every, act = self._beats[number]
            self._beats[number] = (at + every, every, act)
            self._to(at)
            beat(act)
        self._to(until)

    def _to(self, instant: datetime) -> None:
        self._now = instant

    def every(self, seconds: float, act: Callable[[], object]) -> Callable[[], None]:
        number, every = next(self._numbers), timedelta(seconds=seconds)
        self._beats[number] = (self._now + every, every, act)

        def end() -> None:
            self._beats.pop(number, None)

        return end
