"""What a person does to deliveries: each act names who and why, and is journalled with the move itself."""

from __future__ import annotations

from datetime import datetime, timedelta

from durable_core import wakes
from durable_core.claims.operate import Act, act_on
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, Transaction
from durable_core.deliveries.ended import next_hints
from durable_core.deliveries.options import in_utc, seconds_of
from durable_core.errors import InvalidOption
from durable_core.states import DeliveryState

_statements = beside(__file__)


def _due(tx: Transaction, done: list[Row]) -> None:
    wakes.after_commit(
        tx, [wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], first=False) for row in done]
    )


def _free_lines(tx: Transaction, done: list[Row]) -> None:
    """The next of the same ordering key may go."""
    lines = sorted({row["ordering_key"] for row in done if row["ordering_key"] is not None})
    wakes.after_commit(tx, next_hints(tx, lines))


_D = DeliveryState
REDRIVE = Act("redrive", "redriven", "dead or failed", (_D.DEAD, _D.FAILED), _statements.redrive, then=_due)
CANCEL = Act(
    "cancel",
    "canceled",
    "pending or processing",
    (_D.PENDING, _D.PROCESSING),
    _statements.cancel,
    then=_free_lines,
)
DISCARD = Act("discard", "discarded", "dead or failed", (_D.DEAD, _D.FAILED), _statements.discard, then=_free_lines)
RESCHEDULE = Act("reschedule", "rescheduled", "pending", (_D.PENDING,), _statements.reschedule)
RELEASE = Act("release", "released", "held back", (_D.PENDING, _D.PROCESSING), _statements.release)


def redrive(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Send a dead or failed delivery round again with a new budget, in the caller's transaction.

    The row, its key and `step.key` stay; the fence is raised, so that no report of an old
    attempt can land on it; an expiry of it is lifted. Raises NotFound, IllegalMove for a row in
    any other state, and RowBusy when somebody is at work on it: all write nothing, and none waits.
    """
    act_on(tx, REDRIVE, row_id, by=by, reason=reason)


def cancel(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Take a delivery back that is not done, in the caller's transaction.

    One that waits is canceled there and then. One that runs is, too: `step.cancelled` turns true at its next
    heartbeat, and whatever it goes on to write is refused. The hole: what its handler did outside the database is
    done, or may still be. Raises NotFound, IllegalMove, and RowBusy while it is in its commit or has `step.session`
    open: all write nothing, and none waits.
    """
    act_on(tx, CANCEL, row_id, by=by, reason=reason)


def discard(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Give up on a dead or failed delivery, in the caller's transaction: nobody needs to look at it any more.

    It keeps its state, holds up no line, is counted no more, and is pruned after its retention. A redrive brings it
    back until then. Raises as `redrive` does.
    """
    act_on(tx, DISCARD, row_id, by=by, reason=reason)


def reschedule(
    tx: Transaction,
    row_id: str,
    *,
    by: str,
    reason: str,
    countdown: float | timedelta | None = None,
    eta: datetime | None = None,
) -> None:
    """
    Have a waiting delivery come due at another time, sooner or later, in the caller's transaction.

    Give `countdown` (seconds or timedelta, from now by the database's clock) or `eta` (aware datetime). Raises as
    `redrive` does, and InvalidOption.
    """
    act_on(tx, RESCHEDULE, row_id, by=by, reason=reason, **due(countdown, eta))


def release(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Let the sweeps see a row again that one of them failed on and held back, in the caller's transaction.

    Raises NotFound, IllegalMove for a row that is not held, and RowBusy: all write nothing.
    """
    act_on(tx, RELEASE, row_id, by=by, reason=reason)


def due(countdown: float | timedelta | None, eta: datetime | None) -> dict[str, object]:
    """When `reschedule` makes a row due, as its statement names it. Raises InvalidOption."""
    if (countdown is None) == (eta is None):
        raise InvalidOption("reschedule", "countdown", "give countdown or eta, one of them")
    return {
        "delay_seconds": None if countdown is None else seconds_of("reschedule", "countdown", countdown),
        "eta": None if eta is None else in_utc("reschedule", "eta", eta),
    }
