"""What a handler is given beside the state: who acts, by which execution, and what may be written in its commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from durable_core.arguments import canonical, check
from durable_core.cases.store import NewCorrelation, StoreTransaction, misnamed

Write = Callable[[StoreTransaction], object]
"""Something that commits together with the new state."""


class _Own:
    def __repr__(self) -> str:
        return "OWN"


OWN: Final = _Own()
"""The scope key of the step itself, where it has one."""


class CaseContext:
    """
    One attempt at a step. Each attempt has a fresh one: what an attempt that failed had registered is forgotten.

    `key` is the same over all attempts: hand it to the other side as the idempotency key of an external call. It is
    the execution's id, or that of the request under `execute_later`, which is the same over its executions too.
    """

    def __init__(
        self, *, execution_id: str, request_id: str | None, case_id: str, step: str, scope_key: str | None,
        element: Any, actor: Any, input: Any, attempt: int, max_attempts: int,
    ) -> None:  # fmt: skip
        self.execution_id, self.request_id, self.case_id = execution_id, request_id, case_id
        self.step, self.scope_key, self.element = step, scope_key, element
        self.actor, self.input = actor, input
        self.attempt, self.max_attempts = attempt, max_attempts
        self._writes: list[Write] = []
        self._dormancy: str | None = None

    @property
    def key(self) -> str:
        return self.request_id or self.execution_id

    def in_commit(self, write: Callable[[Any], object]) -> None:
        """
        Call `write(session)` inside the commit: what it writes and the new state stand together, or neither does.

        Writes run in the order in which they are registered, and see each other and the new state. They must be
        re-runnable: a commit that the database refused for reasons of its own is tried again. In memory they are
        given the store's transaction in the place of a session.
        """
        if not callable(write):
            raise TypeError(f"in_commit takes a function of the session; got {write!r}")
        self._writes.append(lambda transaction: transaction.effect(write))

    def correlate(
        self, system: str, external_id: str, *, step: str | None = None, scope_key: str | _Own | None = OWN,
        metadata: Any = None,
    ) -> None:  # fmt: skip
        """
        Register, inside the commit, what another system calls this: its events are for this case from then on.

        `scope_key` is the step's own; None means the case as a whole. An identifier that was registered before is
        moved here, and keeps its id. Raises ValueError for what no correlation can have.
        """
        given = None if isinstance(scope_key, _Own) else scope_key
        wrong = misnamed(system=system, external_id=external_id, scope_key=given, step=step)
        if wrong is not None:
            raise ValueError(f"correlate: {wrong[0]}: {wrong[1]}")
        check(metadata)
        registered = NewCorrelation(
            system=system, external_id=external_id, case_id=self.case_id, step=step,
            metadata=json.loads(canonical(metadata)),  # as it is now: the handler may go on with its own
            scope_key=self.scope_key if isinstance(scope_key, _Own) else given,
        )  # fmt: skip
        self._writes.append(lambda transaction: transaction.correlate(registered))

    def end(self) -> None:
        """Make the case dormant with this commit: it hides from sweeps, and can be executed as before."""
        self._dormancy = "ended"

    def reopen(self) -> None:
        """Make it no longer dormant. Of `end` and `reopen` the last one called counts."""
        self._dormancy = "reopened"

    @property
    def writes(self) -> tuple[Write, ...]:
        """What was registered, in its order."""
        return tuple(self._writes)

    @property
    def dormancy(self) -> str | None:
        return self._dormancy
