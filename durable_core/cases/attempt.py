"""
One execution of a step: claim, run, commit. Two short transactions, with the handler between them, outside both.

Expiry of the lease decides who may take a case; the execution's id in the claim decides who may write.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from uuid_utils import uuid7

from durable_core.arguments import canonical
from durable_core.cases import guards
from durable_core.cases.clock import Clock
from durable_core.cases.declare import CaseType
from durable_core.cases.delta import applied
from durable_core.cases.guards import Evaluation
from durable_core.cases.journal import Draft, Entry, EntryKind, Head, Payload, Seal
from durable_core.cases.request import Claimed, Executed, Request
from durable_core.cases.running import Running
from durable_core.cases.store import CaseRow, ClaimRow, Looked, NewClaim, Store, StoreTransaction, Wanted
from durable_core.database.commits import CommitUnknown
from durable_core.refusals import CaseBusy, CaseNotFound, InvalidState, StepNotAvailable, UnknownCaseType

log = logging.getLogger("durable.cases")

T = TypeVar("T")

TRIES = 3
"""So often a transaction is tried that the machine room refuses; no attempt is spent on it."""
PAUSE_SECONDS = 0.05


class Lifecycle:
    """Executes steps on cases in a store, by a clock for guards and sleeps; leases are the store's to judge."""

    def __init__(
        self, store: Store, types: Mapping[str, CaseType[Any]], clock: Clock, seal: Callable[[], Seal]
    ) -> None:
        self.store, self.types, self.clock, self.seal = store, types, clock, seal

    def execute(self, request: Request) -> Executed:
        """
        Claim the case, run the step, commit what it returns.

        Raises what `Cases.execute` says. A refusal writes nothing at all.
        """
        claimed = self._claim(request)
        return claimed if isinstance(claimed, Executed) else Running(self, request, claimed).run()

    def definition(self, case: CaseRow, override: CaseType[Any] | None = None) -> CaseType[Any]:
        """The definition by the stored name. Raises UnknownCaseType."""
        found = override if override is not None else self.types.get(case.case_type)
        if found is None or found.name != case.case_type:
            raise UnknownCaseType(case.case_type, tuple(self.types))
        return found

    # --- claim ------------------------------------------------------------------------------------

    def _claim(self, request: Request) -> Claimed | Executed:
        execution_id = str(uuid7())
        return self.tried(
            request.case_id,
            lambda transaction: self._claimed(transaction, request, execution_id),
            lambda transaction, looked: looked.held_by(execution_id),
        )

    def _claimed(self, transaction: StoreTransaction, request: Request, execution_id: str) -> Claimed | Executed:
        """Everything is asked before anything is written, so a refusal has nothing to take back."""
        case = transaction.lock(request.case_id)
        if case is None:
            raise CaseNotFound(request.case_id)
        looked = transaction.look(case.id, request.request_id)
        if looked.answered is not None:
            return self._answer(transaction, case, looked.answered)
        case_type = self.definition(case, request.definition)
        state = loaded(case_type, case)
        held = looked.claim
        if held is not None and not looked.lapsed:
            raise CaseBusy(case.id, held.execution_id, held.step, held.scope_key, held.expires_at)
        at = guards.address(case_type, state, request.step, request.scope_key)
        given = at.step.dump_input(at.step.load_input(request.input))
        actor, as_of = case_type.actor_of(request.actor), request.as_of or self.clock.now()
        guard = guards.evaluate(at.step, state, actor=actor.value, element=at.element, key=at.key, as_of=as_of)
        if not guard.available:
            raise StepNotAvailable(case.id, at.step.name, at.key, guard)
        seal, head, actor_text = self.seal(), case.head, canonical(actor.json)
        if held is not None:
            expired = seal.sealed(_expired(held), case.id, head, looked.now)
            transaction.lapse(held, expired)
            head = Head(expired.number, expired.chain)
        draft = Draft(
            id=str(uuid7()), execution_id=execution_id, request_id=request.request_id, entry=EntryKind.CLAIMED,
            attempt=1, step=at.step.name, scope_key=at.key, as_of=guard.as_of,
            payload=Payload(
                actor=actor_text, input=None if at.step.input.model is None else canonical(given),
                guard=canonical(guard.to_json()), state=case.state,
            ),
        )  # fmt: skip
        new = NewClaim(
            case_id=case.id, execution_id=execution_id, step=at.step.name, scope_key=at.key,
            request_id=request.request_id, lease_seconds=request.lease.seconds,
        )  # fmt: skip
        row = transaction.take(new, seal.sealed(draft, case.id, head, looked.now))
        return Claimed(
            execution_id=execution_id, case_type=case_type, step=at.step, scope_key=at.key,
            policy=request.retry or at.step.retry, text=case.state, actor=actor, actor_text=actor_text, input=given,
            guard=guard, row=row,
        )  # fmt: skip

    def _answer(self, transaction: StoreTransaction, case: CaseRow, completed: Entry) -> Executed:
        """What a request came to that was executed before. A definition that is gone, or erased data, leave gaps."""
        of = Wanted(case_id=case.id, execution_id=completed.execution_id, kinds=(EntryKind.CLAIMED,), limit=1)
        (claimed,) = transaction.entries(of)
        patch = completed.delta
        document = None if claimed.erased_at is not None or patch is None else applied(claimed.state, patch)
        case_type = self.types.get(case.case_type)
        if document is not None and case_type is not None:
            try:
                document = case_type.load(document)
            except InvalidState:
                pass  # it is told as it was stored
        return Executed(
            execution_id=completed.execution_id, case_id=case.id, case_type=case.case_type, step=completed.step,
            scope_key=completed.scope_key, request_id=completed.request_id, attempts=completed.attempt,
            guard=None if claimed.guard is None else Evaluation.from_json(claimed.guard), state=document, delta=patch,
            seq=completed.seq or 0, dormancy=completed.dormancy,
            ended_at=transaction.dormant_since(case.id, completed.number),
            claimed_at=claimed.recorded_at, committed_at=completed.recorded_at, answered=True,
        )  # fmt: skip

    # --- what both transactions share -------------------------------------------------------------

    def tried(
        self,
        case_id: str,
        act: Callable[[StoreTransaction], T],
        stands: Callable[[StoreTransaction, Looked], bool],
    ) -> T:
        """
        One transaction, again where the machine room refuses it.

        Where the answer to its COMMIT was lost, `stands` is asked under the case's lock, which waits for the
        transaction in doubt, before anything else is done. Raises CommitUnknown where that cannot be asked either.
        """
        for again in range(1, TRIES + 1):
            done: list[T] = []
            try:
                with self.store.transaction() as transaction:
                    done.append(act(transaction))
                return done[0]
            except CommitUnknown as unknown:
                if self._asked(case_id, stands, unknown):
                    return done[0]
                if again == TRIES:
                    raise
            except Exception as error:
                if again == TRIES or not self.store.is_transient(error):
                    raise
                log.warning("case_transaction_repeated", extra={"row_id": case_id, "error": type(error).__name__})
            self.clock.sleep(PAUSE_SECONDS * again)
        raise AssertionError("the last try returns or raises")

    def _asked(self, case_id: str, stands: Callable[[StoreTransaction, Looked], bool], unknown: CommitUnknown) -> bool:
        for again in range(1, TRIES + 1):
            try:
                with self.store.transaction() as transaction:
                    transaction.lock(case_id)
                    answer = stands(transaction, transaction.look(case_id))
                # A lock is a write: what was read counts once this COMMIT, too, was acknowledged.
                return answer
            except CommitUnknown:
                pass
            except Exception as error:
                if not self.store.is_transient(error):
                    raise
            if again < TRIES:
                self.clock.sleep(PAUSE_SECONDS * again)
        log.warning("case_commit_outcome_unknown", extra={"row_id": case_id})
        raise unknown


def loaded(case_type: CaseType[Any], case: CaseRow) -> Any:
    """The stored state as its type has it. Raises InvalidState, naming the case."""
    try:
        return case_type.load(json.loads(case.state))
    except InvalidState as invalid:
        raise InvalidState(invalid.case_type, invalid.issues, case.id) from None


def _expired(claim: ClaimRow) -> Draft:
    """The entry of an execution whose lease ran out, by whoever takes its case over."""
    error = {"name": "LeaseExpired", "message": f"its lease ended at {claim.expires_at.isoformat()}"}
    return Draft(
        id=str(uuid7()), execution_id=claim.execution_id, request_id=claim.request_id, entry=EntryKind.EXPIRED,
        attempt=claim.attempt, step=claim.step, scope_key=claim.scope_key, payload=Payload(error=canonical(error)),
    )  # fmt: skip
