"""
The one table of states and legal moves.

The guard triggers in the migrations and `docs/state_machines.md` are rendered from it by
`durable_core.database.guards`; a test keeps the three equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DeliveryState(StrEnum):
    """Where a delivery is. There is no "retrying": that is pending with attempts behind it."""

    PENDING = "pending"
    PROCESSING = "processing"
    SENT = "sent"
    FAILED = "failed"
    DEAD = "dead"
    CANCELED = "canceled"
    EXPIRED = "expired"


class PlanState(StrEnum):
    """Where a plan is. Between two steps it is executing and nobody owns it."""

    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"
    REJECTED = "rejected"
    EXPIRED = "expired"


class OperationState(StrEnum):
    """Where an operation is. Between two polls it is running and nobody owns it."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"


class FenceRule(StrEnum):
    """What a move does to the fence."""

    KEPT = "kept"
    RAISED = "raised by one"


class SettleRule(StrEnum):
    """Whether a move ends the claim of its fence."""

    KEPT = "no claim is settled"
    OPTIONAL = "settled by its owner, or left to a late report"
    REQUIRED = "the claim of this fence is settled"


@dataclass(frozen=True)
class Move:
    """One legal change of state: what it demands of the two fences, and who makes it."""

    source: str
    target: str
    names: tuple[str, ...]
    fence: FenceRule
    settle: SettleRule
    says: str


_D = DeliveryState

TERMINAL = frozenset({_D.SENT, _D.FAILED, _D.DEAD, _D.CANCELED, _D.EXPIRED})
"""Nothing leaves these but an operator's redrive of a failed or dead delivery."""

PRUNED = (_D.SENT, _D.CANCELED, _D.EXPIRED)
"""Terminal states whose rows go after the retention; failed and dead rows wait for a person."""

SETTLEABLE = (_D.PROCESSING, _D.PENDING)
"""A report may land on a processing row, or on one that was reaped and that nobody took since."""

DELIVERY_MOVES: tuple[Move, ...] = (
    Move(
        _D.PENDING, _D.PROCESSING, ("take",), FenceRule.RAISED, SettleRule.KEPT,
        "a worker claims a due row",
    ),
    Move(
        _D.PROCESSING, _D.SENT, ("settle",), FenceRule.KEPT, SettleRule.REQUIRED,
        "the owner reports success",
    ),
    Move(
        _D.PENDING, _D.SENT, ("settle",), FenceRule.KEPT, SettleRule.REQUIRED,
        "a late success: the lease lapsed, the row was reaped, nobody took it since",
    ),
    Move(
        _D.PROCESSING, _D.PENDING, ("fail", "release", "reap", "postpone", "snooze"), FenceRule.KEPT,
        SettleRule.OPTIONAL,
        "a failed attempt with budget left, a claim given back or put off, or a lapsed lease",
    ),
    Move(
        _D.PROCESSING, _D.FAILED, ("fail",), FenceRule.KEPT, SettleRule.REQUIRED,
        "the handler says it can never work",
    ),
    Move(
        _D.PENDING, _D.FAILED, ("fail",), FenceRule.KEPT, SettleRule.REQUIRED,
        "the same, reported late",
    ),
    Move(
        _D.PROCESSING, _D.DEAD, ("fail", "release", "reap"), FenceRule.KEPT, SettleRule.OPTIONAL,
        "the budget of failures or of interruptions is spent",
    ),
    Move(
        _D.PENDING, _D.DEAD, ("fail",), FenceRule.KEPT, SettleRule.REQUIRED,
        "the last failure of the budget, reported late",
    ),
    Move(
        _D.PENDING, _D.CANCELED, ("cancel",), FenceRule.RAISED, SettleRule.REQUIRED,
        "an operator or the application takes it back",
    ),
    Move(
        _D.PROCESSING, _D.CANCELED, ("cancel",), FenceRule.RAISED, SettleRule.REQUIRED,
        "the same while it runs; the owner's commit is refused",
    ),
    Move(
        _D.PENDING, _D.EXPIRED, ("expire",), FenceRule.KEPT, SettleRule.OPTIONAL,
        "its time to be useful has passed",
    ),
    Move(
        _D.DEAD, _D.PENDING, ("redrive",), FenceRule.RAISED, SettleRule.REQUIRED,
        "an operator sends it round again with a new budget",
    ),
    Move(
        _D.FAILED, _D.PENDING, ("redrive",), FenceRule.RAISED, SettleRule.REQUIRED,
        "the same for a delivery that had given up",
    ),
)  # fmt: skip

_P = PlanState

PLAN_TERMINAL = frozenset({_P.EXECUTED, _P.FAILED, _P.REJECTED, _P.EXPIRED})
"""Nothing leaves these: to try again is to propose again."""

PLAN_MOVES: tuple[Move, ...] = (
    Move(
        _P.PENDING, _P.APPROVED, ("approve",), FenceRule.KEPT, SettleRule.KEPT,
        "a person approves what its digest says, and its consent has not run out",
    ),
    Move(
        _P.PENDING, _P.REJECTED, ("reject",), FenceRule.KEPT, SettleRule.KEPT,
        "a person says no",
    ),
    Move(
        _P.PENDING, _P.EXPIRED, ("expire",), FenceRule.KEPT, SettleRule.KEPT,
        "nobody approved it in time",
    ),
    Move(
        _P.APPROVED, _P.EXPIRED, ("expire",), FenceRule.KEPT, SettleRule.KEPT,
        "it was approved, and did not start in time",
    ),
    Move(
        _P.APPROVED, _P.EXECUTING, ("take",), FenceRule.RAISED, SettleRule.KEPT,
        "a worker claims its first step",
    ),
    Move(
        _P.EXECUTING, _P.EXECUTED, ("settle", "heal"), FenceRule.KEPT, SettleRule.OPTIONAL,
        "the last step is done, or its receipts are found to be complete",
    ),
    Move(
        _P.EXECUTING, _P.FAILED, ("settle", "heal", "release"), FenceRule.KEPT, SettleRule.OPTIONAL,
        "a step failed or met a conflict, its worker was lost inside it, or nobody went on in time",
    ),
)  # fmt: skip

_O = OperationState

OPERATION_TERMINAL = frozenset({_O.SUCCEEDED, _O.FAILED, _O.CANCELED})
"""Nothing leaves these, and none of them is polled again."""

OPERATION_MOVES: tuple[Move, ...] = (
    Move(
        _O.QUEUED, _O.RUNNING, ("take",), FenceRule.RAISED, SettleRule.KEPT,
        "a worker claims it, to issue the external call: once, ever",
    ),
    Move(
        _O.QUEUED, _O.FAILED, ("refuse", "expire"), FenceRule.KEPT, SettleRule.KEPT,
        "its pre-check says no, or nobody issued it in time",
    ),
    Move(
        _O.QUEUED, _O.CANCELED, ("cancel",), FenceRule.RAISED, SettleRule.REQUIRED,
        "an operator or the application takes it back before the call",
    ),
    Move(
        _O.RUNNING, _O.SUCCEEDED, ("settle",), FenceRule.KEPT, SettleRule.REQUIRED,
        "a poll says that all of it is done",
    ),
    Move(
        _O.RUNNING, _O.FAILED, ("settle", "reap", "release"), FenceRule.KEPT, SettleRule.OPTIONAL,
        "the call or the other side failed, it was silent for too long, or the outcome of the call is unknown",
    ),
    Move(
        _O.RUNNING, _O.CANCELED, ("cancel",), FenceRule.RAISED, SettleRule.REQUIRED,
        "an operator or the application gives it up; the other side may still finish it",
    ),
)  # fmt: skip
