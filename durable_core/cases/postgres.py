"""The port on Postgres: what each statement beside it is given, and what its rows are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import psycopg
from psycopg.errors import DivisionByZero
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, PendingRollbackError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker
from uuid_utils import uuid7

from durable_core.arguments import canonical
from durable_core.cases.journal import Entry, EntryKind, Payload
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
from durable_core.claims.claim import LEAST_ANSWER_SECONDS, LOCK_WAIT
from durable_core.claims.session import ended, joined_session, leave_if_forked
from durable_core.database.commits import CommitUnknown, answer_lost
from durable_core.database.connections import Database, raw
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, Transaction, checked, is_infrastructure, run
from durable_core.errors import EffectEscaped

_statements = beside(__file__)

ANSWER_SECONDS = max(LEAST_ANSWER_SECONDS, 10.0)
"""How long an answer to COMMIT, or to a heartbeat, is waited for; a third of the default lease."""

COMMITS_WITH_ITS_ENTRY = "guard_case_commit"
"""The guard that refuses a COMMIT of a state without its entry, by the name it gives in its error."""


class PostgresTransaction:
    """One transaction on Postgres: ours, or the caller's."""

    def __init__(self, tx: Transaction, sessions: sessionmaker[Session] | None = None) -> None:
        self._tx, self._sessions = tx, sessions
        self.session: Session | None = None
        self._locked: Row = {}
        self._pid = os.getpid()

    @property
    def tx(self) -> Transaction:
        """For the statements of the rooms beside this one: events, migrations."""
        return self._tx

    # --- reading ----------------------------------------------------------------------------------

    def case(self, case_id: str) -> CaseRow | None:
        rows = run(self._tx, _statements.case_of, id=case_id)
        return CaseRow(**rows[0]) if rows else None

    def claim(self, case_id: str) -> ClaimRow | None:
        rows = run(self._tx, _statements.claim_of, id=case_id)
        return ClaimRow(**rows[0]) if rows else None

    def entries(self, wanted: Wanted) -> list[Entry]:
        of: dict[str, object] = {
            "case_id": wanted.case_id, "after": wanted.after, "limit": wanted.limit,
            "kinds": None if wanted.kinds is None else [str(kind) for kind in wanted.kinds],
        }  # fmt: skip
        if wanted.execution_id is not None:
            statement = _statements.numbers_of_execution
            of |= {"execution_id": wanted.execution_id, "step": wanted.step, "scope_key": wanted.scope_key}
        elif wanted.step is not None:
            statement = _statements.numbers_of_step
            of |= {"step": wanted.step, "scope_key": wanted.scope_key}
        elif wanted.scope_key is not None:
            statement = _statements.numbers_of_scope
            of |= {"scope_key": wanted.scope_key}
        else:
            statement = _statements.numbers
        numbers = [row["number"] for row in run(self._tx, statement, **of)]
        return self._numbered(wanted.case_id, numbers) if numbers else []

    def _numbered(self, case_id: str, numbers: Sequence[int]) -> list[Entry]:
        return [_entry(row) for row in run(self._tx, _statements.entries, case_id=case_id, numbers=list(numbers))]

    def correlation(self, system: str, external_id: str) -> Correlation | None:
        rows = run(self._tx, _statements.correlation, system=system, external_id=external_id)
        return correlation_of(rows[0]) if rows else None

    # --- the lifecycle ----------------------------------------------------------------------------

    def insert(self, case_id: str, case_type: str, state: str) -> CaseRow:
        return CaseRow(**run(self._tx, _statements.insert, id=case_id, case_type=case_type, state=state)[0])

    def lock(self, case_id: str) -> CaseRow | None:
        rows = run(self._tx, _statements.lock, id=case_id, lock_timeout=LOCK_WAIT)
        if not rows:
            return None
        self._locked = rows[0]
        return CaseRow(**{name: rows[0][name] for name in CaseRow.__dataclass_fields__})

    def look(self, case_id: str, request_id: str | None = None) -> Looked:
        (row,) = run(self._tx, _statements.look, id=case_id, request_id=request_id)
        return Looked(
            claim=None if row["case_id"] is None else _claim(row),
            lapsed=row["lapsed"],
            answered=None if row["answered"] is None else self._numbered(case_id, [row["answered"]])[0],
            now=row["now"],
        )

    def completed(self, case_id: str, execution_id: str) -> Entry | None:
        kinds = (EntryKind.COMPLETED,)
        found = self.entries(Wanted(case_id=case_id, execution_id=execution_id, kinds=kinds, limit=1))
        return found[0] if found else None

    def dormant_since(self, case_id: str, number: int) -> datetime | None:
        since: datetime | None = run(self._tx, _statements.dormant_since, case_id=case_id, number=number)[0]["since"]
        return since

    def written(self, entry_id: str) -> bool:
        return bool(run(self._tx, _statements.written, id=entry_id)[0]["written"])

    def lapse(self, claim: ClaimRow, entry: Entry) -> None:
        run(self._tx, _statements.lapse, **_parameters(entry, "error"))

    def take(self, claim: NewClaim, entry: Entry) -> ClaimRow:
        told = _parameters(entry, "actor", "input", "guard", "state") | {"as_of": entry.as_of}
        return ClaimRow(**run(self._tx, _statements.take, **told, lease_seconds=claim.lease_seconds)[0])

    def append(self, entry: Entry, *, attempt: int | None = None, release: bool = False) -> None:
        told = _parameters(entry, "actor", "error")
        run(self._tx, _statements.append, **told, next_attempt=attempt, release=release)

    def write_state(self, write: StateWrite) -> None:
        run(self._tx, _statements.write_state, **vars(write))

    def effect(self, write: Callable[[Any], object]) -> None:
        try:
            try:
                write(self._joined())
            finally:
                leave_if_forked(self._pid)
            self._joined().flush()
        except (psycopg.Error, DBAPIError) as error:
            refused = getattr(error, "orig", error)
            if isinstance(refused, psycopg.Error) and refused.diag.constraint_name == COMMITS_WITH_ITS_ENTRY:
                raise EffectEscaped(self._locked["id"], "case") from error
            raise

    def _joined(self) -> Session:
        """The session of user code on our transaction, under the host's own class and its own bound on locks."""
        assert self._sessions is not None
        if self.session is None:
            assert isinstance(self._tx, Connection)
            run(self._tx, _statements.unbound, was=self._locked["lock_timeout_was"])
            self.session = joined_session(self._sessions, self._tx)
        return self.session

    def settle(self, entry: Entry, write: StateWrite | None) -> None:
        state: dict[str, object] = dict.fromkeys(("state", "seq", "ended_at", "at"))
        if write is not None:
            state = {name: value for name, value in vars(write).items() if name != "case_id"}
        told = _parameters(entry, "actor", "delta") | {"entry_seq": entry.seq, "dormancy": entry.dormancy}
        try:
            run(self._tx, _statements.settle, **told, **state, writes=write is not None, xid=self._locked["xid"])
        except Exception as error:
            # Pending: a COMMIT by the connection was refused, and the write did not let that pass.
            if isinstance(error, PendingRollbackError) or isinstance(getattr(error, "orig", error), DivisionByZero):
                raise EffectEscaped(entry.case_id, "case") from error
            raise

    # --- beside it --------------------------------------------------------------------------------

    def erase(self, case_id: str, numbers: Sequence[int] | None, by: str) -> list[int]:
        told = None if numbers is None else list(numbers)
        rows = run(self._tx, _statements.erase, case_id=case_id, numbers=told, by=by)
        return sorted(row["number"] for row in rows)

    def correlate(self, correlation: NewCorrelation) -> Correlation:
        metadata = None if correlation.metadata is None else canonical(correlation.metadata)
        told = vars(correlation) | {"id": str(uuid7()), "metadata": metadata}
        return correlation_of(run(self._tx, _statements.correlate, **told)[0])


class PostgresStore:
    """Cases on Postgres: an Engine, a sessionmaker or a Database says where."""

    def __init__(self, where: Engine | sessionmaker[Session] | Database) -> None:
        if isinstance(where, sessionmaker):
            where = Database(sessions=where)
        self.database = where if isinstance(where, Database) else Database(where)
        self._beating: tuple[int, Database] | None = None

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        connection = self.database.connect()
        transaction: PostgresTransaction | None = None
        try:
            connection.begin()
            transaction = PostgresTransaction(connection, self.database.sessions)
            yield transaction
            if transaction.session is not None:
                transaction.session.flush()
            self._commit(connection, transaction.session)
        finally:
            if transaction is not None and transaction.session is not None:
                with suppress(
                    psycopg.Error, SQLAlchemyError
                ):  # its connection may be gone; the first error is the news
                    Session.close(transaction.session)
            ended(connection)

    def _commit(self, connection: Connection, session: Session | None) -> None:
        driver = raw(connection)
        try:
            with self.database.watch.over(driver, ANSWER_SECONDS):
                if session is None:
                    connection.commit()
                else:
                    Session.commit(session)
        except Exception as error:
            if driver.closed or answer_lost(error):
                raise CommitUnknown(
                    "the answer to a COMMIT on a case was lost, and what became of it could not be asked: look at the "
                    "journal of the case, whose claim ends with its lease."
                ) from error
            raise

    def within(self, tx: Any) -> PostgresTransaction:
        return PostgresTransaction(checked(tx))

    def keep(self, case_id: str, execution_id: str, lease_seconds: float) -> bool:
        # Never from the host's pool: where that is exhausted, heartbeats must still go out.
        if self._beating is None or self._beating[0] != os.getpid():
            self._beating = (os.getpid(), self.database.background().bounded(ANSWER_SECONDS))
        told: dict[str, object] = {"case_id": case_id, "execution_id": execution_id, "lease_seconds": lease_seconds}
        with self._beating[1].driver() as driver:
            return bool(run(driver, _statements.keep, **told)[0]["still_mine"])

    def is_transient(self, error: BaseException) -> bool:
        return is_infrastructure(error)


def _claim(row: Row) -> ClaimRow:
    return ClaimRow(**{name: row[name] for name in ClaimRow.__dataclass_fields__})


_PLAIN = [name for name in Entry.__dataclass_fields__ if name not in ("entry", "payload")]


def _entry(row: Row) -> Entry:
    payload = Payload(*(row[name] for name in Payload._fields))
    return Entry(entry=EntryKind(row["entry"]), payload=payload, **{name: row[name] for name in _PLAIN})


_APPENDED = (
    "case_id", "number", "id", "execution_id", "request_id", "attempt", "step", "scope_key", "salt", "payload_digest",
    "digest", "chain", "keyed", "recorded_at",
)  # fmt: skip


def _parameters(entry: Entry, *payload: str) -> dict[str, object]:
    """What a statement names of an entry: what every kind has, and these parts of its payload."""
    told: dict[str, object] = {name: getattr(entry, name) for name in _APPENDED}
    return told | {"entry": str(entry.entry)} | {name: getattr(entry.payload, name) for name in payload}


def correlation_of(row: Mapping[str, Any]) -> Correlation:
    """A correlation of its row, whose metadata are text."""
    metadata = None if row["metadata"] is None else json.loads(row["metadata"])
    return Correlation(**{**row, "metadata": metadata})


__all__ = ["PostgresStore", "PostgresTransaction", "correlation_of"]
