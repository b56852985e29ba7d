"""What a person does to a delivery: each act names who and why, and is journalled with the move itself."""

from __future__ import annotations

from durable_core import wakes
from durable_core.arguments import clean_text
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, Transaction, checked, run
from durable_core.deliveries.read import checked_id
from durable_core.errors import IllegalMove, InvalidOption, NotFound, RowBusy

_statements = beside(__file__)


def redrive(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Send a dead or failed delivery round again with a new budget, in the caller's transaction.

    The row, its key and `step.key` stay; the fence is raised, so that no report of an old
    attempt can land on it. Raises NotFound, IllegalMove for a row in any other state, and
    RowBusy when somebody is at work on it: all write nothing, and none waits.
    """
    row = _acted(tx, _statements.redrive, "redrive", "dead or failed", row_id, by, reason)
    wakes.after_commit(tx, [wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], first=False)])


def release(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Let the sweeps see a row again that one of them failed on and held back, in the caller's transaction.

    Raises NotFound, IllegalMove for a row that is not held, and RowBusy: all write nothing.
    """
    _acted(tx, _statements.release, "release", "held back", row_id, by, reason)


def _acted(tx: Transaction, statement: Statement, act: str, needed: str, row_id: str, by: str, reason: str) -> Row:
    """Run an operator's statement on one row, with who and why. Raises InvalidOption too."""
    row_id = checked_id(row_id)
    for name, text in (("by", by), ("reason", reason)):
        if not isinstance(text, str) or not text.strip():
            raise InvalidOption(act, name, "say who acts and why; both are kept in the journal")
    rows = run(checked(tx), statement, id=row_id, by=clean_text(by, 200), reason=clean_text(reason, 1000))
    if not rows:
        raise NotFound("delivery", row_id)
    row = rows[0]
    if row["busy"]:
        raise RowBusy(act, row_id)
    if not row["done"]:
        raise IllegalMove(act, row_id, row["was"], needed)
    return row
