"""What `Cases` does for others than a caller who waits: other systems, workers, and runs over all cases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

from sqlalchemy import Engine

from durable_core.cases import correlations, later, read
from durable_core.cases.attempt import Lifecycle
from durable_core.cases.declare import Attempts, CaseType
from durable_core.cases.event import Event
from durable_core.cases.inbox import inbox
from durable_core.cases.ingest import ExternalActor, Ingested, Ingestion
from durable_core.cases.letters import DeadLetter, Which
from durable_core.cases.migrate import BATCH, Migrated, Migration, Plan, Progress
from durable_core.cases.postgres import PostgresStore
from durable_core.cases.request import Lease, Request
from durable_core.cases.store import Correlation, Store
from durable_core.cases.system import SystemRun, settled
from durable_core.database.connections import Database
from durable_core.database.transactions import Transaction
from durable_core.deliveries.options import Options
from durable_core.deliveries.rows import Ref
from durable_core.errors import InvalidOption, UnsupportedTransaction
from durable_core.refusals import CaseNotFound, UnknownCaseType, UnknownStep

MOST_PER_PAGE = 1000


class Outside:
    """The rooms of `Cases` that other systems, workers and migrations come through."""

    store: Store
    types: dict[str, CaseType[Any]]
    lease: Lease
    lifecycle: Lifecycle
    external_actor: ExternalActor
    _elsewhere: tuple[Engine, Self] | None = None

    # --- through Celery ---------------------------------------------------------------------------

    def execute_later(
        self, tx: Transaction, case_id: str, step: str, *, scope_key: str | None = None, actor: Any = None,
        input: Any = None, **options: Unpack[Options],
    ) -> Ref:  # fmt: skip
        """
        Have a worker execute a step: the request commits or vanishes with the caller's rows.

        It is a delivery of the kind `case.<type>`, with the options of any: `key`, `countdown`, `priority` and so on.
        However often it is carried out, one execution is committed for it; `ctx.key` is its id in each. A busy case is
        waited for, and for an hour a worker that knows type, step and state. Another refusal, and an execution that
        failed, end it as `failed` with the reason as its code.
        Refused now, with nothing written: CaseNotFound, UnknownCaseType, UnknownStep, InvalidInput, and what
        `enqueue` refuses. The guard is not asked now. Not for a MemoryStore.
        """
        if not isinstance(self.store, PostgresStore):
            raise UnsupportedTransaction(type(tx).__name__)  # a request is a delivery, and these are rows
        row = self.store.within(tx).case(read.checked_id(case_id))
        if row is None:
            raise CaseNotFound(str(case_id))
        case_type = self.types.get(row.case_type)
        if case_type is None:
            raise UnknownCaseType(row.case_type, tuple(self.types))
        if step not in case_type.steps:
            raise UnknownStep(case_type.name, step, tuple(case_type.steps))
        return later.request(
            tx, case_type, row.id, step, scope_key=scope_key, actor=actor, input=input, options=options
        )  # fmt: skip

    def carry_out(
        self, case_id: str, step: str, *, scope_key: str | None, actor: Any, input: Any, request_id: str
    ) -> dict[str, Any]:
        """Execute a step for a request, or answer it from what was committed for it before."""
        done = self.lifecycle.execute(
            Request(
                case_id=read.checked_id(case_id), step=step, scope_key=scope_key, actor=actor, input=input,
                lease=self.lease, request_id=request_id,
            )
        )  # fmt: skip
        return {"execution_id": done.execution_id, "seq": done.seq}

    def on(self, database: Database) -> Self:
        """The same cases on the connections of another `Database`: a worker's, which are its process's own."""
        if isinstance(self.store, PostgresStore) and self.store.database.engine is database.engine:
            return self
        known = self._elsewhere
        if known is None or known[0] is not database.engine:
            other = copy.copy(self)
            other.store = PostgresStore(database)
            other.lifecycle = Lifecycle(other.store, self.types, self.lifecycle.clock, self.lifecycle.seal)
            # Kept: each store has a connection of its own for its heartbeats.
            known = self._elsewhere = (database.engine, other)
        return known[1]

    # --- other systems ----------------------------------------------------------------------------

    def correlate(
        self, tx: Any, case_id: str, system: str, external_id: str, *, step: str | None = None,
        scope_key: str | None = None, metadata: Any = None,
    ) -> Correlation:  # fmt: skip
        """
        Register what another system calls this case: its events are for it from then on, and for `step` where it is
        given. A name that was registered before is moved here, and keeps its id. Raises CaseNotFound, InvalidOption.
        """
        return correlations.correlate(
            self.store.within(tx), case_id, system, external_id, step=step, scope_key=scope_key, metadata=metadata
        )

    def correlation_of(self, tx: Any, system: str, external_id: str) -> Correlation | None:
        """What a system's name means; None for one that nobody registered."""
        return self.store.within(tx).correlation(system, external_id)

    def correlations(self, tx: Any, case_id: str, *, after: str | None = None, limit: int = 100) -> list[Correlation]:
        """What other systems call a case and its elements, oldest first. Raises CaseNotFound and InvalidOption."""
        return correlations.of_case(self.store.within(tx), case_id, after=after, limit=limit)

    def ingest(self, event: Event | Mapping[str, Any]) -> Ingested:
        """
        Take in an event of another system: it becomes one execution, or a dead letter with a reason.

        It owns its transactions, as `execute` does, and runs the step here and now, with the system as its actor
        (`external_actor`) and the payload as its input. One that was seen before is a duplicate, and nothing runs;
        but a dead letter of `case-busy` or `execution-failed` is run again. Nothing about the event is raised, but
        InvalidArguments for what is no event. An outage is raised, and the event is brought to its end by a sweep.
        """
        return self._ingestion().ingest(event if isinstance(event, Event) else Event.of(event))

    def resume(self, event_id: str, tries: int) -> Ingested | None:
        """Bring an event to its end that a sweep took up; None where somebody else did."""
        return self._ingestion().resume(event_id, tries)

    def _ingestion(self) -> Ingestion:
        return Ingestion(self.lifecycle, self.lease, self.external_actor)

    def dead_letters(
        self, tx: Any, *, system: str | None = None, case_id: str | None = None, reason: str | None = None,
        after: str | None = None, limit: int = 50,
    ) -> list[DeadLetter]:  # fmt: skip
        """
        Events that became no execution, newest first, as they came; `after` is the last id of the page before.

        To have one run again, ingest it again: that works for `case-busy` and `execution-failed`. Another is sent anew
        under a `key` of its own. Raises InvalidOption, and CaseNotFound for what is no case's id.
        """
        if not 1 <= limit <= MOST_PER_PAGE:
            raise InvalidOption("dead_letters", "limit", f"a page has 1 to {MOST_PER_PAGE} events")
        row_id = None if case_id is None else read.checked_id(case_id)
        last = read.checked_after("dead_letters", after)
        return inbox(self.store.within(tx)).dead_letters(Which(system, row_id, reason, last, limit))

    # --- without a caller to raise at -------------------------------------------------------------

    def run_as_system(
        self, case_id: str, step: str, *, actor: Any = None, input: Any = None, scope_key: str | None = None,
        retry: Attempts | int | None = None, definition: CaseType[Any] | None = None,
    ) -> SystemRun:  # fmt: skip
        """
        As `execute`, and whatever exception came of it is returned: refusals, failures, outages. It classifies nothing.

        What ends the process or the task passes. `definition` takes the place of the deployed one for this run.
        """

        def execute() -> Any:
            return self.lifecycle.execute(
                Request(
                    case_id=read.checked_id(case_id), step=step, scope_key=scope_key,
                    actor={"system": "durable"} if actor is None else actor, input=input, lease=self.lease,
                    retry=None if retry is None else Attempts.of(retry), definition=definition,
                )
            )  # fmt: skip

        return settled(execute)

    def migrate(
        self, case_type: CaseType[Any] | str, name: str, transform: Callable[[Any], Any], *,
        reads: CaseType[Any] | None = None, ids: Sequence[str] | None = None, ended: bool = False,
        limit: int | None = None, dry_run: bool = False, batch: int = BATCH, progress: Progress | None = None,
    ) -> Migrated:  # fmt: skip
        """
        Take every case of a type through `transform`, once per `name`: run again, it goes on with what is left.

        `transform` is given the state as JSON, or as `reads`, a definition that knows the old states, has it, and
        returns the new one, which is validated by the type as it is deployed. Each case is an execution of the step
        `migrate:<name>`, without a guard and with one attempt. Those that are busy, raise or come out invalid are left
        as they were, listed, and taken up by the next run. `ended`: dormant cases too. `dry_run` writes nothing, not a
        claim. `progress(done, of)` is called after each case. Raises UnknownCaseType, DefinitionError, and an
        outage: then it has ended there.
        """
        found = self.types.get(case_type if isinstance(case_type, str) else case_type.name)
        if found is None:
            raise UnknownCaseType(str(case_type), tuple(self.types))
        checked = None if ids is None else [read.checked_id(one) for one in ids]
        plan = Plan.of(found, name, transform, reads=reads, ids=checked, ended=ended)
        return Migration(self.lifecycle, self.lease, plan).run(
            limit=limit, dry_run=dry_run, batch=batch, progress=progress
        )
