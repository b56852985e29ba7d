"""How one delivery differs from its kind's defaults: the options, checked at the door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

from durable_core.errors import InvalidOption
from durable_core.retry import LONGEST_DELAY_SECONDS

DEFAULT_QUEUE = "durable"
DEFAULT_PRIORITY = 5
DEFAULT_MAX_ATTEMPTS = 5
DEFAULT_MAX_INTERRUPTIONS = 20
LARGEST_BUDGET = 1_000_000
MOST_URGENT, LEAST_URGENT = 0, 9
"""As Celery counts on Redis."""


EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
"""Due times beyond are refused by the database, or unreadable in Python."""


class Options(TypedDict, total=False):
    """How one delivery differs from its kind's defaults."""

    key: str | None
    countdown: float | timedelta
    eta: datetime
    queue: str
    priority: int


_KNOWN = Options.__optional_keys__


@dataclass(frozen=True)
class Placement:
    """Options, checked."""

    key: str | None = None
    delay_seconds: float = 0.0
    eta: datetime | None = None
    queue: str | None = None
    priority: int | None = None

    @staticmethod
    def of(kind: str, options: Mapping[str, Any]) -> Placement:
        """Raises InvalidOption, naming the option."""
        for name in options:
            if name not in _KNOWN:
                raise InvalidOption(kind, name, f"there is no such option; there are {', '.join(sorted(_KNOWN))}")
        key, eta, queue, priority = (options.get(name) for name in ("key", "eta", "queue", "priority"))
        if key is not None and not (isinstance(key, str) and _is_plain(key) and 0 < len(key.encode()) <= 1000):
            raise InvalidOption(kind, "key", "a key is text of 1 to 1,000 bytes without control characters")
        if eta is not None and "countdown" in options:
            raise InvalidOption(kind, "eta", "give countdown or eta, not both")
        eta = None if eta is None else _in_utc(kind, eta)
        if queue is not None and not is_queue(queue):
            raise InvalidOption(kind, "queue", QUEUE_RULE)
        if priority is not None and not is_whole(priority, MOST_URGENT, LEAST_URGENT):
            raise InvalidOption(kind, "priority", "a priority is a whole number from 0 (most urgent) to 9")
        return Placement(key, _seconds(kind, options.get("countdown", 0)), eta, queue, priority)


SWEEPS_QUEUE = "control"
"""Work in the sweeps' own queue would stand in the way of the rescue."""

QUEUE_RULE = (
    f"a queue is named with letters, digits, '_', '-' and '.', at most 100, and {SWEEPS_QUEUE!r} is the sweeps' own"
)


def is_queue(name: object) -> bool:
    """Whether a queue's name is safe in a broker's key and a metric label, and free for work."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 100
        and name.isascii()
        and name != SWEEPS_QUEUE
        and all(c.isalnum() or c in "_-." for c in name)
    )


def is_whole(number: object, least: int, most: int) -> bool:
    """Whether it is an integer in this range; True and False are none."""
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= most


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return text.isprintable()


def _in_utc(kind: str, eta: object) -> datetime:
    """In UTC, for Postgres reads no offset with fractions of a second, and Python may have one without an offset."""
    if not isinstance(eta, datetime) or eta.tzinfo is None or eta.utcoffset() is None:
        raise InvalidOption(kind, "eta", "an eta is a datetime with a time zone")
    if not EARLIEST <= eta < LATEST:
        raise InvalidOption(kind, "eta", "an eta lies between the years 1970 and 9000, in UTC")
    return eta.astimezone(UTC)


def _seconds(kind: str, countdown: object) -> float:
    seconds = countdown.total_seconds() if isinstance(countdown, timedelta) else countdown
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_DELAY_SECONDS:
        raise InvalidOption(kind, "countdown", "a countdown is 0 seconds to one year, or a timedelta")
    return float(seconds)
