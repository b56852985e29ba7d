"""What a person, or the application, does to operations. Nobody can have a call issued again: start another."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from durable_core import wakes
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, Transaction, checked, run
from durable_core.deliveries.options import who_or_why
from durable_core.errors import IllegalMove, NotFound, RowBusy
from durable_core.operations import read
from durable_core.operations.read import Operation, checked_id
from durable_core.states import OPERATION_TERMINAL, OperationState

log = logging.getLogger("durable.operate")
_statements = beside(__file__)

HELD_BACK = "held back"
"""What a row `was` that a sweep holds back, where nobody would act on it before it is released."""


@dataclass(frozen=True)
class Act:
    """One act: its statement, what it is called once it is done, and the states it leaves."""

    name: str
    done: str
    needed: str
    states: tuple[OperationState, ...]
    statement: Statement
    hints: bool = False
    """What was done is for a worker to go on with."""


_O = OperationState
CANCEL = Act("cancel", "canceled", "queued or running", (_O.QUEUED, _O.RUNNING), _statements.cancel, hints=True)
POLL = Act("poll", "to be polled", "running", (_O.RUNNING,), _statements.poll, hints=True)
RELEASE = Act("release", "released", "held back", (_O.QUEUED, _O.RUNNING), _statements.release)


def cancel(tx: Transaction, row_id: str, *, by: str, reason: str) -> Operation:
    """
    Give an operation up, in the caller's transaction; the operation as it is then.

    Its slot is free, and whatever its worker goes on to report is refused. One that had ended comes back unchanged.
    After the commit the other side is asked to stop, by the kind's `cancel`, once, best effort. The hole: it may
    finish all the same, so the next start's `precheck` is to look. Raises NotFound, and RowBusy when somebody
    writes to it at this moment: then nothing was written, and nothing was waited for.
    """
    row_id = checked_id(row_id)
    rows = act_on_each(tx, CANCEL, [row_id], by=by, reason=reason)
    if not rows:
        raise NotFound("operation", row_id)
    if not rows[0]["done"] and rows[0]["was"] not in OPERATION_TERMINAL:
        raise refusal(CANCEL, rows[0])
    return read.get(tx, row_id)


def poll(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Have a running operation polled now, in the caller's transaction: a worker asks the other side after the commit.

    Raises NotFound, IllegalMove for one that does not run or is held back, which is released first, and RowBusy while
    it is being polled: all write nothing.
    """
    act_on(tx, POLL, row_id, by=by, reason=reason)


def release(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Let the sweeps see a row again that one of them failed on and held back, in the caller's transaction.

    Raises NotFound, IllegalMove for a row that is not held, and RowBusy: all write nothing.
    """
    act_on(tx, RELEASE, row_id, by=by, reason=reason)


def act_on(tx: Transaction, act: Act, row_id: str, *, by: str, reason: str) -> None:
    """One act on one row. Raises what the acts above name, and InvalidOption without a name and a reason."""
    row_id = checked_id(row_id)
    rows = act_on_each(tx, act, [row_id], by=by, reason=reason)
    if not rows:
        raise NotFound("operation", row_id)
    if not rows[0]["done"]:
        raise refusal(act, rows[0])


def refusal(act: Act, row: Row) -> RowBusy | IllegalMove:
    """Why an act was not done to this row."""
    if row["busy"]:
        return RowBusy(act.name, row["id"], "operation")
    needed = "released first" if row["was"] == HELD_BACK else act.needed
    return IllegalMove(act.name, row["id"], row["was"], needed, "operation")


def act_on_each(tx: Transaction, act: Act, row_ids: Sequence[str], *, by: str, reason: str) -> list[Row]:
    """One act on several rows in one statement: each row with `done`, or `busy`, or the state that it `was` in."""
    rows = run(
        checked(tx), act.statement, ids=list(row_ids), by=who_or_why(act.name, "by", by),
        reason=who_or_why(act.name, "reason", reason),
    )  # fmt: skip
    done = [row for row in rows if row["done"]]
    if done:
        facts = {"row_id": done[0]["id"]} if len(row_ids) == 1 else {}
        log.info("operator_action", extra={"act": act.name, "actor": by, "rows": len(done), **facts})
    if act.hints:
        hints = [
            wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], first=False)
            for row in done
            # A canceled one that the other side does not know is nobody's business any more.
            if act is not CANCEL or row["known"]
        ]
        wakes.after_commit(tx, hints)
    return rows
