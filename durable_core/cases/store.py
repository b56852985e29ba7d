"""
The port: all that the lifecycle of cases knows of storage.

Two keep it: Postgres, and a store in memory for the tests of those who use cases. States and payloads cross it as JSON
texts, so that what is stored is what was digested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from durable_core.arguments import Unfit, check
from durable_core.cases.journal import Entry, EntryKind, Head


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """A case as it is stored; `state` is the JSON text of its document."""

    id: str
    case_type: str
    state: str = field(repr=False)
    seq: int
    ended_at: datetime | None
    journal_count: int
    journal_head: str
    created_at: datetime
    updated_at: datetime

    @property
    def head(self) -> Head:
        return Head(self.journal_count, self.journal_head)


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """Who acts on a case, for as long as its lease and its own settling allow. `execution_id` is the fence."""

    case_id: str
    execution_id: str
    step: str
    scope_key: str | None
    request_id: str | None
    attempt: int
    claimed_at: datetime
    heartbeat_at: datetime
    expires_at: datetime


@dataclass(frozen=True, kw_only=True)
class NewClaim:
    """A claim that is about to be taken; the store stamps it by its own clock."""

    case_id: str
    execution_id: str
    step: str
    scope_key: str | None
    request_id: str | None
    lease_seconds: float


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a look under the case's lock found: the claim on it, and the store's own instant."""

    claim: ClaimRow | None
    lapsed: bool
    """Whether the lease of that claim has run out by the store's clock; one that ends this very instant has."""
    answered: Entry | None
    """The `completed` entry of the request that was asked about."""
    now: datetime

    def held_by(self, execution_id: str) -> bool:
        return self.claim is not None and self.claim.execution_id == execution_id


@dataclass(frozen=True, kw_only=True)
class StateWrite:
    """What a commit makes of a case."""

    case_id: str
    state: str = field(repr=False)
    seq: int
    ended_at: datetime | None
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which entries of a case, in order; `after` is a number."""

    case_id: str
    after: int = 0
    limit: int = 100
    step: str | None = None
    scope_key: str | None = None
    execution_id: str | None = None
    kinds: tuple[EntryKind, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """What another system calls a thing of ours, and the case that its events are for."""

    id: str
    system: str
    external_id: str
    case_id: str
    scope_key: str | None
    step: str | None
    metadata: Any
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class NewCorrelation:
    """A correlation that is about to be registered, anew or in the place of another of its identifier."""

    system: str
    external_id: str
    case_id: str
    scope_key: str | None = None
    step: str | None = None
    metadata: Any = None


LONGEST_NAMES = {"system": 200, "external_id": 1000, "scope_key": 1000, "step": 200}
"""Of a correlation, in bytes; the first two stand in an index."""


def misnamed(**names: object) -> tuple[str, str] | None:
    """Which of these names no correlation can have, and why; `scope_key` and `step` may be None."""
    for option, name in names.items():
        most = LONGEST_NAMES[option]
        if name is None and option in ("scope_key", "step"):
            continue
        if not isinstance(name, str):
            return option, f"it is text of 1 to {most} bytes; got {type(name).__name__}"
        try:
            check(name)
        except Unfit as unfit:
            return option, f"it is text of 1 to {most} bytes; {unfit}"
        if not 0 < len(name.encode()) <= most:
            return option, f"it is text of 1 to {most} bytes"
    return None


class StoreTransaction(Protocol):
    """One transaction: everything written in it stands, or nothing does."""

    # --- reading, without a lock ------------------------------------------------------------------

    def case(self, case_id: str) -> CaseRow | None: ...

    def claim(self, case_id: str) -> ClaimRow | None:
        """The claim on a case, live or lapsed."""
        ...

    def entries(self, wanted: Wanted) -> list[Entry]: ...

    def correlation(self, system: str, external_id: str) -> Correlation | None: ...

    # --- the lifecycle ----------------------------------------------------------------------------

    def insert(self, case_id: str, case_type: str, state: str) -> CaseRow:
        """A new case, with seq 0 and an empty journal."""
        ...

    def lock(self, case_id: str) -> CaseRow | None:
        """The case, locked until this transaction ends; as it is once the lock is granted."""
        ...

    def look(self, case_id: str, request_id: str | None = None) -> Looked:
        """What is so under the lock. To be asked after `lock` has returned."""
        ...

    def completed(self, case_id: str, execution_id: str) -> Entry | None:
        """The `completed` entry of an execution."""
        ...

    def dormant_since(self, case_id: str, number: int) -> datetime | None:
        """Since when the case was dormant once this entry was written."""
        ...

    def written(self, entry_id: str) -> bool:
        """Whether an entry of this id is in a journal."""
        ...

    def lapse(self, claim: ClaimRow, entry: Entry) -> None:
        """Take away a claim whose lease is over, and append the entry that says so."""
        ...

    def take(self, claim: NewClaim, entry: Entry) -> ClaimRow:
        """Claim the case, and append the entry that says so."""
        ...

    def append(self, entry: Entry, *, attempt: int | None = None, release: bool = False) -> None:
        """
        Append an entry. If its execution still holds the claim: the number of the attempt that comes next, or release
        the claim.
        """
        ...

    def write_state(self, write: StateWrite) -> None:
        """What the commit makes of the case, for the writes of user code to see; `settle` follows."""
        ...

    def effect(self, write: Callable[[Any], object]) -> None:
        """A write of user code, in this transaction."""
        ...

    def settle(self, entry: Entry, write: StateWrite | None) -> None:
        """
        Append `completed` and end the claim, after `write_state`, or with the state that is given here.

        Raises EffectEscaped when user code ended the transaction behind our back.
        """
        ...

    # --- beside it --------------------------------------------------------------------------------

    def erase(self, case_id: str, numbers: Sequence[int] | None, by: str) -> list[int]:
        """Erase the payload of these entries, or of all; the numbers of those that had one. Under the case's lock."""
        ...

    def correlate(self, correlation: NewCorrelation) -> Correlation:
        """Register an identifier; one that is there is moved, and keeps its id."""
        ...


class Store(Protocol):
    """Where cases are kept."""

    def transaction(self) -> AbstractContextManager[StoreTransaction]:
        """
        A short transaction of our own: committed at its end, rolled back by an exception.

        Raises CommitUnknown when the answer to COMMIT was lost.
        """
        ...

    def within(self, tx: Any) -> StoreTransaction:
        """The caller's own transaction, which we neither commit nor roll back. Raises UnsupportedTransaction."""
        ...

    def keep(self, case_id: str, execution_id: str, lease_seconds: float) -> bool:
        """Make the lease of a claim last so long from now; False when somebody else has the case."""
        ...

    def is_transient(self, error: BaseException) -> bool:
        """Whether an error says something about the machine room only: then the transaction may be tried again."""
        ...
