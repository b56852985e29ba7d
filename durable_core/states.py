"""
The one table of states and legal moves.

The guard trigger in the migrations and `docs/state_machines.md` are rendered from it by
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
