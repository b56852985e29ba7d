"""The Celery tasks: thin shells. The shell offers, the core decides, and no retry is ever Celery's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import UTC
from typing import Any, Protocol

from billiard.process import current_process
from celery.exceptions import Retry as CeleryRetry

from durable_core import kinds
from durable_core.celery_binding.durable import Durable
from durable_core.database.transactions import DATABASE_ERRORS, is_infrastructure, said
from durable_core.deliveries import attempt
from durable_core.deliveries.read import checked_id
from durable_core.deliveries.worker import Attempted, Outcome, Worker
from durable_core.errors import DefinitionError, NotFound
from durable_core.operations import attempt as operations
from durable_core.plans import attempt as plans
from durable_core.sweeps import run_sweep

log = logging.getLogger("durable.run")

HARD_LIMIT_GRACE = 10.0
"""Seconds between the soft limit, an exception in the handler, and the hard one, which kills the child."""

RECORDS = {"operation": operations.RECORD_SECONDS}
"""Seconds that a contract's task may go on after its soft limit with what it alone knows, before that grace."""


class DeliveryEnded(Exception):
    """A delivery ended failed or dead: what Flower shows as FAILURE. The row has it already."""


class AttemptNotMade(Exception):
    """Something of ours failed before or beside the handler; the worker's log tells it, and dispatch hints again."""


class DeliveryRetried(Exception):
    """An attempt ended and another will come: what Flower shows beside RETRY. The row has it already."""


def is_ours(task: object) -> bool:
    return getattr(task, "durable_kind", None) is not None


def check_names(durable: Durable) -> None:
    """Raises DefinitionError when a kind is named like a task of the host's, or an operation has no poll."""
    for kind in kinds.known():
        if not all(is_ours(durable.app.tasks.get(name)) for name in kind.names):
            raise DefinitionError(f"kind {kind.name!r} is named like an existing Celery task; rename one of them.")
    for operation in kinds.operations:
        operation.check()


class CarriedOut(kinds.Kind, Protocol):
    """A kind that a task carries out."""

    __module__: str

    @property
    def timeout(self) -> float:
        """How long one attempt may take, in seconds."""
        ...


PERFORM: dict[str, Callable[[Worker, Any, str], Attempted]] = {
    "delivery": attempt.perform,
    "plan": plans.perform,
    "operation": operations.perform,
}
"""How a hint is acted on, by the contract of its kind."""


def register_kind(durable: Durable, contract: str, kind: CarriedOut) -> None:
    """
    One task of the kind's name, and of each it had before, with per-task options only.

    Acknowledged early: the row recovers without the broker, and a late-acknowledged task in
    flight when Redis restarts takes the worker's main process down (Celery 5.7).
    """
    app: Any = durable.app
    for name in kind.names:
        if name in app._tasks:
            raise DefinitionError(f"kind {name!r} is named like an existing Celery task; rename one of them.")

        def deliver(_task: Any, id: object = None, **_: object) -> str:
            try:
                attempted = _attempted(durable, contract, kind, id)
                if attempted.outcome is Outcome.UNAVAILABLE:
                    _leave_if_spent()
            except Exception as error:
                _leave_if_spent()
                # Its text stays here: events go through the broker, and it may hold what was in the arguments.
                log.exception("attempt_not_made", extra={"row_id": str(id)[:60], "kind": kind.name})
                raise AttemptNotMade(type(error).__name__) from None
            return _told(attempted)

        # Where the pool spawns its children they import the modules of their tasks: the kind's, not this one.
        deliver.__module__ = kind.__module__
        app.task(
            name=name, bind=True, acks_late=False, ignore_result=True, max_retries=0, serializer="json",
            soft_time_limit=kind.timeout, throws=(DeliveryEnded,),
            time_limit=kind.timeout + RECORDS.get(contract, 0.0) + HARD_LIMIT_GRACE,
            durable_kind=kind.name, typing=False, shared=False,
        )(deliver)  # fmt: skip


def _attempted(durable: Durable, contract: str, kind: CarriedOut, row_id: object) -> Attempted:
    try:
        checked = checked_id(row_id if isinstance(row_id, str) else "")
    except NotFound:
        # Somebody sent the task with Celery's own means: nothing is lost, for nothing was ever enqueued.
        log.warning("task_without_delivery", extra={"kind": kind.name})
        return Attempted(Outcome.NOTHING_TO_DO, "", kind.name)
    return PERFORM[contract](durable.worker, kind, checked)


def _leave_if_spent() -> None:
    """
    End a pool child that has no file descriptor left; the parent starts another and gives back what this one held.

    Handlers of any task may have leaked them. It could act on no hint, and would take one after the other.
    """
    try:
        os.close(os.dup(2))
    except OSError as error:
        if current_process().name == "MainProcess":
            return
        log.error("child_without_descriptors", extra={"error": str(error)})
        raise SystemExit(os.EX_OSERR) from None


def _told(attempted: Attempted) -> str:
    """
    How Celery and Flower hear of it: a result text, RETRY, or FAILURE.

    Retry is raised, not called: `task.retry()` would publish a message with an ETA, and
    the row holds its due time already.
    """
    match attempted.outcome:
        case (
            Outcome.SENT | Outcome.DONE | Outcome.NOTHING_TO_DO | Outcome.CLAIM_LOST
            | Outcome.ISSUED | Outcome.POLLED | Outcome.SUCCEEDED | Outcome.CANCELED
        ):  # fmt: skip
            return attempted.outcome.value
        case Outcome.FAILED | Outcome.DEAD:
            # The code alone: an exception's text may hold what was in the arguments, and events go through the broker.
            raise DeliveryEnded(f"{attempted.outcome.value}: {attempted.error_code}")
        case Outcome.UNAVAILABLE:
            raise CeleryRetry(attempted.outcome.value)
        case Outcome.SNOOZED | Outcome.PUT_OFF:
            # No success: its work is still to be done. No attempt is counted, so none is told either.
            raise _retried(f"{attempted.outcome.value}{_until(attempted)}", attempted)
        case Outcome.RETRY | Outcome.INTERRUPTED | Outcome.UNKNOWN | Outcome.WAITING:
            said = f"{attempted.outcome.value} (attempt {attempted.attempt} of {attempted.max_attempts})"
            raise _retried(said, attempted)


def _retried(said: str, attempted: Attempted) -> CeleryRetry:
    reason = said if attempted.error_code is None else f"{said}: {attempted.error_code}"
    # Celery's event names the exception inside, not the message: without one Flower shows "None".
    return CeleryRetry(reason, exc=DeliveryRetried(reason), when=attempted.due_at)


def _until(attempted: Attempted) -> str:
    """When the row is due again, in UTC and whole seconds."""
    if attempted.due_at is None:
        return ""
    return f" until {attempted.due_at.astimezone(UTC).isoformat(timespec='seconds').replace('+00:00', 'Z')}"


def register_sweep(durable: Durable, name: str) -> None:
    """One task `durable.<sweep>`. Any number of messages may come: one of a name runs at a time, after its rest."""
    app: Any = durable.app

    @app.task(  # type: ignore[untyped-decorator]  # Celery's stubs do not know per-task options of ours
        name=f"durable.{name}", acks_late=False, ignore_result=True, max_retries=0, serializer="json",
        typing=False, shared=False,
    )  # fmt: skip
    def sweep(**_: object) -> dict[str, object]:
        (meant,) = (one for one in durable.settings.sweeps() if one.name == name)
        try:
            return run_sweep(durable.database, meant, durable.settings.bounds())
        except DATABASE_ERRORS as error:
            if not is_infrastructure(error):
                raise
            # Beat offers it again within seconds: one line each time, and no screens of traceback in an outage.
            log.warning("sweep_not_answered", extra={"sweep": name, "error": said(error)})
            raise CeleryRetry("no answer from the database, will be offered again") from None
