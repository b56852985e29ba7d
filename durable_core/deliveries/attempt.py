"""One attempt: claim, run, commit. The handler runs outside any transaction of ours unless it opens `step.session`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from datetime import datetime
from typing import Any

from sqlalchemy.exc import DBAPIError

from durable_core.arguments import clean_text, result_text
from durable_core.claims import claim as protocol
from durable_core.claims.claim import Claim, Holder
from durable_core.claims.heartbeat import Held
from durable_core.claims.session import Effect, LockRefused, StepTransaction, leave_if_forked
from durable_core.database.commits import CommitUnknown, Resolved
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import (
    CANCELED,
    DATABASE_ERRORS,
    LOCK_TIMEOUT,
    Transaction,
    checked,
    is_infrastructure,
    run,
    said,
    sqlstate,
)
from durable_core.deliveries.declare import AsyncStep, DeliveryKind, Step, registry, terms
from durable_core.deliveries.ended import hint_next
from durable_core.deliveries.options import DEFAULT_QUEUE
from durable_core.deliveries.raised import refuse_unrun, told, with_causes
from durable_core.deliveries.report import TRIES, came_to, end, interrupt
from durable_core.deliveries.traced import followed
from durable_core.deliveries.worker import Attempted, Outcome, Worker
from durable_core.errors import ClaimLost, EffectEscaped, GiveUp, InvalidArguments, Retry, Snooze
from durable_core.retry import LONGEST_DELAY_SECONDS, Verdict, after_failure
from durable_core.states import DeliveryState
from durable_core.tracing import settling

log = logging.getLogger("durable.run")
_statements = beside(__file__)

UNKNOWN_SECONDS = 10.0
"""How long dispatch leaves a row alone whose kind a worker did not know: in a rolling deploy others may know it."""

LEAVING = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends the process and is no outcome of a handler; Celery's own shutdown exceptions are SystemExit."""

ROWLESS_SECONDS = 600.0
"""A process says this often that it is given hints of rows which are not in its database, not at every hint."""

LONGEST_RETRY_SECONDS = 24 * 3600.0
"""No `Retry(after=...)` puts a failed attempt off for longer: no other side's word must park a row for a year."""

UNIQUE_VIOLATION = "23505"
ONE_OF_A_LINE = "deliveries_one_of_a_line"

UNFIT_SECONDS = 60.0
"""How long a row waits whose arguments do not fit the handler, until a worker tries again."""


def claim_one(tx: Transaction, kind: DeliveryKind[..., Any], row_id: str, holder: Holder) -> Claim | None:
    """Claim this row if it is due and of this kind; None when there is nothing to take. Commits with `tx`."""
    claims = protocol.take(
        checked(tx), _statements.take, holder, id=row_id, kinds=list(kind.names),
        timeout_seconds=kind.timeout, max_attempts=kind.max_attempts, max_interruptions=kind.max_interruptions,
    )  # fmt: skip
    return claims[0] if claims else None


def claim_due(tx: Transaction, limit: int, *, queue: str = DEFAULT_QUEUE, holder: Holder | None = None) -> list[Claim]:
    """
    Claim at most `limit` due rows of a queue, the most overdue first, of the kinds declared here.

    Rows that somebody else is claiming are skipped, not waited for, so fewer than asked may
    come back. `limit` below 1 claims nothing and runs no statement. All share one lease: keep
    `limit` small enough to be drained in half of it, or hold the claims under a heartbeat.
    """
    tx = checked(tx)
    if limit < 1:
        return []
    return protocol.take(
        tx,
        _statements.take_due,
        holder or Holder(),
        queue=queue,
        limit=limit,
        terms=json.dumps(terms(registry)),
    )


def perform(worker: Worker, kind: DeliveryKind[..., Any], row_id: str) -> Attempted:
    """
    Act on a hint: claim the row, run its handler, commit the outcome.

    A hint that finds nothing to take is an ordinary outcome, and so is a database that does
    not answer: dispatch hints again. Raises an exit of the process, after the row was given
    back, and a database that refuses the claim for another reason, such as a missing schema.
    """
    try:
        with worker.database.driver() as driver:
            claim = claim_one(driver, kind, row_id, worker.holder)
            if claim is None:
                _look_for_its_row(worker, driver, kind, row_id)
    except DATABASE_ERRORS as error:
        if _another_of_its_line(error):
            return Attempted(Outcome.NOTHING_TO_DO, row_id, kind.name)
        if not is_infrastructure(error):
            raise
        log.warning("claim_not_answered", extra={"row_id": row_id, "kind": kind.name, "error": said(error)})
        return Attempted(Outcome.UNAVAILABLE, row_id, kind.name)
    except worker.time_limits:
        # It may have struck while a connection went in or out of the pool.
        worker.database.renew()
        raise
    if claim is None:
        log.debug("nothing_to_claim", extra={"row_id": row_id, "kind": kind.name})
        return Attempted(Outcome.NOTHING_TO_DO, row_id, kind.name)
    return carry_out(worker, kind, claim)


def _another_of_its_line(error: BaseException) -> bool:
    """Another delivery of the same ordering key was claimed at the same moment: a lost race."""
    return sqlstate(error) == UNIQUE_VIOLATION and ONE_OF_A_LINE in str(error)


def _look_for_its_row(worker: Worker, tx: Transaction, kind: DeliveryKind[..., Any], row_id: str) -> None:
    """Say, now and then, that a hint's row is in some other database: two installations share their queues."""
    if time.monotonic() < worker.quiet_until or run(tx, _statements.known, id=row_id):
        return
    worker.quiet_until = time.monotonic() + ROWLESS_SECONDS
    log.warning("hint_without_row", extra={"row_id": row_id, "kind": kind.name})


def perform_due(worker: Worker, limit: int, *, queue: str = DEFAULT_QUEUE) -> list[Attempted]:
    """
    Claim up to `limit` due rows and attempt them one after the other, all under the heartbeat.

    What one row's handler raises is that row's failed attempt; the others go on.
    """
    try:
        with worker.database.autocommit() as connection:
            claims = claim_due(connection, limit, queue=queue, holder=worker.holder)
    except DATABASE_ERRORS as error:
        if not _another_of_its_line(error):
            raise
        claims = []
    waiting = [(claim, worker.heartbeat.hold(claim, _statements)) for claim in claims]
    done: list[Attempted] = []
    try:
        while waiting:
            claim, held = waiting.pop(0)
            done.append(carry_out(worker, registry.get(claim.kind), claim, held))
    finally:
        for claim, held in waiting:
            worker.heartbeat.let_go(held)
            end(
                worker, claim, Verdict(DeliveryState.PENDING), counted="shutdown", move="release",
                code="SHUTDOWN", message="the worker was stopped before this row's turn",
            )  # fmt: skip
    return done


@followed
def carry_out(worker: Worker, kind: DeliveryKind[..., Any], claim: Claim, held: Held | None = None) -> Attempted:
    """Run the handler under a claim and commit what came of it. See `perform`."""
    facts = {"row_id": claim.id, "kind": claim.kind, "fence": claim.fence, "attempt": claim.attempt}
    log.debug("delivery_claimed", extra=facts)
    held = held or worker.heartbeat.hold(claim, _statements)
    try:
        try:
            return _Attempt(worker, kind, claim, held).run()
        except LEAVING as leaving:
            # The process goes: give the row back, so that nobody has to wait for the lease. A parent that ends it
            # does so itself, and knows better what for.
            if not worker.told_to_end():
                interrupt(worker, claim, "WORKER_STOPPED", f"the worker was stopped ({type(leaving).__name__})")
            raise
    finally:
        worker.heartbeat.let_go(held)
        hint_next(worker.database, claim.ordering_key)


class _Attempt:
    """One claim's way from the handler to the receipt."""

    def __init__(self, worker: Worker, kind: DeliveryKind[..., Any], claim: Claim, held: Held) -> None:
        self.worker, self.kind, self.claim, self.held = worker, kind, claim, held
        self.began = time.monotonic()
        self.deadline = claim.taken_at + kind.timeout
        self.pid = os.getpid()

    def run(self) -> Attempted:
        """The handler, and its commit; repeated whole, without spending an attempt, when the machine room says no."""
        for again in range(1, TRIES + 1):
            try:
                return self._once()
            except _Repeat as repeat:
                if time.monotonic() >= self.deadline:
                    return self._timed_out()
                log.warning("attempt_repeated", extra=self._facts(error=said(repeat.cause)))
                # A kind that may not be interrupted is not run twice either: its external call may have happened.
                if again == TRIES or self.held.lost.is_set() or self.claim.max_interruptions == 0:
                    return self._interrupted(repeat.cause)
                time.sleep(self.worker.pause(again))
        raise AssertionError("unreachable")

    def _once(self) -> Attempted:
        transaction = StepTransaction(self.worker.database, _statements, self.claim, self.worker.holder.answer_seconds)
        effects: list[Effect] = []
        offered = AsyncStep if self.kind.is_async else Step
        step = offered(self.claim, transaction, self.held, effects, self.deadline)
        try:
            arguments = self.kind.signature.unpack(self.claim.arguments)
        except InvalidArguments as unfit:
            return self._postponed(unfit)
        try:
            try:
                try:
                    value = self.kind.handler(step, **arguments)
                    if self.kind.is_async:
                        value = asyncio.run(value)
                finally:
                    leave_if_forked(self.pid)
                refuse_unrun(value)
            except BaseException as error:
                broken = transaction.broken
                transaction.discard()
                if isinstance(error, LockRefused) or (broken and is_infrastructure(error) and not _own_bound(error)):
                    raise _Repeat(error) from error
                return self._ended_by(error)
            step.handler_returned()
            return self._settled(transaction, tuple(effects), value)
        finally:
            transaction.discard()

    # --- success ---------------------------------------------------------------------------------

    def _settled(self, transaction: StepTransaction, effects: tuple[Effect, ...], value: object) -> Attempted:
        result, warning = result_text(value)
        if warning:
            log.warning("result_not_stored", extra=self._facts(error=warning))
        # Work done with step.session goes with its transaction: only the whole attempt can be
        # repeated. Without it, the commit alone is replayed, and in_commit effects with it.
        replayable, doubtful = not transaction.used, False
        for again in range(1, TRIES + 1):
            try:
                with settling(self.kind.name, self.claim.id):
                    transaction.commit({"result": result}, effects)
            except CommitUnknown as unknown:
                doubtful = True
                match came_to(self.worker, self.claim)[0]:
                    case Resolved.COMMITTED:
                        log.info("commit_resolved", extra=self._facts(resolved="committed"))
                    case Resolved.NOT_COMMITTED if replayable and again < TRIES:
                        log.info("commit_resolved", extra=self._facts(resolved="not committed"))
                        continue
                    case Resolved.NOT_COMMITTED:
                        raise _Repeat(unknown) from unknown
                    case Resolved.LOST:
                        return self._refused("success")
                    case Resolved.NOT_ASKED if replayable and again < TRIES:
                        time.sleep(self.worker.pause(again))
                        continue
                    case Resolved.UNKNOWN | Resolved.NOT_ASKED:
                        log.error("commit_unknown", extra=self._facts())
                        return self._attempted(Outcome.UNKNOWN)
            except ClaimLost:
                # An earlier try may have landed after all, and later than the row was asked.
                if not doubtful or came_to(self.worker, self.claim)[0] is not Resolved.COMMITTED:
                    return self._refused("success")
                log.info("commit_resolved", extra=self._facts(resolved="committed"))
            except Exception as error:
                # An effect's statements come wrapped by SQLAlchemy. The receipt's go to the driver, and no time-out of
                # theirs is the handler's.
                effects_own = _own_bound(error) and isinstance(error, DBAPIError)
                if not isinstance(error, LockRefused) and (not is_infrastructure(error) or effects_own):
                    return self._ended_by(error)
                if not replayable:
                    raise _Repeat(error) from error
                if again == TRIES:
                    return self._interrupted(error)
                time.sleep(self.worker.pause(again))
                continue
            log.info("delivery_committed", extra=self._facts(outcome="sent"))
            return self._attempted(Outcome.SENT)
        raise AssertionError("unreachable")

    # --- everything else -------------------------------------------------------------------------

    def _ended_by(self, error: BaseException) -> Attempted:
        """What an exception from the handler, or from an effect, means."""
        struck = any(isinstance(one, self.worker.time_limits) for one in with_causes(error))
        if struck:
            # It may have struck while a connection went in or out of the pool, which then never gets it back.
            self.worker.database.renew()
        if isinstance(error, ClaimLost):
            return self._refused("effect")
        if isinstance(error, GiveUp):
            return self._failed(Verdict(DeliveryState.FAILED), error.code, error.message)
        if isinstance(error, self.worker.time_limits):
            return self._timed_out()
        if isinstance(error, Retry):
            return self._retry_later(error.code, error.message or "the handler asked to be run again", error.after)
        if isinstance(error, Snooze):
            return self._put_off(Outcome.SNOOZED, "snooze", error.after, error.code, error.message)
        if isinstance(error, LEAVING):
            raise error
        if self.worker.told_to_end():
            # What a handler raises on its way out says nothing about its work.
            raise SystemExit(os.EX_SOFTWARE) from error
        if struck:
            # What it interrupted, a driver for one, made another exception of it.
            return self._timed_out(told(error))
        code = error.reason if isinstance(error, EffectEscaped) else "WORKER_ERROR"
        if self.kind.gives_up_on(error):
            return self._failed(Verdict(DeliveryState.FAILED), code, told(error))
        return self._retry_later(code, told(error))

    def _timed_out(self, raised: str = "") -> Attempted:
        return self._retry_later("TIMEOUT", f"the attempt took longer than {self.kind.timeout:g} s\n{raised}".strip())

    def _retry_later(self, code: str, message: str, after: float | None = None) -> Attempted:
        failure, random = self.claim.attempt, self.worker.random
        delay = self.kind.backoff.jittered(failure, random) if after is None else min(after, LONGEST_RETRY_SECONDS)
        return self._failed(after_failure(failure, self.claim.max_attempts, delay), code, message)

    def _failed(self, verdict: Verdict, code: str, message: str) -> Attempted:
        """Commit a failed attempt: state, due time and journal line, under the fence. No effect of it stands."""
        row = end(self.worker, self.claim, verdict, counted="failure", move="fail", code=code, message=message)
        if isinstance(row, Outcome):
            return self._not_recorded(row, "failure")
        outcome = {
            DeliveryState.PENDING: Outcome.RETRY,
            DeliveryState.FAILED: Outcome.FAILED,
            DeliveryState.DEAD: Outcome.DEAD,
        }[verdict.state]
        level = logging.WARNING if outcome is Outcome.RETRY else logging.ERROR
        event = {
            Outcome.RETRY: "delivery_retry_scheduled",
            Outcome.FAILED: "delivery_failed",
            Outcome.DEAD: "delivery_dead",
        }[outcome]
        first_line = clean_text(message, 500).split("\n", 1)[0]
        when = {"next_attempt_at": row["due_at"]} if outcome is Outcome.RETRY else {}
        log.log(level, event, extra=self._facts(outcome=outcome.value, error_code=code, error=first_line, **when))
        return self._attempted(outcome, code, first_line, row["due_at"])

    def _postponed(self, unfit: InvalidArguments) -> Attempted:
        """The code changed under the row: keep it, spend nothing, and try again until the right worker is there."""
        why = unfit.what
        log.error("delivery_waits_for_arguments", extra=self._facts(error=clean_text(why, 500)))
        return self._put_off(Outcome.WAITING, "postpone", UNFIT_SECONDS, unfit.reason, why, waiting_for="arguments")

    def _put_off(
        self, outcome: Outcome, move: str, seconds: float, code: str, message: str, waiting_for: str | None = None
    ) -> Attempted:
        """Keep the row for later at no cost to its budget."""
        verdict = Verdict(DeliveryState.PENDING, min(max(seconds, 0.0), LONGEST_DELAY_SECONDS))
        row = end(
            self.worker, self.claim, verdict, counted="snooze", move=move, code=code, message=message,
            waiting_for=waiting_for,
        )  # fmt: skip
        if isinstance(row, Outcome):
            return self._not_recorded(row, move)
        return self._attempted(outcome, code, None, row["due_at"])

    def _interrupted(self, error: BaseException) -> Attempted:
        """The machine room refused for good: give the row back without spending an attempt."""
        row = interrupt(self.worker, self.claim, "INFRASTRUCTURE", said(error))
        if isinstance(row, Outcome):
            return self._not_recorded(row, "interruption")
        dead = row["state"] == DeliveryState.DEAD
        outcome = Outcome.DEAD if dead else Outcome.INTERRUPTED
        return self._attempted(outcome, "INFRASTRUCTURE", said(error), row["due_at"])

    def _not_recorded(self, why: Outcome, reported: str) -> Attempted:
        """The report did not land: the claim is lost, or the row says that it was settled after all."""
        if why is Outcome.CLAIM_LOST:
            return self._refused(reported)
        return self._attempted(why)

    def _refused(self, reported: str) -> Attempted:
        """The fence said no: somebody else has the row. Nothing was written; one journal line tells people."""
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

    def _attempted(
        self,
        outcome: Outcome,
        code: str | None = None,
        message: str | None = None,
        due_at: datetime | None = None,
    ) -> Attempted:
        claim = self.claim
        return Attempted(outcome, claim.id, claim.kind, claim.attempt, claim.max_attempts, code, message, due_at)

    def _facts(self, **more: object) -> dict[str, object]:
        return {
            "row_id": self.claim.id, "kind": self.claim.kind, "fence": self.claim.fence,
            "attempt": self.claim.attempt, "max_attempts": self.claim.max_attempts,
            "duration_s": round(time.monotonic() - self.began, 4), **more,
        }  # fmt: skip


def _own_bound(error: BaseException) -> bool:
    """A lock or statement time-out of the host's own, met by user code: we had put ours back, so it is a failure."""
    return sqlstate(error) in (LOCK_TIMEOUT, CANCELED)


class _Repeat(Exception):
    """The whole attempt must run again, at no cost to its budget."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def wait_for_handler(database: Database, kind: str, row_id: str) -> bool:
    """Remark on a pending row that a worker without its handler was hinted; whether the remark was made."""
    with database.autocommit() as connection:
        return bool(run(connection, _statements.wait_for_handler, id=row_id, kind=kind, delay_seconds=UNKNOWN_SECONDS))
