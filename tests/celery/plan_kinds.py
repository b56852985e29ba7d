"""Steps of plans that these tests run, and the points at which a test may hold one: `asked` names the point."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from durable_core import PlanStep, kinds, plan_step
from durable_core.plans.declare import StepKind
from tests.celery.shop import ShopSession, pause, write_effect

QUEUE = "plans"


def noted(step: PlanStep, n: int) -> int:
    """Write one effect, and come by two points: inside the step's transaction, and after its commit."""
    write_effect(step.session, step, f"{step.index}:{n}")  # type: ignore[arg-type]
    pause(f"{step.id}.{step.index}", "inside")
    step.session.info["pause_after_commit"] = f"{step.id}.{step.index}"
    return n


@event.listens_for(ShopSession, "after_commit", propagate=True)
def _hold_after_commit(session: Session) -> None:
    """A released savepoint is no commit."""
    if not session.in_nested_transaction() and (of := session.info.pop("pause_after_commit", None)):
        pause(of, "after")


class _AtClaim(logging.Filter):
    """Claimed, the row not locked yet: held where the log says so."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == "step_claimed":
            pause(f"{record.row_id}.{record.attempt - 1}", "claimed")  # type: ignore[attr-defined]
        return True


def hold_at_claims() -> None:
    """In a worker: its steps come by the point `claimed` too."""
    log = logging.getLogger("durable.run")
    log.setLevel(logging.DEBUG)
    log.addFilter(_AtClaim())


class PlanKinds:
    """The declared steps."""

    noted: StepKind[..., Any]

    def __init__(self) -> None:
        self.noted = plan_step("shop.noted", queue=QUEUE, timeout=60)(noted)

    def forget(self) -> None:
        kinds.plan_steps.remove("shop.noted")
