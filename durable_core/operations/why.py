"""Why an operation is where it is, in one sentence for people."""

from __future__ import annotations

from datetime import UTC, datetime

from durable_core.operations.read import Operation
from durable_core.states import OperationState

_ENDED = {
    OperationState.SUCCEEDED: "the other side says that all of it is done",
    OperationState.CANCELED: "it was given up; the other side may have finished it all the same",
}


def why(row: Operation, now: datetime) -> str:
    """What it waits for, or how it ended. No id of the other side, and nothing of the arguments."""
    if row.held_reason and not row.ended:
        return "a sweep failed on it and held it back: mend the cause, then `durable operations release` it"
    if row.state is OperationState.QUEUED:
        return _queued(row)
    if row.state is OperationState.RUNNING:
        return _running(row, now)
    if row.error_code == "OUTCOME_UNKNOWN":
        return "its call may have got through: look at the other side before you start another"
    return _ENDED.get(row.state, f"it failed: {row.error_code}")


def _queued(row: Operation) -> str:
    if row.waiting_for == "handler":
        return "it waits for a worker that knows its kind"
    if row.waiting_for:
        return "it waits for a worker whose code takes its arguments"
    if row.error_code:
        return f"its pre-check could not be made, and is made again; nothing was issued ({row.error_code})"
    until = row.start_before.astimezone(UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
    return f"it waits for a worker to issue it, until {until}"


def _running(row: Operation, now: datetime) -> str:
    place = f"process {row.owner_pid} on {row.owner_host}"
    if row.external_ids is None:
        if row.owner:
            return f"{place} is making its call"
        return "what became of the call was not heard: it is being looked for on the other side"
    if row.owner:
        return f"{place} is asking the other side"
    late = (now - row.due_at).total_seconds()
    return f"its next poll is {f'late by {late:.0f} s' if late > 0 else f'due in {-late:.0f} s'}"
