"""The inbox in memory, with the moves that the one in Postgres has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from uuid_utils.compat import uuid7

from durable_core.cases.event import Event
from durable_core.cases.letters import (
    DEAD_LETTERED,
    EXECUTED,
    PENDING,
    WORTH_ANOTHER_TRY,
    Address,
    DeadLetter,
    Letter,
    Waiting,
    Which,
)
from durable_core.cases.memory import MemoryTransaction


@dataclass(frozen=True)
class _Row:
    id: str
    event: str
    received_at: datetime
    tries: int = 1
    status: str = PENDING
    reason: str | None = None
    detail: str | None = None
    address: Address = field(default_factory=Address)
    execution_id: str | None = None
    settled_at: datetime | None = None


class MemoryInbox:
    """The inbox in a transaction of a MemoryStore; rolled back with it."""

    def __init__(self, transaction: MemoryTransaction) -> None:
        self._tx = transaction
        self._rows: dict[str, _Row] = transaction.store.events

    def admit(self, event: Event) -> Waiting | None:
        key = event.idempotency_key
        if key in self._rows:
            return None
        row = _Row(str(uuid7()), event.text(), self._tx.store.clock.now())
        self._tx.put(self._rows, key, row)
        return _waiting(row)

    def reopen(self, event: Event) -> Waiting | None:
        row = self._rows.get(event.idempotency_key)
        if row is None or row.status != DEAD_LETTERED or row.reason not in WORTH_ANOTHER_TRY:
            return None
        again = _Row(row.id, row.event, row.received_at, row.tries + 1)
        self._tx.put(self._rows, event.idempotency_key, again)
        return _waiting(again)

    def known(self, event: Event) -> Letter | None:
        row = self._rows.get(event.idempotency_key)
        if row is None:
            return None
        return Letter(
            id=row.id, status=row.status, reason=row.reason, detail=row.detail, execution_id=row.execution_id,
            **vars(row.address),
        )  # fmt: skip

    def pending(self, event_id: str, tries: int) -> Waiting | None:
        found = self._waits(event_id, tries)
        return None if found is None else _waiting(found[1])

    def executed(self, waiting: Waiting, address: Address, execution_id: str) -> bool:
        return self._ends(waiting, status=EXECUTED, address=address, execution_id=execution_id)

    def bury(self, waiting: Waiting, address: Address, reason: str, detail: str) -> bool:
        return self._ends(waiting, status=DEAD_LETTERED, address=address, reason=reason, detail=detail)

    def dead_letters(self, which: Which) -> list[DeadLetter]:
        found = []
        for row in sorted(self._rows.values(), key=lambda row: row.id, reverse=True):
            event = Event.kept(row.event)
            if (
                row.status == DEAD_LETTERED
                and which.system in (None, event.system)
                and which.case_id in (None, row.address.case_id)
                and which.reason in (None, row.reason)
                and (which.after is None or row.id < which.after)
            ):
                assert row.reason is not None
                assert row.settled_at is not None
                found.append(
                    DeadLetter(
                        id=row.id, system=event.system, external_id=event.external_id, type=event.type,
                        reason=row.reason, detail=row.detail, tries=row.tries, event=Event.read(row.event),
                        received_at=row.received_at, settled_at=row.settled_at, **vars(row.address),
                    )
                )  # fmt: skip
        return found[: which.limit]

    def _waits(self, event_id: str, tries: int) -> tuple[str, _Row] | None:
        for key, row in self._rows.items():
            if (row.id, row.tries, row.status) == (event_id, tries, PENDING):
                return key, row
        return None

    def _ends(self, waiting: Waiting, **how: Any) -> bool:
        found = self._waits(waiting.id, waiting.tries)
        if found is None:
            return False
        key, row = found
        self._tx.put(self._rows, key, replace(row, settled_at=self._tx.store.clock.now(), **how))
        return True


def _waiting(row: _Row) -> Waiting:
    return Waiting(row.id, row.tries, Event.kept(row.event))
