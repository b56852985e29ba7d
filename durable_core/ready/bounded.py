"""Calls of foreign code that may take any time, waited for so long and no longer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MOST_ABANDONED = 16


class Bounded:
    """
    Runs calls on threads of their own; at most `MOST_ABANDONED` at a time in a process.

    The hole: a call that is not waited for any longer is not ended, for Python cannot. It goes on beside
    us until its own end; where that never comes, the threads run out, and every further call is overdue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._places = threading.BoundedSemaphore(MOST_ABANDONED)

    def within(self, seconds: float, call: Callable[[], T]) -> T:
        """What the call returns or raises. Raises TimeoutError when that takes longer, or no thread is left."""
        ends = time.monotonic() + seconds
        if seconds <= 0 or not self._places.acquire(timeout=seconds):
            raise TimeoutError(f"{self._name}: no answer in time")
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((call(), None))
            except BaseException as broken:  # whatever it is, it belongs to the one who waits
                answer.put((None, broken))
            finally:
                self._places.release()

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except BaseException:
            self._places.release()
            raise
        try:
            value, broken = answer.get(timeout=max(ends - time.monotonic(), 0.001))
        except queue.Empty:
            raise TimeoutError(f"{self._name}: no answer in time") from None
        if broken is not None:
            raise broken
        return value  # type: ignore[return-value]  # no error means that there is a value
