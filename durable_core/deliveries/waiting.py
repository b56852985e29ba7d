"""Why a pending delivery does not run now: everything that stands in its way, as facts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.paused import Pause, pauses
from durable_core.deliveries.read import EXPIRES_SOON_SECONDS, Delivery, get, now
from durable_core.states import DeliveryState

_statements = beside(__file__)


class Cause(StrEnum):
    """What a pending delivery waits for, or is about to meet."""

    HELD = "held"
    PAUSED = "paused"
    BEHIND = "behind"
    EXPIRED = "expired"
    ARGUMENTS = "arguments"
    HANDLER = "handler"
    NOT_DUE = "not_due"
    WORKER = "worker"
    EXPIRES_SOON = "expires_soon"


LETS_CLAIM = frozenset({Cause.ARGUMENTS, Cause.HANDLER, Cause.WORKER, Cause.EXPIRES_SOON})
"""What keeps nobody from claiming the row: the others do."""


@dataclass(frozen=True)
class Ahead:
    """The delivery that has to go first: nothing of its ordering key goes before it."""

    id: str
    kind: str
    state: DeliveryState
    due_at: datetime


@dataclass(frozen=True)
class Wait:
    """
    One thing that a pending delivery waits for. `until` is when that is over by itself; None says that nobody knows.

    Of `EXPIRES_SOON` it is when the delivery expires. `pause` and `ahead` belong to the causes of their names.
    """

    cause: Cause
    until: datetime | None = None
    pause: Pause | None = None
    ahead: Ahead | None = None

    @property
    def blocks(self) -> bool:
        """Whether no worker can claim the row while this lasts."""
        return self.cause not in LETS_CLAIM


def waits(tx: Transaction, row_id: str) -> list[Wait]:
    """
    Everything that a pending delivery waits for, what a person has to act on first; empty for one in another state.

    Where nothing blocks it, a worker that knows its kind and reads its queue can claim it now: `WORKER`, or what the
    last worker found wrong. The hole: outside a REPEATABLE READ transaction the facts may be some milliseconds apart.
    Raises NotFound.
    """
    return waits_of(tx, get(tx, row_id))


def waits_of(tx: Transaction, row: Delivery) -> list[Wait]:
    """The same of a row that was read in this transaction."""
    if row.state is not DeliveryState.PENDING:
        return []
    at = now(tx)
    found = [Wait(Cause.HELD)] if row.held_reason else []
    found += [
        Wait(Cause.PAUSED, pause.until, pause=pause)
        for pause in pauses(tx)
        if pause.name == (row.queue if pause.what == "queue" else row.kind)
    ]
    if row.ordering_key is not None:
        found += [
            Wait(Cause.BEHIND, ahead=Ahead(line["id"], line["kind"], DeliveryState(line["state"]), line["due_at"]))
            for line in run(checked(tx), _statements.ahead, id=row.id)
        ]
    expired = row.expires_at is not None and row.expires_at <= at
    if expired:
        found.append(Wait(Cause.EXPIRED))
    if row.waiting_for is not None:
        found.append(Wait(Cause(row.waiting_for)))
    if row.due_at > at:
        found.append(Wait(Cause.NOT_DUE, row.due_at))
    if not found:
        found.append(Wait(Cause.WORKER))
    if row.expires_at is not None and not expired and row.expires_at <= _soon(row, at):
        found.append(Wait(Cause.EXPIRES_SOON, row.expires_at))
    return found


def _soon(row: Delivery, at: datetime) -> datetime:
    """An expiry up to this instant is worth a word: within the hour, or before the row is due at all."""
    return max(at + timedelta(seconds=EXPIRES_SOON_SECONDS), row.due_at)
