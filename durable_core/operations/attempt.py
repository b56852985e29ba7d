"""
One look at an operation: issue its call, which happens at most once, ever; or poll it; or look for what became of it.

Only the owner of fence 1 issues. Its claim is committed before the call, and nothing leads back from there: whatever
comes later finds the row running.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from durable_core.claims.claim import Claim
from durable_core.claims.heartbeat import Held
from durable_core.claims.session import leave_if_forked
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import DATABASE_ERRORS, Row, is_infrastructure, run, said
from durable_core.deliveries.raised import with_causes
from durable_core.deliveries.worker import Attempted, Outcome, Worker
from durable_core.errors import GiveUp, InvalidArguments, Retry
from durable_core.operations.declare import OperationKind, OperationStep, called, issued_of, polled_of
from durable_core.operations.report import LONGEST_POLL_PAUSE, OUTAGE_SECONDS, Report, remark_refused, settle
from durable_core.operations.sanitised import code_of, of_error, sanitised
from durable_core.operations.statuses import Issued, read, seconds_asked, verdict
from durable_core.operations.traced import followed
from durable_core.states import OperationState

log = logging.getLogger("durable.run")
_statements = beside(__file__)

LEAVING = (KeyboardInterrupt, SystemExit, GeneratorExit)

UNFIT_SECONDS = 60.0
"""How long one waits whose arguments do not fit the handler, until a worker tries again."""
UNKNOWN_SECONDS = 10.0
"""How long one is left alone whose kind a worker did not know."""
PUT_OFF_SECONDS = 10.0
"""How long one waits whose pre-check could not be made."""
ARRIVAL_SECONDS = 30.0
"""So long after it was made, or half of the patience, a call may still come to be known to the other side."""
RECORD_SECONDS = 60.0
"""The ids of a call that was answered are tried to be recorded for so long: nobody else could ever tell them. The
lease may last by as much longer than the call, and the hard limit of the task comes after it."""

POLL_SECONDS = 30.0
"""A poll, or a look for the ids, has so long, or the kind's `timeout` where that is less: another may ask after it."""

GAVE_UP = "GAVE_UP"
"""The code of a `GiveUp` that names none."""


def perform(worker: Worker, kind: OperationKind, row_id: str) -> Attempted:
    """
    Act on a hint: issue what is queued, poll what runs, ask the other side to stop what was canceled.

    A hint that finds nothing to do is an ordinary outcome, and so is a database that does not answer. Raises an exit
    of the process, and a database that refuses the claim for another reason, such as a missing schema.
    """
    try:
        with worker.database.driver() as driver:
            rows = run(driver, _statements.look, id=row_id, kind=kind.name)
        if not rows:
            return Attempted(Outcome.NOTHING_TO_DO, row_id, kind.name)
        match rows[0]["state"]:
            case "queued" if rows[0]["may_be_issued"]:
                return _begin(worker, kind, rows[0])
            case "running":
                return _ask_again(worker, kind, row_id)
            case "canceled" if kind.cancel_hook is not None:
                return _ask_to_cancel(worker, kind, rows[0], _read(rows[0]["external_ids"]))
        return Attempted(Outcome.NOTHING_TO_DO, row_id, kind.name)
    except DATABASE_ERRORS as error:
        if not is_infrastructure(error):
            raise
        # Of a claim whose COMMIT has lost its answer too: its call is not made. Another thread of this process may
        # have claimed it at the same moment, and nothing could tell the two apart. It ends as its lease does.
        log.warning("claim_not_answered", extra={"row_id": row_id, "kind": kind.name, "error": said(error)})
        return Attempted(Outcome.UNAVAILABLE, row_id, kind.name)
    except worker.time_limits:
        worker.database.renew()
        raise


# --- before the call -----------------------------------------------------------------------------


def _begin(worker: Worker, kind: OperationKind, row: Row) -> Attempted:
    """The pre-check, outside any claim; then the claim, then the call."""
    try:
        arguments = kind.signature.unpack(row["arguments"])
    except InvalidArguments as unfit:
        log.error(
            "operation_waits_for_arguments", extra={"row_id": row["id"], "kind": kind.name, "error": unfit.reason}
        )
        why = f"argument {unfit.argument!r} does not fit the handler"
        return _put_off(worker, kind, row["id"], UNFIT_SECONDS, unfit.reason, why, waiting_for="arguments")
    if kind.precheck_hook is not None:
        with worker.database.autocommit() as connection:
            run(connection, _statements.begin_precheck, id=row["id"])
        refused = _prechecked(worker, kind, row, arguments)
        if refused is not None:
            return refused
    before = time.monotonic()
    with worker.database.driver() as driver:
        taken = run(
            driver, _statements.take, **worker.holder.parameters, id=row["id"], kind=kind.name, finds=kind.finds,
            cancels=kind.cancel_hook is not None, timeout_seconds=kind.timeout, record_seconds=RECORD_SECONDS,
        )  # fmt: skip
    if not taken:
        return Attempted(Outcome.NOTHING_TO_DO, row["id"], kind.name)
    claim = Claim.of(taken[0], before)
    return _held(worker, claim, "call", lambda held: _Look(worker, kind, claim, held, taken[0]).issue(arguments))


def _prechecked(worker: Worker, kind: OperationKind, row: Row, arguments: dict[str, Any]) -> Attempted | None:
    """None where the other side would take the call, as far as the pre-check can tell."""
    assert kind.precheck_hook is not None
    pid = os.getpid()
    try:
        try:
            called(kind.precheck_hook, OperationStep(kind, row["id"], row["arguments"]), **arguments)
        finally:
            leave_if_forked(pid)
    except LEAVING:
        raise
    except GiveUp as no:
        code = _code(no, "OPERATION_REFUSED")
        message = sanitised(no.message)
        with worker.database.autocommit() as connection:
            done = run(connection, _statements.refuse, id=row["id"], error_code=code, error_message=message)
        if not done:
            return Attempted(Outcome.NOTHING_TO_DO, row["id"], kind.name)
        log.warning("operation_refused", extra={"row_id": row["id"], "kind": kind.name, "error_code": code})
        return Attempted(Outcome.FAILED, row["id"], kind.name, error_code=code, error_message=message)
    except BaseException as error:
        if _struck(worker, error):
            worker.database.renew()
        elif not isinstance(error, Exception):
            raise
        if worker.told_to_end():
            raise SystemExit(os.EX_SOFTWARE) from error
        asked = error.after if isinstance(error, Retry) else None
        seconds = PUT_OFF_SECONDS if asked is None else min(max(asked, 0.0), 24 * 3600.0)
        return _put_off(worker, kind, row["id"], seconds, "PRECHECK_FAILED", of_error(error))
    return None


def _put_off(
    worker: Worker, kind: OperationKind, row_id: str, seconds: float, code: str, message: str,
    waiting_for: str | None = None,
) -> Attempted:  # fmt: skip
    """Still queued, and due later; nothing was issued."""
    with worker.database.autocommit() as connection:
        rows = run(
            connection, _statements.put_off, id=row_id, delay_seconds=seconds, waiting_for=waiting_for,
            error_code=code, error_message=message,
        )  # fmt: skip
    log.warning("operation_put_off", extra={"row_id": row_id, "kind": kind.name, "error_code": code})
    due_at = rows[0]["due_at"] if rows else None
    return Attempted(Outcome.PUT_OFF, row_id, kind.name, error_code=code, error_message=message, due_at=due_at)


# --- under a claim -------------------------------------------------------------------------------


def _ask_again(worker: Worker, kind: OperationKind, row_id: str) -> Attempted:
    before = time.monotonic()
    with worker.database.driver() as driver:
        taken = run(
            driver, _statements.take_again, **worker.holder.parameters, id=row_id, kind=kind.name,
            timeout_seconds=min(kind.timeout, POLL_SECONDS), outage_seconds=OUTAGE_SECONDS,
            arrival_seconds=ARRIVAL_SECONDS,
        )  # fmt: skip
    if not taken:
        return Attempted(Outcome.NOTHING_TO_DO, row_id, kind.name)
    row = taken[0]
    if row["failed"]:
        log.error("operation_failed", extra={"row_id": row_id, "kind": kind.name, "error_code": row["error_code"]})
        return Attempted(
            Outcome.FAILED, row_id, kind.name, error_code=row["error_code"], error_message=row["error_message"]
        )
    claim = Claim.of(row, before)
    what = "find" if row["external_ids"] is None else "poll"
    return _held(worker, claim, what, lambda held: _Look(worker, kind, claim, held, row).again())


def _held(worker: Worker, claim: Claim, what: str, act: Callable[[Held], Attempted]) -> Attempted:
    held = worker.heartbeat.hold(claim, _statements)
    try:
        return followed(what, claim, lambda: act(held))
    finally:
        worker.heartbeat.let_go(held)


class _Look:
    """One claim's way from the hook to the report."""

    def __init__(self, worker: Worker, kind: OperationKind, claim: Claim, held: Held, row: Row) -> None:
        self.worker, self.kind, self.claim, self.held, self.row = worker, kind, claim, held, row
        self.began = time.monotonic()
        self.pid = os.getpid()
        seconds = kind.timeout if self._issues else min(kind.timeout, POLL_SECONDS)
        self.step = OperationStep(kind, claim.id, claim.arguments, claim, held, deadline=claim.taken_at + seconds)

    def issue(self, arguments: dict[str, Any]) -> Attempted:
        """The call. What it raises ends the operation; what is not known of it is never found out by calling again."""
        log.info(
            "operation_issued", extra={"row_id": self.claim.id, "kind": self.claim.kind, "fence": self.claim.fence}
        )
        try:
            value = self._call(self.kind.handler, self.step, **arguments)
        except LEAVING:
            self._gone("WORKER_STOPPED")
            raise
        except Retry as unsure:
            return self._outcome_unknown(sanitised(unsure.message) or "the call could not tell what became of it")
        except BaseException as error:
            if self.worker.told_to_end():
                raise SystemExit(os.EX_SOFTWARE) from error
            if _struck(self.worker, error):
                self.worker.database.renew()
                return self._outcome_unknown(f"the call took longer than {self.kind.timeout:g} s")
            if not isinstance(error, Exception):
                self._gone("WORKER_STOPPED")
                raise
            code = _code(error, "CALL_FAILED")
            return self._ended(Report(OperationState.FAILED, code=code, message=self._said(error), move="call failed"))
        try:
            issued = issued_of(value)
        except (TypeError, ValueError) as unfit:
            # The call has been made, and its ids are lost: nobody can poll it.
            return self._outcome_unknown(sanitised(str(unfit)))
        return self._recorded(issued, "issued")

    def again(self) -> Attempted:
        """A poll, or where the call's outcome is unknown a look for it. Neither issues anything."""
        if self.row["external_ids"] is None:
            return self._look_for_it()
        return self._poll()

    @property
    def _issues(self) -> bool:
        """Whether this claim is the one that may call: nothing raises the fence before it."""
        return self.claim.fence == 1

    def _poll(self) -> Attempted:
        ids: list[str] = _read(self.row["external_ids"])
        assert self.kind.poll_hook is not None
        try:
            answer = polled_of(self._call(self.kind.poll_hook, self.step, list(ids)))
        except LEAVING:
            self._gone("WORKER_STOPPED")
            raise
        except BaseException as error:
            return self._not_answered(error, "POLL_FAILED", ids)
        kept = read(self.kind.words, ids, answer.statuses, _read(self.row["external_statuses"]) or {})
        found = verdict(kept)
        return self._ended(
            Report(
                found.state, statuses=kept, answered=True, renews=found.heard,
                provider_seconds=seconds_asked("retry_after", answer.retry_after),
                code=found.code, message=found.message, move=_MOVES[found.state],
            )
        )  # fmt: skip

    def _look_for_it(self) -> Attempted:
        if self.kind.find_hook is None:
            # Another deploy's code declared it. That nobody can look is known now.
            return self._outcome_unknown("this worker's code declares no `find`")
        try:
            value = self._call(self.kind.find_hook, self.step)
            issued = None if value is None else issued_of(value)
        except LEAVING:
            self._gone("WORKER_STOPPED")
            raise
        except BaseException as error:
            return self._not_answered(error, "FIND_FAILED", ())
        if issued is None and self.row["may_arrive"]:
            return self._ended(
                Report(backs_off=True, code="NOT_FOUND_YET", message="the other side does not know it yet")
            )
        if issued is None:
            message = "what became of the call was not heard, and the other side knows nothing of it"
            return self._ended(Report(OperationState.FAILED, code="OUTCOME_UNKNOWN", message=message, move="not found"))
        return self._recorded(issued, "found")

    # --- what came of it -------------------------------------------------------------------------

    def _recorded(self, issued: Issued, move: str) -> Attempted:
        """Store the ids. They are in hand, and nobody else's: tried for as long as the row may still take them."""
        ids = list(issued.external_ids)
        kept = read(self.kind.words, ids, issued.statuses, {})
        found = verdict(kept) if issued.statuses or not ids else None
        report = Report(
            OperationState.RUNNING if found is None else found.state, external_ids=ids, statuses=kept if found else {},
            renews=True, provider_seconds=seconds_asked("retry_after", issued.retry_after),
            code=found.code if found else None, message=found.message if found else None, move=move,
        )  # fmt: skip
        done = self._ended(report, seconds=RECORD_SECONDS)
        if done.outcome is Outcome.CLAIM_LOST and self.kind.cancel_hook is not None:
            # Canceled during the call: the ids are known here alone.
            _ask_to_cancel(self.worker, self.kind, self.row, ids)
        return done

    def _outcome_unknown(self, why: str) -> Attempted:
        """The call may have got through. It is looked for where the kind can, and never made again."""
        if self.kind.finds and self._issues:
            return self._ended(Report(renews=True, code="OUTCOME_UNKNOWN", message=why, move="look for it"))
        return self._ended(Report(OperationState.FAILED, code="OUTCOME_UNKNOWN", message=why, move="outcome unknown"))

    def _not_answered(self, error: BaseException, code: str, ids: tuple[str, ...] | list[str]) -> Attempted:
        """Nothing of the operation changes, its patience least of all; asked again a little later."""
        if self.worker.told_to_end():
            raise SystemExit(os.EX_SOFTWARE) from error
        if _struck(self.worker, error):
            self.worker.database.renew()
            code = "TIMEOUT"
        elif not isinstance(error, Exception):
            self._gone("WORKER_STOPPED")
            raise error
        asked = error.after if isinstance(error, Retry) else None
        message = of_error(error, ids)
        log.warning(
            "operation_not_polled",
            extra={
                "row_id": self.claim.id, "kind": self.claim.kind, "fence": self.claim.fence, "error_code": code,
                "error": message,
            },
        )  # fmt: skip
        return self._ended(
            Report(
                backs_off=asked is None, provider_seconds=max(asked or 0.0, 0.0), code=code, message=message,
            )
        )  # fmt: skip

    def _ended(self, report: Report, *, seconds: float = 0.0) -> Attempted:
        # No hook waits for longer than the time-out: what is beyond it is a process of ours that stood still.
        asked = min(time.monotonic() - self.began, self.kind.timeout)
        row = settle(self.worker, self.claim, self.held, report, asked=asked, seconds=seconds)
        if row is Outcome.CLAIM_LOST:
            remark_refused(self.worker, self.claim, report.move or "poll")
            return self._attempted(Outcome.CLAIM_LOST, "CLAIM_LOST")
        if isinstance(row, Outcome):
            return self._attempted(row)
        state = OperationState(row["state"])
        outcome = _OUTCOMES[state]
        if state is OperationState.RUNNING:
            outcome = Outcome.ISSUED if report.external_ids is not None else Outcome.POLLED
            outcome = Outcome.PUT_OFF if report.code is not None else outcome
        level = logging.ERROR if state is OperationState.FAILED else logging.INFO
        event = {
            OperationState.RUNNING: "operation_polled",
            OperationState.SUCCEEDED: "operation_succeeded",
            OperationState.FAILED: "operation_failed",
        }[state]
        facts = {
            "row_id": self.claim.id, "kind": self.claim.kind, "fence": self.claim.fence, "outcome": outcome.value,
            "error_code": report.code, "duration_s": round(time.monotonic() - self.began, 4),
        }  # fmt: skip
        log.log(level, event, extra=facts)
        return self._attempted(outcome, report.code, report.message, row["due_at"])

    def _gone(self, code: str) -> None:
        """The process goes. A parent that ends it gives its rows back itself; else it is told what is known."""
        if self.worker.told_to_end():
            return
        if self._issues:
            self._outcome_unknown("the worker was stopped during the call")
        else:
            self._ended(Report(code=code, message="the worker was stopped during a poll"))

    def _call(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return called(hook, *args, **kwargs)
        finally:
            leave_if_forked(self.pid)

    def _said(self, error: BaseException) -> str:
        message = error.message if isinstance(error, GiveUp) else None
        return of_error(error) if message is None else sanitised(message)

    def _attempted(
        self, outcome: Outcome, code: str | None = None, message: str | None = None, due_at: Any = None
    ) -> Attempted:
        return Attempted(outcome, self.claim.id, self.claim.kind, 1, 1, code, message, due_at)


_S = OperationState
_MOVES = {_S.RUNNING: None, _S.SUCCEEDED: "poll", _S.FAILED: "poll"}
_OUTCOMES = {_S.RUNNING: Outcome.POLLED, _S.SUCCEEDED: Outcome.SUCCEEDED, _S.FAILED: Outcome.FAILED}


def _read(text: str | None) -> Any:
    """The ids or the statuses; they come as text, for hosts may have their driver read JSON in its own way."""
    return None if text is None else json.loads(text)


def _code(error: BaseException, otherwise: str) -> str:
    """The code that a handler named, as far as it may be kept."""
    return code_of(error.code, otherwise) if isinstance(error, GiveUp) and error.code != GAVE_UP else otherwise


def _struck(worker: Worker, error: BaseException) -> bool:
    """Whether a time limit is at the bottom of this; what it interrupted may have made another exception of it."""
    return any(isinstance(one, worker.time_limits) for one in with_causes(error))


# --- after a cancel ------------------------------------------------------------------------------


def _ask_to_cancel(worker: Worker, kind: OperationKind, row: Row, ids: list[str] | None) -> Attempted:
    """Ask the other side to stop what was canceled: at most once, by its line in the journal; best effort."""
    facts = {"row_id": row["id"], "kind": kind.name}
    nothing = Attempted(Outcome.NOTHING_TO_DO, row["id"], kind.name)
    if not ids or kind.cancel_hook is None:
        return nothing
    with worker.database.transaction() as connection:
        if not run(connection, _statements.lock_canceled, id=row["id"], kind=kind.name):
            return nothing
        # In a statement of its own, for its snapshot is taken under the lock.
        if not run(connection, _statements.ask_to_cancel, id=row["id"]):
            return nothing
    try:
        called(kind.cancel_hook, OperationStep(kind, row["id"], row["arguments"]), list(ids))
    except LEAVING:
        raise
    except BaseException as error:
        if _struck(worker, error):
            worker.database.renew()
        elif not isinstance(error, Exception):
            raise
        log.warning("operation_not_canceled_there", extra={**facts, "error": of_error(error, ids)})
        return Attempted(Outcome.CANCELED, row["id"], kind.name, error_code="CANCEL_FAILED")
    log.info("operation_canceled_there", extra=facts)
    return Attempted(Outcome.CANCELED, row["id"], kind.name)


def wait_for_handler(database: Database, kind: str, row_id: str) -> bool:
    """Remark on a row that a worker without its code was hinted; whether the remark was made."""
    with database.autocommit() as connection:
        return bool(run(connection, _statements.wait_for_handler, id=row_id, kind=kind, delay_seconds=UNKNOWN_SECONDS))


__all__ = ["LONGEST_POLL_PAUSE", "OUTAGE_SECONDS", "perform", "wait_for_handler"]
