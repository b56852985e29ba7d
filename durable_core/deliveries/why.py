"""Words about one delivery: what it waits for, or how it ended. The command line and Flower both say them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_never

from durable_core.claims.journal import Line
from durable_core.deliveries.paused import Pause
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.waiting import Ahead, Cause, Wait
from durable_core.states import TERMINAL, DeliveryState


@dataclass(frozen=True)
class Because:
    """
    One reason why a plan or an operation is where it is: `cause` for programs, `says` for people, without a full stop.

    `until` is when that is over by itself, or is looked at anew; None says that nobody knows. While one lasts that
    `blocks` no worker can take the row.
    """

    cause: str
    says: str
    until: datetime | None = None
    blocks: bool = False


def why(
    row: Delivery, waits: list[Wait], now: datetime, lines: Sequence[Line] = (), *, payload: bool = True
) -> list[str]:
    """
    In sentences: all that a pending delivery waits for, one each, or, of any other, where it is or how it ended.

    `lines` of its journal say who canceled it. Without `payload` keys are left out, and of what the database said when
    a sweep failed on the row all but the kind of error.
    """
    if row.state is DeliveryState.PENDING:
        return [says(row, wait, now, payload=payload) for wait in waits]
    if row.held_reason and row.state not in TERMINAL:
        # Before anything else: whatever it seems to wait for, no sweep and no claim will come to it.
        return [_held(row, payload)]
    match row.state:
        case DeliveryState.PROCESSING:
            return [_processing(row, now)]
        case DeliveryState.SENT:
            return [f"done{_at(row, now)}: its handler returned and its receipt was committed."]
        case DeliveryState.FAILED:
            return [f"given up for good{_at(row, now)} ({row.error_code}); {_redrive(row)}."]
        case DeliveryState.DEAD:
            count, what = (
                (row.interruptions, "lost worker") if row.failures < row.max_attempts else (row.failures, "failure")
            )
            spent = f"{count} {what}{'s' * (count != 1)}"
            return [f"its budget was spent{_at(row, now)} by {spent} ({row.error_code}); {_redrive(row)}."]
        case DeliveryState.CANCELED:
            act = next((line for line in reversed(lines) if line.move == "cancel"), None)
            who = "" if act is None else f" by {act.by} ({act.reason})"
            return [f"canceled{_at(row, now)}{who}: it was taken back before it was done."]
        case DeliveryState.EXPIRED:
            return [f"expired{_at(row, now)}: its time to be useful passed before it was done."]


def _redrive(row: Delivery) -> str:
    return f"it leaves only by `durable deliveries redrive {row.id}`"


def _at(row: Delivery, now: datetime) -> str:
    """When it ended: " at 2026-11-30T08:00:00Z, 5m ago"."""
    return "" if row.finished_at is None else f" at {instant(row.finished_at)}, {between(row.finished_at, now)} ago"


def says(row: Delivery, wait: Wait, now: datetime, *, payload: bool = True) -> str:
    """One thing that a pending delivery waits for, in a sentence; `payload` as for `why`."""
    match wait.cause:
        case Cause.HELD:
            return _held(row, payload)
        case Cause.PAUSED:
            assert wait.pause is not None
            return of_pause(wait.pause, now)
        case Cause.BEHIND:
            assert wait.ahead is not None
            return _behind(row, wait.ahead, now, payload)
        case Cause.EXPIRED:
            assert row.expires_at is not None
            return f"its time to be useful passed {between(row.expires_at, now)} ago: the next expire sweep ends it."
        case Cause.NOT_DUE:
            until = between(now, row.due_at)
            if row.error_code and row.attempts:
                return f"its last attempt ended with {row.error_code}; the next is due in {until}."
            return f"it is not due before {until} have passed."
        case Cause.ARGUMENTS:
            return (
                "its arguments do not fit the handler of the last worker that took it: deploy the code that fits them."
            )
        case Cause.HANDLER:
            return f"{_due(row, now)}a worker that was told of it does not know kind {row.kind}: deploy its code there."
        case Cause.WORKER:
            return f"{_due(row, now)}it waits for a free worker that reads queue {row.queue}."
        case Cause.EXPIRES_SOON:
            assert row.expires_at is not None
            left = between(now, row.expires_at)
            if row.expires_at <= row.due_at:
                return f"it expires in {left}, before it is due."
            return f"it expires in {left}, unless a worker has begun it by then."
        case _:
            assert_never(wait.cause)


def attempts(row: Delivery) -> str:
    """How much of the budget is used: "2 of 5". Interruptions have a budget of their own and are left out."""
    running = row.state in (DeliveryState.PROCESSING, DeliveryState.SENT)
    return f"{row.failures + running} of {row.max_attempts}"


def kind_of_error(said: str) -> str:
    """Of what a database error says, its class: the rest may quote a row."""
    return said.partition(":")[0]


def instant(at: datetime) -> str:
    """ISO 8601 in UTC."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def span(seconds: float) -> str:
    """A duration for people, in its two largest units: `45s`, `3m 20s`, `2d 4h`."""
    whole = max(0, int(seconds))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count) or "0s"


def _held(row: Delivery, payload: bool) -> str:
    said = row.held_reason or ""
    return (
        f"held back by a sweep that failed on it ({said if payload else kind_of_error(said)}); "
        f"release it with `durable deliveries release {row.id}`."
    )


def of_pause(pause: Pause, now: datetime) -> str:
    """A pause that keeps a row: by whom, why, and how it ends."""
    end = (
        f"until somebody resumes it with `durable resume --{pause.what} {pause.name}`"
        if pause.until is None
        else f"until {instant(pause.until)}, in {between(now, pause.until)}"
    )
    return f"{pause.what} {pause.name} is paused by {pause.by} ({pause.reason}), {end}."


def _behind(row: Delivery, ahead: Ahead, now: datetime, payload: bool) -> str:
    """Where one that is ahead has troubles of its own, `show` of it tells them."""
    key = f" {row.ordering_key}" if payload else ""
    found = f"behind delivery {ahead.id} of the same ordering key{key}, which "
    match ahead.state:
        case DeliveryState.PROCESSING:
            return f"{found}is processing."
        case DeliveryState.PENDING if ahead.due_at > now:
            return f"{found}has begun and is pending, due in {between(now, ahead.due_at)}."
        case DeliveryState.PENDING:
            return f"{found}is pending."
        case _:
            return f"{found}is {ahead.state.value}: redrive or discard that one."


def _due(row: Delivery, now: datetime) -> str:
    return f"due for {between(row.due_at, now)}; " if row.due_at <= now else ""


def hinted(hint_at: datetime, now: datetime) -> str:
    """When dispatch hints a row of a plan or an operation again, if nobody has claimed it by then."""
    return f"it is hinted again in {between(now, hint_at)}" if hint_at > now else "it is hinted by the next dispatch"


def between(since: datetime, until: datetime) -> str:
    """The time from one instant to another, as `span` says it."""
    return span((until - since).total_seconds())


def _processing(row: Delivery, now: datetime) -> str:
    running = "" if row.claimed_at is None else f" for {span((now - row.claimed_at).total_seconds())}"
    place = f"process {row.owner_pid} on {row.owner_host}"
    if row.lease_expires_at is not None and row.lease_expires_at <= now:
        silent = span((now - row.lease_expires_at).total_seconds())
        return f"running{running} in {place}, whose lease lapsed {silent} ago: the next reap takes it back."
    left = "" if row.deadline_at is None else f"; its time is over in {span((row.deadline_at - now).total_seconds())}"
    return f"running{running} in {place}{left}."
