"""A delivery in words for its page. What a customer wrote is told only where the setting says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never

from humanize import precisedelta

from durable_core.celery_binding.flower.look import Seen
from durable_core.claims.journal import Line
from durable_core.deliveries.paused import Pause
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.waiting import Cause, Wait
from durable_core.states import TERMINAL, DeliveryState

HIDDEN = "not shown here"


@dataclass(frozen=True)
class Reason:
    """One sentence on why a delivery is where it is, and another delivery that it speaks of."""

    says: str
    other: str | None = None


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


def attempts(row: Delivery) -> str:
    """How much of the budget is used: "2 of 5". Interruptions have a budget of their own and are left out."""
    running = row.state in (DeliveryState.PROCESSING, DeliveryState.SENT)
    return f"{row.failures + running} of {row.max_attempts}"


def reasons(seen: Seen, *, payload: bool) -> list[Reason]:
    """Why it waits, all of it; or, of one that does not, where it is or how it ended."""
    row, now = seen.row, seen.now
    if row.state is DeliveryState.PENDING:
        return [_waits(row, wait, now, payload) for wait in seen.waits]
    if row.held_reason and row.state not in TERMINAL:
        return [_held(row, payload)]
    match row.state:
        case DeliveryState.PROCESSING:
            return [Reason(_processing(row, now))]
        case DeliveryState.SENT:
            return [Reason("Done: its handler returned, and its receipt was committed.")]
        case DeliveryState.FAILED:
            return [Reason(f"Given up for good. It leaves only by durable deliveries redrive {row.id}")]
        case DeliveryState.DEAD:
            return [Reason(f"Its budget is spent. It leaves only by durable deliveries redrive {row.id}")]
        case DeliveryState.CANCELED:
            return [Reason("Taken back by a person before it was done.")]
        case DeliveryState.EXPIRED:
            return [Reason("Its time to be useful passed before it was done.")]
        case _:
            assert_never(row.state)


def journal(lines: list[Line], *, payload: bool) -> list[tuple[str, ...]]:
    """
    At, move, from, to, fence, attempt, by, why. A code is told, and what a person gave as the reason of an act.

    A sweep that holds a row writes down what the database said: of that only the kind of error, without the setting.
    """
    return [
        (
            instant(line.at), line.move, line.from_state or "", line.to_state or "", str(line.fence),
            "" if line.attempt is None else str(line.attempt), line.by or "",
            _unsaid(line.reason, payload) if line.move == "hold" else line.reason or "",
        )
        for line in lines
    ]  # fmt: skip


def instant(at: datetime) -> str:
    """In UTC and whole seconds."""
    return at.astimezone(UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _waits(row: Delivery, wait: Wait, now: datetime, payload: bool) -> Reason:
    match wait.cause:
        case Cause.HELD:
            return _held(row, payload)
        case Cause.PAUSED:
            assert wait.pause is not None
            return Reason(_paused(wait.pause, now))
        case Cause.BEHIND:
            assert wait.ahead is not None
            ahead = wait.ahead
            return Reason(f"Behind another of its ordering key, which is {ahead.state.value}: {ahead.kind}", ahead.id)
        case Cause.EXPIRED:
            return Reason("Its time to be useful is over: the next expire sweep ends it.")
        case Cause.ARGUMENTS:
            return Reason("Its arguments do not fit the handler of the worker that took it: deploy the code they fit.")
        case Cause.HANDLER:
            return Reason(f"A worker that was told of it does not know kind {row.kind}: deploy its code there.")
        case Cause.NOT_DUE:
            again = f"Its last attempt ended with {row.error_code}. " if row.error_code and row.attempts else ""
            return Reason(f"{again}Due in {span(row.due_at - now)}.")
        case Cause.WORKER:
            return Reason(f"Due for {span(now - row.due_at)}. It waits for a free worker that reads queue {row.queue}.")
        case Cause.EXPIRES_SOON:
            assert row.expires_at is not None
            return Reason(f"It expires in {span(row.expires_at - now)}.")
        case _:
            assert_never(wait.cause)


def _held(row: Delivery, payload: bool) -> Reason:
    why = _unsaid(row.held_reason, payload)
    return Reason(f"A sweep failed on it ({why}). It is held back until durable deliveries release {row.id}")


def _paused(pause: Pause, now: datetime) -> str:
    end = "until somebody resumes it" if pause.until is None else f"for {span(pause.until - now)} more"
    return f"{pause.what.capitalize()} {pause.name} is paused by {pause.by} ({pause.reason}), {end}."


def _processing(row: Delivery, now: datetime) -> str:
    place = f"process {row.owner_pid} on {row.owner_host}"
    if row.lease_expires_at is not None and row.lease_expires_at <= now:
        silent = span(now - row.lease_expires_at)
        return f"Running in {place}, whose lease lapsed {silent} ago: the next reap takes it back."
    since = "" if row.claimed_at is None else f" for {span(now - row.claimed_at)}"
    return f"Running{since} in {place}."


def _unsaid(error: str | None, payload: bool) -> str:
    """What a database error says: its class alone where payload is not shown, for the rest may quote a row."""
    text = error or ""
    return text if payload else text.partition(":")[0]


def _if(payload: bool, value: str | None) -> str | None:
    return value if payload or value is None else HIDDEN


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _when(at: datetime | None, now: datetime) -> str | None:
    if at is None:
        return None
    return f"{instant(at)} ({f'in {span(at - now)}' if at > now else f'{span(now - at)} ago'})"


def span(length: timedelta) -> str:
    """A duration in words, its two largest units."""
    seconds = timedelta(seconds=max(0, int(length.total_seconds())))
    return ", ".join(precisedelta(seconds, format="%d").replace(" and ", ", ").split(", ")[:2])
