"""A delivery in words for its page. What a customer wrote is told only where the setting says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from durable_core.celery_binding.flower.look import Seen
from durable_core.claims.journal import Line
from durable_core.deliveries.why import attempts, kind_of_error, span, why
from durable_core.states import DeliveryState

HIDDEN = "not shown here"


@dataclass(frozen=True)
class Reason:
    """One sentence on why a delivery is where it is: around the id of another that it speaks of, which is a link."""

    says: str
    other: str | None = None
    after: str = ""


def facts(seen: Seen, *, payload: bool) -> list[tuple[str, str]]:
    """Names and values, without those that the row has none of."""
    row, now = seen.row, seen.now
    told: list[tuple[str, str | None]] = [
        ("Queue", f"{row.queue}, priority {row.priority}"),
        ("Attempts", attempts(row)),
        ("Interrupted", f"{row.interruptions} of {row.max_interruptions}" if row.interruptions else None),
        ("Given back at shutdowns", str(row.shutdowns) if row.shutdowns else None),
        ("Snoozed", str(row.snoozes) if row.snoozes else None),
        ("Error code", row.error_code),
        ("Due", _when(row.due_at, now) if row.state is DeliveryState.PENDING else None),
        ("Expires", _when(row.expires_at, now)),
        ("Created", _when(row.created_at, now)),
        ("Claimed", _when(row.claimed_at, now)),
        ("Lease until", _when(row.lease_expires_at, now)),
        ("Deadline", _when(row.deadline_at, now)),
        ("Finished", _when(row.finished_at, now)),
        ("Discarded", _when(row.discarded_at, now)),
        ("Fence", f"{row.fence}, settled {row.settled_fence}"),
        ("Key", _if(payload, row.key)),
        ("Ordering key", _if(payload, row.ordering_key)),
        ("Arguments", _if(payload, _written(row.shown_arguments))),
        ("Result", _if(payload, None if row.result is None else _written(row.result))),
        ("Error", _if(payload, row.error_message)),
    ]
    return [(name, value) for name, value in told if value is not None]


def reasons(seen: Seen, *, payload: bool) -> list[Reason]:
    """Why it waits, all of it; or, of one that does not, where it is or how it ended."""
    told = why(seen.row, seen.waits, seen.now, seen.lines, payload=payload)
    others = [wait.ahead.id if wait.ahead else None for wait in seen.waits] or [None]
    return [_reason(says, other) for says, other in zip(told, others, strict=True)]


def _reason(says: str, other: str | None) -> Reason:
    says = says[0].upper() + says[1:]
    if other is None:
        return Reason(says)
    before, _, after = says.partition(other)
    return Reason(before, other, after)


def journal(lines: list[Line], *, payload: bool) -> list[tuple[str, ...]]:
    """
    At, move, from, to, fence, attempt, by, why. A code is told, and what a person gave as the reason of an act.

    A sweep that holds a row writes down what the database said: of that only the kind of error, without the setting.
    """
    return [
        (
            instant(line.at), line.move, line.from_state or "", line.to_state or "", str(line.fence),
            "" if line.attempt is None else str(line.attempt), line.by or "",
            _said(line, payload),
        )
        for line in lines
    ]  # fmt: skip


def _said(line: Line, payload: bool) -> str:
    text = line.reason or ""
    return kind_of_error(text) if line.move == "hold" and not payload else text


def instant(at: datetime) -> str:
    """In UTC and whole seconds."""
    return at.astimezone(UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _if(payload: bool, value: str | None) -> str | None:
    return value if payload or value is None else HIDDEN


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _when(at: datetime | None, now: datetime) -> str | None:
    if at is None:
        return None
    seconds = (at - now).total_seconds()
    return f"{instant(at)} ({f'in {span(seconds)}' if seconds > 0 else f'{span(-seconds)} ago'})"
