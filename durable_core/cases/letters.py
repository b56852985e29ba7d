"""The words of the inbox: an event that waits, one as it stands, a dead letter, and where one goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from durable_core.cases.event import Event

PENDING, EXECUTED, DEAD_LETTERED = "pending", "executed", "dead-lettered"

WORTH_ANOTHER_TRY = frozenset({"case-busy", "execution-failed"})
"""Reasons of dead letters that another delivery of the same event may mend."""


@dataclass(frozen=True)
class Waiting:
    """An event that waits for its end. `tries` is its fence: whoever takes it up raises it, and settles under it."""

    id: str
    tries: int
    event: Event


@dataclass(frozen=True)
class Letter:
    """An event as it stands in the inbox."""

    id: str
    status: str
    reason: str | None
    detail: str | None
    case_id: str | None
    step: str | None
    scope_key: str | None
    execution_id: str | None


@dataclass(frozen=True)
class Address:
    """Where an event goes, as far as that is known."""

    case_id: str | None = None
    step: str | None = None
    scope_key: str | None = None


@dataclass(frozen=True)
class DeadLetter:
    """An event that did not become an execution, with the reason, and the event as it came."""

    id: str
    system: str
    external_id: str
    type: str
    reason: str
    detail: str | None
    case_id: str | None
    step: str | None
    scope_key: str | None
    tries: int
    event: Mapping[str, Any]
    received_at: datetime
    settled_at: datetime


@dataclass(frozen=True)
class Which:
    """Which dead letters: newest first, after that id."""

    system: str | None = None
    case_id: str | None = None
    reason: str | None = None
    after: str | None = None
    limit: int = 50


class Inbox(Protocol):
    """What ingestion knows of storage, in one transaction."""

    def admit(self, event: Event) -> Waiting | None:
        """Write the event down as pending; None where one of its key is there."""
        ...

    def reopen(self, event: Event) -> Waiting | None:
        """Take a dead letter of this key up again, if its reason is worth it; as it first came."""
        ...

    def known(self, event: Event) -> Letter | None:
        """The event of this key, as it stands."""
        ...

    def pending(self, event_id: str, tries: int) -> Waiting | None:
        """The event, if it still waits under this number."""
        ...

    def executed(self, waiting: Waiting, address: Address, execution_id: str) -> bool:
        """It was executed; False where it is another's by now, and nothing was written."""
        ...

    def bury(self, waiting: Waiting, address: Address, reason: str, detail: str) -> bool:
        """It is a dead letter; False where it is another's by now, and nothing was written."""
        ...

    def dead_letters(self, which: Which) -> list[DeadLetter]: ...
