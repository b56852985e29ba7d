"""
Looking at deliveries: one, a page, and what waits in each queue. Reads only, and every answer is bounded.

What is read to find it is not always: see `page`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from durable_core import kinds, secrets
from durable_core.claims.operate import checked_id as spelled
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, Transaction, checked, run
from durable_core.errors import InvalidOption, NotFound
from durable_core.states import DeliveryState

_statements = beside(__file__)

COUNT_LIMIT = 10_000
"""Counts stop here, so that looking costs the same with any backlog; a count at the limit means "or more"."""
MOST_PER_PAGE = 1000
EXPIRES_SOON_SECONDS = 3600.0
"""A waiting delivery that expires within so long is worth a word: something may still be done about it."""
EXPIRED_LATELY_SECONDS = 24 * 3600.0

FEW = frozenset({DeliveryState.PROCESSING, DeliveryState.DEAD, DeliveryState.FAILED})
"""States with an index of their own and, in a healthy system, few rows."""


@dataclass(frozen=True)
class Delivery:
    """
    One row, as it was read. Instants are aware datetimes by the database's clock.

    `arguments` are those of the row, secrets too, and are in no repr; `shown_arguments` are for people.
    """

    id: str
    kind: str
    queue: str
    priority: int
    key: str | None
    ordering_key: str | None
    arguments: dict[str, Any] = field(repr=False)
    state: DeliveryState
    due_at: datetime
    expires_at: datetime | None
    fence: int
    settled_fence: int
    attempts: int
    interruptions: int
    shutdowns: int
    snoozes: int
    max_attempts: int
    max_interruptions: int
    owner: str | None
    owner_pid: int | None
    owner_host: str | None
    claimed_at: datetime | None
    beat_at: datetime | None
    lease_expires_at: datetime | None
    deadline_at: datetime | None
    waiting_for: str | None
    held_reason: str | None
    error_code: str | None
    error_message: str | None
    result: Any
    created_at: datetime
    finished_at: datetime | None
    discarded_at: datetime | None

    @property
    def failures(self) -> int:
        """Failed attempts of the present budget."""
        running = 1 if self.state is DeliveryState.PROCESSING else 0
        succeeded = 1 if self.state is DeliveryState.SENT else 0
        return self.attempts - self.interruptions - self.shutdowns - self.snoozes - running - succeeded

    @property
    def shown_arguments(self) -> dict[str, Any]:
        """
        The arguments with secrets masked: those annotated `Secret[...]`, and whatever is named like one.

        Where the kind's code is not loaded, or its types cannot be read, the names alone decide.
        """
        kind = kinds.deliveries.find(self.kind)
        try:
            hidden = frozenset[str]() if kind is None else kind.signature.hidden
        except Exception:  # a type that its module never declared: the kind is broken, and its rows are to be read
            hidden = frozenset()
        return secrets.masked(self.arguments, hidden)

    def as_json(self, *, arguments: bool = True) -> dict[str, Any]:
        """The row with its instants as ISO 8601 in UTC, secrets masked; without its payload where that stays unseen."""
        facts = {**asdict(self), "arguments": self.shown_arguments, "failures": self.failures}
        if not arguments:
            del facts["arguments"]
        return {
            name: value.astimezone(UTC).isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value
            for name, value in facts.items()
        }


@dataclass(frozen=True)
class QueueLine:
    """
    What waits and runs in one queue; counts stop at COUNT_LIMIT.

    `paused`, `behind` (another of its ordering key), `waiting_for_handler`, `waiting_for_arguments` and `held` count
    among the due rows that were read, the longest due first: of a longer backlog they say nothing about the rest. One
    row may be in several. `retrying` counts, among the later ones that were read, those that have failed before.
    """

    queue: str
    oldest_due_at: datetime | None
    due: int
    later: int
    processing: int
    paused: int
    behind: int
    waiting_for_handler: int
    waiting_for_arguments: int
    held: int
    retrying: int


@dataclass(frozen=True)
class Expiries:
    """
    Waiting rows that expire within the hour, and rows that expired within the last `expired_within_seconds`: a day.

    `expired` counts among the COUNT_LIMIT rows that were done with last: where more were in a day, it is how
    long these took.
    """

    expiring: int
    expired: int
    expired_within_seconds: float


def checked_id(row_id: str) -> str:
    """A delivery's id in its one spelling. Raises NotFound for what cannot be an id."""
    return spelled(row_id, "delivery")


def get(tx: Transaction, row_id: str) -> Delivery:
    """The delivery as this transaction sees it. Raises NotFound."""
    rows = run(checked(tx), _statements.get, id=checked_id(row_id))
    if not rows:
        raise NotFound("delivery", row_id)
    return _delivery(rows[0])


def page(
    tx: Transaction,
    *,
    state: str | None = None,
    kind: str | None = None,
    queue: str | None = None,
    key: str | None = None,
    after: str | None = None,
    limit: int = 50,
) -> list[Delivery]:
    """
    At most `limit` deliveries, newest first; `after` is the last id of the page before.

    The hole: a filter that no index serves, such as a key or a kind alone, reads rows until
    the page is full, of a large table many. Nothing here ends that but the caller's own
    statement timeout; the command line sets one.
    Raises InvalidOption for an unknown state or a limit outside 1 to 1,000.
    """
    if state is not None and state not in set(DeliveryState):
        raise InvalidOption("page", "state", f"there is no state {state!r}; there are {', '.join(DeliveryState)}")
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("page", "limit", f"a page has 1 to {MOST_PER_PAGE} rows")
    wanted = {
        "state": state, "kind": kind, "queue": queue, "key": key, "limit": limit,
        "after": None if after is None else checked_id(after),
    }  # fmt: skip
    ids = [row["id"] for row in run(checked(tx), _statements.few, **wanted)] if state in FEW else None
    rows = run(checked(tx), _statements.page, ids=ids, **wanted)
    return [_delivery(row) for row in rows]


_estimate = Statement("estimate", f"explain (format json) {_statements.matching.source}")


def estimate(
    tx: Transaction,
    *,
    state: str | None = None,
    kind: str | None = None,
    queue: str | None = None,
    key: str | None = None,
) -> int:
    """
    About how many deliveries `page` would find in all, by the planner's statistics: no row is read.

    The hole: it is as good as the last ANALYZE of the table.
    """
    (row,) = run(checked(tx), _estimate, state=state, kind=kind, queue=queue, key=key)
    (plan,) = row.values()
    return int(plan[0]["Plan"]["Plan Rows"])


def queues(tx: Transaction) -> list[QueueLine]:
    """What waits and runs, queue by queue, the one with the oldest due row first."""
    return [QueueLine(**row) for row in run(checked(tx), _statements.queues, count_limit=COUNT_LIMIT)]


def ended(tx: Transaction) -> dict[str, int]:
    """How many deliveries are dead and failed, and not discarded; counts stop at COUNT_LIMIT."""
    return dict(run(checked(tx), _statements.ended, count_limit=COUNT_LIMIT)[0])


def expiries(tx: Transaction) -> Expiries:
    """How many deliveries are about to lose their use, and how many lately did."""
    (row,) = run(
        checked(tx), _statements.expiries, count_limit=COUNT_LIMIT, soon_seconds=EXPIRES_SOON_SECONDS,
        lately_seconds=EXPIRED_LATELY_SECONDS,
    )  # fmt: skip
    return Expiries(**row)


def now(tx: Transaction) -> datetime:
    """The database's clock."""
    instant: datetime = run(checked(tx), _statements.now)[0]["now"]
    return instant


def _delivery(row: Row) -> Delivery:
    facts = dict(row)
    facts["arguments"] = json.loads(facts["arguments"])
    facts["result"] = None if facts["result"] is None else json.loads(facts["result"])
    facts["state"] = DeliveryState(facts["state"])
    return Delivery(**facts)
