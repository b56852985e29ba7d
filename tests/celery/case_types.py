"""A type of cases that workers and tests share; its step counts what it began, and is held where a test asks for it."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import text

from durable_core import kinds
from durable_core.cases.cases import Cases
from durable_core.cases.declare import Attempts, CaseType
from durable_core.deliveries.declare import registry
from tests.celery.shop import engine, pause

QUEUE, NAME = "cases", "shop_sale"
LEASE, HEARTBEAT = 3.0, 0.8


class CaseTypes:
    """The declared type and its cases."""

    def __init__(self) -> None:
        self.sale: CaseType[Any] = CaseType(NAME, queue=QUEUE)
        self.sale.step("count", retry=Attempts(limit=1))(count)
        self.cases = Cases(engine(), [self.sale], lease=LEASE, heartbeat=HEARTBEAT)

    def forget(self) -> None:
        kinds.case_types.remove(NAME)
        registry.remove(self.sale.delivery_kind)
        registry.remove("case-event")


def count(state: Any, ctx: Any) -> Any:
    """Begin, which is counted outside any transaction; be held, perhaps; and count in the state and in a table."""
    with engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(
            text("insert into executions (row_id, key, pid) values (:row_id, :key, :pid)"),
            {"row_id": ctx.execution_id, "key": ctx.key, "pid": os.getpid()},
        )
    pause(ctx.case_id, "inside")
    ctx.in_commit(
        lambda session: session.execute(
            text("insert into effects (row_id, note) values (:row_id, :note)"),
            {"row_id": ctx.case_id, "note": ctx.execution_id},
        )
    )
    return {"count": state["count"] + 1}
