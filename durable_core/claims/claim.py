"""
The protocol that every contract shares: take, keep, lock, settle, release.

Each contract's `attempt.sql` names these statements. This runs take, lock and settle; the
heartbeat runs keep, and the contract's attempt runs release. `settle_alone` is lock, settle
and COMMIT in one, for a receipt that comes with no effect. A claim is a row id and a
fence. Expiry of the lease decides who may take; the fence decides who may write.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

import psycopg
from sqlalchemy import Connection

from durable_core.database.connections import raw
from durable_core.database.statements import Statement, Statements
from durable_core.database.transactions import Row, Transaction, run, run_raw
from durable_core.errors import DefinitionError

LOCK_WAIT = "5s"
"""How long a transaction of ours waits for a row lock before it lets go and tries again."""

INTERRUPTED_AS = ("CLAIM_EXPIRED", "CHILD_LOST")
"""Codes under which a claim was booked as an interruption while its owner was still alive."""

LEAST_ANSWER_SECONDS = 5.0
"""A busy disk may take seconds for a COMMIT; one that is given up costs a look at the row."""

OWNER_VARIABLE = "DURABLE_OWNER"
"""Environment variable by which a worker's parent hands its nonce to its children, spawned ones included."""


@lru_cache(maxsize=1)
def _drawn() -> str:
    return secrets.token_hex(8)


def owner_nonce() -> str:
    """The nonce of this worker: its parent's if it drew one, else one of this process."""
    return os.environ.get(OWNER_VARIABLE) or _drawn()


@dataclass(frozen=True)
class Holder:
    """Who claims, and for how long at a time. Lease 30 s, heartbeat 8 s: design, section 7."""

    owner: str = field(default_factory=owner_nonce)
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    lease_seconds: float = 30.0
    heartbeat_seconds: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_seconds * 3 <= self.lease_seconds:
            raise DefinitionError(
                f"durable_lease_seconds={self.lease_seconds:g} is less than three heartbeats of "
                f"{self.heartbeat_seconds:g} s: one late beat would lose the claim. Make the lease longer."
            )

    @property
    def answer_seconds(self) -> float:
        """How long an answer of the database is waited for, COMMIT's included: a third of a lease, at least 5 s."""
        return max(LEAST_ANSWER_SECONDS, self.lease_seconds / 3)

    @property
    def parameters(self) -> dict[str, object]:
        """As the take statements name them."""
        return {
            "owner": self.owner,
            "owner_pid": self.pid,
            "owner_host": self.host,
            "lease_seconds": self.lease_seconds,
        }


@dataclass(frozen=True)
class Claim:
    """Leave to act on one row, until its fence is raised or settled. `attempt` is the go at its budget, from 1."""

    id: str
    kind: str
    fence: int
    attempt: int
    max_attempts: int
    interruptions: int
    max_interruptions: int
    deadline_at: datetime
    arguments: str = field(repr=False)
    taken_at: float
    """`time.monotonic()` before the claim was sent: the database cannot have stamped it earlier."""
    ordering_key: str | None = None
    what: ClassVar[str] = "delivery"
    """What is claimed, for sentences."""

    @staticmethod
    def of(row: Row, taken_at: float) -> Claim:
        return Claim(
            id=str(row["id"]),
            kind=row["kind"],
            fence=row["fence"],
            attempt=row["attempt"],
            max_attempts=row["max_attempts"],
            interruptions=row["interruptions"],
            max_interruptions=row["max_interruptions"],
            deadline_at=row["deadline_at"],
            arguments=row["arguments"],
            taken_at=taken_at,
            ordering_key=row["ordering_key"],
        )

    @property
    def naming(self) -> dict[str, object]:
        """The parameters that every write of this claim's owner names."""
        return {"id": self.id, "fence": self.fence}


def take(tx: Transaction, statement: Statement, holder: Holder, **parameters: object) -> list[Claim]:
    """Claim rows by a `take` statement; none when somebody else was faster, or nothing is due."""
    before = time.monotonic()
    return [Claim.of(row, before) for row in run(tx, statement, **holder.parameters, **parameters)]


@dataclass(frozen=True)
class Locked:
    """The row, locked on its fence in an open transaction: nobody else can take it before that ends."""

    late: bool
    """The lease had lapsed and the row went back to pending, but nobody took it since."""
    reaped_as: str | None
    """What the reaper, or its parent, booked for this claim; the report takes it back."""
    xid: str
    lock_timeout_was: str


def lock(connection: Connection, statements: Statements, claim: Claim) -> Locked | None:
    """
    BEGIN, and lock the row on its fence with a bound on the wait; its answer is read before anything else is sent.

    None means the claim is lost, and nothing may be written. The transaction stays open
    either way; its owner ends it.
    """
    connection.begin()
    rows = run_raw(raw(connection), statements.lock, {**claim.naming, "lock_timeout": LOCK_WAIT})
    if not rows:
        return None
    (row,) = rows
    return Locked(
        late=row["state"] == "pending",
        reaped_as=row["reaped_as"],
        xid=row["xid"],
        lock_timeout_was=row["lock_timeout_was"],
    )


def settle(
    connection: Connection,
    statements: Statements,
    claim: Claim,
    locked: Locked,
    receipt: Mapping[str, object],
) -> None:
    """Write the receipt in the locked transaction. Raises DivisionByZero, ending it, if the claim does not hold."""
    run_raw(raw(connection), statements.settle, _settling(claim, locked, receipt))


def settle_alone(
    driver: psycopg.Connection[Any], statements: Statements, claim: Claim, receipt: Mapping[str, object]
) -> bool:
    """Lock the row on its fence and write the receipt in one statement; False, and nothing, when the claim is lost."""
    told = {"lock_timeout": LOCK_WAIT, "interrupted_as": list(INTERRUPTED_AS)}
    return bool(run_raw(driver, statements.settle_alone, {**claim.naming, **told, **receipt}))


def _taken_back(locked: Locked) -> dict[str, object]:
    return {
        "interruptions_booked": int(locked.reaped_as in INTERRUPTED_AS),
        "shutdowns_booked": int(locked.reaped_as == "SHUTDOWN"),
    }


def _settling(claim: Claim, locked: Locked, receipt: Mapping[str, object]) -> dict[str, object]:
    return {**claim.naming, "xid": locked.xid, "late": locked.late, **_taken_back(locked), **receipt}
