"""Pure policy: how long to wait, and what a failure or a lost worker means. Knows no database and no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from durable_core.errors import DefinitionError
from durable_core.states import DeliveryState

LONGEST_DELAY_SECONDS = 366 * 24 * 3600.0
"""No delay of ours reaches further: a due time must stay readable everywhere (year below 9000)."""


@dataclass(frozen=True)
class Backoff:
    """
    Seconds to wait after the k-th failure: `base * factor ** (k - 1)`, at most `cap`, then `jitter` either way.

    The defaults (30 s, 2 min, 8 min, 32 min, then an hour; 15 %) are the numbers of docs/contracts/deliveries.md.
    """

    base: float = 30.0
    factor: float = 4.0
    cap: float = 3600.0
    jitter: float = 0.15

    def __post_init__(self) -> None:
        if not (0 < self.base <= self.cap <= LONGEST_DELAY_SECONDS and self.factor >= 1 and 0 <= self.jitter < 1):
            raise DefinitionError(
                "Backoff needs 0 < base <= cap <= one year, factor >= 1 and 0 <= jitter < 1; "
                f"got base={self.base}, factor={self.factor}, cap={self.cap}, jitter={self.jitter}."
            )

    def seconds(self, failure: float) -> float:
        """The delay after this failure, before jitter. `failure` is floored and taken as at least 1."""
        exponent = max(int(failure), 1) - 1
        try:
            # As floats: of whole numbers Python would work out every digit.
            return min(self.base * float(self.factor) ** exponent, self.cap)
        except OverflowError:
            return self.cap

    def jittered(self, failure: float, random: Callable[[], float]) -> float:
        """The delay to use: jitter after the cap, so that a crowd at the cap spreads too; never below 0."""
        return spread(self.seconds(failure), self.jitter, random)


def spread(seconds: float, jitter: float, random: Callable[[], float]) -> float:
    """`seconds` moved by up to `jitter` (a share) either way. `random` draws from [0, 1)."""
    return max(seconds * (1 - jitter + 2 * jitter * random()), 0.0)


RESCUE = Backoff(base=30.0, factor=2.0, cap=3600.0)
"""Delay from the second interruption of a row on; the first costs none. Design, sections 3 and 7."""


def rescue_seconds(interruptions: int, random: Callable[[], float]) -> float:
    """
    How long a row waits after it lost its worker for the `interruptions`-th time.

    None the first time, so that work resumes at once after a deploy or a crash; then
    doubling, so that a payload that kills its process cannot keep a worker busy dying.
    """
    return 0.0 if interruptions <= 1 else RESCUE.jittered(interruptions - 1, random)


@dataclass(frozen=True)
class Verdict:
    """Where a row goes after an attempt that did not succeed: its next state, and the wait when that is pending."""

    state: DeliveryState
    delay_seconds: float = 0.0


def after_failure(failure: int, max_attempts: int, delay_seconds: float) -> Verdict:
    """The `failure`-th failure of a row that may fail `max_attempts` times in all: one more go, or dead."""
    if failure >= max_attempts:
        return Verdict(DeliveryState.DEAD)
    return Verdict(DeliveryState.PENDING, min(max(delay_seconds, 0.0), LONGEST_DELAY_SECONDS))


def after_interruption(interruptions: int, max_interruptions: int, delay_seconds: float) -> Verdict:
    """The `interruptions`-th lost worker of a row that may lose `max_interruptions`: one more go, or dead."""
    if interruptions > max_interruptions:
        return Verdict(DeliveryState.DEAD)
    return Verdict(DeliveryState.PENDING, delay_seconds)
