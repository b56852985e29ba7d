"""What beat drives for periodic kinds: a delivery for each slot that is due. Any number of these may run at once."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection
from uuid_utils.compat import uuid7

from durable_core import wakes
from durable_core.database.connections import Database
from durable_core.database.migrate import found, newest
from durable_core.database.statements import Statement, beside, current_schema
from durable_core.database.transactions import DATABASE_ERRORS, Row, is_infrastructure, run, said, sqlstate
from durable_core.deliveries.declare import DeliveryKind, registry
from durable_core.deliveries.enqueue import MISSING, enqueue_new
from durable_core.deliveries.options import Placement
from durable_core.deliveries.rows import New
from durable_core.deliveries.slots import MISSED, Cadence
from durable_core.errors import IdempotencyConflict, SchemaBehind

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)

SLOT_KEY = "cron:"
"""The row of a slot has this and the slot, in UTC, for its key: the database keeps one row per kind and key."""

_SECOND = timedelta(seconds=1)


NOTHING = Statement("nothing", "select where false")


def look() -> tuple[Statement, dict[str, object]]:
    """A statement that has a row where `fire` has something to do."""
    declared = _declared()
    return (_statements.look, {"declared": _said_by_code(declared)}) if declared else (NOTHING, {})


def fire(database: Database) -> int:
    """
    Write the deliveries of the slots that are due, for the kinds that this process knows; how many.

    One transaction per schedule locks it, writes its rows and moves it on: a slot has its row
    and is over, or neither. A schedule that somebody else has locked is theirs. One that fails
    keeps no other back; the first failure is raised at the end, for people to see.
    """
    declared = _declared()
    if not declared:
        return 0
    written, failure = 0, None
    for row in _to_look_at(database, declared):
        kind = declared[row["kind"]]
        try:
            with database.transaction() as connection:
                if row["missing"]:
                    _begin(connection, kind, row["now"])
                written += _follow(connection, kind)
        except Exception as error:
            if is_infrastructure(error):
                raise
            log.error("schedule_failed", extra={"kind": kind.name, "error": said(error)})
            failure = failure or error
    wakes.wake()
    if failure is not None:
        raise failure
    return written


def _to_look_at(database: Database, declared: dict[str, DeliveryKind[..., Any]]) -> list[Row]:
    """The schedules in which something is to be done. Raises SchemaBehind where there is no table for them yet."""
    try:
        with database.autocommit() as connection:
            return run(connection, _statements.look, declared=_said_by_code(declared))
    except DATABASE_ERRORS as error:
        if sqlstate(error) not in MISSING:
            raise
        with database.autocommit() as connection:
            raise SchemaBehind(current_schema(), found(connection), newest()) from error


def _declared() -> dict[str, DeliveryKind[..., Any]]:
    return {kind.name: kind for kind in registry if kind.cadence is not None}


def _said_by_code(declared: dict[str, DeliveryKind[..., Any]]) -> str:
    return json.dumps([{"kind": name, **_terms(kind.cadence)} for name, kind in declared.items() if kind.cadence])


def _terms(cadence: Cadence) -> dict[str, str]:
    return {"cron": cadence.cron, "timezone": cadence.timezone, "missed": cadence.missed}


def _begin(connection: Connection, kind: DeliveryKind[..., Any], now: datetime) -> None:
    """A schedule for a kind that has none: the one of a name it had before, or a new one that begins now."""
    assert kind.cadence is not None
    _, *formerly = kind.names
    if formerly:
        run(connection, _statements.adopt, kind=kind.name, formerly=formerly)
    run(
        connection, _statements.begin, kind=kind.name, id=str(uuid7()), **_terms(kind.cadence), now=now,
        next_slot=kind.cadence.after(now),
    )  # fmt: skip


def _follow(connection: Connection, kind: DeliveryKind[..., Any]) -> int:
    """Do what the schedule is due for, and then what the code says about it now; how many rows were written."""
    assert kind.cadence is not None
    rows = run(connection, _statements.lock, kind=kind.name)
    if not rows:
        return 0
    row = rows[0]
    decided = Decided.of(row, kind.cadence)
    if decided is None:
        return 0
    written = 0
    for slot in decided.runs:
        written += _write(connection, kind, slot)
    run(
        connection, _statements.advance, id=row["id"], **_terms(kind.cadence), now=row["now"],
        last_slot=decided.last_slot, next_slot=decided.next_slot, resumed=decided.resumed,
        skipped_from=decided.skipped_from, skipped_to=decided.skipped_to,
    )  # fmt: skip
    if decided.skipped_from is not None and decided.skipped_to is not None:
        facts = {"from": decided.skipped_from.isoformat(), "to": decided.skipped_to.isoformat(), "kind": kind.name}
        log.warning("slots_skipped", extra=facts)
    return written


def _write(connection: Connection, kind: DeliveryKind[..., Any], slot: datetime) -> int:
    new = New.of(kind, Placement(key=slot_key(slot)), kind.slot_arguments(slot))
    try:
        return int(enqueue_new(connection, new).created)
    except IdempotencyConflict:
        # Somebody deleted the schedule, or wrote under a slot's key by hand: the slot has its row.
        return 0


def slot_key(slot: datetime) -> str:
    return f"{SLOT_KEY}{slot:%Y-%m-%dT%H:%M:%SZ}"


@dataclass(frozen=True)
class Decided:
    """What becomes of a schedule that is due, resumed or changed."""

    runs: list[datetime]
    last_slot: datetime | None
    next_slot: datetime
    resumed: bool = False
    skipped_from: datetime | None = None
    skipped_to: datetime | None = None

    @staticmethod
    def of(row: Row, code: Cadence) -> Decided | None:
        """
        By the locked row, its time and the code; None when there is nothing to do.

        What is due is judged by the cadence on the row: that was said when it became due. A
        process with other code would else skip a slot by the mere act of changing the schedule.
        """
        now, last, next_slot = row["now"], row["last_slot"], row["next_slot"]
        noted = Cadence(row["cron"], row["timezone"], row["missed"])
        resumed = row["paused_at"] is not None and row["paused_until"] is not None and row["paused_until"] <= now
        paused = row["paused_at"] is not None and not resumed
        if resumed:
            next_slot = noted.at_or_after(max(row["paused_until"], last + _SECOND if last else row["paused_until"]))
        moved = (noted.cron, noted.timezone) != (code.cron, code.timezone)
        due = not paused and next_slot <= now
        if not due and not resumed and noted == code:
            return None
        runs: list[datetime] = []
        skipped: tuple[datetime, datetime] | tuple[None, None] = (None, None)
        if due:
            runs, skipped = _chosen(noted, next_slot, now)
            last = noted.latest(next_slot, now, 1)[-1]
        if due or moved:
            next_slot = code.after(max(now, last) if last else now)
        return Decided(runs, last, next_slot, resumed, *skipped)


def _chosen(
    cadence: Cadence, first: datetime, now: datetime
) -> tuple[list[datetime], tuple[datetime, datetime] | tuple[None, None]]:
    """Of the slots from the first that is due until now: those that run, and from where to where they are left out."""
    bound = MISSED[cadence.missed]
    since = max(first, now - timedelta(seconds=bound.seconds))
    runs = cadence.latest(since, now, bound.most)
    if runs and runs[0] == first:
        return runs, (None, None)
    before = runs[0] - _SECOND if runs else now
    return runs, (first, cadence.latest(first, before, 1)[-1])
