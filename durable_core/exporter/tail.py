"""
What has happened: rows that ended, journal lines and new rows are read once each, in their order, a batch at a time.

The counters begin at zero with the process. They count a little behind the clock, so that whoever wrote a row earlier
has committed it; what is committed later still is in no counter. On a replica they count as far behind what has reached
it, however late that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from durable_core.database.statements import beside
from durable_core.database.transactions import Row, run
from durable_core.exporter.metrics import BY_NAME, METRICS, Series, Type

_statements = beside(__file__)

LAG_SECONDS = 30.0
"""The end of an attempt is committed within seconds, or given up."""

ENQUEUE_LAG_SECONDS = 60.0
"""How long a caller may keep the transaction open in which it enqueued, and be counted."""

BATCH = 10_000
"""Rows that a look reads at most: what is left is read by the looks after it."""

MOST_RUNNING = 10_000
"""Running operations whose polls are counted as they are made; those beyond are counted when they end."""

LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
LAST_SEQ = 2**63 - 1

_TIMES = {
    "wait": ("durable_queue_wait_seconds", "queue"),
    "duration": ("durable_attempt_duration_seconds", "kind"),
    "latency": ("durable_delivery_latency_seconds", "kind"),
}


def counters() -> dict[str, Series]:
    """Every counter and histogram, with nothing counted."""
    return {m.name: Series(m) for m in METRICS if m.type in (Type.COUNTER, Type.HISTOGRAM)}


@dataclass
class Place:
    """Where a look stopped: everything up to here has been counted."""

    at: datetime
    id: Any


Polls = tuple[int, int]
"""How many were answered, and how many were not."""


@dataclass
class Tails:
    """What each look has counted, and how far. The first one of each only says where to begin."""

    series: dict[str, Series] = field(default_factory=counters)
    batch: int = BATCH
    places: dict[str, Place] = field(default_factory=dict)
    polled: dict[str, Polls] | None = None
    """How often each operation had been polled when it was last looked at; None before the first look."""

    def finished(self, connection: Connection) -> None:
        """Count the rows that were sent, canceled or expired since."""
        place = self._place("finished", connection, LAST_ID)
        if place is None:
            return
        bounds = {
            f"{name}_bounds": list(BY_NAME[metric].buckets) for name, (metric, _) in _TIMES.items()
        }  # fmt: skip
        rows = run(
            connection, _statements.finished,
            at=place.at, id=place.id, limit=self.batch, lag_seconds=LAG_SECONDS, **bounds,
        )  # fmt: skip
        self._told("finished", rows, self._one_finished, LAST_ID)

    def _one_finished(self, row: Row) -> None:
        queue, kind, what = row["queue"], row["kind"], row["what"]
        if what in _TIMES:
            metric, label = _TIMES[what]
            self.series[metric].observe((row[label],), row["bucket"], row["rows"], row["seconds"])
        elif what == "sent":
            self.series["durable_attempts_total"].add((queue, kind, "committed"), row["rows"])
        elif what == "expired":
            self.series["durable_expired_total"].add((queue, kind), row["rows"])

    def journal(self, connection: Connection) -> None:
        """Count the attempts that failed, were lost or were cancelled since."""
        place = self._place("journal", connection, LAST_SEQ)
        if place is None:
            return
        rows = run(connection, _statements.journal, at=place.at, id=place.id, limit=self.batch, lag_seconds=LAG_SECONDS)
        self._told("journal", rows, self._one_line, LAST_SEQ)

    def _one_line(self, row: Row) -> None:
        self.series["durable_attempts_total"].add((row["queue"], row["kind"], row["what"]), row["rows"])
        if row["lost"]:
            self.series["durable_lease_expirations_total"].add((row["queue"],), row["lost"])

    def steps(self, connection: Connection) -> None:
        """Count the steps of the plans that ended since."""
        place = self._place("steps", connection, LAST_ID)
        if place is None:
            return
        rows = run(connection, _statements.steps, at=place.at, id=place.id, limit=self.batch, lag_seconds=LAG_SECONDS)
        self._told("steps", rows, self._one_step, LAST_ID)

    def _one_step(self, row: Row) -> None:
        self.series["durable_plan_steps_total"].add((row["kind"], row["what"]), row["rows"])

    def polls(self, connection: Connection) -> None:
        """Count the polls of the operations that run, made since. What was made before the first look is left out."""
        rows = run(connection, _statements.polls, limit=MOST_RUNNING)
        begins, self.polled = self.polled is None, self.polled or {}
        for row in rows:
            if begins:
                self.polled[row["id"]] = (row["answered"], row["unanswered"])
            else:
                self._polled(row)
        while len(self.polled) > 2 * MOST_RUNNING:  # of rows that somebody deleted
            del self.polled[next(iter(self.polled))]

    def _polled(self, row: Row) -> None:
        assert self.polled is not None
        now = (row["answered"], row["unanswered"])
        before = self.polled.get(row["id"], (0, 0))
        self.polled[row["id"]] = now
        for outcome, more in zip(("answered", "unanswered"), map(int.__sub__, now, before), strict=True):
            if more > 0:
                self.series["durable_operation_polls_total"].add((row["kind"], outcome), more)

    def operations_ended(self, connection: Connection) -> None:
        """Count the operations that ended since, and those of their polls that were not counted while they ran."""
        if self.polled is None:
            return
        place = self._place("operations_ended", connection, LAST_ID)
        if place is not None:
            self._told("operations_ended", self._ended(connection, place, LAG_SECONDS), self._one_operation, LAST_ID)
        elif "operations_ended" in self.places:
            # What has ended in the lag is counted at the next looks, and was polled before this one.
            for row in self._ended(connection, self.places["operations_ended"], 0.0):
                if row["kind"] is not None:
                    self.polled.setdefault(row["id"], (row["answered"], row["unanswered"]))

    def _ended(self, connection: Connection, after: Place, lag_seconds: float) -> list[Row]:
        return run(
            connection, _statements.operations_ended, at=after.at, id=after.id, limit=self.batch,
            lag_seconds=lag_seconds,
        )  # fmt: skip

    def _one_operation(self, row: Row) -> None:
        assert self.polled is not None
        self.series["durable_operations_ended_total"].add((row["kind"], row["what"]), 1)
        self._polled(row)
        del self.polled[row["id"]]

    def enqueued(self, connection: Connection) -> None:
        """Count the rows that were written since."""
        place = self.places.get("enqueued")
        if place is None:
            (row,) = run(connection, _statements.enqueued_until, lag_seconds=ENQUEUE_LAG_SECONDS)
            if row["until"] is not None:
                self.places["enqueued"] = Place(row["until"], row["until_id"])
            return
        rows = run(connection, _statements.enqueued, id=place.id, limit=self.batch, lag_seconds=ENQUEUE_LAG_SECONDS)
        for row in rows:
            if row["kind"] is not None:
                self.series["durable_enqueued_total"].add((row["queue"], row["kind"]), row["rows"])
        if rows[0]["read"] == self.batch:
            self.places["enqueued"] = Place(_made_at(rows[0]["kept_id"], rows[0]["until"]), rows[0]["kept_id"])
        elif rows[0]["until"] is not None:
            self.places["enqueued"] = Place(rows[0]["until"], max(place.id, rows[0]["until_id"]))

    def _place(self, name: str, connection: Connection, last: Any) -> Place | None:
        if name not in self.places:
            (row,) = run(connection, _statements.finished_until, lag_seconds=LAG_SECONDS)
            if row["until"] is not None:
                self.places[name] = Place(row["until"], last)
            return None
        return self.places[name]

    def _told(self, name: str, rows: list[Row], one: Callable[[Row], None], last: Any) -> None:
        for row in rows:
            if row["kind"] is not None:
                one(row)
        first, place = rows[0], self.places[name]
        if first["read"] == self.batch:
            self.places[name] = Place(first["kept_at"], first["kept_id"])
        elif first["until"] is not None and first["until"] > place.at:  # a clock set back leaves the place where it was
            self.places[name] = Place(first["until"], last)


def _made_at(row_id: str, until: datetime) -> datetime:
    """The instant that an id begins with, in the time zone of another."""
    epoch = datetime.fromtimestamp(0, until.tzinfo)
    return epoch + timedelta(milliseconds=int(row_id.replace("-", "")[:12], 16))
