"""How often a step is tried within one claim, and how long it waits between two attempts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from durable_core.errors import DefinitionError

FIRST_DELAY, LONGEST_DEFAULT_DELAY = 0.1, 5.0
MOST_ATTEMPTS = 1000
LONGEST_DELAY = 3600.0
"""A case is claimed while it waits: what waits longer is executed later."""


@dataclass(frozen=True)
class Attempts:
    """
    `limit` attempts in all, and the seconds to wait after the k-th that failed.

    `delay` is a number, or a function of k; without it 0.1 s, doubled each time, 5 s at most. Raises DefinitionError.
    """

    limit: int = 3
    delay: float | Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or not 1 <= self.limit <= MOST_ATTEMPTS:
            raise DefinitionError(
                f"Attempts: the limit is a whole number from 1 to {MOST_ATTEMPTS}; got {self.limit!r}."
            )
        if self.delay is not None and not callable(self.delay) and not _is_delay(self.delay):
            raise DefinitionError(
                f"Attempts: a delay is seconds, from 0 to {LONGEST_DELAY:.0f}, or a function of the attempt that "
                f"failed; got {self.delay!r}."
            )
        if callable(self.delay) and self.limit > 1:
            try:
                answer: object = self.delay(1)
            except Exception as raised:
                raise DefinitionError(f"Attempts: the delay raised {type(raised).__name__} for attempt 1.") from raised
            if not _is_delay(answer):
                raise DefinitionError(f"Attempts: the delay after attempt 1 is {answer!r}, no number of seconds.")

    def seconds(self, failed: int) -> float:
        """The wait after this attempt, counted from 1; where the function gives no delay, as if there were none."""
        if callable(self.delay):
            try:
                answer: Any = self.delay(failed)
            except Exception:
                answer = None  # the step's own fault is the one to be told, and its next attempt may succeed
            if _is_delay(answer):
                return float(answer)
        elif self.delay is not None:
            return float(self.delay)
        return min(FIRST_DELAY * 2.0 ** min(failed - 1, 64), LONGEST_DEFAULT_DELAY)

    @classmethod
    def of(cls, given: Attempts | int) -> Attempts:
        """A policy, or a number of attempts, as a policy. Raises DefinitionError."""
        return given if isinstance(given, Attempts) else cls(given)


def _is_delay(seconds: object) -> bool:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return False
    return 0 <= seconds <= LONGEST_DELAY  # so neither NaN nor infinite
