"""
Migrations of states: every case of a type goes through a step `migrate:<name>`, by the ordinary claim, run and commit.

The `completed` entry of that step is the mark: a migration that is run again goes on where it stopped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import UUID, uuid5

from durable_core.arguments import clean_text
from durable_core.cases.attempt import Lifecycle
from durable_core.cases.declare import MIGRATION_PREFIX, Attempts, CaseType, Step
from durable_core.cases.delta import delta
from durable_core.cases.journal import EntryKind
from durable_core.cases.memory import MemoryTransaction
from durable_core.cases.passing import passing
from durable_core.cases.postgres import PostgresTransaction
from durable_core.cases.request import Lease, Request
from durable_core.cases.schema import Misfits, Schema
from durable_core.cases.store import StoreTransaction, Wanted
from durable_core.cases.system import settled
from durable_core.database.statements import beside
from durable_core.database.transactions import run
from durable_core.errors import DefinitionError
from durable_core.refusals import CaseRefused, InvalidState

log = logging.getLogger("durable.cases")
_statements = beside(__file__)

BATCH = 100
MOST_COUNTED = 1_000_000
LONGEST_DETAIL = 500

Progress = Callable[[int, int], object]
"""Called after each case with how many are done, and how many there are in this run."""


@dataclass(frozen=True)
class Unmigrated:
    """A case that was left as it was, without the mark: the next run takes it up."""

    case_id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Migrated:
    """
    What a run came to: cases looked at, changed, marked without a change, and left; whether there are more.

    One that another run was through with in the meantime counts as unchanged.
    """

    name: str
    dry_run: bool
    scanned: int
    changed: int
    unchanged: int
    failed: tuple[Unmigrated, ...]
    more: bool
    """A limit ended the run before the last case."""


@dataclass(frozen=True)
class Plan:
    """One migration: which cases it is for, what it does to a state, and how."""

    case_type: CaseType[Any]
    name: str
    transform: Callable[[Any], Any]
    reads: CaseType[Any] | None = None
    ids: tuple[str, ...] | None = None
    ended: bool = False

    @staticmethod
    def of(
        case_type: CaseType[Any], name: str, transform: Callable[[Any], Any], *, reads: CaseType[Any] | None = None,
        ids: Sequence[str] | None = None, ended: bool = False,
    ) -> Plan:  # fmt: skip
        """Raises DefinitionError for what cannot be a migration."""
        if not isinstance(name, str) or not name.strip() or len(name) > 100 or not name.isprintable():
            raise DefinitionError(f"migrate: a migration has a name of 1 to 100 printable characters; got {name!r}.")
        if not callable(transform):
            raise DefinitionError(f"migration {name!r}: transform is a function of the state; got {transform!r}.")
        if reads is not None and reads.name != case_type.name:
            raise DefinitionError(
                f"migration {name!r}: it is for {case_type.name!r}, and would read states of {reads.name!r}."
            )
        return Plan(case_type, name, transform, reads, None if ids is None else tuple(dict.fromkeys(ids)), ended)

    @property
    def step(self) -> str:
        return f"{MIGRATION_PREFIX}{self.name}"

    def definition(self) -> CaseType[Any]:
        """
        The type for this run: it has one step more, and reads states as they were, not as its schema has them now.

        What the step returns is validated as ever.
        """
        step = Step(self.case_type.name, self.step, lambda state, _: self.transform(state), retry=Attempts(limit=1))
        made = object.__new__(_Migrating)
        vars(made).update(vars(self.case_type.with_step(step)))
        made.reads = Schema(None, "") if self.reads is None else self.reads.state
        return made


class _Migrating(CaseType[Any]):
    reads: Schema

    def load(self, document: object) -> Any:
        try:
            return self.reads.load(document)
        except Misfits as unfit:
            raise InvalidState(self.name, unfit.issues) from None

    def load_result(self, document: object) -> Any:
        return super().load(document)


class Migration:
    """A plan, carried out by a lifecycle."""

    def __init__(self, lifecycle: Lifecycle, lease: Lease, plan: Plan) -> None:
        self.lifecycle, self.lease, self.plan = lifecycle, lease, plan
        self.definition = plan.definition()

    def run(
        self, *, limit: int | None = None, dry_run: bool = False, batch: int = BATCH, progress: Progress | None = None
    ) -> Migrated:
        """See `Cases.migrate`."""
        for name, number in (("limit", limit), ("batch", batch)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise DefinitionError(f"migration {self.plan.name!r}: {name} is a whole number from 1; got {number!r}.")
        total = 0
        if progress is not None:
            with self.lifecycle.store.transaction() as transaction:
                total = len(_waiting(transaction, self.plan, None, min(limit or MOST_COUNTED, MOST_COUNTED)))
        waiting = self._waiting(batch)
        scanned = changed = unchanged = 0
        failed: list[Unmigrated] = []
        for case_id in islice(waiting, limit):
            came = self._dry(case_id) if dry_run else self._migrated(case_id)
            scanned += 1
            if isinstance(came, Unmigrated):
                failed.append(came)
                log.warning("case_not_migrated", extra={"row_id": case_id, "error_code": came.reason})
            else:
                changed, unchanged = changed + came, unchanged + (not came)
            if progress is not None:
                progress(scanned, max(total, scanned))
        more = limit is not None and scanned == limit and next(waiting, None) is not None
        return Migrated(self.plan.name, dry_run, scanned, changed, unchanged, tuple(failed), more)

    def _waiting(self, batch: int) -> Iterator[str]:
        """The cases without the mark, by id: each once, those too that fail."""
        after: str | None = None
        while True:
            with self.lifecycle.store.transaction() as transaction:
                ids = _waiting(transaction, self.plan, after, batch)
            yield from ids
            if len(ids) < batch:
                return
            after = ids[-1]

    def _migrated(self, case_id: str) -> bool | Unmigrated:
        """Whether this run changed it. An outage is raised: the run ends here, and the next one goes on."""
        request = Request(
            case_id=case_id, step=self.plan.step, actor={"system": "durable", "migration": self.plan.name},
            lease=self.lease, retry=Attempts(limit=1), definition=self.definition,
            # The mark is asked again under the case's lock: another run may have made it since this one looked.
            request_id=str(uuid5(UUID(case_id), self.plan.step)),
        )  # fmt: skip
        done = settled(lambda: self.lifecycle.execute(request))
        if done.result is not None:
            return bool(done.result.delta) and not done.result.answered
        assert done.error is not None
        if self.lifecycle.store.is_transient(done.error):
            raise done.error
        return _left(case_id, done.error)

    def _dry(self, case_id: str) -> bool | Unmigrated:
        """Whether it would be changed; nothing is written, and nothing claimed."""
        with self.lifecycle.store.transaction() as transaction:
            case = transaction.case(case_id)
        if case is None:
            return Unmigrated(case_id, "NOT_FOUND", "it is gone")
        before = json.loads(case.state)
        try:
            after = self.definition.dump(self.plan.transform(self.definition.load(before)))
        except passing():
            raise
        except Exception as error:
            return _left(case_id, error)
        return bool(delta(before, after))


def _left(case_id: str, error: Exception) -> Unmigrated:
    # Of what a transform raises the name alone: its text may hold what is in the state.
    refused = isinstance(error, CaseRefused | InvalidState)
    reason = error.reason if isinstance(error, CaseRefused) else "EXECUTION_FAILED"
    return Unmigrated(case_id, reason, clean_text(str(error) if refused else type(error).__name__, LONGEST_DETAIL))


def _waiting(transaction: StoreTransaction, plan: Plan, after: str | None, limit: int) -> list[str]:
    if isinstance(transaction, MemoryTransaction):
        cases = sorted(transaction.store.cases.values(), key=lambda case: case.id)
        mine = [
            case.id
            for case in cases
            if case.case_type == plan.case_type.name
            and (after is None or case.id > after)
            and (plan.ended or case.ended_at is None)
            and (plan.ids is None or case.id in plan.ids)
        ]
        marked = (EntryKind.COMPLETED,)
        unmarked = (
            case_id
            for case_id in mine
            if not transaction.entries(Wanted(case_id=case_id, step=plan.step, kinds=marked, limit=1))
        )
        return list(islice(unmarked, limit))
    assert isinstance(transaction, PostgresTransaction)
    wanted: dict[str, Any] = {
        "case_type": plan.case_type.name, "step": plan.step, "after": after, "ended": plan.ended, "limit": limit,
    }  # fmt: skip
    if plan.ids is None:
        rows = run(transaction.tx, _statements.waiting, **wanted)
    else:
        rows = run(transaction.tx, _statements.waiting_among, **wanted, ids=list(plan.ids))
    return [row["id"] for row in rows]
