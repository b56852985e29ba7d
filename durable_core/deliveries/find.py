"""Finding what an id names: a delivery by its id, its key or the line it stands in; or a schedule. Reads only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import UUID

from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Transaction, checked, run

_statements = beside(__file__)

SHORTEST = 8
"""Characters of the beginning of an id: fewer name half of all rows."""

MOST = 20
"""Rows that are named at most; more than so many are no answer."""

_BEGINNING = re.compile(rf"[0-9a-f]{{{SHORTEST},31}}\Z")


@dataclass(frozen=True)
class Found:
    """
    One row that a text names. `by` is what of it the text is: its id, its key, and so on.

    `what` is `delivery`, `plan`, `operation` or `schedule`; a schedule has no state and no queue.
    """

    what: str
    id: str
    by: str
    kind: str
    queue: str | None = None
    state: str | None = None


def find(tx: Transaction, text: str) -> list[Found]:
    """
    Everything that this text names, at most MOST of each way of naming.

    An id, with or without dashes; the beginning of one; a `step.key`, which is `kind:id`; an idempotency key, of any
    kind; an ordering key; the id of a schedule. The id of the Celery task that carried the first
    hint is the row's own. The holes: later hints have task ids that nobody keeps, and by its ordering key a delivery is
    found only while it waits or runs, or holds up its line.
    """
    text = text.strip()
    row_id = named(text)
    found: list[Found] = []
    if row_id is not None:
        found += _rows(tx, _statements.by_id, "id", id=row_id)
        found += _rows(tx, _statements.by_schedule, "id", id=row_id)
    elif (start := beginning(text)) is not None:
        found += _rows(
            tx, _statements.by_beginning, "beginning of an id", most=MOST,
            first=str(UUID(start.ljust(32, "0"))), last=str(UUID(start.ljust(32, "f"))),
        )  # fmt: skip
    elif (after_colon := named(text.rpartition(":")[2])) is not None:
        found += [
            one
            for one in _rows(tx, _statements.by_id, "step.key", id=after_colon)
            if one.kind == text.rpartition(":")[0]
        ]
    # A trace id belongs here, once a row keeps the one of its caller.
    found += _rows(tx, _statements.by_key, "key", key=text, most=MOST)
    found += _rows(tx, _statements.by_ordering_key, "ordering key", key=text, most=MOST)
    return found


def named(text: str) -> str | None:
    """The id that this text is, in its one spelling."""
    try:
        return str(UUID(text)) if len(text) in (32, 36) else None
    except ValueError:
        return None


def beginning(text: str) -> str | None:
    """The beginning of an id that this text is, without dashes."""
    text = text.lower().replace("-", "")
    return text if _BEGINNING.match(text) else None


def is_short(text: str) -> bool:
    """Whether this text looks like the beginning of an id, and is too short for one."""
    return re.fullmatch(rf"[0-9a-f]{{1,{SHORTEST - 1}}}", text.strip().lower().replace("-", "")) is not None


def _rows(tx: Transaction, statement: Statement, by: str, **parameters: object) -> list[Found]:
    return [Found(by=by, **row) for row in run(checked(tx), statement, **parameters)]
