"""The registry: which kinds this process knows. Handlers are declared with no app at hand, as `shared_task` does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from durable_core.errors import DefinitionError, UnknownHandler

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,199}\Z")
RESERVED_PREFIX = "durable."
"""Names of the sweeps' own tasks; no kind may start so."""


class Kind(Protocol):
    """What the registry needs of a declared object."""

    @property
    def name(self) -> str: ...

    @property
    def queue(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]:
        """The name, and those it had before: rows and hints may still carry them."""
        ...


def checked_name(name: str) -> str:
    """A kind's name that is safe in a Celery task name, a log line and a metric label."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise DefinitionError(
            f"kind {name!r}: use letters, digits, '_', '-' and '.', at most 200, starting with a letter or '_'."
        )
    if name.startswith(RESERVED_PREFIX):
        raise DefinitionError(f"kind {name!r}: names starting with {RESERVED_PREFIX!r} belong to the sweeps.")
    return name


K = TypeVar("K", bound=Kind)


class Registry(Generic[K]):
    """
    Kinds by name. A name is declared once; the second time is a definition error.

    So is a name that a registry `beside` it has: each kind becomes a Celery task of its name.
    """

    def __init__(self, beside: Sequence[Registry[Any]] = ()) -> None:
        self._kinds: dict[str, K] = {}
        self._listeners: list[Callable[[K], None]] = []
        self._beside = tuple(beside)
        for other in self._beside:
            other._beside = (*other._beside, self)

    def add(self, kind: K) -> None:
        for name in kind.names:
            if name in self._kinds or any(name in other for other in self._beside):
                raise DefinitionError(f"kind {name!r} is declared twice; a kind names one handler.")
        self._kinds.update(dict.fromkeys(kind.names, kind))
        for listener in self._listeners:
            listener(kind)

    def when_added(self, listener: Callable[[K], None]) -> None:
        """Call this for every kind declared from now on."""
        self._listeners.append(listener)

    def remove(self, name: str) -> None:
        """Forget a kind; for tests that declare their own."""
        kind = self._kinds.get(name)
        for known in kind.names if kind is not None else ():
            self._kinds.pop(known, None)

    def get(self, name: str) -> K:
        """Raises UnknownHandler when this process does not know the kind."""
        try:
            return self._kinds[name]
        except KeyError:
            raise UnknownHandler(name) from None

    def find(self, name: str) -> K | None:
        return self._kinds.get(name)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(kind for name, kind in self._kinds.items() if name == kind.name))

    def __contains__(self, name: object) -> bool:
        return name in self._kinds


deliveries: Registry[Any] = Registry()
"""The delivery kinds that this process knows (`DeliveryKind` objects)."""

plan_steps: Registry[Any] = Registry(beside=(deliveries,))
"""The steps of plans that this process knows (`StepKind` objects)."""

operations: Registry[Any] = Registry(beside=(deliveries, plan_steps))
"""The operations that this process knows (`OperationKind` objects)."""

case_types: Registry[Any] = Registry()
"""The case types that this process knows (`CaseType` objects). No Celery task has their name: `case.<name>` has."""

CONTRACTS: Mapping[str, Registry[Any]] = {"delivery": deliveries, "plan": plan_steps, "operation": operations}
"""The registry of each contract that workers carry out."""


def known() -> Iterator[Kind]:
    """Every kind that this process knows, whatever its contract."""
    for registry in CONTRACTS.values():
        yield from registry
