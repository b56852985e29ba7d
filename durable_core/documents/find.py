"""Finding what an id names among the documents, deleted ones included. Reads only."""

from __future__ import annotations

from uuid import UUID

from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.find import MOST, Found, beginning, named

_statements = beside(__file__)


def find(tx: Transaction, text: str) -> list[Found]:
    """By an id or its beginning; at most MOST."""
    text = text.strip()
    if (row_id := named(text)) is not None:
        return _rows(tx, _statements.by_id, "id", id=row_id)
    if (first := beginning(text)) is not None:
        return _rows(
            tx, _statements.by_beginning, "beginning of an id", most=MOST,
            first=str(UUID(first.ljust(32, "0"))), last=str(UUID(first.ljust(32, "f"))),
        )  # fmt: skip
    return []


def _rows(tx: Transaction, statement: Statement, by: str, **parameters: object) -> list[Found]:
    return [Found(by=by, **row) for row in run(checked(tx), statement, **parameters)]
