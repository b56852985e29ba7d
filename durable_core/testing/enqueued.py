"""Looking at what the code under test enqueued, inside of the test's own transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from durable_core import kinds
from durable_core.arguments import canonical
from durable_core.database.transactions import Transaction, checked
from durable_core.deliveries.declare import DeliveryKind, Prepared
from durable_core.deliveries.options import Placement
from durable_core.deliveries.read import Delivery, page
from durable_core.kinds import checked_name
from durable_core.states import DeliveryState

Wanted: TypeAlias = "DeliveryKind[..., Any] | Prepared[...] | str"
"""A kind, a kind with options that its row must have, or the name of a kind whose code is elsewhere."""

SHOWN = 10
"""Rows that a message tells of."""

NEAR = timedelta(seconds=1)
"""A countdown is counted from the insert, which is a moment before or after the row's own instant."""


def assert_enqueued(tx: Transaction, kind: Wanted, /, *args: Any, **kwargs: Any) -> list[Delivery]:
    """
    The pending deliveries of this kind that this transaction sees, with these arguments; the oldest first.

    Arguments left out may be anything. With `kind.options(queue=…, key=…, priority=…, countdown=…, eta=…)` the row must
    have these too. `(row,) = assert_enqueued(…)` says that there is exactly one.

    Raises AssertionError where there is none, with what each row of this kind has instead; and InvalidArguments for an
    argument that the handler does not take.
    """
    __tracebackhide__ = True
    asked = _Asked.of(kind, args, kwargs)
    found = [row for row in _pending(tx, asked.kind) if not asked.differences(row)]
    if not found:
        raise AssertionError(f"no pending delivery of {asked}\n{_instead(tx, asked)}")
    return found[::-1]


def refute_enqueued(tx: Transaction, kind: Wanted, /, *args: Any, **kwargs: Any) -> None:
    """
    That there is none of what `assert_enqueued` would find.

    Raises AssertionError with those there are, and InvalidArguments as `assert_enqueued` does.
    """
    __tracebackhide__ = True
    asked = _Asked.of(kind, args, kwargs)
    found = [row for row in _pending(tx, asked.kind) if not asked.differences(row)]
    if found:
        shown = "\n".join(f"  {_told(row)}" for row in found[:SHOWN])
        raise AssertionError(f"{len(found)} pending of {asked}\n{shown}")


@dataclass(frozen=True)
class _Asked:
    """What a row must have. An argument's text is None where it must be the default, which is not stored."""

    kind: str
    arguments: Mapping[str, str | None]
    placement: Placement

    @staticmethod
    def of(kind: Wanted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Asked:
        placement = kind.placement if isinstance(kind, Prepared) else Placement()
        name = kind.kind.name if isinstance(kind, Prepared) else kind if isinstance(kind, str) else kind.name
        declared = kinds.deliveries.find(checked_name(name))
        if declared is not None:
            return _Asked(declared.name, declared.signature.some(args, kwargs), placement)
        if args:
            raise TypeError(f"kind {name!r} is not declared here, so its arguments need their names")
        return _Asked(name, {key: canonical(value) for key, value in kwargs.items()}, placement)

    def differences(self, row: Delivery) -> list[str]:
        """What this row has otherwise, in words."""
        said = []
        for name, text in self.arguments.items():
            stored = canonical(row.arguments[name]) if name in row.arguments else None
            if stored != text:
                said.append(f"{name} is {'not given' if stored is None else stored}")
        where = self.placement
        for option, wanted, has in (
            ("queue", where.queue, row.queue), ("key", where.key, row.key), ("priority", where.priority, row.priority),
        ):  # fmt: skip
            if wanted is not None and wanted != has:
                said.append(f"{option} is {has!r}")
        if where.eta is not None and row.due_at != where.eta:
            said.append(f"due at {row.due_at.isoformat()}")
        delay = row.due_at - row.created_at
        if where.delay_seconds and abs(delay - timedelta(seconds=where.delay_seconds)) > NEAR:
            said.append(f"due {delay.total_seconds():g} s after it was enqueued")
        return said

    def __str__(self) -> str:
        where = self.placement
        said = [f"{name}={'its default' if text is None else text}" for name, text in self.arguments.items()]
        said += [
            f"{option} {wanted!r}"
            for option, wanted in (("queue", where.queue), ("key", where.key), ("priority", where.priority))
            if wanted is not None
        ]
        said += [f"countdown {where.delay_seconds:g} s"] if where.delay_seconds else []
        said += [f"eta {where.eta.isoformat()}"] if where.eta is not None else []
        return f"{self.kind} with {', '.join(said)}" if said else self.kind


def _pending(tx: Transaction, kind: str) -> Iterator[Delivery]:
    """The newest first, however many there are."""
    last: str | None = None
    while rows := page(checked(tx), kind=kind, state=DeliveryState.PENDING, after=last, limit=1000):
        yield from rows
        last = rows[-1].id


def _instead(tx: Transaction, asked: _Asked) -> str:
    """What is there instead, for the message."""
    rows = page(tx, kind=asked.kind, limit=SHOWN)
    if rows:
        return "of this kind there are, the newest first:\n" + "\n".join(
            f"  {_told(row)}{_unlike(asked.differences(row))}" for row in rows
        )
    others = Counter(row.kind for row in page(tx, state=DeliveryState.PENDING, limit=100))
    listed = ", ".join(f"{kind} ({count})" for kind, count in sorted(others.items()))
    return f"of this kind there is none; pending are {listed or 'none of others either'}"


def _unlike(differences: list[str]) -> str:
    return f"\n    unlike: {'; '.join(differences)}" if differences else ""


def _told(row: Delivery) -> str:
    given = ", ".join(f"{name}={canonical(value)}" for name, value in row.arguments.items())
    key = f", key {row.key!r}" if row.key is not None else ""
    return f"{row.id} {row.state}, queue {row.queue!r}{key}, due {row.due_at.isoformat()}: ({given})"
