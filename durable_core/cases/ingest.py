"""
Ingestion: an event of another system becomes one execution of a step, or a dead letter with a reason.

The event is written down first, one row per key. Its execution is asked for under the row's id, and commits at most
once; the row becomes `executed` in that very commit. Where a process dies in between, a sweep takes it up again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from durable_core.arguments import clean_text
from durable_core.cases.attempt import Lifecycle
from durable_core.cases.event import Event
from durable_core.cases.inbox import inbox
from durable_core.cases.letters import EXECUTED, Address, Letter, Waiting
from durable_core.cases.passing import passing
from durable_core.cases.request import Lease, Request
from durable_core.cases.store import Correlation, Store, StoreTransaction
from durable_core.database.commits import CommitUnknown
from durable_core.errors import GiveUp
from durable_core.refusals import CaseRefused

log = logging.getLogger("durable.ingest")

DUPLICATE = "duplicate"
UNROUTED, NO_STEP, FAILED = "unrouted", "no-step", "execution-failed"

LONGEST_DETAIL = 1000

ExternalActor = Callable[[Event], Any]
"""Who acts when an event does, as the guards are to see it."""


def external_actor(event: Event) -> dict[str, str]:
    """Who acts when an event does, unless the application says otherwise."""
    return {"system": event.system}


@dataclass(frozen=True)
class Ingested:
    """
    What became of an event: `executed`, `dead-lettered` with a reason, or `duplicate` of one that came before.

    `id` is the row of the event; for a duplicate `was` is how that one stands.
    """

    status: str
    id: str
    reason: str | None = None
    detail: str | None = None
    case_id: str | None = None
    step: str | None = None
    scope_key: str | None = None
    execution_id: str | None = None
    was: str | None = None


class EventTaken(GiveUp):
    """Somebody else took the event up, or settled it, while it was executed: nothing of this execution may commit."""


@dataclass(frozen=True)
class Ingestion:
    """Ingestion on the store of a lifecycle."""

    lifecycle: Lifecycle
    lease: Lease
    actor: ExternalActor = external_actor

    @property
    def store(self) -> Store:
        return self.lifecycle.store

    def ingest(self, event: Event) -> Ingested:
        """Take an event in. See `Cases.ingest`."""
        with self.store.transaction() as transaction:
            found = inbox(transaction)
            # In this order: between the two nobody can make a dead letter of what was not there.
            waiting = found.admit(event) or found.reopen(event)
            known = found.known(event) if waiting is None else None
        if waiting is None:
            assert known is not None, "an event is never deleted"
            return _told(known, status=DUPLICATE, was=known.status)
        return self.run(waiting)

    def resume(self, event_id: str, tries: int) -> Ingested | None:
        """Bring an event to its end that a sweep took up. None where somebody else did, or it has ended."""
        with self.store.transaction() as transaction:
            waiting = inbox(transaction).pending(event_id, tries)
        return None if waiting is None else self.run(waiting)

    def run(self, waiting: Waiting) -> Ingested:
        """Route it, execute the step, and settle it."""
        event = waiting.event
        with self.store.transaction() as transaction:
            address, reason = addressed(event, transaction.correlation(event.system, event.external_id))
        if reason is not None:
            return self._buried(waiting, address, reason, _WHY[reason].format(event=event))

        settled_by: set[str] = set()

        def settle(transaction: StoreTransaction, execution_id: str) -> None:
            if not inbox(transaction).executed(waiting, address, execution_id):
                raise EventTaken(f"event {waiting.id} was taken up by another process")
            settled_by.add(execution_id)

        try:
            assert address.case_id is not None
            assert address.step is not None
            request = Request(
                case_id=address.case_id, step=address.step, scope_key=address.scope_key, actor=self.actor(event),
                input=event.payload, lease=self.lease, request_id=waiting.id, in_commit=settle,
            )  # fmt: skip
            execution_id = self.lifecycle.execute(request).execution_id
        except CaseRefused as refused:
            return self._buried(waiting, address, code_of(refused), str(refused))
        except passing():
            # The task ends, and its claim is left to its lease: the event waits for the sweep.
            raise
        except Exception as error:
            if self.store.is_transient(error) or isinstance(error, CommitUnknown):
                raise
            # A defect around the step, a mapping of actors for one. The event's sender can do nothing about it.
            log.error("event_not_executed", extra={"row_id": waiting.id, "error": type(error).__name__})
            return self._buried(waiting, address, FAILED, f"{type(error).__name__}")
        log.info("event_executed", extra={"row_id": waiting.id})
        if execution_id not in settled_by:
            return self._answered(waiting, address, execution_id)
        return Ingested(EXECUTED, waiting.id, execution_id=execution_id, **vars(address))

    def _answered(self, waiting: Waiting, address: Address, execution_id: str) -> Ingested:
        """Its execution had been committed before: nothing ran now."""
        with self.store.transaction() as transaction:
            found = inbox(transaction)
            found.executed(waiting, address, execution_id)
            known = found.known(waiting.event)
        assert known is not None
        return _told(known)

    def _buried(self, waiting: Waiting, address: Address, reason: str, detail: str) -> Ingested:
        with self.store.transaction() as transaction:
            found = inbox(transaction)
            buried = found.bury(waiting, address, reason, clean_text(detail, LONGEST_DETAIL))
            known = found.known(waiting.event)
        assert known is not None
        if buried:
            log.warning("event_dead_lettered", extra={"row_id": waiting.id, "error_code": reason})
        return _told(known)


_WHY = {
    UNROUTED: "no case is correlated with {event.system} {event.external_id}",
    NO_STEP: "neither the event nor the correlation of {event.system} {event.external_id} names a step",
}


def addressed(event: Event, found: Correlation | None) -> tuple[Address, str | None]:
    """Where the event goes: the event's own words first, then the correlation's; or the reason why nowhere."""
    if found is None:
        return Address(None, event.step, event.scope_key), UNROUTED
    scope_key = event.scope_key if event.scope_key is not None else found.scope_key
    address = Address(found.case_id, event.step or found.step, scope_key)
    return address, None if address.step is not None else NO_STEP


def code_of(refused: CaseRefused) -> str:
    """The reason of a dead letter: `case-busy` for CASE_BUSY."""
    return refused.reason.lower().replace("_", "-")


def _told(letter: Letter, **more: Any) -> Ingested:
    facts = {
        "status": letter.status, "id": letter.id, "reason": letter.reason, "detail": letter.detail,
        "case_id": letter.case_id, "step": letter.step, "scope_key": letter.scope_key,
        "execution_id": letter.execution_id,
    }  # fmt: skip
    return Ingested(**{**facts, **more})
