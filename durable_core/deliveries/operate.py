"""What a person does to deliveries: each act names who and why, and is journalled with the move itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from durable_core import wakes
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, Transaction, checked, run
from durable_core.deliveries.ended import next_hints
from durable_core.deliveries.options import in_utc, seconds_of, who_or_why
from durable_core.deliveries.read import checked_id
from durable_core.errors import IllegalMove, InvalidOption, NotFound, RowBusy
from durable_core.states import DeliveryState

log = logging.getLogger("durable.operate")
_statements = beside(__file__)


@dataclass(frozen=True)
class Act:
    """One act: its statement, what it is called once it is done, and the states it leaves."""

    name: str
    done: str
    needed: str
    states: tuple[DeliveryState, ...]
    statement: Statement
    frees_its_line: bool = False
    """The next of the same ordering key may go, and is hinted."""
    makes_due: bool = False


_D = DeliveryState
REDRIVE = Act("redrive", "redriven", "dead or failed", (_D.DEAD, _D.FAILED), _statements.redrive, makes_due=True)
CANCEL = Act(
    "cancel", "canceled", "pending or processing", (_D.PENDING, _D.PROCESSING), _statements.cancel, frees_its_line=True
)
DISCARD = Act("discard", "discarded", "dead or failed", (_D.DEAD, _D.FAILED), _statements.discard, frees_its_line=True)
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


def act_on(tx: Transaction, act: Act, row_id: str, *, by: str, reason: str, **more: object) -> None:
    """One act on one row. Raises what the acts above name, and InvalidOption without a name and a reason."""
    row_id = checked_id(row_id)
    rows = act_on_each(tx, act, [row_id], by=by, reason=reason, **more)
    if not rows:
        raise NotFound("delivery", row_id)
    if not rows[0]["done"]:
        raise refusal(act, rows[0])


def refusal(act: Act, row: Row) -> RowBusy | IllegalMove:
    """Why an act was not done to this row."""
    if row["busy"]:
        return RowBusy(act.name, row["id"])
    return IllegalMove(act.name, row["id"], row["was"], act.needed)


def act_on_each(
    tx: Transaction, act: Act, row_ids: Sequence[str], *, by: str, reason: str, **more: object
) -> list[Row]:
    """
    One act on several rows in one statement: each row with `done`, or `busy`, or the state that it `was` in.

    Rows that are not there come back as nothing. What may run now is hinted after the commit.
    """
    rows = run(
        checked(tx), act.statement, ids=list(row_ids), by=who_or_why(act.name, "by", by),
        reason=who_or_why(act.name, "reason", reason), **more,
    )  # fmt: skip
    done = [row for row in rows if row["done"]]
    if done:
        facts = {"row_id": done[0]["id"]} if len(row_ids) == 1 else {}
        log.info("operator_action", extra={"act": act.name, "actor": by, "rows": len(done), **facts})
    if act.makes_due:
        hints = [wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], first=False) for row in done]
        wakes.after_commit(tx, hints)
    if act.frees_its_line:
        lines = sorted({row["ordering_key"] for row in done if row["ordering_key"] is not None})
        wakes.after_commit(tx, next_hints(tx, lines))
    return rows
