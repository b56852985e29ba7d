"""Looking over cases: a page of them, how many wait, and what an id names. Reads only, and no state is read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.find import MOST, Found, beginning, named
from durable_core.deliveries.read import COUNT_LIMIT, MOST_PER_PAGE
from durable_core.errors import InvalidOption

_statements = beside(__file__)


@dataclass(frozen=True)
class Line:
    """One case of a page, without its state. The claim on it, live or lapsed, is told by its step."""

    id: str
    case_type: str
    seq: int
    ended_at: datetime | None
    entries: int
    created_at: datetime
    updated_at: datetime
    claimed_step: str | None
    claimed_scope_key: str | None
    claimed_until: datetime | None


@dataclass(frozen=True)
class Counts:
    """How many cases are claimed, how many of these by a lease that is over, and what waits in the inbox."""

    claimed: int
    lapsed: int
    pending_events: int
    dead_letters: int


def page(
    tx: Transaction,
    *,
    case_type: str | None = None,
    dormant: bool = False,
    after: str | None = None,
    limit: int = 50,
) -> list[Line]:
    """At most `limit` cases, newest first; `after` is the last id of the page before. Raises InvalidOption."""
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("page", "limit", f"a page has 1 to {MOST_PER_PAGE} cases")
    last = None if after is None else named(after)
    if after is not None and last is None:
        raise InvalidOption("page", "after", "it is the id of a case")
    rows = run(checked(tx), _statements.page, case_type=case_type, dormant=dormant, after=last, limit=limit)
    return [Line(**row) for row in rows]


def counts(tx: Transaction) -> Counts:
    """What is at work and what waits; each count stops at COUNT_LIMIT."""
    return Counts(**run(checked(tx), _statements.counts, limit=COUNT_LIMIT)[0])


def find(tx: Transaction, text: str) -> list[Found]:
    """
    The cases that a text names: by the id of one or its beginning, of an execution or an event of it, or by what
    another system calls it. A request's id names its delivery, whose arguments have the case.
    """
    text = text.strip()
    found: list[Found] = []
    if (row_id := named(text)) is not None:
        found += _rows(tx, _statements.by_id, "id", id=row_id)
        found += _rows(tx, _statements.by_execution, "execution", id=row_id)
        found += _rows(tx, _statements.by_event, "event", id=row_id)
    elif (first := beginning(text)) is not None:
        found += _rows(
            tx, _statements.by_beginning, "beginning of an id", most=MOST,
            first=str(UUID(first.ljust(32, "0"))), last=str(UUID(first.ljust(32, "f"))),
        )  # fmt: skip
    return found + _rows(tx, _statements.by_external_id, "external id", external_id=text, most=MOST)


def _rows(tx: Transaction, statement: Statement, by: str, **parameters: object) -> list[Found]:
    return [Found(by=by, **row) for row in run(checked(tx), statement, **parameters)]
