"""Looking at plans: one, its report, a page of them. A look heals: it writes down what time has decided already."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from durable_core.claims.journal import Line, lines_of
from durable_core.database.statements import beside
from durable_core.database.transactions import (
    AsyncTransaction,
    Row,
    Steps,
    Transaction,
    acarried,
    achecked,
    carried,
    checked,
    run,
)
from durable_core.errors import InvalidOption, NotFound
from durable_core.plans.heal import healed
from durable_core.plans.rows import Plan, Receipt, Report, StepOf, report_of
from durable_core.states import PlanState

_statements = beside(__file__)

MOST_PER_PAGE = 1000
MOST_LINES = 10_000
COUNT_LIMIT = 10_000


def checked_id(plan_id: str) -> str:
    """A plan's id in its one spelling. Raises NotFound for what cannot be an id."""
    try:
        return str(UUID(plan_id))
    except (ValueError, AttributeError, TypeError):
        raise NotFound("plan", str(plan_id)[:60]) from None


def get(tx: Transaction, plan_id: str, *, origin: str | None = None) -> Plan:
    """
    The plan as this transaction sees it, with its receipts.

    One whose time is over is healed in the same transaction: pending or approved to expired; one that was interrupted
    to failed, or to executed where all its receipts are there. One whose row somebody has locked is left alone, and so
    is everything where the transaction is read-only or its role may not write. Raises NotFound, for a plan of another
    `origin` too.
    """
    return carried(checked(tx), _got(checked_id(plan_id), origin))


async def aget(tx: AsyncTransaction, plan_id: str, *, origin: str | None = None) -> Plan:
    """As `get`, in an async transaction."""
    return await acarried(achecked(tx), _got(checked_id(plan_id), origin))


def report(tx: Transaction, plan_id: str, *, origin: str | None = None) -> Report:
    """What became of each step: done, failed, conflict or not run, from the receipts. Heals and raises as `get`."""
    return report_of(get(tx, plan_id, origin=origin))


async def areport(tx: AsyncTransaction, plan_id: str, *, origin: str | None = None) -> Report:
    """As `report`, in an async transaction."""
    return report_of(await aget(tx, plan_id, origin=origin))


def page(
    tx: Transaction,
    *,
    state: str | None = None,
    origin: str | None = None,
    after: str | None = None,
    limit: int = 50,
) -> list[Plan]:
    """
    At most `limit` plans, newest first, without their receipts; `after` is the last id of the page before.

    Nothing is healed here: one whose time is over stands as it was until a sweep comes by. The hole: a state that few
    plans of many are in reads until the page is full. Raises InvalidOption.
    """
    return [_plan(row) for row in run(checked(tx), _statements.page, **_wanted(state, origin, after, limit))]


async def apage(
    tx: AsyncTransaction,
    *,
    state: str | None = None,
    origin: str | None = None,
    after: str | None = None,
    limit: int = 50,
) -> list[Plan]:
    """As `page`, in an async transaction."""
    return await acarried(achecked(tx), _paged(_wanted(state, origin, after, limit)))


def _paged(wanted: dict[str, object]) -> Steps[list[Plan]]:
    rows = yield _statements.page, wanted
    return [_plan(row) for row in rows]


def _wanted(state: str | None, origin: str | None, after: str | None, limit: int) -> dict[str, object]:
    if state is not None and state not in set(PlanState):
        raise InvalidOption("page", "state", f"there is no state {state!r}; there are {', '.join(PlanState)}")
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("page", "limit", f"a page has 1 to {MOST_PER_PAGE} plans")
    return {"state": state, "origin": origin, "limit": limit, "after": None if after is None else checked_id(after)}


def previous(tx: Transaction, plan_id: str, *, origin: str | None = None) -> Plan | None:
    """The proposal of the same origin that came before this one, or None. Heals and raises as `get`."""
    return carried(checked(tx), _before(checked_id(plan_id), origin))


async def aprevious(tx: AsyncTransaction, plan_id: str, *, origin: str | None = None) -> Plan | None:
    """As `previous`, in an async transaction."""
    return await acarried(achecked(tx), _before(checked_id(plan_id), origin))


def journal(tx: Transaction, plan_id: str, *, limit: int = 200, origin: str | None = None) -> list[Line]:
    """
    The newest `limit` moves of a plan, oldest first: who, when and why. Nothing is healed here.

    Raises NotFound, for a plan of another `origin` too, and InvalidOption.
    """
    return carried(checked(tx), _history(checked_id(plan_id), limit, origin))


async def ajournal(tx: AsyncTransaction, plan_id: str, *, limit: int = 200, origin: str | None = None) -> list[Line]:
    """As `journal`, in an async transaction."""
    return await acarried(achecked(tx), _history(checked_id(plan_id), limit, origin))


@dataclass(frozen=True)
class Waiting:
    """How many plans wait for a person, since when the oldest does, and how many run; counts stop at COUNT_LIMIT."""

    pending: int
    oldest_pending_at: datetime | None
    executing: int


def waiting(tx: Transaction) -> Waiting:
    """What waits for a person, and what runs."""
    return Waiting(**run(checked(tx), _statements.waiting, limit=COUNT_LIMIT)[0])


def _before(plan_id: str, origin: str | None) -> Steps[Plan | None]:
    rows = yield _statements.there, {"id": plan_id, "origin": origin}
    if not rows:
        raise NotFound("plan", plan_id)
    if rows[0]["origin"] is None:
        return None
    found = yield _statements.before, {"id": plan_id, "origin": rows[0]["origin"]}
    return (yield from _got(found[0]["id"], origin)) if found else None


def _history(plan_id: str, limit: int, origin: str | None) -> Steps[list[Line]]:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_LINES:
        raise InvalidOption("journal", "limit", f"it is a whole number from 1 to {MOST_LINES:,}")
    rows = yield _statements.there, {"id": plan_id, "origin": origin}
    if not rows:
        raise NotFound("plan", plan_id)
    return (yield from lines_of(plan_id, limit))


def _got(plan_id: str, origin: str | None) -> Steps[Plan]:
    named: dict[str, object] = {"id": plan_id, "origin": origin}
    rows = yield _statements.get, named
    if rows and rows[0]["ripe"]:
        yield from healed(plan_id)
        rows = yield _statements.get, named
    if not rows:
        raise NotFound("plan", plan_id)
    receipts = yield _statements.receipts, {"id": plan_id}
    return replace(_plan(rows[0]), receipts=tuple(Receipt(**receipt) for receipt in receipts))


def _plan(row: Row) -> Plan:
    facts: dict[str, Any] = {name: value for name, value in row.items() if name != "ripe"}
    facts["steps"] = tuple(StepOf.of(step) for step in facts["steps"])
    facts["scopes"] = tuple(facts["scopes"])
    facts["state"] = PlanState(facts["state"])
    return Plan(**facts)
