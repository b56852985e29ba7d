"""Why a plan is where it is: for people in a sentence each, for programs in a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.paused import Pause, pauses
from durable_core.deliveries.read import now as clock
from durable_core.deliveries.why import Because, between, hinted, instant, kind_of_error, of_pause
from durable_core.plans.read import get
from durable_core.plans.rows import Plan
from durable_core.states import PLAN_TERMINAL, PlanState

_statements = beside(__file__)


class Cause(StrEnum):
    """What a plan waits for, where it is, or that it ended."""

    HELD = "held"
    OVERDUE = "overdue"
    APPROVAL = "approval"
    PAUSED = "paused"
    HANDLER = "handler"
    WORKER = "worker"
    IN_FLIGHT = "in_flight"
    LAPSED = "lapsed"
    ENDED = "ended"


def reasons(tx: Transaction, plan_id: str, *, origin: str | None = None) -> list[Because]:
    """
    Everything that keeps a plan where it is, what a person has to act on first; or how it ended.

    Heals as `get` does. The hole: outside a REPEATABLE READ transaction the facts may be some milliseconds apart.
    Raises NotFound.
    """
    return reasons_of(tx, get(tx, plan_id, origin=origin))


def reasons_of(tx: Transaction, plan: Plan) -> list[Because]:
    """The same of a plan that `get` has read in this transaction."""
    rows = run(checked(tx), _statements.hinted, id=plan.id)
    return list(_reasons(plan, clock(tx), pauses(tx), rows[0]["hint_at"] if rows else None))


def _reasons(
    plan: Plan, now: datetime, pauses: Sequence[Pause], hint_at: datetime | None
) -> Iterator[Because]:  # fmt: skip
    if plan.state in PLAN_TERMINAL:
        yield Because(Cause.ENDED, _ended(plan, now))
        return
    if plan.held_reason:
        yield Because(
            Cause.HELD,
            f"a sweep failed on it ({kind_of_error(plan.held_reason)}) and held it back: mend the cause, then "
            f"`durable plans release {plan.id}` it",
            blocks=True,
        )
    if plan.in_flight:
        yield _in_flight(plan, now)
        return
    until = plan.continue_until if plan.state is PlanState.EXECUTING else plan.expires_at
    if until is not None and until <= now:
        yield Because(Cause.OVERDUE, _overdue(plan, until, now), blocks=True)
    elif plan.state is PlanState.PENDING:
        others = "" if plan.self_approval else f" (another one than {plan.proposed_by})"
        yield Because(
            Cause.APPROVAL,
            f"it waits for a person{others} to approve or reject it, until {instant(plan.expires_at)}, in "
            f"{between(now, plan.expires_at)}: `durable plans show {plan.id}`",
            plan.expires_at,
            blocks=True,
        )
    else:
        yield from _waits(plan, now, until, pauses, hint_at)


def _waits(
    plan: Plan, now: datetime, until: datetime | None, pauses: Sequence[Pause], hint_at: datetime | None
) -> Iterator[Because]:
    """Approved, or between two steps."""
    paused = [pause for pause in pauses if pause.name == (plan.queue if pause.what == "queue" else plan.kind)]
    for pause in paused:
        yield Because(Cause.PAUSED, of_pause(pause, now).rstrip("."), pause.until, blocks=True)
    left = "" if until is None else f", until {instant(until)}"
    if plan.waiting_for is not None:
        yield Because(
            Cause.HANDLER,
            f"{_step(plan)} waits for its code: a worker that was hinted does not know kind {plan.kind}; deploy it "
            f"where queue {plan.queue} is read{left}",
            until,
        )
    elif not paused and not plan.held_reason:
        again = "" if hint_at is None else f"; {hinted(hint_at, now)}"
        yield Because(
            Cause.WORKER, f"{_step(plan)} waits for a free worker that reads queue {plan.queue}{left}{again}", until
        )


def _in_flight(plan: Plan, now: datetime) -> Because:
    running = "" if plan.claimed_at is None else f" for {between(plan.claimed_at, now)}"
    place = f"{_step(plan)} runs{running} in process {plan.owner_pid} on {plan.owner_host}"
    if plan.lease_expires_at is not None and plan.lease_expires_at <= now:
        return Because(
            Cause.LAPSED,
            f"{place}, whose lease lapsed {between(plan.lease_expires_at, now)} ago: while its row is locked it is "
            "alive, else the next reap ends the plan as interrupted",
        )
    lease = "" if plan.lease_expires_at is None else f", under a lease of another {between(now, plan.lease_expires_at)}"
    over = "" if plan.deadline_at is None else f"; its time is over in {between(now, plan.deadline_at)}"
    return Because(Cause.IN_FLIGHT, f"{place}{lease}{over}", plan.lease_expires_at, blocks=True)


def _step(plan: Plan) -> str:
    return f"step {len(plan.receipts) + 1} of {len(plan.steps)}, {plan.kind},"


def _overdue(plan: Plan, until: datetime, now: datetime) -> str:
    ago = f"passed {between(until, now)} ago"
    if plan.state is PlanState.PENDING:
        return f"its time to be approved {ago}: the next expire sweep ends it"
    if plan.state is PlanState.APPROVED:
        return f"its time to start {ago}: the next expire sweep ends it, and no step of it has run"
    return f"its time to go on {ago}: the next reap ends it as interrupted, after {len(plan.receipts)} of its steps"


def _ended(plan: Plan, now: datetime) -> str:
    at = "" if plan.finished_at is None else f" at {instant(plan.finished_at)}, {between(plan.finished_at, now)} ago"
    match plan.state:
        case PlanState.EXECUTED:
            return f"done{at}: all of its {len(plan.steps)} steps have their receipt"
        case PlanState.REJECTED:
            why = f" ({plan.rejected_reason})" if plan.rejected_reason else ""
            return f"rejected{at} by {plan.rejected_by}{why}: no step of it has run"
        case PlanState.EXPIRED:
            what = "nobody approved it" if plan.approved_at is None else "it was approved, and did not start,"
            return f"expired{at}: {what} in time; propose it again"
        case _:
            done = sum(receipt.outcome == "ok" for receipt in plan.receipts)
            return f"failed{at} ({plan.error_code}) after {done} of its {len(plan.steps)} steps, which stay: " + (
                f"`durable plans report {plan.id}`"
            )
