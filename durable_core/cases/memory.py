"""
Cases in memory, with rollback and a clock of its own: for the tests of those who write case types.

It keeps the port's promises as Postgres does, and one file of tests is run on both. It is lost with its process, and it
is one writer at a time: what Postgres does about two of them it cannot show.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from uuid_utils import uuid7

from durable_core.cases.clock import Clock, SystemClock
from durable_core.cases.journal import GENESIS, Entry, EntryKind, Payload
from durable_core.cases.store import (
    CaseRow,
    ClaimRow,
    Correlation,
    Looked,
    NewClaim,
    NewCorrelation,
    StateWrite,
    Wanted,
)
from durable_core.errors import UnsupportedTransaction


class MemoryStore:
    """`Cases(MemoryStore(clock), [sale])`; the `tx` of its methods is what `with store.transaction() as tx` gives."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.cases: dict[str, CaseRow] = {}
        self.claims: dict[str, ClaimRow] = {}
        self.journal: dict[str, list[Entry]] = {}
        self.correlations: dict[tuple[str, str], Correlation] = {}
        self.tables: dict[str, list[Any]] = {}
        self.events: dict[str, Any] = {}
        """The rows of the inbox, by their keys."""
        self.ordinal = 0
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextmanager
    def transaction(self) -> Iterator[MemoryTransaction]:
        """Committed at its end, rolled back by an exception. One at a time: another thread waits for its end."""
        if self._holder == threading.get_ident():
            raise RuntimeError(
                "a transaction of this MemoryStore is open in this thread, and another would wait for it for ever: "
                "end it before you execute a step."
            )
        with self._lock:
            self._holder = threading.get_ident()
            transaction = MemoryTransaction(self)
            try:
                yield transaction
            except BaseException:
                transaction.roll_back()
                raise
            finally:
                transaction.open = False
                self._holder = None

    def within(self, tx: Any) -> MemoryTransaction:
        if not isinstance(tx, MemoryTransaction) or tx.store is not self or not tx.open:
            raise UnsupportedTransaction(f"{type(tx).__module__}.{type(tx).__qualname__}")
        return tx

    def keep(self, case_id: str, execution_id: str, lease_seconds: float) -> bool:
        # A beat may come while its own thread has a transaction open: a virtual clock beats where it is moved.
        with nullcontext() if self._holder == threading.get_ident() else self._lock:
            claim = self.claims.get(case_id)
            if claim is None or claim.execution_id != execution_id:
                return False
            now = self.clock.now()
            expires_at = max(claim.expires_at, now + timedelta(seconds=lease_seconds))
            self.claims[case_id] = replace(claim, heartbeat_at=now, expires_at=expires_at)
            return True

    def is_transient(self, error: BaseException) -> bool:
        return False


class MemoryTransaction:
    """
    One transaction in memory. It is what a write of `in_commit` is given.

    `add` and `rows` are tables of the test's own, rolled back with everything else.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.open = store, True
        self._undo: list[Callable[[], object]] = []

    def add(self, table: str, row: Any) -> None:
        """A row in a table of the test's own."""
        rows = self.store.tables.setdefault(table, [])
        rows.append(row)
        self._undo.append(rows.pop)

    def rows(self, table: str) -> tuple[Any, ...]:
        return tuple(self.store.tables.get(table, ()))

    def roll_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def put(self, rows: dict[Any, Any], key: Any, row: Any) -> None:
        """A row under its key, or none; undone by a rollback."""
        missing = key not in rows
        before = rows.get(key)
        self._undo.append(lambda: rows.pop(key, None) if missing else rows.__setitem__(key, before))
        if row is None:
            rows.pop(key, None)
        else:
            rows[key] = row

    # --- reading ----------------------------------------------------------------------------------

    def case(self, case_id: str) -> CaseRow | None:
        return self.store.cases.get(case_id)

    def claim(self, case_id: str) -> ClaimRow | None:
        return self.store.claims.get(case_id)

    def entries(self, wanted: Wanted) -> list[Entry]:
        found = [
            entry
            for entry in self.store.journal.get(wanted.case_id, ())
            if entry.number > wanted.after
            and (wanted.step is None or entry.step == wanted.step)
            and (wanted.scope_key is None or entry.scope_key == wanted.scope_key)
            and (wanted.execution_id is None or entry.execution_id == wanted.execution_id)
            and (wanted.kinds is None or entry.entry in wanted.kinds)
        ]
        return [_copy(entry) for entry in found[: wanted.limit]]

    def correlation(self, system: str, external_id: str) -> Correlation | None:
        found = self.store.correlations.get((system, external_id))
        return None if found is None else copied(found)

    # --- the lifecycle ----------------------------------------------------------------------------

    def insert(self, case_id: str, case_type: str, state: str) -> CaseRow:
        now = self.store.clock.now()
        case = CaseRow(
            id=case_id, case_type=case_type, state=state, seq=0, ended_at=None, journal_count=0, journal_head=GENESIS,
            created_at=now, updated_at=now,
        )  # fmt: skip
        self.put(self.store.cases, case_id, case)
        return case

    def lock(self, case_id: str) -> CaseRow | None:
        return self.case(case_id)

    def look(self, case_id: str, request_id: str | None = None) -> Looked:
        now, claim = self.store.clock.now(), self.claim(case_id)
        answered = [
            entry
            for entry in self.store.journal.get(case_id, ())
            if request_id is not None and entry.request_id == request_id and entry.entry == EntryKind.COMPLETED
        ]
        return Looked(
            claim=claim,
            lapsed=claim is not None and claim.expires_at <= now,
            answered=_copy(answered[0]) if answered else None,
            now=now,
        )

    def completed(self, case_id: str, execution_id: str) -> Entry | None:
        kinds = (EntryKind.COMPLETED,)
        found = self.entries(Wanted(case_id=case_id, execution_id=execution_id, kinds=kinds, limit=1))
        return found[0] if found else None

    def dormant_since(self, case_id: str, number: int) -> datetime | None:
        since: datetime | None = None
        for entry in self.store.journal.get(case_id, ()):
            if entry.number <= number and entry.dormancy is not None:
                since = (since or entry.recorded_at) if entry.dormancy == "ended" else None
        return since

    def written(self, entry_id: str) -> bool:
        return any(entry.id == entry_id for entries in self.store.journal.values() for entry in entries)

    def lapse(self, claim: ClaimRow, entry: Entry) -> None:
        self._append(entry)
        self.put(self.store.claims, claim.case_id, None)

    def take(self, claim: NewClaim, entry: Entry) -> ClaimRow:
        assert claim.case_id not in self.store.claims
        self._append(entry)
        now = self.store.clock.now()
        taken = ClaimRow(
            case_id=claim.case_id, execution_id=claim.execution_id, step=claim.step, scope_key=claim.scope_key,
            request_id=claim.request_id, attempt=1, claimed_at=now, heartbeat_at=now,
            expires_at=now + timedelta(seconds=claim.lease_seconds),
        )  # fmt: skip
        self.put(self.store.claims, claim.case_id, taken)
        return taken

    def append(self, entry: Entry, *, attempt: int | None = None, release: bool = False) -> None:
        self._append(entry)
        claim = self.claim(entry.case_id)
        if claim is None or claim.execution_id != entry.execution_id:
            return
        if release:
            self.put(self.store.claims, entry.case_id, None)
        elif attempt is not None:
            self.put(self.store.claims, entry.case_id, replace(claim, attempt=attempt))

    def write_state(self, write: StateWrite) -> None:
        case = self.store.cases[write.case_id]
        changed = replace(case, state=write.state, seq=write.seq, ended_at=write.ended_at, updated_at=write.at)
        self.put(self.store.cases, case.id, changed)

    def effect(self, write: Callable[[Any], object]) -> None:
        write(self)

    def settle(self, entry: Entry, write: StateWrite | None) -> None:
        if write is not None:
            self.write_state(write)
        self._append(entry)
        self.put(self.store.claims, entry.case_id, None)

    def _append(self, entry: Entry) -> None:
        case = self.store.cases[entry.case_id]
        assert entry.number == case.journal_count + 1
        self.store.ordinal += 1
        entries = self.store.journal.setdefault(entry.case_id, [])
        entries.append(replace(entry, ordinal=self.store.ordinal))
        self._undo.append(entries.pop)
        self.put(self.store.cases, case.id, replace(case, journal_count=entry.number, journal_head=entry.chain))

    # --- beside it --------------------------------------------------------------------------------

    def erase(self, case_id: str, numbers: Sequence[int] | None, by: str) -> list[int]:
        entries = self.store.journal.get(case_id, [])
        erased: list[int] = []
        now: datetime = self.store.clock.now()
        for index, entry in enumerate(entries):
            if entry.erased_at is None and (numbers is None or entry.number in numbers):
                self._undo.append(partial(entries.__setitem__, index, entry))
                entries[index] = replace(entry, payload=Payload(), salt=None, erased_at=now, erased_by=by)
                erased.append(entry.number)
        return erased

    def correlate(self, correlation: NewCorrelation) -> Correlation:
        now, named = self.store.clock.now(), (correlation.system, correlation.external_id)
        before = self.store.correlations.get(named)
        made = Correlation(
            **vars(correlation), id=before.id if before else str(uuid7()),
            created_at=before.created_at if before else now, updated_at=now,
        )  # fmt: skip
        self.put(self.store.correlations, named, copied(made))
        return made


def copied(correlation: Correlation) -> Correlation:
    """With metadata of its own, as they come back from JSON: what one caller changes, no other one sees."""
    return replace(correlation, metadata=json.loads(json.dumps(correlation.metadata)))


def _copy(entry: Entry) -> Entry:
    """An entry keeps the values that it made of its texts: whoever changes them changes those of his own copy."""
    return replace(entry)
