"""What a person decides about a plan: each act names who, and is journalled with the move itself."""

from __future__ import annotations

import logging

from sqlalchemy.ext.asyncio import AsyncSession

from durable_core import wakes
from durable_core.claims.operate import who_or_why
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
)
from durable_core.errors import IllegalMove, InvalidOption, NotFound, RowBusy
from durable_core.plans.read import checked_id
from durable_core.refusals import PlanExpired, SelfApproval, StalePlan
from durable_core.states import PlanState

log = logging.getLogger("durable.operate")
_statements = beside(__file__)


def approve(
    tx: Transaction,
    plan_id: str,
    *,
    by: str,
    digest: str,
    reason: str | None = None,
    origin: str | None = None,
) -> None:
    """
    Approve a plan as its `digest` says it, in the caller's transaction; its first step is hinted after the commit.

    Refused, in this order: NotFound, for a plan of another `origin` too; RowBusy while somebody else decides about it;
    PlanExpired; IllegalMove where it is not pending any more, so that of two approvals the first stays, or where a
    sweep holds it back, for nobody would take its steps before it is released; SelfApproval; StalePlan. Each writes
    nothing, and none waits. Nothing that is said here widens what was proposed.
    """
    hint = carried(checked(tx), _approved(checked_id(plan_id), by, digest, reason, origin))
    wakes.after_commit(tx, [hint])


async def aapprove(
    tx: AsyncTransaction,
    plan_id: str,
    *,
    by: str,
    digest: str,
    reason: str | None = None,
    origin: str | None = None,
) -> None:
    """As `approve`, in an async transaction."""
    hint = await acarried(achecked(tx), _approved(checked_id(plan_id), by, digest, reason, origin))
    wakes.after_commit(tx.sync_session if isinstance(tx, AsyncSession) else None, [hint])


def reject(tx: Transaction, plan_id: str, *, by: str, reason: str | None = None, origin: str | None = None) -> None:
    """
    Say no to a pending plan, in the caller's transaction. Refused as `approve` is, but by anybody and by no digest.
    """
    carried(checked(tx), _rejected(checked_id(plan_id), by, reason, origin))


async def areject(
    tx: AsyncTransaction, plan_id: str, *, by: str, reason: str | None = None, origin: str | None = None
) -> None:
    """As `reject`, in an async transaction."""
    await acarried(achecked(tx), _rejected(checked_id(plan_id), by, reason, origin))


def release(tx: Transaction, plan_id: str, *, by: str, reason: str, origin: str | None = None) -> None:
    """
    Let the sweeps see a plan again that one of them failed on and held back, in the caller's transaction.

    Raises NotFound, for a plan of another `origin` too; RowBusy; and IllegalMove for one that is not held: all write
    nothing.
    """
    carried(checked(tx), _released(checked_id(plan_id), by, reason, origin))


async def arelease(tx: AsyncTransaction, plan_id: str, *, by: str, reason: str, origin: str | None = None) -> None:
    """As `release`, in an async transaction."""
    await acarried(achecked(tx), _released(checked_id(plan_id), by, reason, origin))


def _approved(plan_id: str, by: str, digest: str, reason: str | None, origin: str | None) -> Steps[wakes.Hint]:
    by = who_or_why("approve", "by", by)
    if not isinstance(digest, str):
        raise InvalidOption("approve", "digest", f"it is the plan's digest, as text; got {type(digest).__name__}")
    if "\x00" in digest:
        raise StalePlan(plan_id)
    rows = yield _statements.approve, {
        "id": plan_id, "by": by, "digest": digest, "reason": _why("approve", reason), "origin": origin,
    }  # fmt: skip
    row = _decided("approve", plan_id, rows)
    if not row["done"] and row["held"]:
        raise IllegalMove("approve", plan_id, "held back", "released first", "plan")
    if not row["done"]:
        raise SelfApproval(plan_id, by) if not row["may"] else StalePlan(plan_id)
    log.info("operator_action", extra={"act": "approve", "actor": by, "rows": 1, "row_id": plan_id})
    return wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"])


def _rejected(plan_id: str, by: str, reason: str | None, origin: str | None) -> Steps[None]:
    by = who_or_why("reject", "by", by)
    rows = yield _statements.reject, {"id": plan_id, "by": by, "reason": _why("reject", reason), "origin": origin}
    _decided("reject", plan_id, rows)
    log.info("operator_action", extra={"act": "reject", "actor": by, "rows": 1, "row_id": plan_id})


def _released(plan_id: str, by: str, reason: str, origin: str | None) -> Steps[None]:
    by, why = who_or_why("release", "by", by), who_or_why("release", "reason", reason)
    rows = yield _statements.release, {"id": plan_id, "by": by, "reason": why, "origin": origin}
    row = _there("release", plan_id, rows)
    if not row["done"]:
        raise IllegalMove("release", plan_id, row["was"], "held back", "plan")
    log.info("operator_action", extra={"act": "release", "actor": by, "rows": 1, "row_id": plan_id})


def _why(act: str, reason: str | None) -> str | None:
    return None if reason is None else who_or_why(act, "reason", reason)


def _there(act: str, plan_id: str, rows: list[Row]) -> Row:
    if not rows:
        raise NotFound("plan", plan_id)
    if rows[0]["busy"]:
        raise RowBusy(act, plan_id, "plan")
    return rows[0]


def _decided(act: str, plan_id: str, rows: list[Row]) -> Row:
    """The row that was decided about, as it was. Raises for one about which time, or somebody else, had decided."""
    row = _there(act, plan_id, rows)
    if not row["done"]:
        if row["was"] == PlanState.EXPIRED or (row["was"] == PlanState.PENDING and row["over"]):
            raise PlanExpired(plan_id)
        if row["was"] != PlanState.PENDING:
            raise IllegalMove(act, plan_id, row["was"], "pending", "plan")
    return row
