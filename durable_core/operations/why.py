"""Why an operation is where it is: for people in a sentence each, for programs in a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.paused import Pause, pauses
from durable_core.deliveries.read import now as clock
from durable_core.deliveries.why import Because, between, hinted, instant, kind_of_error, of_pause, span
from durable_core.operations.read import Operation, get
from durable_core.states import OperationState

_statements = beside(__file__)


class Cause(StrEnum):
    """What an operation waits for, where it is, or that it ended."""

    HELD = "held"
    OVERDUE = "overdue"
    PAUSED = "paused"
    ARGUMENTS = "arguments"
    HANDLER = "handler"
    NOT_DUE = "not_due"
    WORKER = "worker"
    IN_FLIGHT = "in_flight"
    LAPSED = "lapsed"
    UNHEARD = "unheard"
    POLL_DUE = "poll_due"
    POLL_LATER = "poll_later"
    ENDED = "ended"


def reasons(tx: Transaction, row_id: str) -> list[Because]:
    """
    Everything that keeps an operation where it is, what a person has to act on first; or how it ended.

    A poll that is due is hinted, as by `get`. The hole: outside a REPEATABLE READ transaction the facts may be some
    milliseconds apart. Raises NotFound.
    """
    return reasons_of(tx, get(tx, row_id))


def reasons_of(tx: Transaction, row: Operation) -> list[Because]:
    """The same of a row that was read in this transaction."""
    rows = run(checked(tx), _statements.hinted, id=row.id)
    return list(_reasons(row, clock(tx), pauses(tx), rows[0]["hint_at"] if rows else None))


def why(row: Operation, now: datetime) -> str:
    """The first of them, as far as the row alone tells. No id of the other side, and nothing of the arguments."""
    return next(_reasons(row, now)).says


def _reasons(
    row: Operation, now: datetime, pauses: Sequence[Pause] = (), hint_at: datetime | None = None
) -> Iterator[Because]:
    if row.ended:
        yield Because(Cause.ENDED, _ended(row, now))
        return
    if row.held_reason:
        yield Because(
            Cause.HELD,
            f"a sweep failed on it ({kind_of_error(row.held_reason)}) and held it back: mend the cause, then "
            f"`durable operations release {row.id}` it",
            blocks=True,
        )
    if row.state is OperationState.QUEUED:
        yield from _queued(row, now, pauses, hint_at)
    else:
        yield from _running(row, now, hint_at)


def _queued(
    row: Operation, now: datetime, pauses: Sequence[Pause], hint_at: datetime | None
) -> Iterator[Because]:  # fmt: skip
    over = row.start_before <= now
    paused = [pause for pause in pauses if pause.name == (row.queue if pause.what == "queue" else row.kind)]
    if over:
        yield Because(
            Cause.OVERDUE,
            f"the time to issue it passed {between(row.start_before, now)} ago: the next expire sweep ends it, "
            "never issued",
            blocks=True,
        )
    for pause in paused:
        yield Because(Cause.PAUSED, of_pause(pause, now).rstrip("."), pause.until, blocks=True)
    if row.waiting_for == "handler":
        yield Because(Cause.HANDLER, f"it waits for a worker that knows its kind: one that was hinted lacks {row.kind}")
    elif row.waiting_for:
        yield Because(Cause.ARGUMENTS, "it waits for a worker whose code takes its arguments")
    if row.due_at > now:
        put_off = f"it is looked at again in {between(now, row.due_at)}"
        if row.error_code and not row.waiting_for:
            put_off = (
                f"its pre-check could not be made, and is made again; nothing was issued ({row.error_code}); {put_off}"
            )
        yield Because(Cause.NOT_DUE, put_off, row.due_at, blocks=True)
    elif not (over or paused or row.waiting_for or row.held_reason):
        yield Because(
            Cause.WORKER,
            f"it waits for a worker to issue it, one that reads queue {row.queue}, until {instant(row.start_before)}"
            f"{_again(hint_at, now)}",
            row.start_before,
        )


def _running(row: Operation, now: datetime, hint_at: datetime | None) -> Iterator[Because]:
    if row.owner:
        yield _in_flight(row, now)
        return
    left = f"; {_patience(row, now)}" if row.patience_until else ""
    if row.waiting_for == "handler":
        yield Because(
            Cause.HANDLER,
            f"a worker that was to ask the other side does not know kind {row.kind}: deploy its code{left}",
        )
    late = (now - row.due_at).total_seconds()
    if row.external_ids is None:
        when = f", again in {span(-late)}" if late < 0 else _again(hint_at, now)
        yield Because(
            Cause.UNHEARD,
            "what became of the call was not heard: it is being looked for on the other side" + when + left,
            row.due_at if late < 0 else None,
        )
    elif late < 0:
        yield Because(Cause.POLL_LATER, f"its next poll is due in {span(-late)}{_met(row)}{left}", row.due_at)
    else:
        yield Because(
            Cause.POLL_DUE,
            f"its next poll is late by {span(late)}: it waits for a worker that reads queue {row.queue}"
            f"{_again(hint_at, now)}{_met(row)}{left}",
        )


def _in_flight(row: Operation, now: datetime) -> Because:
    place = f"process {row.owner_pid} on {row.owner_host}"
    does = "is asking the other side" if row.external_ids is not None else (
        "is making its call" if row.fence == 1 else "is looking for what became of the call"
    )  # fmt: skip
    if row.lease_expires_at is not None and row.lease_expires_at <= now:
        return Because(
            Cause.LAPSED,
            f"{place} {does}, and its lease lapsed {between(row.lease_expires_at, now)} ago: the next reap decides",
        )
    lease = "" if row.lease_expires_at is None else f", under a lease of another {between(now, row.lease_expires_at)}"
    return Because(Cause.IN_FLIGHT, f"{place} {does}{lease}", row.lease_expires_at, blocks=True)


def _met(row: Operation) -> str:
    return f"; the last one met {row.error_code}" if row.error_code else ""


def _patience(row: Operation, now: datetime) -> str:
    assert row.patience_until is not None
    if row.patience_until <= now:
        return f"its patience was over {between(row.patience_until, now)} ago"
    return f"its patience ends in {between(now, row.patience_until)}"


def _again(hint_at: datetime | None, now: datetime) -> str:
    return "" if hint_at is None else f"; {hinted(hint_at, now)}"


def _ended(row: Operation, now: datetime) -> str:
    at = "" if row.finished_at is None else f" at {instant(row.finished_at)}, {between(row.finished_at, now)} ago"
    if row.state is OperationState.CANCELED:
        return (
            f"it was given up{at} by {row.canceled_by} ({row.canceled_reason}); the other side may have finished it "
            "all the same"
        )
    if row.state is OperationState.SUCCEEDED:
        return f"it ended{at}: the other side says that all of it is done"
    if row.error_code == "OUTCOME_UNKNOWN":
        return f"it failed{at}: its call may have got through, so look at the other side before you start another"
    return f"it failed{at}: {row.error_code}"
