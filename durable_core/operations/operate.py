"""What a person, or the application, does to operations. Nobody can have a call issued again: start another."""

from __future__ import annotations

from durable_core import wakes
from durable_core.claims.operate import Act, act_on, act_on_each, refusal
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, Transaction
from durable_core.errors import NotFound
from durable_core.operations import read
from durable_core.operations.read import Operation, checked_id
from durable_core.states import OPERATION_TERMINAL, OperationState

_statements = beside(__file__)


def _hint(tx: Transaction, some: list[Row]) -> None:
    """What was done is for a worker to go on with."""
    wakes.after_commit(
        tx, [wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], first=False) for row in some]
    )


def _hint_known(tx: Transaction, done: list[Row]) -> None:
    """A canceled one that the other side does not know is nobody's business any more."""
    _hint(tx, [row for row in done if row["known"]])


_O = OperationState
_ALIVE = (_O.QUEUED, _O.RUNNING)
CANCEL = Act("cancel", "canceled", "queued or running", _ALIVE, _statements.cancel, "operation", then=_hint_known)
POLL = Act("poll", "to be polled", "running", (_O.RUNNING,), _statements.poll, "operation", then=_hint)
RELEASE = Act("release", "released", "held back", _ALIVE, _statements.release, "operation")


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
