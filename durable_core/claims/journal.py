"""The history of a row's moves, as a person reads it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from durable_core.database.statements import beside
from durable_core.database.transactions import Steps, Transaction, carried, checked

_statements = beside(__file__)


@dataclass(frozen=True)
class Line:
    """One move. The happy path of a delivery (claim, sent) writes none; the row's own columns tell it."""

    seq: int
    at: datetime
    move: str
    from_state: str | None
    to_state: str | None
    fence: int
    attempt: int | None
    by: str | None
    reason: str | None
    facts: dict[str, Any] | None


def read(tx: Transaction, row_id: str, *, limit: int = 200) -> list[Line]:
    """The newest `limit` lines of a row, oldest first."""
    return carried(checked(tx), lines_of(row_id, limit))


def lines_of(row_id: str, limit: int) -> Steps[list[Line]]:
    """As `read`, in a transaction of any sort."""
    rows = yield _statements.read, {"id": row_id, "limit": limit}
    return [Line(**row) for row in rows]
