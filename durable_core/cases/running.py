"""A claimed step runs, as often as its policy says, under a heartbeat; then it commits, or its end is journalled."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from uuid_utils import uuid7

from durable_core.arguments import canonical, clean_text
from durable_core.cases import guards
from durable_core.cases.context import CaseContext, Write
from durable_core.cases.delta import delta
from durable_core.cases.journal import Draft, EntryKind, Head, Payload
from durable_core.cases.passing import passing
from durable_core.cases.request import Claimed, Executed, Request
from durable_core.cases.store import Looked, StateWrite, StoreTransaction
from durable_core.claims.session import leave_if_forked
from durable_core.database.commits import CommitUnknown
from durable_core.errors import EffectEscaped, GiveUp
from durable_core.refusals import CaseClaimLost, ExecutionFailed, InvalidState

if TYPE_CHECKING:
    from durable_core.cases.attempt import Lifecycle

log = logging.getLogger("durable.cases")

T = TypeVar("T")

DEFECTS = (InvalidState, EffectEscaped)
"""Failures of ours that another attempt cannot mend."""


class Raised(Exception):
    """
    What user code raised.

    It may have executed a step of another case: what became of that one (its claim lost, its commit unknown, its state
    invalid) says nothing of this execution.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Running:
    """One claim's way from the first attempt to the end of it."""

    def __init__(self, lifecycle: Lifecycle, request: Request, claimed: Claimed) -> None:
        self.lifecycle, self.request, self.claimed = lifecycle, request, claimed
        self.case_id = request.case_id

    def run(self) -> Executed:
        end_beat = self.lifecycle.clock.every(self.request.lease.heartbeat, self._beat)
        try:
            return self._attempts()
        finally:
            end_beat()

    def _beat(self) -> None:
        kept = self.lifecycle.store.keep(self.case_id, self.claimed.execution_id, self.request.lease.seconds)
        if not kept:
            log.debug("case_claim_not_kept", extra=self._of_case())

    def _attempts(self) -> Executed:
        limit = self.claimed.policy.limit
        for attempt in range(1, limit + 1):
            error: Exception
            try:
                return self._attempt(attempt)
            except Raised as raised:
                error, final = raised.error, isinstance(raised.error, GiveUp)
            except CaseClaimLost as lost:
                self._failed(attempt, lost)
                raise
            except CommitUnknown:
                # Whether it stands nobody can tell now: to say "failed", or to run it again, could be wrong.
                raise
            except passing():
                # The task ends. Its claim is left to its lease, as that of a process that was killed.
                raise
            except Exception as own:
                error, final = own, isinstance(own, DEFECTS)
            log.warning("case_attempt_failed", extra=self._of_case(attempt=attempt, error=type(error).__name__))
            final = final or attempt == limit
            over = self._failed(attempt, error) if final else self._attempt_failed(attempt, error)
            if over is not None:
                raise over from error
            if final:
                raise ExecutionFailed(
                    self.case_id, self.claimed.execution_id, self.claimed.step.name, self.claimed.scope_key,
                    attempt, type(error).__name__, said(error),
                ) from error  # fmt: skip
            self.lifecycle.clock.sleep(self.claimed.policy.seconds(attempt))
        raise AssertionError("the last attempt returns or raises")

    # --- one attempt ------------------------------------------------------------------------------

    def _attempt(self, attempt: int) -> Executed:
        """The handler on a state of its own, and the commit of what it returns."""
        claimed = self.claimed
        old = json.loads(claimed.text)
        state = claimed.case_type.load(json.loads(claimed.text))
        # The element is looked up in this attempt's state: what the handler changes in it is changed in the state.
        at = guards.address(claimed.case_type, state, claimed.step.name, claimed.scope_key)
        context = CaseContext(
            execution_id=claimed.execution_id, request_id=self.request.request_id, case_id=self.case_id,
            step=claimed.step.name, scope_key=claimed.scope_key, element=at.element, actor=self._actor(),
            input=claimed.step.load_input(claimed.input), attempt=attempt, max_attempts=claimed.policy.limit,
        )  # fmt: skip
        pid = os.getpid()
        try:
            with self._theirs():
                returned = claimed.step.handler(state, context)
        finally:
            leave_if_forked(pid)
        new = claimed.case_type.dump(returned)
        return self._commit(attempt, context, new, delta(old, new))

    @contextmanager
    def _theirs(self) -> Iterator[None]:
        """Around a call of user code. Raises Raised, but for what ends the task or the machine room refuses."""
        try:
            yield
        except passing():
            raise
        except EffectEscaped as escaped:
            if escaped.row_id == self.case_id:
                raise
            raise Raised(escaped) from escaped
        except Exception as error:
            if self.lifecycle.store.is_transient(error):
                raise  # our transaction is tried again
            raise Raised(error) from error

    def _actor(self) -> Any:
        """Who acts, a fresh copy for each attempt; what is no JSON is handed on as it was given."""
        claimed = self.claimed
        if not claimed.actor.whole:
            return claimed.actor.value
        return claimed.case_type.actor_of(json.loads(claimed.actor_text)).value

    def _commit(self, attempt: int, context: CaseContext, new: Any, patch: list[dict[str, Any]]) -> Executed:
        claimed, text = self.claimed, canonical(new)
        writes: list[Write] = list(context.writes)
        engine_write = self.request.in_commit
        if engine_write is not None:
            writes.append(lambda transaction: engine_write(transaction, claimed.execution_id))

        def commit(transaction: StoreTransaction) -> Executed:
            case = transaction.lock(self.case_id)
            looked = transaction.look(self.case_id)
            if case is None or not looked.held_by(claimed.execution_id):
                raise self._lost(looked)
            ended_at = case.ended_at
            if context.dormancy is not None:
                ended_at = (ended_at or looked.now) if context.dormancy == "ended" else None
            write = StateWrite(case_id=case.id, state=text, seq=case.seq + 1, ended_at=ended_at, at=looked.now)
            draft = self._draft(
                EntryKind.COMPLETED, attempt, seq=write.seq, dormancy=context.dormancy, delta=canonical(patch, around=2)
            )
            entry = self.lifecycle.seal().sealed(draft, case.id, case.head, looked.now)
            if writes:
                transaction.write_state(write)
                for one in writes:
                    with self._theirs():
                        one(transaction)
            transaction.settle(entry, None if writes else write)
            return Executed(
                execution_id=claimed.execution_id, case_id=case.id, case_type=case.case_type, step=claimed.step.name,
                scope_key=claimed.scope_key, request_id=self.request.request_id, attempts=attempt,
                guard=claimed.guard, state=claimed.case_type.load_result(new), delta=patch, seq=write.seq,
                dormancy=context.dormancy, ended_at=ended_at, claimed_at=claimed.row.claimed_at,
                committed_at=looked.now,
            )  # fmt: skip

        def stands(transaction: StoreTransaction, looked: Looked) -> bool:
            if transaction.completed(self.case_id, claimed.execution_id) is not None:
                return True
            if not looked.held_by(claimed.execution_id):
                raise self._lost(looked)
            return False

        return self.lifecycle.tried(self.case_id, commit, stands)

    def _lost(self, looked: Looked) -> CaseClaimLost:
        holder = None if looked.claim is None else looked.claim.execution_id
        return CaseClaimLost(self.case_id, self.claimed.execution_id, holder)

    # --- what did not come to a commit ------------------------------------------------------------

    def _attempt_failed(self, attempt: int, error: BaseException) -> CaseClaimLost | None:
        """Say so, and count the next attempt; where somebody else has the case by now, that is the end."""
        failed = self._draft(EntryKind.ATTEMPT_FAILED, attempt, error=failure(error))

        def act(transaction: StoreTransaction) -> CaseClaimLost | None:
            head, looked = self._look(transaction)
            entry = self.lifecycle.seal().sealed(failed, self.case_id, head, looked.now)
            transaction.append(entry, attempt=attempt + 1)
            if looked.held_by(self.claimed.execution_id):
                return None
            lost = self._lost(looked)
            end = self._draft(EntryKind.FAILED, attempt, error=failure(lost))
            head = Head(entry.number, entry.chain)
            transaction.append(self.lifecycle.seal().sealed(end, self.case_id, head, looked.now))
            return lost

        return self.lifecycle.tried(self.case_id, act, lambda transaction, _: transaction.written(failed.id))

    def _failed(self, attempt: int, error: BaseException) -> CaseClaimLost | None:
        """
        Say that it failed for good, and give the case free in the same transaction.

        Returned is that somebody else has it by now: then it is not given free, and the caller is told of that.
        """
        failed = self._draft(EntryKind.FAILED, attempt, error=failure(error))

        def act(transaction: StoreTransaction) -> CaseClaimLost | None:
            head, looked = self._look(transaction)
            entry = self.lifecycle.seal().sealed(failed, self.case_id, head, looked.now)
            transaction.append(entry, release=True)
            return None if looked.held_by(self.claimed.execution_id) else self._lost(looked)

        return self.lifecycle.tried(self.case_id, act, lambda transaction, _: transaction.written(failed.id))

    def _look(self, transaction: StoreTransaction) -> tuple[Head, Looked]:
        case = transaction.lock(self.case_id)
        assert case is not None, "a case is not deleted"
        return case.head, transaction.look(self.case_id)

    def _draft(
        self, entry: EntryKind, attempt: int, *, seq: int | None = None, dormancy: str | None = None, **payload: str
    ) -> Draft:
        claimed = self.claimed
        return Draft(
            id=str(uuid7()), execution_id=claimed.execution_id, request_id=self.request.request_id, entry=entry,
            attempt=attempt, step=claimed.step.name, scope_key=claimed.scope_key, seq=seq, dormancy=dormancy,
            payload=Payload(actor=claimed.actor_text, **payload),
        )  # fmt: skip

    def _of_case(self, **more: object) -> dict[str, object]:
        claimed = self.claimed
        return {
            "row_id": self.case_id, "kind": claimed.case_type.name, "step": claimed.step.name,
            "execution_id": claimed.execution_id, **more,
        }  # fmt: skip


MESSAGE_LENGTH = 2000


def said(error: BaseException) -> str:
    """The text of an exception, which may raise itself."""
    try:
        return clean_text(str(error), MESSAGE_LENGTH)
    except Exception:
        return ""


def failure(error: BaseException) -> str:
    """What the journal keeps of an exception."""
    return canonical({"name": type(error).__name__, "message": said(error)})
