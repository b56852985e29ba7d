"""Looking at operations: one, a page, and what is alive. A look at one whose poll is due has it polled."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from durable_core import kinds, secrets, wakes
from durable_core.claims.operate import checked_id as spelled
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, Transaction, checked, run
from durable_core.deliveries.read import COUNT_LIMIT, MOST_PER_PAGE
from durable_core.errors import InvalidOption, NotFound
from durable_core.states import OPERATION_TERMINAL, OperationState

_statements = beside(__file__)

REMEMBERED = 1000
"""Reads of so many operations are remembered by a process, so that each drives one poll at a time."""


@dataclass(frozen=True)
class Operation:
    """
    One row, as it was read. Instants are aware datetimes by the database's clock.

    The ids and words of the other side are for the code that talks to it, and in no repr; `public` leaves them out.
    """

    id: str
    kind: str
    queue: str
    priority: int
    key: str | None
    arguments: dict[str, Any] = field(repr=False)
    trigger: str
    started_by: str
    one_in_flight: bool
    finds: bool
    patience_seconds: float
    every_seconds: float
    state: OperationState
    issued_at: datetime | None
    external_ids: list[str] | None = field(repr=False)
    external_statuses: dict[str, dict[str, str]] | None = field(repr=False)
    polls: int
    polled_at: datetime | None
    patience_until: datetime | None
    outage_at: datetime | None
    start_before: datetime
    fence: int
    settled_fence: int
    owner: str | None
    owner_pid: int | None
    owner_host: str | None
    claimed_at: datetime | None
    beat_at: datetime | None
    lease_expires_at: datetime | None
    deadline_at: datetime | None
    due_at: datetime
    waiting_for: str | None
    held_reason: str | None
    error_code: str | None
    error_message: str | None
    canceled_by: str | None
    canceled_reason: str | None
    created_at: datetime
    finished_at: datetime | None

    @property
    def external_operations(self) -> int | None:
        """How many operations the other side has for it; None while that is not known."""
        return None if self.external_ids is None else len(self.external_ids)

    @property
    def ended(self) -> bool:
        """Whether nothing of it changes any more."""
        return self.state in OPERATION_TERMINAL

    def public(self) -> dict[str, Any]:
        """What anybody may see, for an answer over HTTP: of the other side a count alone, no arguments, no owner."""
        return {
            "id": self.id, "kind": self.kind, "state": self.state.value, "trigger": self.trigger,
            "started_by": self.started_by, "external_operations": self.external_operations,
            "error": None if self.error_code is None else {"code": self.error_code, "message": self.error_message},
            "created_at": _spelled(self.created_at), "finished_at": _spelled(self.finished_at),
        }  # fmt: skip

    def as_json(self, *, arguments: bool = False) -> dict[str, Any]:
        """The row for operators, with instants as ISO 8601 in UTC: of the other side's ids a count, secrets masked."""
        facts = {**asdict(self), "external_operations": self.external_operations}
        del facts["external_ids"], facts["external_statuses"], facts["arguments"]
        if arguments:
            facts["arguments"] = self.shown_arguments
        return {name: _spelled(value) if isinstance(value, datetime) else value for name, value in facts.items()}

    @property
    def shown_arguments(self) -> dict[str, Any]:
        """The arguments with secrets masked: those annotated `Secret[...]`, and whatever is named like one."""
        kind = kinds.operations.find(self.kind)
        try:
            hidden = frozenset[str]() if kind is None else kind.signature.hidden
        except Exception:  # a type that its module never declared: the kind is broken, and its rows are to be read
            hidden = frozenset()
        return secrets.masked(self.arguments, hidden)


@dataclass(frozen=True)
class Live:
    """How many wait for their call, run, and are overdue: silent past their patience, or not issued in time."""

    queued: int
    running: int
    overdue: int


def checked_id(row_id: str) -> str:
    """An operation's id in its one spelling. Raises NotFound for what cannot be an id."""
    return spelled(row_id, "operation")


def get(tx: Transaction, row_id: str) -> Operation:
    """
    The operation as this transaction sees it. Raises NotFound.

    Where its poll is due, the look has it polled: by a hint, at most one for each poll's interval, sent without a wait.
    Nothing is written in the transaction.
    """
    rows = run(checked(tx), _statements.get, id=checked_id(row_id))
    if not rows:
        raise NotFound("operation", row_id)
    if rows[0]["poll_is_due"]:
        _drive(rows[0])
    return _operation(rows[0])


def page(
    tx: Transaction, *, state: str | None = None, kind: str | None = None, key: str | None = None,
    after: str | None = None, limit: int = 50,
) -> list[Operation]:  # fmt: skip
    """
    At most `limit` operations, newest first; `after` is the last id of the page before.

    The hole: a filter that matches few rows of a large table reads until the page is full. Raises InvalidOption for
    an unknown state or a limit outside 1 to 1,000.
    """
    if state is not None and state not in set(OperationState):
        raise InvalidOption("page", "state", f"there is no state {state!r}; there are {', '.join(OperationState)}")
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("page", "limit", f"a page has 1 to {MOST_PER_PAGE} rows")
    rows = run(
        checked(tx), _statements.page, state=state, kind=kind, key=key, limit=limit,
        after=None if after is None else checked_id(after),
    )  # fmt: skip
    return [_operation(row) for row in rows]


def live(tx: Transaction) -> Live:
    """What is alive; counts stop at COUNT_LIMIT."""
    return Live(**run(checked(tx), _statements.live, count_limit=COUNT_LIMIT)[0])


# --- reads drive polls ---------------------------------------------------------------------------

_driven: OrderedDict[str, float] = OrderedDict()
_guard = threading.Lock()


def _drive(row: Row) -> None:
    """Offer one hint, unless this process offered one less than a poll's interval ago."""
    carrier = wakes.carrier()
    if carrier is None:
        return
    now = time.monotonic()
    with _guard:
        if now - _driven.get(row["id"], -row["every_seconds"]) < row["every_seconds"]:
            return
        _driven[row["id"]] = now
        _driven.move_to_end(row["id"])
        while len(_driven) > REMEMBERED:
            _driven.popitem(last=False)
    wakes.offer([wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], first=False)])


def _operation(row: Row) -> Operation:
    facts = {name: row[name] for name in _NAMES}
    # As text, for the host may have its driver read JSON in its own way.
    for name in ("arguments", "external_ids", "external_statuses"):
        facts[name] = None if facts[name] is None else json.loads(facts[name])
    facts["state"] = OperationState(facts["state"])
    return Operation(**facts)


_NAMES = tuple(one.name for one in fields(Operation))


def _spelled(instant: datetime | None) -> str | None:
    return None if instant is None else instant.astimezone(UTC).isoformat().replace("+00:00", "Z")
