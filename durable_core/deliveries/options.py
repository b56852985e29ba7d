"""How one delivery differs from its kind's defaults: the options, checked at the door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
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


class KeyPolicy(StrEnum):
    """What becomes of a second delivery under a key that is taken."""

    RETURN_FIRST = "return_first"
    """The first is given back; other arguments are refused. For an intention that must happen once."""
    RAISE = "raise"
    """It is refused, whatever its arguments."""
    REPLACE = "replace"
    """While the first waits, it takes the new arguments and keeps its turn. For "bring this up to date"."""
    DEBOUNCE = "debounce"
    """The same, and its due time is counted anew: it runs once it was left alone for the countdown."""


NEWEST_WINS = (KeyPolicy.REPLACE, KeyPolicy.DEBOUNCE)


class Options(TypedDict, total=False):
    """How one delivery differs from its kind's defaults."""

    key: str | None
    key_policy: str
    countdown: float | timedelta
    eta: datetime
    expires: float | timedelta | datetime
    ordering_key: str | None
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
    key_policy: KeyPolicy = KeyPolicy.RETURN_FIRST
    expires_seconds: float | None = None
    expires_at: datetime | None = None
    ordering_key: str | None = None

    @staticmethod
    def of(kind: str, options: Mapping[str, Any]) -> Placement:
        """Raises InvalidOption, naming the option."""
        for name in options:
            if name not in _KNOWN:
                raise InvalidOption(kind, name, f"there is no such option; there are {', '.join(sorted(_KNOWN))}")
        key, eta, queue, priority = (options.get(name) for name in ("key", "eta", "queue", "priority"))
        ordering_key, expires = options.get("ordering_key"), options.get("expires")
        for name, text in (("key", key), ("ordering_key", ordering_key)):
            if text is not None and not (isinstance(text, str) and _is_plain(text) and 0 < len(text.encode()) <= 1000):
                raise InvalidOption(kind, name, "a key is text of 1 to 1,000 bytes without control characters")
        if eta is not None and "countdown" in options:
            raise InvalidOption(kind, "eta", "give countdown or eta, not both")
        eta = None if eta is None else in_utc(kind, "eta", eta)
        policy = _policy(kind, options)
        expires_at = in_utc(kind, "expires", expires) if isinstance(expires, datetime) else None
        expires_seconds = None if expires is None or expires_at else seconds_of(kind, "expires", expires)
        if queue is not None and not is_queue(queue):
            raise InvalidOption(kind, "queue", QUEUE_RULE)
        if priority is not None and not is_whole(priority, MOST_URGENT, LEAST_URGENT):
            raise InvalidOption(kind, "priority", "a priority is a whole number from 0 (most urgent) to 9")
        delay = seconds_of(kind, "countdown", options.get("countdown", 0))
        return Placement(key, delay, eta, queue, priority, policy, expires_seconds, expires_at, ordering_key)


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


def _policy(kind: str, options: Mapping[str, Any]) -> KeyPolicy:
    if "key_policy" not in options:
        return KeyPolicy.RETURN_FIRST
    try:
        policy = KeyPolicy(options["key_policy"])
    except ValueError:
        raise InvalidOption(kind, "key_policy", f"it is one of {', '.join(KeyPolicy)}") from None
    if options.get("key") is None:
        raise InvalidOption(kind, "key_policy", "it says what a key means; give the key as well")
    if policy is KeyPolicy.DEBOUNCE and not options.get("countdown"):
        raise InvalidOption(kind, "key_policy", "a debounce needs the countdown that starts anew with each call")
    return policy


def in_utc(kind: str, option: str, instant: object) -> datetime:
    """In UTC, for Postgres reads no offset with fractions of a second, and Python may have one without an offset."""
    if not isinstance(instant, datetime) or instant.tzinfo is None or instant.utcoffset() is None:
        raise InvalidOption(kind, option, "an instant is a datetime with a time zone")
    if not EARLIEST <= instant < LATEST:
        raise InvalidOption(kind, option, "an instant lies between the years 1970 and 9000, in UTC")
    return instant.astimezone(UTC)


def seconds_of(kind: str, option: str, duration: object) -> float:
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_DELAY_SECONDS:
        raise InvalidOption(kind, option, "it is 0 seconds to one year, or a timedelta")
    return float(seconds)
