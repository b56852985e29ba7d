"""Looking at the schedules. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.declare import registry
from durable_core.deliveries.slots import Cadence

_statements = beside(__file__)


@dataclass(frozen=True)
class Schedule:
    """
    One schedule, as it was read; its history is `deliveries.journal(tx, schedule.id)`.

    `next_slot` is None while it is paused for good. `declared` says whether this process knows
    a periodic kind of that name: a kind that was removed from the code keeps its schedule and never runs.
    """

    kind: str
    id: str
    cron: str
    timezone: str
    missed: str
    since: datetime
    last_slot: datetime | None
    next_slot: datetime | None
    paused_at: datetime | None
    paused_until: datetime | None
    paused_by: str | None
    paused_reason: str | None
    skipped_from: datetime | None
    skipped_to: datetime | None
    skipped_at: datetime | None
    declared: bool


def schedules(tx: Transaction) -> list[Schedule]:
    """Every schedule, by kind. One appears when a sweep that knows its kind has run for the first time."""
    found = []
    for row in run(checked(tx), _statements.schedules):
        next_slot = row["next_slot"]
        if row["paused_at"] is not None:
            until = row["paused_until"]
            next_slot = until and Cadence(row["cron"], row["timezone"], row["missed"]).at_or_after(until)
        kind = registry.find(row["kind"])
        declared = kind is not None and kind.name == row["kind"] and kind.cadence is not None
        found.append(Schedule(**{**row, "next_slot": next_slot}, declared=declared))
    return found
