"""The inbox on Postgres: events of other systems as rows, one per key, and the moves that they make."""

from __future__ import annotations

from uuid_utils.compat import uuid7

from durable_core.cases.event import Event
from durable_core.cases.letters import Address, DeadLetter, Inbox, Letter, Waiting, Which
from durable_core.cases.memory import MemoryTransaction
from durable_core.cases.memory_inbox import MemoryInbox
from durable_core.cases.postgres import PostgresTransaction
from durable_core.cases.store import StoreTransaction
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, Transaction, run

_statements = beside(__file__)


class PostgresInbox:
    """The inbox in a transaction of Postgres."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def admit(self, event: Event) -> Waiting | None:
        return _waiting(
            run(
                self._tx, _statements.admit, id=str(uuid7()), system=event.system, external_id=event.external_id,
                type=event.type, idempotency_key=event.idempotency_key, event=event.text(),
            )
        )  # fmt: skip

    def reopen(self, event: Event) -> Waiting | None:
        return _waiting(run(self._tx, _statements.reopen, idempotency_key=event.idempotency_key))

    def known(self, event: Event) -> Letter | None:
        rows = run(self._tx, _statements.known, idempotency_key=event.idempotency_key)
        return Letter(**rows[0]) if rows else None

    def pending(self, event_id: str, tries: int) -> Waiting | None:
        return _waiting(run(self._tx, _statements.pending, id=event_id, tries=tries))

    def executed(self, waiting: Waiting, address: Address, execution_id: str) -> bool:
        named = _named(waiting, address)
        return bool(run(self._tx, _statements.executed, **named, execution_id=execution_id))

    def bury(self, waiting: Waiting, address: Address, reason: str, detail: str) -> bool:
        return bool(run(self._tx, _statements.bury, **_named(waiting, address), reason=reason, detail=detail))

    def dead_letters(self, which: Which) -> list[DeadLetter]:
        rows = run(
            self._tx, _statements.dead_letters, system=which.system, case_id=which.case_id, reason=which.reason,
            after=which.after, limit=which.limit,
        )  # fmt: skip
        return [DeadLetter(**{**row, "event": Event.read(row["event"])}) for row in rows]


def inbox(transaction: StoreTransaction) -> Inbox:
    """The inbox in a transaction of the store that keeps the cases."""
    if isinstance(transaction, MemoryTransaction):
        return MemoryInbox(transaction)
    assert isinstance(transaction, PostgresTransaction)
    return PostgresInbox(transaction.tx)


def _named(waiting: Waiting, address: Address) -> dict[str, object]:
    return {
        "id": waiting.id, "tries": waiting.tries, "case_id": address.case_id, "step": address.step,
        "scope_key": address.scope_key,
    }  # fmt: skip


def _waiting(rows: list[Row]) -> Waiting | None:
    return Waiting(rows[0]["id"], rows[0]["tries"], Event.kept(rows[0]["event"])) if rows else None
