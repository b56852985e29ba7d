"""Where the lifecycle is tested: Postgres, its clock moved, and a store in memory. One file of tests runs on both."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from durable_core.cases.cases import Cases
from durable_core.cases.clock import VirtualClock
from durable_core.cases.declare import CaseType
from durable_core.cases.memory import MemoryStore
from durable_core.testing import MovableClock

TABLES = ("cases", "case_claims", "case_journal", "case_correlations", "case_events")


class Crash(BaseException):
    """The process dies in the handler: nothing of ours catches it."""


class DatabaseClock(VirtualClock):
    """Moves the clock of the database as it moves itself."""

    def __init__(self, movable: MovableClock) -> None:
        movable.freeze()
        self._movable = movable
        super().__init__(movable.now())

    def _to(self, instant) -> None:
        self._movable.advance((instant - self._now).total_seconds())
        super()._to(instant)


class World:
    """What a test of the lifecycle works with, wherever cases are kept."""

    clock: VirtualClock

    def __init__(self) -> None:
        self.count = 0

    def type(self, state: Any = None, **how: Any) -> CaseType[Any]:
        self.count += 1
        return CaseType(f"test.case_{self.count}", state=state, registered=False, **how)

    def cases(self, *types: CaseType[Any], **how: Any) -> Cases:
        return Cases(self.where, types, clock=self.clock, **how)

    def create(self, cases: Cases, state: Any, type_: CaseType[Any] | None = None) -> str:
        with self.begin() as tx:
            return cases.create(tx, type_ or next(iter(cases.types)), state).id

    def get(self, cases: Cases, case_id: str):
        with self.begin() as tx:
            return cases.get(tx, case_id)

    def journal(self, cases: Cases, case_id: str, **how: Any):
        with self.begin() as tx:
            return cases.journal(tx, case_id, limit=1000, **how)

    def kinds(self, cases: Cases, case_id: str) -> list[tuple[str, int]]:
        return [(str(entry.entry), entry.attempt) for entry in self.journal(cases, case_id)]


class OnPostgres(World):
    name = "postgres"

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.where = engine
        self.clock = DatabaseClock(MovableClock(engine))

    @contextmanager
    def begin(self):
        with Session(self.where) as session, session.begin():
            yield session

    def write(self, tx: Session, note: str) -> None:
        """A write of the host's, into a table of its own."""
        tx.execute(text("insert into effects (note) values (:note)"), {"note": note})

    def read(self, tx: Session) -> list[str]:
        return list(tx.scalars(text("select note from effects order by id")))

    def state_in(self, tx: Session, case_id: str):
        return tx.scalar(text("select state from durable.cases where id = :id"), {"id": case_id})

    def everything(self):
        """All that is stored of cases, the numbers that were drawn included."""
        with self.where.connect() as tx:
            rows = {
                table: tx.scalars(text(f"select t::text from durable.{table} t order by 1")).all() for table in TABLES
            }
            drawn = tx.scalar(
                text("select last_value from pg_sequences where sequencename = 'case_journal_ordinal_seq'")
            )
        return rows, drawn


class InMemory(World):
    name = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.where = MemoryStore(self.clock)

    def begin(self):
        return self.where.transaction()

    def write(self, tx, note: str) -> None:
        tx.add("effects", note)

    def read(self, tx) -> list[str]:
        return list(tx.rows("effects"))

    def state_in(self, tx, case_id: str):
        return json.loads(tx.case(case_id).state)

    def everything(self):
        store = self.where
        journal = {case_id: tuple(entries) for case_id, entries in store.journal.items() if entries}
        return dict(store.cases), dict(store.claims), journal, dict(store.correlations), store.ordinal
