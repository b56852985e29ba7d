"""A delivery before it is written, and what its caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from durable_core import wakes
from durable_core.arguments import digest
from durable_core.deliveries.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_INTERRUPTIONS,
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE,
    KeyPolicy,
    Placement,
)
from durable_core.states import DeliveryState


@dataclass(frozen=True)
class Ref:
    """
    A delivery by its id. `created` is False when the key already named this row.

    `state` is what this transaction saw; read it anew with `deliveries.get`.
    """

    id: str
    kind: str
    created: bool
    state: DeliveryState = DeliveryState.PENDING
    replaced: bool = False
    """The row was there, waiting, and has this call's arguments now: `key_policy` replace or debounce."""


class Defaults(Protocol):
    """What a delivery has where its options say nothing: a declared kind, or one whose code is not here."""

    @property
    def name(self) -> str: ...

    @property
    def queue(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def max_attempts(self) -> int: ...

    @property
    def max_interruptions(self) -> int: ...

    @property
    def is_strict(self) -> bool: ...


@dataclass(frozen=True)
class Elsewhere:
    """A kind whose code is not in this process."""

    name: str
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    max_interruptions: int = DEFAULT_MAX_INTERRUPTIONS
    is_strict: bool = False


@dataclass(frozen=True)
class New:
    """A row to be: checked, not yet written. `arguments` is their canonical text."""

    kind: str
    queue: str
    priority: int
    arguments: str = field(repr=False)
    max_attempts: int
    max_interruptions: int
    is_strict: bool
    placement: Placement
    trace: str | None = None
    """The context of the span in which it is enqueued, for a link from its attempts."""

    @staticmethod
    def of(kind: Defaults, placement: Placement, arguments: str) -> New:
        return New(
            kind=kind.name,
            queue=placement.queue or kind.queue,
            priority=kind.priority if placement.priority is None else placement.priority,
            arguments=arguments,
            max_attempts=kind.max_attempts,
            max_interruptions=kind.max_interruptions,
            is_strict=kind.is_strict,
            placement=placement,
        )

    @property
    def key(self) -> str | None:
        return self.placement.key

    @property
    def policy(self) -> KeyPolicy:
        return self.placement.key_policy

    def row(self, row_id: str) -> dict[str, object]:
        placed = self.placement
        return {
            "id": row_id,
            "kind": self.kind,
            "queue": self.queue,
            "priority": self.priority,
            "key": self.key,
            "arguments": self.arguments,
            "digest": digest(self.arguments),
            "max_attempts": self.max_attempts,
            "max_interruptions": self.max_interruptions,
            "delay_seconds": placed.delay_seconds,
            "eta": None if placed.eta is None else placed.eta.isoformat(),
            "ordering_key": placed.ordering_key,
            "ordering_strict": self.is_strict and placed.ordering_key is not None,
            "expires_seconds": placed.expires_seconds,
            "expires_at": None if placed.expires_at is None else placed.expires_at.isoformat(),
            "trace": self.trace,
        }

    def hint(self, row_id: str) -> wakes.Hint:
        return wakes.Hint(self.kind, row_id, self.queue, self.priority)

    @property
    def due_now(self) -> bool:
        return self.placement.delay_seconds == 0 and self.placement.eta is None
