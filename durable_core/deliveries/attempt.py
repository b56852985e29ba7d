"""One attempt: claim, run, commit. The handler runs outside any transaction of ours unless it opens `step.session`."""

from __future__ import annotations

import asyncio
import json
import logging
import random as random_module
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

import psycopg
from sqlalchemy.exc import DBAPIError

from durable_core.arguments import clean_text, result_text
from durable_core.claims import claim as protocol
from durable_core.claims.claim import LOCK_TIMEOUT, Claim, Holder
from durable_core.claims.heartbeat import Heartbeat, Held
from durable_core.claims.session import Effect, StepTransaction
from durable_core.database.commits import CommitUnknown, Resolved, resolve
from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, Transaction, checked, is_infrastructure, run, sqlstate
from durable_core.deliveries.declare import AsyncStep, DeliveryKind, Step, registry, terms
from durable_core.deliveries.options import DEFAULT_QUEUE
from durable_core.errors import ClaimLost, EffectEscaped, GiveUp, InvalidArguments, Retry
from durable_core.retry import Verdict, after_failure, rescue_seconds
from durable_core.states import DeliveryState

log = logging.getLogger("durable.run")
_statements = beside(__file__)

TRIES = 3
"""How often a transaction that the machine room refused (deadlock, lock timeout) is tried again."""


UNFIT_SECONDS = 60.0
"""How long a row waits whose arguments do not fit the handler, until a worker tries again."""


class Outcome(StrEnum):
    """What became of one hint."""

    SENT = "sent"
    NOTHING_TO_DO = "nothing to do"
    RETRY = "will be tried again"
    FAILED = "failed"
    DEAD = "dead"
    CLAIM_LOST = "claim lost"
    INTERRUPTED = "interrupted"
    WAITING = "waits for a handler that takes its arguments"
    UNAVAILABLE = "no answer from the database, will be hinted again"
    UNKNOWN = "unknown, left to its lease"


@dataclass(frozen=True)
class Attempted:
    """The outcome of one hint, for whoever carried it."""

    outcome: Outcome
    id: str
    kind: str
    attempt: int = 0
    max_attempts: int = 0
    error_code: str | None = None
    error_message: str | None = None
    due_at: datetime | None = None


@dataclass
class Worker:
    """What a process needs to attempt deliveries. `time_limits` are the exceptions that mean "out of time"."""

    database: Database
    holder: Holder = field(default_factory=Holder)
    heartbeat: Heartbeat | None = None
    time_limits: tuple[type[BaseException], ...] = (TimeoutError,)
    random: Callable[[], float] = random_module.random

    def __post_init__(self) -> None:
        self.heartbeat = self.heartbeat or Heartbeat(self.database, self.holder)


def claim_one(tx: Transaction, kind: DeliveryKind[..., Any], row_id: str, holder: Holder) -> Claim | None:
    """Claim this row if it is due and of this kind; None when there is nothing to take. Commits with `tx`."""
    claims = protocol.take(
        checked(tx), _statements.take, holder, id=row_id, kinds=list(kind.names), timeout_seconds=kind.timeout,
        max_attempts=kind.max_attempts, max_interruptions=kind.max_interruptions,
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
    not answer: dispatch hints again. Raises only an exit of the process, after the row was
    given back.
    """
    try:
        with worker.database.autocommit() as connection:
            claim = claim_one(connection, kind, row_id, worker.holder)
    except (DBAPIError, psycopg.Error) as error:
        if not is_infrastructure(error):
            raise
        log.warning("claim_not_answered", extra={"row_id": row_id, "kind": kind.name, "error": str(error)[:300]})
        return Attempted(Outcome.UNAVAILABLE, row_id, kind.name)
    if claim is None:
        log.debug("nothing_to_claim", extra={"row_id": row_id, "kind": kind.name})
        return Attempted(Outcome.NOTHING_TO_DO, row_id, kind.name)
    return carry_out(worker, kind, claim)


def perform_due(worker: Worker, limit: int, *, queue: str = DEFAULT_QUEUE) -> list[Attempted]:
    """
    Claim up to `limit` due rows and attempt them one after the other, all under the heartbeat.

    What one row's handler raises is that row's failed attempt; the others go on.
    """
    with worker.database.autocommit() as connection:
        claims = claim_due(connection, limit, queue=queue, holder=worker.holder)
    assert worker.heartbeat is not None
    waiting = [(claim, worker.heartbeat.hold(claim, _statements)) for claim in claims]
    done: list[Attempted] = []
    try:
        while waiting:
            claim, held = waiting.pop(0)
            done.append(carry_out(worker, registry.get(claim.kind), claim, held))
    finally:
        for claim, held in waiting:
            worker.heartbeat.let_go(held)
            _release(worker, claim, "WORKER_STOPPED", "the worker was stopped before this row's turn")
    return done


def carry_out(worker: Worker, kind: DeliveryKind[..., Any], claim: Claim, held: Held | None = None) -> Attempted:
    """Run the handler under a claim and commit what came of it. See `perform`."""
    assert worker.heartbeat is not None
    facts = {"row_id": claim.id, "kind": claim.kind, "fence": claim.fence, "attempt": claim.attempt}
    log.debug("delivery_claimed", extra=facts)
    held = held or worker.heartbeat.hold(claim, _statements)
    try:
        try:
            return _Attempt(worker, kind, claim, held).run()
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as leaving:
            # The process goes: give the row back, so that nobody has to wait for the lease.
            _release(worker, claim, "WORKER_STOPPED", f"the worker was stopped ({type(leaving).__name__})")
            raise
    finally:
        worker.heartbeat.let_go(held)


class _Attempt:
    """One claim's way from the handler to the receipt."""

    def __init__(self, worker: Worker, kind: DeliveryKind[..., Any], claim: Claim, held: Held) -> None:
        self.worker, self.kind, self.claim, self.held = worker, kind, claim, held
        self.began = time.monotonic()

    def run(self) -> Attempted:
        """The handler, and its commit; repeated whole, without spending an attempt, when the machine room says no."""
        for again in range(1, TRIES + 1):
            try:
                return self._once()
            except _Repeat as repeat:
                log.warning("attempt_repeated", extra=self._facts(error=clean_text(str(repeat.cause), 500)))
                if again == TRIES or self.held.lost.is_set():
                    return self._interrupted(repeat.cause)
                time.sleep(0.05 * again * (1 + self.worker.random()))
        raise AssertionError("unreachable")

    def _once(self) -> Attempted:
        transaction = StepTransaction(self.worker.database, _statements, self.claim)
        effects: list[Effect] = []
        deadline = self.claim.taken_at + self.kind.timeout
        offered = AsyncStep if self.kind.is_async else Step
        step = offered(self.claim, transaction, self.held, effects, deadline)
        try:
            arguments = self.kind.signature.unpack(self.claim.arguments)
        except InvalidArguments as unfit:
            return self._postponed(unfit)
        try:
            try:
                value = self.kind.handler(step, **arguments)
                if self.kind.is_async:
                    value = asyncio.run(value)
            except BaseException as error:
                broken = transaction.broken
                transaction.discard()
                if broken and is_infrastructure(error):
                    raise _Repeat(error) from error
                return self._ended_by(error)
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
        replayable = not transaction.used
        for again in range(1, TRIES + 1):
            try:
                transaction.commit({"result": result}, effects)
            except CommitUnknown as unknown:
                match resolve(self.worker.database, _statements.resolve, self.claim.id, self.claim.fence, LOCK_TIMEOUT):
                    case Resolved.COMMITTED:
                        log.info("commit_resolved", extra=self._facts(resolved="committed"))
                    case Resolved.NOT_COMMITTED if replayable and again < TRIES:
                        log.info("commit_resolved", extra=self._facts(resolved="not committed"))
                        continue
                    case Resolved.NOT_COMMITTED:
                        raise _Repeat(unknown) from unknown
                    case Resolved.LOST:
                        return self._refused("success")
                    case Resolved.UNKNOWN:
                        log.error("commit_unknown", extra=self._facts())
                        return self._attempted(Outcome.UNKNOWN)
            except ClaimLost:
                return self._refused("success")
            except Exception as error:
                if not is_infrastructure(error):
                    return self._ended_by(error)
                if not replayable:
                    raise _Repeat(error) from error
                if again == TRIES:
                    return self._interrupted(error)
                time.sleep(0.05 * again * (1 + self.worker.random()))
                continue
            log.info("delivery_committed", extra=self._facts(outcome="sent"))
            return self._attempted(Outcome.SENT)
        raise AssertionError("unreachable")

    # --- everything else -------------------------------------------------------------------------

    def _ended_by(self, error: BaseException) -> Attempted:
        """What an exception from the handler, or from an effect, means."""
        if isinstance(error, ClaimLost):
            return self._refused("effect")
        if isinstance(error, GiveUp):
            return self._failed(Verdict(DeliveryState.FAILED), error.code, error.message)
        if isinstance(error, self.worker.time_limits):
            return self._retry_later("TIMEOUT", f"the attempt took longer than {self.kind.timeout:g} s")
        if isinstance(error, Retry):
            return self._retry_later(error.code, error.message or "the handler asked to be run again", error.after)
        if not isinstance(error, Exception):
            raise error
        code = error.reason if isinstance(error, EffectEscaped) else "WORKER_ERROR"
        # Not str(error): an exception's own text may raise, and a failure must still be recorded.
        said, lines = traceback.format_exception_only(error)[-1], traceback.format_exception(error)
        return self._retry_later(code, f"{said}\n{''.join(lines)}")

    def _retry_later(self, code: str, message: str, after: float | None = None) -> Attempted:
        failure, random = self.claim.attempt, self.worker.random
        delay = self.kind.backoff.jittered(failure, random) if after is None else after
        return self._failed(after_failure(failure, self.claim.max_attempts, delay), code, message)

    def _failed(self, verdict: Verdict, code: str, message: str) -> Attempted:
        """Commit a failed attempt: state, due time and journal line, under the fence. No effect of it stands."""
        try:
            row = _reported(
                self.worker, _statements.fail, self.claim,
                to_state=verdict.state.value, delay_seconds=verdict.delay_seconds,
                error_code=clean_text(code, 100), error_message=clean_text(message),
            )  # fmt: skip
        except (DBAPIError, psycopg.Error) as error:
            log.error("failure_not_recorded", extra=self._facts(error=clean_text(str(error), 500)))
            return self._attempted(Outcome.UNKNOWN)
        if row is None:
            return self._settled_already() or self._refused("failure")
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
        log.log(level, event, extra=self._facts(outcome=outcome.value, error_code=code, error=first_line))
        return self._attempted(outcome, code, first_line, row["due_at"])

    def _postponed(self, unfit: InvalidArguments) -> Attempted:
        """The code changed under the row: keep it, spend nothing, and try again until the right worker is there."""
        why = f"argument {unfit.argument!r}: {unfit.problem}"
        try:
            row = _reported(
                self.worker, _statements.postpone, self.claim, delay_seconds=UNFIT_SECONDS, waiting_for="arguments",
                error_code=unfit.reason, error_message=clean_text(why),
            )  # fmt: skip
        except (DBAPIError, psycopg.Error) as error:
            log.error("postponement_not_recorded", extra=self._facts(error=clean_text(str(error), 500)))
            return self._attempted(Outcome.UNKNOWN)
        if row is None:
            return self._refused("failure")
        log.error("delivery_waits_for_arguments", extra=self._facts(error=clean_text(why, 500)))
        return self._attempted(Outcome.WAITING, unfit.reason, None, row["due_at"])

    def _settled_already(self) -> Attempted | None:
        """An exception (a time limit) may strike after COMMIT was sent: then the row says what this fence came to."""
        try:
            with self.worker.database.autocommit() as connection:
                rows = run(connection, _statements.resolve, id=self.claim.id, lock_timeout=LOCK_TIMEOUT)
        except (DBAPIError, psycopg.Error):
            return None
        if not rows or not rows[0]["fence"] == rows[0]["settled_fence"] == self.claim.fence:
            return None
        log.info("commit_resolved", extra=self._facts(resolved=rows[0]["state"]))
        return self._attempted(Outcome.SENT) if rows[0]["state"] == DeliveryState.SENT else None

    def _interrupted(self, error: BaseException) -> Attempted:
        """The machine room refused for good: give the row back without spending an attempt."""
        row = _release(self.worker, self.claim, "INFRASTRUCTURE", f"{type(error).__name__}: {error}")
        if row is None:
            return self._attempted(Outcome.UNKNOWN, "INFRASTRUCTURE")
        dead = row["state"] == DeliveryState.DEAD
        return self._attempted(
            Outcome.DEAD if dead else Outcome.INTERRUPTED,
            "INFRASTRUCTURE",
            clean_text(str(error), 500),
            row["due_at"],
        )

    def _refused(self, reported: str) -> Attempted:
        """The fence said no: somebody else has the row. Nothing was written; one journal line tells people."""
        log.warning("stale_write_refused", extra=self._facts(reported=reported))
        try:
            with self.worker.database.autocommit() as connection:
                run(
                    connection, _statements.remark_stale,
                    **self.claim.naming, reason=f"LATE_{reported.upper()}", reported=reported,
                )  # fmt: skip
        except (DBAPIError, psycopg.Error):
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


class _Repeat(Exception):
    """The whole attempt must run again, at no cost to its budget."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _release(worker: Worker, claim: Claim, code: str, message: str) -> Row | None:
    """Give the row back, counted as an interruption; None when it was not ours or nobody answered."""
    delay = rescue_seconds(claim.interruptions + 1, worker.random)
    try:
        return _reported(
            worker, _statements.release, claim, delay_seconds=delay,
            error_code=clean_text(code, 100), error_message=clean_text(message),
        )  # fmt: skip
    except (DBAPIError, psycopg.Error):
        log.error(
            "release_failed",
            extra={"row_id": claim.id, "kind": claim.kind, "fence": claim.fence},
            exc_info=True,
        )
        return None


def _reported(worker: Worker, statement: Statement, claim: Claim, **parameters: object) -> Row | None:
    """Run one self-guarded statement under the fence, again when the machine room refuses; None for a lost race."""
    doubtful = False
    for again in range(1, TRIES + 1):
        try:
            with worker.database.autocommit() as connection:
                rows = run(connection, statement, lock_timeout=LOCK_TIMEOUT, **claim.naming, **parameters)
                if not rows and doubtful:
                    # An earlier try lost its answer. If this fence is settled, that try was the one that settled it.
                    rows = [
                        row
                        for row in run(connection, _statements.resolve, id=claim.id, lock_timeout=LOCK_TIMEOUT)
                        if row["fence"] == row["settled_fence"] == claim.fence
                    ]
            return rows[0] if rows else None
        except (DBAPIError, psycopg.Error) as error:
            if again == TRIES or not is_infrastructure(error):
                raise
            doubtful = doubtful or sqlstate(error) is None
            time.sleep(0.05 * again * (1 + worker.random()))
    raise AssertionError("unreachable")


def wait_for_handler(database: Database, kind: str, row_id: str) -> bool:
    """Remark on a pending row that a worker without its handler was hinted; whether the remark was made."""
    with database.autocommit() as connection:
        return bool(run(connection, _statements.wait_for_handler, id=row_id, kind=kind))
