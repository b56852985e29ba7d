"""What is asked of an execution, what it holds while it runs, and what it has made of its case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from durable_core.cases.declare import Attempts, CaseType, Recorded, Step
from durable_core.cases.guards import Evaluation
from durable_core.cases.store import ClaimRow, StoreTransaction
from durable_core.errors import DefinitionError


@dataclass(frozen=True)
class Lease:
    """How long a claim lasts without a beat, and how often it beats. Three beats or more go into a lease."""

    seconds: float = 30.0
    heartbeat: float = 5.0

    def __post_init__(self) -> None:
        for name, value in (("lease", self.seconds), ("heartbeat", self.heartbeat)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
                raise DefinitionError(f"Cases: the {name} is seconds, above 0 and a day at most; got {value!r}.")
        if not self.heartbeat < self.seconds / 3:
            raise DefinitionError(
                f"Cases: a heartbeat of {self.heartbeat:g} s is not below a third of the lease of {self.seconds:g} s: "
                "one late beat would lose the claim. Make the lease longer."
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be executed, and how. `definition` is another definition than the deployed one, for this run alone."""

    case_id: str
    step: str
    scope_key: str | None = None
    actor: Any = field(default=None, repr=False)
    input: Any = field(default=None, repr=False)
    as_of: datetime | None = None
    retry: Attempts | None = None
    lease: Lease
    request_id: str | None = None
    definition: CaseType[Any] | None = None
    in_commit: Callable[[StoreTransaction, str], object] | None = None
    """A write of the engine's own in the commit, after those of the handler; it is given the execution's id."""


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What an execution that was committed has made of its case."""

    execution_id: str
    case_id: str
    case_type: str
    step: str
    scope_key: str | None
    request_id: str | None
    attempts: int
    guard: Evaluation | None = field(repr=False)
    """The guard as it was evaluated at the claim; None where it was erased since."""
    state: Any = field(repr=False)
    delta: list[dict[str, Any]] | None = field(repr=False)
    """What it changed; None where it was erased since."""
    seq: int
    dormancy: str | None
    ended_at: datetime | None
    claimed_at: datetime
    committed_at: datetime
    answered: bool = False
    """The request had been executed before: this tells of that, and nothing was executed now."""


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A claim on a case, and what was found when it was taken."""

    execution_id: str
    case_type: CaseType[Any]
    step: Step
    scope_key: str | None
    policy: Attempts
    text: str = field(repr=False)
    """The state as it is stored."""
    actor: Recorded = field(repr=False)
    actor_text: str = field(repr=False)
    """Who acts, as the journal keeps it."""
    input: Any = field(repr=False)
    """The JSON of the validated input."""
    guard: Evaluation = field(repr=False)
    row: ClaimRow
