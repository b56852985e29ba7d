"""A process of its own for tests of plans: `python -m tests.core.plan_process URL` does what each line asks for."""

from __future__ import annotations

import sys
import time

from sqlalchemy import Engine, create_engine

from durable_core import plans
from durable_core.database.connections import Database
from durable_core.deliveries.worker import Worker
from durable_core.plans import attempt, sweep
from durable_core.plans.declare import StepKind
from tests.core.plan_shop import Shop, note

KIND = "plan.elsewhere"


def answer(engine: Engine, kind: StepKind[..., object], act: str, plan_id: str = "") -> str:
    database = Database(engine)
    if act == "perform":
        return str(attempt.perform(Worker(database), kind, plan_id).outcome)
    if act == "read":
        with engine.begin() as tx:
            return str(plans.get(tx, plan_id).state)
    return f"{sweep.reap(database)} {sweep.expire(database)}"


def main() -> None:
    engine = create_engine(sys.argv[1])
    kind = Shop(engine).step(note, name=KIND)
    for line in sys.stdin:
        print(int(time.time()), answer(engine, kind, *line.split()), flush=True)


if __name__ == "__main__":
    main()
