"""Cases as people and programs see them: made, read, their journal looked through, verified and erased."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from uuid_utils import uuid7

from durable_core.arguments import canonical
from durable_core.cases.attempt import Lifecycle, loaded
from durable_core.cases.declare import CaseType
from durable_core.cases.executions import Execution, fold
from durable_core.cases.journal import Entry, EntryKind, Head, Verified, Verifier, current_key
from durable_core.cases.replay import Replayed, replayed
from durable_core.cases.store import CaseRow, ClaimRow, StoreTransaction, Wanted
from durable_core.errors import InvalidOption
from durable_core.refusals import CaseNotFound, UnknownCaseType

MOST_PER_PAGE = 1000
VERIFIED_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case as a transaction saw it. `claim` is who is at work on it, or was and let the lease run out."""

    id: str
    type: str
    state: Any = field(repr=False)
    seq: int
    ended_at: datetime | None
    created_at: datetime
    updated_at: datetime
    claim: ClaimRow | None
    head: Head = field(repr=False)
    """How far its journal goes. Kept elsewhere, it shows later that nothing before was cut off."""

    @property
    def ended(self) -> bool:
        return self.ended_at is not None


def checked_id(case_id: object) -> str:
    """A case's id in its one spelling. Raises CaseNotFound for what cannot be an id."""
    try:
        return str(case_id if isinstance(case_id, UUID) else UUID(str(case_id)))
    except ValueError:
        raise CaseNotFound(str(case_id)[:60]) from None


def checked_after(act: str, after: object) -> str | None:
    """The last id of the page before, in its one spelling. Raises InvalidOption for what cannot be one."""
    if after is None:
        return None
    found = _id(after)
    if found is None:
        raise InvalidOption(act, "after", "it is the last id of the page before")
    return found


def create(lifecycle: Lifecycle, tx: StoreTransaction, case_type: CaseType[Any] | str, state: Any) -> Case:
    """A new case of a type, validated. Raises UnknownCaseType and InvalidState, with nothing written."""
    name = case_type if isinstance(case_type, str) else case_type.name
    found = lifecycle.types.get(name)
    if found is None:
        raise UnknownCaseType(name, tuple(lifecycle.types))
    document = found.dump(state)
    row = tx.insert(str(uuid7()), found.name, canonical(document))
    return _case(row, found.load(document), None)


def get(lifecycle: Lifecycle, tx: StoreTransaction, case_id: str) -> Case:
    """One case, its state validated. Raises CaseNotFound, UnknownCaseType and InvalidState."""
    row = _row(tx, case_id)
    return _case(row, loaded(lifecycle.definition(row), row), tx.claim(row.id))


def _row(tx: StoreTransaction, case_id: str) -> CaseRow:
    row = tx.case(checked_id(case_id))
    if row is None:
        raise CaseNotFound(str(case_id))
    return row


def _case(row: CaseRow, state: Any, claim: ClaimRow | None) -> Case:
    return Case(
        id=row.id, type=row.case_type, state=state, seq=row.seq, ended_at=row.ended_at, created_at=row.created_at,
        updated_at=row.updated_at, claim=claim, head=row.head,
    )  # fmt: skip


def journal(
    tx: StoreTransaction, case_id: str, *, step: str | None, scope_key: str | None, execution_id: str | None,
    kinds: Iterable[str] | None, after: int, limit: int,
) -> list[Entry]:  # fmt: skip
    """
    At most `limit` entries of a case, oldest first, behind the entry numbered `after`.

    The hole: kinds that few entries of many are of, alone, read the journal until the page is full. Raises
    CaseNotFound and InvalidOption.
    """
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("journal", "limit", f"a page has 1 to {MOST_PER_PAGE} entries")
    wanted = None if kinds is None else tuple(_kind(kind) for kind in kinds)
    found = _row(tx, case_id)
    if execution_id is not None and (execution_id := _id(execution_id)) is None:
        return []
    return tx.entries(
        Wanted(
            case_id=found.id, after=after, limit=limit, step=step, scope_key=scope_key, execution_id=execution_id,
            kinds=wanted,
        )
    )  # fmt: skip


def executions(
    tx: StoreTransaction, case_id: str, *, step: str | None, scope_key: str | None, after: int, limit: int
) -> list[Execution]:  # fmt: skip
    """
    At most `limit` executions, oldest first, whose claims lie behind the entry numbered `after`.

    The hole: what an execution that lost its claim says after later claims is not folded in where the page ends before.
    """
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("executions", "limit", f"a page has 1 to {MOST_PER_PAGE} executions")
    found: list[Entry] = []
    begun: set[str] = set()
    size = min(MOST_PER_PAGE, limit * 3)
    while True:
        page = journal(
            tx, case_id, step=step, scope_key=scope_key, execution_id=None, kinds=None, after=after, limit=size
        )  # fmt: skip
        for entry in page:
            if entry.entry == EntryKind.CLAIMED:
                if len(begun) == limit:
                    return fold(found)
                begun.add(entry.execution_id)
            if entry.execution_id in begun:
                found.append(entry)
        if len(page) < size:
            return fold(found)
        after = page[-1].number


def replay(lifecycle: Lifecycle, tx: StoreTransaction, case_id: str, *, after: int, limit: int) -> list[Replayed]:
    """The claims of a case, asked again by today's definition. Raises CaseNotFound and InvalidOption."""
    case_type = lifecycle.types.get(_row(tx, case_id).case_type)
    claims = journal(
        tx, case_id, step=None, scope_key=None, execution_id=None, kinds=(EntryKind.CLAIMED,), after=after, limit=limit
    )  # fmt: skip
    return [replayed(case_type, entry) for entry in claims]


def _kind(kind: str) -> EntryKind:
    if kind not in set(EntryKind):
        raise InvalidOption("journal", "kinds", f"there is no kind {kind!r}; there are {', '.join(EntryKind)}")
    return EntryKind(kind)


def _id(given: object) -> str | None:
    """An id in its one spelling: Python reads some that the database refuses, such as a URN."""
    try:
        return str(UUID(str(given)))
    except ValueError:
        return None


def verify(tx: StoreTransaction, case_id: str, *, head: Head | None, key: bytes | None) -> Verified:
    """
    Compute every digest of a journal anew, and say what is not as it was written: edited, missing, moved.

    The state of the case is held against its commits too, as far as they were not erased, and so is its dormancy.
    `head` is one that was kept elsewhere. It reads the whole journal, in pieces, up to the entry that the case counted
    last. Raises CaseNotFound.
    """
    row = _row(tx, case_id)
    seen = Verifier(row.id, key or current_key(), head)
    after = 0
    while entries := tx.entries(Wanted(case_id=row.id, after=after, limit=VERIFIED_AT_ONCE)):
        seen.see(entry for entry in entries if entry.number <= row.journal_count)
        after = entries[-1].number
    beyond = after if after > row.journal_count and _row(tx, case_id).journal_count < after else None
    return seen.end(row.head, row.seq, row.state, row.ended_at, beyond=beyond)


def erase(tx: StoreTransaction, case_id: str, *, by: str, numbers: Sequence[int] | None) -> list[int]:
    """
    Erase a person's data from entries of a journal, or from all: their payload goes, its digest stays.

    The numbers of those that had a payload. What the case's own state holds is the business of a step. Raises
    CaseNotFound and InvalidOption.
    """
    if not isinstance(by, str) or not 1 <= len(by) <= 200:
        raise InvalidOption("erase", "by", "say who erases it, in 1 to 200 characters")
    found = tx.lock(checked_id(case_id))
    if found is None:
        raise CaseNotFound(str(case_id))
    return tx.erase(found.id, numbers, by)
