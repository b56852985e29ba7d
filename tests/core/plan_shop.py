"""A table of products, steps that change them, and plans of such steps, for tests of plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, text

from durable_core import PlanStep, Target, kinds, plan_step, plans
from durable_core.claims.claim import Holder
from durable_core.deliveries.worker import Attempted, Worker
from durable_core.plans import attempt
from durable_core.plans.attempt import StepClaim
from durable_core.plans.declare import Planned, StepKind
from durable_core.plans.rows import Plan

PRODUCTS = """
    create table if not exists public.products (
        id bigint primary key, name text not null, version bigint not null default 1
    )
"""


def rename(step: PlanStep, product_id: int, *, name: str) -> dict[str, Any]:
    """Rename a product; what it returns says the old name."""
    old = step.session.scalar(text("select name from products where id = :id for update"), {"id": product_id})
    step.session.execute(
        text("update products set name = :name, version = version + 1 where id = :id"),
        {"id": product_id, "name": name},
    )
    return {"old": old}


def product_of(arguments: dict[str, Any]) -> tuple[str, int]:
    """Which product the arguments of `rename` name."""
    return "product", arguments["product_id"]


def note(step: PlanStep, n: int = 0) -> int:
    """Write one effect: a row of `effects` with the step's index."""
    step.session.execute(
        text("insert into effects (row_id, fence, note) values (:id, :fence, :note)"),
        {"id": step.id, "fence": step.fence, "note": f"{step.index}:{n}"},
    )
    return n


class Shop:
    """What a test of plans works with; made by the fixture `shop`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.declared: list[str] = []
        self.count = 0

    def step(self, handler: Callable[..., Any] = note, *, name: str | None = None, **terms: Any) -> StepKind[..., Any]:
        self.count += 1
        kind = plan_step(name or f"plan.step_{self.count}", **terms)(handler)
        self.declared.append(kind.name)
        return kind

    def product(self, product_id: int = 7, name: str = "Ash", version: int = 3) -> Target:
        with self.engine.begin() as tx:
            tx.execute(
                text("insert into products (id, name, version) values (:id, :name, :version)"),
                {"id": product_id, "name": name, "version": version},
            )
        return Target("product", product_id, version=version)

    def name_of(self, product_id: int = 7) -> str:
        with self.engine.connect() as tx:
            return str(tx.scalar(text("select name from products where id = :id"), {"id": product_id}))

    def move(self, product_id: int = 7) -> None:
        with self.engine.begin() as tx:
            tx.execute(text("update products set version = version + 1 where id = :id"), {"id": product_id})

    def propose(self, *steps: Planned, by: str = "assistant", **how: Any) -> Plan:
        with self.engine.begin() as tx:
            return plans.propose(tx, steps, by=by, **how)

    def approved(self, *steps: Planned, **how: Any) -> Plan:
        plan = self.propose(*steps, **how)
        with self.engine.begin() as tx:
            plans.approve(tx, plan.id, by="dana", digest=plan.digest)
        return plan

    def get(self, plan_id: str) -> Plan:
        with self.engine.begin() as tx:
            return plans.get(tx, plan_id)

    def raw(self, plan_id: str) -> Any:
        """The row as it is, without the healing of a read."""
        with self.engine.connect() as tx:
            return tx.execute(text("select * from durable.plans where id = :id"), {"id": plan_id}).one()

    def receipts(self, plan_id: str) -> list[tuple[int, str]]:
        with self.engine.connect() as tx:
            found = text("select step, outcome from durable.plan_receipts where plan_id = :id order by step")
            return [(row.step, row.outcome) for row in tx.execute(found, {"id": plan_id})]

    def lines(self, plan_id: str) -> list[tuple[str, str | None, str | None]]:
        with self.engine.connect() as tx:
            return [(line.move, line.from_state, line.to_state) for line in plans.journal(tx, plan_id)]

    def effects(self, plan_id: str) -> list[str]:
        with self.engine.connect() as tx:
            found = text("select note from effects where row_id = :id order by id")
            return list(tx.scalars(found, {"id": plan_id}))

    def claim(self, plan: Plan, holder: Holder | None = None) -> StepClaim | None:
        with self.engine.begin() as tx:
            kind = tx.scalar(text("select kind from durable.plans where id = :id"), {"id": plan.id})
            return attempt.claim_step(tx, kinds.plan_steps.get(kind), plan.id, holder or Holder())

    def run(self, worker: Worker, plan: Plan, times: int = 1) -> list[Attempted]:
        """Act on so many hints, each of the kind that is next."""
        done = []
        for _ in range(times):
            kind = kinds.plan_steps.get(self.raw(plan.id).kind)
            done.append(attempt.perform(worker, kind, plan.id))
        return done
