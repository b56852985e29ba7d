"""The journal over all rows or of one, newest first, a page at a time. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.read import MOST_PER_PAGE
from durable_core.errors import InvalidOption

_statements = beside(__file__)

LOOKED_AT = 10_000
"""Lines that one page reads at most: a rare move is found over several pages, never by one long reading."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal, and the row it is of. `kind` is None for what is no delivery, such as a schedule."""

    seq: int
    at: datetime
    row_id: str
    contract: str
    kind: str | None
    move: str
    from_state: str | None
    to_state: str | None
    fence: int
    attempt: int | None
    by: str | None
    reason: str | None
    facts: dict[str, Any] | None


@dataclass(frozen=True)
class History:
    """
    A page of the journal. `next_after` is None once nothing older can match.

    `looked_at` is how many lines were read for it. A page may be short, or empty, and have a next one: LOOKED_AT lines
    were read, and older ones may match.
    """

    entries: list[Entry]
    next_after: int | None
    looked_at: int


def history(
    tx: Transaction,
    *,
    row_id: str | None = None,
    since_seconds: float | None = None,
    move: str | None = None,
    after: int | None = None,
    limit: int = 50,
) -> History:
    """
    The newest lines, of one row or of all; `after` is the `next_after` of the page before.

    Lines are numbered as they are written: of two transactions that overlap, the later may have the smaller number.
    Raises InvalidOption for a limit outside 1 to 1,000.
    """
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("history", "limit", f"a page has 1 to {MOST_PER_PAGE} rows")
    rows = run(
        checked(tx), _statements.newest, id=row_id, since_seconds=since_seconds, move=move, after=after, limit=limit,
        looked_at=LOOKED_AT,
    )  # fmt: skip
    bounds = rows[0]
    entries = [
        Entry(**{name: row[name] for name in Entry.__dataclass_fields__}) for row in rows if row["seq"] is not None
    ]
    if len(entries) == limit:
        further: int | None = entries[-1].seq
    else:
        further = bounds["last_seq"] if bounds["looked"] == LOOKED_AT and bounds["last_is_within"] else None
    return History(entries, further, bounds["looked"])
