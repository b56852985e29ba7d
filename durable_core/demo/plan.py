"""The shop's plan: an assistant proposes, a person approves, a step fails, and what was done is made up for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from durable_core import kinds, plans
from durable_core.database.statements import beside
from durable_core.database.transactions import run
from durable_core.demo.shop import WEBHOOK_QUEUE
from durable_core.errors import GiveUp
from durable_core.plans.declare import PlanStep, plan_step
from durable_core.plans.rows import Plan, Report
from durable_core.plans.target import forget_reader, reader_of, target_version
from durable_core.states import PLAN_TERMINAL

_statements = beside(__file__)

REPRICE, DISCONTINUE, PRODUCT = "shop.reprice", "shop.discontinue", "product"
SCOPE = "catalog:write"
ENDED_WITHIN = 60.0
"""Seconds for each of the two plans."""

BEFORE = {"ash": 1000, "elm": 2000, "oak": 3000}
BETWEEN = {"ash": 900, "elm": 2000, "oak": 2700}


@dataclass(frozen=True)
class Played:
    """What became of the two plans: `broken` says what is not as it was promised, in a sentence; None where all is."""

    failed: Report
    compensated: Report | None
    broken: str | None

    @property
    def says(self) -> str:
        if self.broken is not None:
            return self.broken
        done = sum(line.error_code is None and line.at is not None for line in self.failed.lines)
        return f"{done} of {len(self.failed.lines)} steps done, the next failed, and what was done was made up for"


def prepare(connection: Connection) -> None:
    """The products of the shop, in its new schema."""
    run(connection, _statements.create_products)
    run(connection, _statements.stock)


def declare() -> None:
    """The two steps, once in a process."""
    if kinds.plan_steps.find(REPRICE) is not None:
        return

    def named(arguments: dict[str, Any]) -> tuple[str, str]:
        return PRODUCT, arguments["product"]

    @plan_step(REPRICE, scope=SCOPE, target=named, queue=WEBHOOK_QUEUE, timeout=60.0)
    def reprice(step: PlanStep, product: str, cents: int) -> dict[str, Any]:
        (row,) = run(step.session, _statements.reprice, name=product, cents=cents)
        return {"before": row["before"], "version": row["version"]}

    @reprice.compensation
    def price_back(arguments: dict[str, Any], output: Any) -> plans.Planned:
        name = arguments["product"]
        return reprice.planned(name, output["before"], version=output["version"], label=f"the old price of {name}")

    @plan_step(DISCONTINUE, scope=SCOPE, target=named, queue=WEBHOOK_QUEUE, timeout=60.0)
    def discontinue(step: PlanStep, product: str) -> None:
        run(step.session, _statements.remove, name=product)
        raise GiveUp("there are open orders for it")

    if reader_of(PRODUCT) is None:

        @target_version(PRODUCT)
        def version(session: Session, name: Any) -> int | None:
            rows = run(session, _statements.version, name=name)
            return rows[0]["version"] if rows else None


def forget() -> None:
    """Undeclare them; for tests."""
    kinds.plan_steps.remove(REPRICE)
    kinds.plan_steps.remove(DISCONTINUE)
    forget_reader(PRODUCT)


def play(engine: Engine) -> Played:
    """
    Propose, approve, see it fail at its third step, propose what makes up for it, approve that too.

    The workers that run already carry out both.
    """
    declare()
    reprice, discontinue = kinds.plan_steps.get(REPRICE), kinds.plan_steps.get(DISCONTINUE)
    with Session(engine) as session, session.begin():
        plan = plans.propose(
            session,
            [
                reprice.planned("ash", 900, version=1, label="ash 10 % off"),
                reprice.planned("oak", 2700, version=1, label="oak 10 % off"),
                discontinue.planned("elm", version=1, label="no more elm"),
                reprice.planned("elm", 1, version=1, label="never reached"),
            ],
            by="assistant", scopes={SCOPE}, rationale="the summer sale", self_approval=False,
        )  # fmt: skip
    failed = _carried_out(engine, plan)
    if [str(line.became) for line in failed.lines] != ["done", "done", "failed", "not run"]:
        return Played(failed, None, f"the plan came to something else: {failed.text}")
    if (prices := _prices(engine)) != BETWEEN:
        return Played(failed, None, f"after the plan the prices are {prices}")
    with Session(engine) as session, session.begin():
        made = plans.compensate(session, plan.id, by="assistant")
    if made.plan is None or made.not_compensated:
        return Played(failed, None, "not every done step was made up for")
    compensated = _carried_out(engine, made.plan)
    if (prices := _prices(engine)) != BEFORE:
        return Played(failed, compensated, f"after its compensation the prices are {prices}")
    return Played(failed, compensated, None)


def _carried_out(engine: Engine, plan: Plan) -> Report:
    """The report of a plan that a person approves, once it has ended, or as it stands after ENDED_WITHIN."""
    with Session(engine) as session, session.begin():
        plans.approve(session, plan.id, by="dana", digest=plan.digest)
    until = time.monotonic() + ENDED_WITHIN
    while True:
        with Session(engine) as session, session.begin():
            report = plans.report(session, plan.id)
        if report.state in PLAN_TERMINAL or time.monotonic() > until:
            return report
        time.sleep(0.1)


def _prices(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row["name"]: row["cents"] for row in run(connection, _statements.prices)}
