"""One step of a plan: claim, run inside its own transaction, commit effect and receipt together. It runs once."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from psycopg.errors import InvalidSavepointSpecification, NoActiveSqlTransaction
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from durable_core import wakes
from durable_core.arguments import clean_text, result_text
from durable_core.claims.claim import Claim, Holder
from durable_core.claims.each import CHECKED_AT_ONCE
from durable_core.claims.session import LockRefused, StepTransaction, leave_if_forked
from durable_core.database.commits import CommitUnknown, Resolved
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import (
    CANCELED,
    DATABASE_ERRORS,
    LOCK_TIMEOUT,
    Row,
    Transaction,
    checked,
    is_infrastructure,
    run,
    said,
    sqlstate,
)
from durable_core.deliveries.attempt import LEAVING, ROWLESS_SECONDS
from durable_core.deliveries.options import DEFAULT_PRIORITY
from durable_core.deliveries.raised import refuse_unrun, told, with_causes
from durable_core.deliveries.report import TRIES
from durable_core.deliveries.worker import Attempted, Outcome, Worker
from durable_core.document_refusals import VersionConflict
from durable_core.errors import ClaimLost, EffectEscaped, GiveUp, InvalidArguments, Retry, Snooze
from durable_core.plans.declare import PlanStep, StepKind
from durable_core.plans.target import unfit
from durable_core.plans.traced import followed
from durable_core.plans.unsettled import came_to, release
from durable_core.states import PlanState
from durable_core.tracing import settling

log = logging.getLogger("durable.run")
_statements = beside(__file__)


@dataclass(frozen=True, kw_only=True)
class StepClaim(Claim):
    """Leave to run one step of a plan, until its fence is raised or settled."""

    what: ClassVar[str] = "plan"
    index: int
    planned: dict[str, Any]
    scopes: tuple[str, ...]
    next_kind: str | None
    next_queue: str | None

    @staticmethod
    def of_row(row: Row, taken_at: float) -> StepClaim:
        return StepClaim(
            id=str(row["id"]), kind=row["kind"], fence=row["fence"], attempt=row["step"] + 1,
            max_attempts=row["step_count"], interruptions=0, max_interruptions=0, deadline_at=row["deadline_at"],
            arguments=row["arguments"], taken_at=taken_at, index=row["step"], planned=row["planned"],
            scopes=tuple(row["scopes"]), next_kind=row["next_kind"], next_queue=row["next_queue"],
        )  # fmt: skip


def claim_step(tx: Transaction, kind: StepKind[..., Any], plan_id: str, holder: Holder) -> StepClaim | None:
    """Claim the next step of this plan if it is of this kind; None when there is nothing to take. Commits with `tx`."""
    before = time.monotonic()
    rows = run(
        checked(tx), _statements.take, **holder.parameters, id=plan_id, kinds=list(kind.names),
        timeout_seconds=kind.timeout,
    )  # fmt: skip
    return StepClaim.of_row(rows[0], before) if rows else None


def perform(worker: Worker, kind: StepKind[..., Any], plan_id: str) -> Attempted:
    """
    Act on a hint: claim the plan's next step, run it, commit it with its receipt, hint the one after it.

    A hint that finds nothing to take is an ordinary outcome, and so is a database that does not answer: dispatch hints
    again. Raises an exit of the process, and a database that refuses the claim for another reason.
    """
    try:
        with worker.database.driver() as driver:
            claim = claim_step(driver, kind, plan_id, worker.holder)
            if claim is None:
                _look_for_its_row(worker, driver, kind, plan_id)
    except DATABASE_ERRORS as error:
        if not is_infrastructure(error):
            raise
        log.warning("claim_not_answered", extra={"row_id": plan_id, "kind": kind.name, "error": said(error)})
        return Attempted(Outcome.UNAVAILABLE, plan_id, kind.name)
    except worker.time_limits:
        # It may have struck while a connection went in or out of the pool.
        worker.database.renew()
        raise
    if claim is None:
        log.debug("nothing_to_claim", extra={"row_id": plan_id, "kind": kind.name})
        return Attempted(Outcome.NOTHING_TO_DO, plan_id, kind.name)
    return carry_out(worker, kind, claim)


def _look_for_its_row(worker: Worker, tx: Transaction, kind: StepKind[..., Any], plan_id: str) -> None:
    """Say, now and then, that a hint's row is in some other database: two installations share their queues."""
    if time.monotonic() < worker.quiet_until or run(tx, _statements.known, id=plan_id):
        return
    worker.quiet_until = time.monotonic() + ROWLESS_SECONDS
    log.warning("hint_without_row", extra={"row_id": plan_id, "kind": kind.name})


@followed
def carry_out(worker: Worker, kind: StepKind[..., Any], claim: StepClaim) -> Attempted:
    """Run the step under a claim, and commit what came of it. See `perform`."""
    facts = {"row_id": claim.id, "kind": claim.kind, "fence": claim.fence, "attempt": claim.attempt}
    log.debug("step_claimed", extra=facts)
    held = worker.heartbeat.hold(claim, _statements)
    try:
        try:
            attempted = _Running(worker, kind, claim).run()
        except LEAVING as leaving:
            # Its transaction is rolled back. A parent that ends the process gives the row back; a step that ends
            # it by itself has failed, or it would end one process after the other.
            if not worker.told_to_end():
                said_ = f"the step ended its process ({type(leaving).__name__}); nothing of it stands"
                release(worker, claim, PlanState.FAILED, "INTERRUPTED", said_)
            raise
    finally:
        worker.heartbeat.let_go(held)
    if attempted.outcome is Outcome.DONE:
        _hint_next(claim)
    return attempted


def _hint_next(claim: StepClaim) -> None:
    """Tell a worker of the step after this one. Without it dispatch does, within seconds."""
    carrier = wakes.carrier()
    if claim.next_kind is not None and claim.next_queue is not None and carrier is not None:
        hint = wakes.Hint(
            claim.next_kind, claim.id, claim.next_queue, DEFAULT_PRIORITY, claim.attempt + 1, first=False
        )  # fmt: skip
        carrier.offer([hint])


@dataclass(frozen=True)
class _Came:
    """What came of a step, as its receipt says it."""

    outcome: str
    output: str | None = None
    code: str | None = None
    message: str | None = None


class _Running:
    """One claim's way from the handler to the receipt."""

    def __init__(self, worker: Worker, kind: StepKind[..., Any], claim: StepClaim) -> None:
        self.worker, self.kind, self.claim = worker, kind, claim
        self.began = time.monotonic()
        self.deadline = claim.taken_at + kind.timeout
        self.pid = os.getpid()
        self.struck = False

    def run(self) -> Attempted:
        """The step and its commit; repeated whole when the machine room says no: then nothing of it stands."""
        came: _Came | None = None
        again = 0
        while True:
            if came is None and time.monotonic() >= self.deadline:
                came = self._timed_out()
            try:
                return self._once(came)
            except _Alone as alone:
                if came is not None:
                    return self._failed_without_receipt(alone.came.code or "RECEIPT_REFUSED", alone.came.message or "")
                # The transaction could not be kept. What is to be said of the step needs no more than one of its own.
                came, again = alone.came, 0
            except _Repeat as repeat:
                again += 1
                log.warning("attempt_repeated", extra=self._facts(error=said(repeat.cause)))
                if again == TRIES and came is not None:
                    return self._failed_without_receipt(came.code or "RECEIPT_REFUSED", came.message or "")
                if again == TRIES:
                    return self._given_back(repeat.cause)
                time.sleep(self.worker.pause(again))

    def _once(self, came: _Came | None) -> Attempted:
        transaction = StepTransaction(self.worker.database, _statements, self.claim, self.worker.holder.answer_seconds)
        try:
            try:
                session = transaction.session()  # the fence lock comes first, outside the savepoint
            except ClaimLost:
                return self._refused("start" if came is None else "failure")
            except LockRefused as refused:
                raise _Repeat(refused) from refused
            except self.worker.time_limits as limit:
                self.struck = True
                raise _Alone(self._timed_out()) from limit
            if came is None:
                came = self._effect(transaction, session)
            return self._committed(transaction, came)
        finally:
            transaction.discard()
            if self.struck:
                # A time limit may have struck while a connection went in or out of the pool, which then never gets it
                # back. Not before the step's own has gone home: it would stay open in a pool that nobody uses.
                self.struck = False
                self.worker.database.renew()

    # --- the effect, inside a savepoint ------------------------------------------------------------

    def _effect(self, transaction: StepTransaction, session: Session) -> _Came:
        """
        Run the handler inside a savepoint: it stays when the step is ok, and is rolled back when it is not.

        Raises _Repeat for what says nothing about the step, and _Alone when the transaction cannot be kept.
        """
        try:
            inside = session.begin_nested()
        except DATABASE_ERRORS as error:
            raise _Repeat(error) from error
        try:
            try:
                unfit = self._unfit(session)
                if unfit is None:
                    output = self._ran(session, transaction)
            finally:
                leave_if_forked(self.pid)
            if unfit is None:
                # What the host checks at COMMIT is checked here, where it is still this step's failure and no other's.
                session.flush()
                run(session.connection(), CHECKED_AT_ONCE)
                inside.commit()
                return _Came("ok", output)
        except BaseException as error:
            if transaction.broken and is_infrastructure(error) and not _own_bound(error):
                raise _Repeat(error) from error
            unfit = self._told(error)
        try:
            inside.rollback()
            healthy = not transaction.broken
        except (*DATABASE_ERRORS, SQLAlchemyError) as error:
            log.debug("savepoint_not_kept", extra=self._facts(error=said(error)))
            healthy = False
        if not healthy:
            raise _Alone(unfit)
        return unfit

    def _unfit(self, session: Session) -> _Came | None:
        """Why the step may not run: a scope that was not granted, no baseline, a target that has moved."""
        scope = self.kind.scope
        if scope is not None and scope not in self.claim.scopes:
            return _failed("SCOPE_NOT_GRANTED", f"it needs {scope!r}, which was not granted when it was proposed")
        found = unfit(session, self.kind.changes, self.claim.planned, self.claim.arguments)
        if found is None:
            return None
        return _conflict(found.message) if found.conflict else _failed("NO_BASELINE", found.message)

    def _ran(self, session: Session, transaction: StepTransaction) -> str:
        arguments = self.kind.signature.unpack(self.claim.arguments)
        value = self.kind.handler(PlanStep(self.claim, self.claim.index, self.claim.planned, transaction), **arguments)
        refuse_unrun(value)
        output, warning = result_text(value)
        if warning:
            log.warning("result_not_stored", extra=self._facts(error=warning))
        return output

    def _told(self, error: BaseException) -> _Came:
        """What an exception of the handler says of the step. Raises an exit of the process."""
        struck = any(isinstance(one, self.worker.time_limits) for one in with_causes(error))
        self.struck = self.struck or struck
        if isinstance(error, self.worker.time_limits):
            return self._timed_out()
        if isinstance(error, LEAVING):
            raise error
        if isinstance(error, GiveUp | Retry | Snooze):
            return _failed(error.code, error.message)
        if isinstance(error, InvalidArguments) and error.kind == self.kind.name:
            return _failed(error.reason, error.what)
        if isinstance(error, VersionConflict):
            # A document is a target too, whether or not the plan names it as one.
            return _conflict(str(error))
        if self.worker.told_to_end():
            # What a handler raises on its way out says nothing about its work.
            raise SystemExit(os.EX_SOFTWARE) from error
        if struck:
            return self._timed_out()
        orig = getattr(error, "orig", error)
        if isinstance(orig, InvalidSavepointSpecification | NoActiveSqlTransaction):
            escaped = EffectEscaped(self.claim.id, "plan")
            return _failed(escaped.reason, str(escaped))
        return _failed("WORKER_ERROR", told(error))

    def _timed_out(self) -> _Came:
        return _failed("TIMEOUT", f"the step took longer than {self.kind.timeout:g} s")

    # --- the receipt -------------------------------------------------------------------------------

    def _committed(self, transaction: StepTransaction, came: _Came) -> Attempted:
        receipt = {
            "kind": self.claim.kind, "outcome": came.outcome, "output": came.output,
            "error_code": None if came.code is None else clean_text(came.code, 100),
            "error_message": None if came.message is None else clean_text(came.message),
        }  # fmt: skip
        try:
            with settling(self.kind.name, self.claim.id):
                transaction.commit(receipt, ())
        except CommitUnknown as unknown:
            match came_to(self.worker, self.claim)[0]:
                case Resolved.COMMITTED:
                    log.info("commit_resolved", extra=self._facts(resolved="committed"))
                case Resolved.NOT_COMMITTED:
                    raise _Repeat(unknown) from unknown
                case Resolved.LOST:
                    return self._refused("success")
                case Resolved.UNKNOWN | Resolved.NOT_ASKED:
                    log.error("commit_unknown", extra=self._facts())
                    return self._attempted(Outcome.UNKNOWN)
        except EffectEscaped as escaped:
            raise _Alone(_failed(escaped.reason, str(escaped))) from escaped
        except self.worker.time_limits as limit:
            self.struck = True
            match came_to(self.worker, self.claim)[0]:
                case Resolved.COMMITTED:
                    log.info("commit_resolved", extra=self._facts(resolved="committed"))
                case Resolved.NOT_COMMITTED:
                    raise _Alone(self._timed_out()) from limit
                case Resolved.LOST:
                    return self._refused("success")
                case Resolved.UNKNOWN | Resolved.NOT_ASKED:
                    log.error("commit_unknown", extra=self._facts())
                    return self._attempted(Outcome.UNKNOWN)
        except Exception as error:
            if is_infrastructure(error):
                raise _Repeat(error) from error
            # The effect went with its receipt.
            return self._failed_without_receipt("RECEIPT_REFUSED", f"its receipt could not be written: {said(error)}")
        if came.outcome == "ok":
            log.info("step_committed", extra=self._facts(outcome="done"))
            return self._attempted(Outcome.DONE)
        first_line = (clean_text(came.message or "", 500)).split("\n", 1)[0]
        log.error("step_failed", extra=self._facts(outcome=came.outcome, error_code=came.code, error=first_line))
        return self._attempted(Outcome.FAILED, came.code, first_line)

    # --- no receipt --------------------------------------------------------------------------------

    def _failed_without_receipt(self, code: str, message: str) -> Attempted:
        why = release(self.worker, self.claim, PlanState.FAILED, code, message)
        if why is not None:
            return self._not_recorded(why, "failure")
        log.error("step_failed", extra=self._facts(outcome="failed", error_code=code, error=clean_text(message, 500)))
        return self._attempted(Outcome.FAILED, code, message)

    def _given_back(self, error: BaseException) -> Attempted:
        """The machine room refused for good: nothing of the step stands, so it may be taken again."""
        why = release(self.worker, self.claim, PlanState.EXECUTING, "INFRASTRUCTURE", said(error))
        if why is not None:
            return self._not_recorded(why, "interruption")
        return self._attempted(Outcome.INTERRUPTED, "INFRASTRUCTURE", said(error))

    def _not_recorded(self, why: Outcome, reported: str) -> Attempted:
        return self._refused(reported) if why is Outcome.CLAIM_LOST else self._attempted(why)

    def _refused(self, reported: str) -> Attempted:
        """The fence said no: somebody else has decided. Nothing was written; one journal line tells people."""
        log.warning("stale_write_refused", extra=self._facts(reported=reported))
        try:
            with self.worker.database.autocommit() as connection:
                run(
                    connection, _statements.remark_stale,
                    **self.claim.naming, reason=f"LATE_{reported.upper()}", reported=reported,
                )  # fmt: skip
        except DATABASE_ERRORS:
            log.warning("stale_remark_failed", extra=self._facts(), exc_info=True)
        return self._attempted(Outcome.CLAIM_LOST, "CLAIM_LOST")

    def _attempted(self, outcome: Outcome, code: str | None = None, message: str | None = None) -> Attempted:
        claim = self.claim
        return Attempted(outcome, claim.id, claim.kind, claim.attempt, claim.max_attempts, code, message)

    def _facts(self, **more: object) -> dict[str, object]:
        return {
            "row_id": self.claim.id, "kind": self.claim.kind, "fence": self.claim.fence,
            "attempt": self.claim.attempt, "max_attempts": self.claim.max_attempts,
            "duration_s": round(time.monotonic() - self.began, 4), **more,
        }  # fmt: skip


def _failed(code: str, message: str) -> _Came:
    return _Came("failed", None, code or "WORKER_ERROR", message or "it gave no reason")


def _conflict(message: str) -> _Came:
    return _Came("conflict", None, "CONFLICT", message)


def _own_bound(error: BaseException) -> bool:
    """A lock or statement time-out of the host's own, met by user code: we had put ours back, so it is a failure."""
    return sqlstate(error) in (LOCK_TIMEOUT, CANCELED)


class _Repeat(Exception):
    """The whole step must run again: nothing of it stands, and nothing was said of it."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Alone(Exception):
    """What came of the step, to be said in a transaction of its own: the step's is lost, and its effect with it."""

    def __init__(self, came: _Came) -> None:
        super().__init__(came.outcome)
        self.came = came


def wait_for_handler(database: Database, kind: str, plan_id: str) -> bool:
    """Remark on a waiting plan that a worker without the handler of its next step was hinted; whether it was made."""
    with database.autocommit() as connection:
        return bool(run(connection, _statements.wait_for_handler, id=plan_id, kind=kind))
