"""What a person does to a delivery: each act names who and why, and is journalled with the move itself."""

from __future__ import annotations

from durable_core import wakes
from durable_core.arguments import clean_text
from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.read import checked_id
from durable_core.errors import IllegalMove, InvalidOption, NotFound

_statements = beside(__file__)


def redrive(tx: Transaction, row_id: str, *, by: str, reason: str) -> None:
    """
    Send a dead or failed delivery round again with a new budget, in the caller's transaction.

    The row, its key and `step.key` stay; the fence is raised, so that no report of an old
    attempt can land on it. Raises NotFound, and IllegalMove for a row in any other state:
    both write nothing.
    """
    row_id = checked_id(row_id)
    for name, text in (("by", by), ("reason", reason)):
        if not isinstance(text, str) or not text.strip():
            raise InvalidOption("redrive", name, "say who acts and why; both are kept in the journal")
    rows = run(checked(tx), _statements.redrive, id=row_id, by=clean_text(by, 200), reason=clean_text(reason, 1000))
    if not rows:
        raise NotFound("delivery", row_id)
    row = rows[0]
    if row["state"] is None:
        raise IllegalMove("redrive", row_id, row["was"], "dead or failed")
    wakes.after_commit(tx, [wakes.Hint(row["kind"], row_id, row["queue"], row["priority"], first=False)])
