"""Proposing what makes up for a plan: a new plan, from the receipts of the old one, last step first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from durable_core import kinds
from durable_core.database.statements import beside
from durable_core.database.transactions import (
    AsyncTransaction,
    Steps,
    Transaction,
    acarried,
    achecked,
    carried,
    checked,
)
from durable_core.errors import DefinitionError, IllegalMove, NotFound, RowBusy
from durable_core.plans.declare import Planned
from durable_core.plans.propose import DEFAULT_EXPIRES, Drawn, draw_up
from durable_core.plans.read import aget, checked_id, get
from durable_core.plans.rows import Became, Line, Plan, lines_of
from durable_core.refusals import Issue, PlanRefused
from durable_core.states import PlanState

_statements = beside(__file__)


@dataclass(frozen=True)
class Compensated:
    """
    What was proposed to make up for a plan. Nothing is undone by it: a person approves `plan`, and then it runs.

    `not_compensated` are the done steps that declare no compensation, or whose compensation had nothing to do. `plan`
    is None where that is all of them.
    """

    plan: Plan | None
    not_compensated: tuple[Line, ...]


def compensate(
    tx: Transaction,
    plan_id: str,
    *,
    by: str,
    scopes: Iterable[str] | None = None,
    expires: float | timedelta = DEFAULT_EXPIRES,
    origin: str | None = None,
    self_approval: bool | None = None,
) -> Compensated:
    """
    Propose a plan that makes up for the done steps of an executed or failed one, the last first.

    Its steps are those that the kinds declare with `@kind.compensation`; it has the scopes of the old one unless others
    are given, its origin and its risk. It rolls nothing back, and claims no such thing. Raises NotFound; IllegalMove
    where the plan has not ended, has no done step, or is compensated already, be it in part; RowBusy; UnknownHandler
    where a kind is not declared in this process; and what `propose` raises. All write nothing.
    """
    plan_id = checked_id(plan_id)
    carried(checked(tx), _locked(plan_id, origin))
    drawn, left = _drawn(get(tx, plan_id), by, scopes, expires, self_approval)
    if drawn is None:
        return Compensated(None, left)
    carried(tx, drawn.written())
    return Compensated(get(tx, drawn.id), left)


async def acompensate(
    tx: AsyncTransaction,
    plan_id: str,
    *,
    by: str,
    scopes: Iterable[str] | None = None,
    expires: float | timedelta = DEFAULT_EXPIRES,
    origin: str | None = None,
    self_approval: bool | None = None,
) -> Compensated:
    """As `compensate`, in an async transaction."""
    plan_id = checked_id(plan_id)
    await acarried(achecked(tx), _locked(plan_id, origin))
    drawn, left = _drawn(await aget(tx, plan_id), by, scopes, expires, self_approval)
    if drawn is None:
        return Compensated(None, left)
    await acarried(tx, drawn.written())
    return Compensated(await aget(tx, drawn.id), left)


def _locked(plan_id: str, origin: str | None) -> Steps[None]:
    rows = yield _statements.compensable, {"id": plan_id, "origin": origin}
    if not rows:
        raise NotFound("plan", plan_id)
    row = rows[0]
    if row["state"] not in (PlanState.EXECUTED, PlanState.FAILED):
        raise IllegalMove("compensate", plan_id, row["state"], "executed or failed", "plan")
    if not row["locked"]:
        raise RowBusy("compensate", plan_id, "plan")
    if row["compensated_by"] is not None:
        said = f"compensated by plan {row['compensated_by']}"
        raise IllegalMove("compensate", plan_id, said, "without one", "plan")


def _drawn(
    plan: Plan, by: str, scopes: Iterable[str] | None, expires: float | timedelta, self_approval: bool | None
) -> tuple[Drawn | None, tuple[Line, ...]]:
    done = [line for line in lines_of(plan.steps, plan.receipts) if line.became is Became.DONE]
    if not done:
        raise IllegalMove("compensate", plan.id, f"{plan.state} with no step done", "one with something done", "plan")
    steps: list[Planned] = []
    left: list[Line] = []
    for line in reversed(done):
        kind = kinds.plan_steps.get(line.kind)
        made = None if kind.compensate is None else kind.compensate(dict(plan.steps[line.step].arguments), line.output)
        if made is None:
            left.append(line)
            continue
        if not isinstance(made, Planned):
            raise DefinitionError(
                f"kind {kind.name!r}: its compensation returns other.planned(...) or None; got {type(made).__name__}."
            )
        steps.append(made)
    if not steps:
        return None, tuple(left)
    try:
        drawn = draw_up(
            steps, by=by, scopes=plan.scopes if scopes is None else scopes, expires=expires, origin=plan.origin,
            risk=plan.risk, rationale=f"compensates plan {plan.id}", self_approval=self_approval, compensates=plan.id,
        )  # fmt: skip
    except PlanRefused as refused:
        raise PlanRefused((Issue(None, f"the compensation of plan {plan.id}"), *refused.issues)) from None
    return drawn, tuple(left)
