"""
The instants at which a periodic kind is due, from its crontab and its time zone. Knows no database and no clock.

`cronsim` reads the crontab and finds the next match on a calendar without offsets. What a change of the offset does
to that match is decided here, for the answer must not depend on the instant from which one asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from durable_core.errors import DefinitionError

DEFAULT_TIMEZONE = "UTC"
SLOT = "slot"
"""A handler's parameter of this name is given the slot."""

_SECOND, _DAY = timedelta(seconds=1), timedelta(days=1)
_FIRST_WINDOW = timedelta(hours=1)


@dataclass(frozen=True)
class Missed:
    """What becomes of slots that no sweep came to in time: the latest `most` of them run, none older than `seconds`."""

    most: int
    seconds: float


MISSED = {
    "skip": Missed(1, 60.0),
    "once": Missed(1, 7 * 24 * 3600.0),
    "all": Missed(100, 24 * 3600.0),
}
"""By the word that a declaration says. The newest due slot alone is a missed one only from 60 s on: `skip` runs it
before."""
DEFAULT_MISSED = "once"


@dataclass(frozen=True)
class Cadence:
    """A crontab of five fields in a time zone, and what becomes of its missed slots."""

    cron: str
    timezone: str = DEFAULT_TIMEZONE
    missed: str = DEFAULT_MISSED

    @staticmethod
    def of(kind: str, cron: object, timezone: object, missed: object) -> Cadence:
        """Raises DefinitionError, with what is wrong in one sentence."""
        if not isinstance(cron, str) or len(cron.split()) != 5:
            raise DefinitionError(
                f"kind {kind!r}: cron is five fields (minute, hour, day of month, month, day of week), "
                f"such as '0 8 * * 1-5'; got {cron!r}."
            )
        if not isinstance(missed, str) or missed not in MISSED:
            raise DefinitionError(f"kind {kind!r}: missed is one of {', '.join(MISSED)}; got {missed!r}.")
        if not isinstance(timezone, str) or not _is_zone(timezone):
            raise DefinitionError(
                f"kind {kind!r}: timezone {timezone!r} is none that this system knows; use a name such as "
                "'Europe/Prague'."
            )
        cadence = Cadence(" ".join(cron.split()), timezone, missed)
        try:
            cadence.after(datetime(2000, 1, 1, tzinfo=UTC))
        except (CronSimError, NoSlot) as refused:
            why = "it matches no day" if isinstance(refused, NoSlot) else str(refused)
            raise DefinitionError(f"kind {kind!r}: cron {cron!r} cannot be read: {why}.") from None
        return cadence

    @cached_property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @property
    def names_times(self) -> bool:
        """Whether it names times of the day: neither its minutes nor its hours begin with a star."""
        minutes, hours = self.cron.split()[:2]
        return not minutes.startswith("*") and not hours.startswith("*")

    def after(self, instant: datetime) -> datetime:
        """
        The first slot later than this instant, in UTC. Raises NoSlot when none comes within 50 years.

        A crontab that names times follows the wall clock: a time that the clock leaves out is due at the first
        instant after the gap, one that it shows twice at its first occurrence. One with a star runs whenever the
        wall clock matches: not in a gap, and in both halves of an overlap.
        """
        instant = instant.astimezone(UTC)
        return self._named_after(instant) if self.names_times else self._matching_after(instant)

    def at_or_after(self, instant: datetime) -> datetime:
        """The first slot that is no earlier than this instant."""
        slot = self.after(instant - _SECOND)
        while slot < instant:
            slot = self.after(slot)
        return slot

    def latest(self, since: datetime, until: datetime, most: int) -> list[datetime]:
        """The latest slots from `since` to `until`, both included, in their order; at most so many."""
        window = _FIRST_WINDOW
        while True:
            # A window that grows: a year of minutes is not walked through for the sake of its last one.
            start = max(since, until - window)
            found: list[datetime] = []
            slot = self.at_or_after(start)
            while slot <= until:
                found.append(slot)
                slot = self.after(slot)
            if start == since or len(found) >= most:
                return found[-most:]
            window *= 4

    def _named_after(self, instant: datetime) -> datetime:
        wall = instant.astimezone(self.zone).replace(tzinfo=None)
        while True:
            wall = self._match_after(wall)
            slot = self._first_instant(wall)
            # In the second half of an overlap the wall clock shows times whose first occurrence is over; and two
            # times in one gap are due at the same instant.
            if slot > instant:
                return slot

    def _first_instant(self, wall: datetime) -> datetime:
        """When the wall clock first shows this time; or, if it leaves it out, the first instant after the gap."""
        first = wall.replace(tzinfo=self.zone, fold=0).astimezone(UTC)
        if first.astimezone(self.zone).replace(tzinfo=None) == wall:
            return first
        # In a gap fold=1 reads the time by the offset after it, which is an instant before it.
        before = wall.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
        return self._change(before, first)

    def _matching_after(self, instant: datetime) -> datetime:
        """Stretch by stretch of one offset, in which the wall clock is a calendar like any other."""
        while True:
            offset = self._offset(instant)
            slot = (self._match_after((instant + offset).replace(tzinfo=None)) - offset).replace(tzinfo=UTC)
            changed = self._first_change(instant, slot)
            if changed is None:
                return slot
            # A second before the change, by the offset after it: the instant of the change itself may match.
            offset = self._offset(changed)
            slot = (self._match_after((changed - _SECOND + offset).replace(tzinfo=None)) - offset).replace(tzinfo=UTC)
            if slot == changed or self._first_change(changed, slot) is None:
                return slot
            instant = changed

    def _match_after(self, wall: datetime) -> datetime:
        try:
            return next(CronSim(self.cron, wall))
        except StopIteration:
            raise NoSlot(self.cron) from None

    def _offset(self, instant: datetime) -> timedelta:
        offset = instant.astimezone(self.zone).utcoffset()
        assert offset is not None  # a ZoneInfo has one for every instant
        return offset

    def _first_change(self, since: datetime, until: datetime) -> datetime | None:
        """The first instant in (since, until] with another offset than the one before it, looked for day by day."""
        at = since
        while at < until:
            later = min(at + _DAY, until)
            if self._offset(later) != self._offset(at):
                return self._change(at, later)
            at = later
        return None

    def _change(self, before: datetime, after: datetime) -> datetime:
        """The instant, to the second, of the one change of the offset between these two."""
        offset = self._offset(before)
        before, after = before.replace(microsecond=0), after.replace(microsecond=0)
        while after - before > _SECOND:
            middle = before + timedelta(seconds=(after - before) // _SECOND // 2)
            if self._offset(middle) == offset:
                before = middle
            else:
                after = middle
        return after


class NoSlot(Exception):
    """A crontab that matches no day within 50 years."""


def checked_handler(kind: str, handler: Callable[..., object]) -> bool:
    """
    Whether the handler of a periodic kind takes the slot.

    Raises DefinitionError for one that asks for anything else: nobody is there to say what it should be.
    """
    parameters = list(inspect.signature(handler).parameters.values())[1:]
    for parameter in parameters:
        if parameter.name != SLOT and parameter.default is inspect.Parameter.empty:
            raise DefinitionError(
                f"kind {kind!r}: a kind with a cron is called with nothing but its step and, if it takes one, "
                f"slot: datetime; give {parameter.name!r} a default."
            )
    return any(parameter.name == SLOT for parameter in parameters)


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # ZoneInfoNotFoundError is a KeyError; a folder of zones an OSError
        return False
    return True
