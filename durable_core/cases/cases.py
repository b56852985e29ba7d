"""`Cases`: the case types of an application on its database, and everything that can be done with their cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from durable_core.cases import guards, later, read
from durable_core.cases.attempt import Lifecycle
from durable_core.cases.clock import Clock, SystemClock
from durable_core.cases.declare import Attempts, CaseType
from durable_core.cases.executions import Execution
from durable_core.cases.guards import NOT_GIVEN, Affordance, Evaluation
from durable_core.cases.ingest import ExternalActor, external_actor
from durable_core.cases.journal import Entry, Head, Seal, Verified, current_key
from durable_core.cases.memory import MemoryStore
from durable_core.cases.outside import Outside
from durable_core.cases.postgres import PostgresStore
from durable_core.cases.read import Case
from durable_core.cases.replay import Replayed
from durable_core.cases.request import Executed, Lease, Request
from durable_core.cases.store import Store
from durable_core.database.connections import Database
from durable_core.errors import DefinitionError


class Cases(Outside):
    """
    Cases of these types in this database: an Engine, a sessionmaker or a `Database`, or a `MemoryStore` in tests.

    Methods that take `tx` work in the caller's transaction and never commit it; `execute` owns its transactions,
    for a handler runs between two of them. `lease` and `heartbeat` are seconds; `clock` is for guards and sleeps,
    never for leases. `journal_key` seals the journal, in the place of the setting `durable_journal_key`.
    `external_actor(event)` is who acts when an event is ingested: its system, `{"system": ...}`, if not given.

    Raises DefinitionError.
    """

    def __init__(
        self,
        engine: Engine | sessionmaker[Session] | Database | MemoryStore,
        types: Iterable[CaseType[Any]],
        *,
        lease: float = 30.0,
        heartbeat: float = 5.0,
        clock: Clock | None = None,
        journal_key: str | bytes | None = None,
        external_actor: ExternalActor = external_actor,
    ) -> None:
        self.types: dict[str, CaseType[Any]] = {}
        for one in types:
            if not isinstance(one, CaseType):
                raise DefinitionError(f"Cases takes case types, in a list; got {one!r}.")
            if one.name in self.types:
                raise DefinitionError(f"Cases: two case types are named {one.name!r}.")
            self.types[one.name] = one
        self.lease = Lease(lease, heartbeat)
        self.store: Store = engine if isinstance(engine, MemoryStore) else PostgresStore(engine)
        if clock is None:
            clock = engine.clock if isinstance(engine, MemoryStore) else SystemClock()
        self._key = journal_key.encode() if isinstance(journal_key, str) else journal_key
        self.lifecycle = Lifecycle(self.store, self.types, clock, lambda: Seal(self._key or current_key()))
        self.external_actor = external_actor
        if isinstance(self.store, PostgresStore):
            for case_type in self.types.values():
                later.carry(case_type, self)

    def create(self, tx: Any, case_type: CaseType[Any] | str, state: Any) -> Case:
        """
        A new case with this state: a value of the type's model, or the JSON of one.

        Raises UnknownCaseType and InvalidState, with nothing written.
        """
        return read.create(self.lifecycle, self.store.within(tx), case_type, state)

    def get(self, tx: Any, case_id: str) -> Case:
        """One case, its state as the type has it. Raises CaseNotFound, UnknownCaseType and InvalidState."""
        return read.get(self.lifecycle, self.store.within(tx), case_id)

    # --- what can be done -------------------------------------------------------------------------

    def affordances(
        self, tx: Any, case_id: str, *, actor: Any, as_of: datetime | None = None, blocked: bool = False
    ) -> tuple[Affordance, ...]:
        """
        What this actor can do with the case now, a step with a scope once for each element: advice, no reservation.

        With `blocked` also what cannot be done, with the reasons. A dormant case lists as any other. Raises what `get`
        does, and BadScopeKey where the keys of a scope do not tell its elements apart.
        """
        return self.affordances_of(self.get(tx, case_id), actor=actor, as_of=as_of, blocked=blocked)

    def affordances_of(
        self, case: Case, *, actor: Any, as_of: datetime | None = None, blocked: bool = False
    ) -> tuple[Affordance, ...]:
        """As `affordances`, of a case that was read already: nothing is read again, and no transaction is needed."""
        case_type = self.types[case.type]
        return guards.affordances(case_type, case.state, actor, as_of or self.lifecycle.clock.now(), blocked=blocked)

    def explain(
        self, tx: Any, case_id: str, step: str, scope_key: str | None = None, *, actor: Any = NOT_GIVEN,
        as_of: datetime | None = None,
    ) -> Evaluation:  # fmt: skip
        """
        Why a step can or cannot be done now, condition by condition.

        Without an actor its permits are not asked; None is an actor. Raises what `get` does, UnknownStep, BadScopeKey.
        """
        case = self.get(tx, case_id)
        at = as_of or self.lifecycle.clock.now()
        return guards.explain(self.types[case.type], case.state, step, scope_key, actor=actor, as_of=at)

    # --- doing it ---------------------------------------------------------------------------------

    def execute(
        self, case_id: str, step: str, *, actor: Any = None, input: Any = None, scope_key: str | None = None,
        as_of: datetime | None = None, retry: Attempts | int | None = None, lease: float | None = None,
        heartbeat: float | None = None,
    ) -> Executed:  # fmt: skip
        """
        Claim the case, run the step, commit what it returns. No transaction is open while the handler runs.

        It owns its transactions: call it outside of any that holds the case's row. A refusal writes nothing:
        CaseNotFound, UnknownCaseType, InvalidState; CaseBusy; UnknownStep, BadScopeKey; InvalidInput;
        StepNotAvailable; the first of them that is so is raised. CaseClaimLost when another execution took the case
        over meanwhile, ExecutionFailed when the attempts are used up or the step cannot work: of both the journal
        tells, and nothing else was written. DefinitionError for a bad `retry`, `lease` or `heartbeat`.

        An infrastructure error comes as it is; a claim that it leaves behind ends with its lease. CommitUnknown when
        nobody can tell whether the commit stands: look at the journal.
        """
        return self.lifecycle.execute(
            Request(
                case_id=read.checked_id(case_id), step=step, scope_key=scope_key, actor=actor, input=input, as_of=as_of,
                retry=None if retry is None else Attempts.of(retry), lease=self.leased(lease, heartbeat),
            )
        )  # fmt: skip

    def leased(self, lease: float | None, heartbeat: float | None) -> Lease:
        """The lease of one call. Raises DefinitionError."""
        if lease is None and heartbeat is None:
            return self.lease
        seconds = self.lease.seconds if lease is None else lease
        return Lease(seconds, min(self.lease.heartbeat, seconds / 4) if heartbeat is None else heartbeat)

    # --- what was done ----------------------------------------------------------------------------

    def journal(
        self, tx: Any, case_id: str, *, step: str | None = None, scope_key: str | None = None,
        execution_id: str | None = None, kinds: Iterable[str] | None = None, after: int = 0, limit: int = 100,
    ) -> list[Entry]:  # fmt: skip
        """
        At most `limit` entries of a case, oldest first, behind the entry numbered `after`.

        The hole: kinds that few entries of many are of, alone, read the journal until the page is full. Raises
        CaseNotFound and InvalidOption.
        """
        return read.journal(
            self.store.within(tx), case_id, step=step, scope_key=scope_key, execution_id=execution_id, kinds=kinds,
            after=after, limit=limit,
        )  # fmt: skip

    def executions(
        self, tx: Any, case_id: str, *, step: str | None = None, scope_key: str | None = None, after: int = 0,
        limit: int = 100,
    ) -> list[Execution]:  # fmt: skip
        """
        At most `limit` executions, oldest first, folded from the journal behind the entry numbered `after`.

        The hole: what an execution that lost its claim says after later claims is not folded in where the page ends
        before it. Raises CaseNotFound and InvalidOption.
        """
        return read.executions(
            self.store.within(tx), case_id, step=step, scope_key=scope_key, after=after, limit=limit
        )  # fmt: skip

    def replay(self, tx: Any, case_id: str, *, after: int = 0, limit: int = 100) -> list[Replayed]:
        """
        Ask the guards of at most `limit` claims again: today's definition, on the state, actor and instant of then.

        A mismatch says which condition has changed; a moment that today's definition cannot address is told with its
        reason, and never raised. Raises CaseNotFound and InvalidOption.
        """
        return read.replay(self.lifecycle, self.store.within(tx), case_id, after=after, limit=limit)

    def verify(self, tx: Any, case_id: str, *, head: Head | None = None) -> Verified:
        """
        Compute every digest of a journal anew, and say what is not as it was written: edited, missing, moved. The
        state of the case is held against its last commit too, unless that was erased.

        `head` is a `Case.head` that was kept elsewhere: it shows a tail that was cut off, and a journal written anew.
        The whole journal is read. Raises CaseNotFound.
        """
        return read.verify(self.store.within(tx), case_id, head=head, key=self._key)

    def erase(self, tx: Any, case_id: str, *, by: str, numbers: Sequence[int] | None = None) -> list[int]:
        """
        Erase a person's data from these entries of the journal, or from all; the numbers of those that had some.

        Actor, input, guard, state, delta and error go; their digest stays, and who erased them when. What the state of
        the case holds is the business of a step. Raises CaseNotFound and InvalidOption.
        """
        return read.erase(self.store.within(tx), case_id, by=by, numbers=numbers)
