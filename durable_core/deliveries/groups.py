"""Errors by what they have in common: failed, dead and retrying deliveries, grouped by fingerprint. Reads only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.states import DeliveryState

_statements = beside(__file__)

LOOKED_AT = 10_000
"""So many failed and dead deliveries are read, the newest; and so many lines of the journal, for those that retry."""

SAID_CHARACTERS = 1000
"""Of an error's text so much is read: the exception comes first, its traceback after it."""

LONGEST_SHAPE = 200

_NAMES_ONE = (
    (re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE), "<url>"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<address>"),
    (re.compile(r"\b[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*'(?!\w)|"(?:[^"\\]|\\.)*"|`[^`]*`|“[^”]*”|«[^»]*»"""), "<text>"),
    (re.compile(r"\b0x[0-9a-f]+\b|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"\d+(?:[.,:_-]?\d+)*"), "<n>"),
    (re.compile(r"\s+"), " "),
)
"""What tells one occurrence from the next: taken out in this order, so that the digits of an id are no numbers."""


@dataclass(frozen=True)
class Failed:
    """One delivery that failed lately: `at` is when."""

    id: str
    kind: str
    queue: str
    state: DeliveryState
    error_code: str | None
    shape: str
    at: datetime
    due_at: datetime | None

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.kind, self.error_code, self.shape)

    @property
    def retries(self) -> bool:
        """It will be tried again by itself; the others wait for a person."""
        return self.state in (DeliveryState.PENDING, DeliveryState.PROCESSING)


@dataclass(frozen=True)
class Group:
    """Deliveries whose last error has the same kind, code and shape; `sample` is the one that failed last."""

    fingerprint: str
    kind: str
    error_code: str | None
    shape: str
    count: int
    failed: int
    dead: int
    retrying: int
    first_seen_at: datetime
    last_seen_at: datetime
    sample: str


@dataclass(frozen=True)
class Errors:
    """
    What failed lately, the newest first. `complete` is False where more than LOOKED_AT were there to be read.

    Of one kind, those are read that are among the newest LOOKED_AT of all kinds. Of deliveries that retry, those are
    read that failed within the newest LOOKED_AT lines of the journal.
    """

    rows: list[Failed]
    complete: bool

    def groups(self) -> list[Group]:
        """The largest group first."""
        by_fingerprint: dict[str, list[Failed]] = {}
        for row in self.rows:
            by_fingerprint.setdefault(row.fingerprint, []).append(row)
        found = [_group(name, rows) for name, rows in by_fingerprint.items()]
        return sorted(found, key=lambda group: (-group.count, -group.last_seen_at.timestamp(), group.fingerprint))


def _group(name: str, rows: list[Failed]) -> Group:
    newest = rows[0]
    return Group(
        name, newest.kind, newest.error_code, newest.shape, len(rows),
        sum(row.state is DeliveryState.FAILED for row in rows), sum(row.state is DeliveryState.DEAD for row in rows),
        sum(row.retries for row in rows), min(row.at for row in rows), newest.at, newest.id,
    )  # fmt: skip


def errors(tx: Transaction, *, kind: str | None = None) -> Errors:
    """The deliveries that failed and were not done since, by their last error; discarded ones are left out."""
    bounds = {"kind": kind, "looked_at": LOOKED_AT, "characters": SAID_CHARACTERS}
    ended = run(checked(tx), _statements.ended, **bounds)
    retrying = run(checked(tx), _statements.retrying, **bounds)
    rows = [
        Failed(
            row["id"], row["kind"], row["queue"], DeliveryState(row["state"]), row["error_code"], shape(row["said"]),
            row["at"], row["due_at"],
        )
        for row in (*ended, *retrying)
        if row["id"] is not None
    ]  # fmt: skip
    rows.sort(key=lambda row: (row.at, row.id), reverse=True)
    return Errors(rows, complete=ended[0]["looked"] < LOOKED_AT and retrying[0]["looked"] < LOOKED_AT)


def shape(message: str | None) -> str:
    """The first line of an error without what differs each time: ids, numbers, quoted text, addresses."""
    text = (message or "").strip().split("\n", 1)[0]
    for pattern, instead in _NAMES_ONE:
        text = pattern.sub(instead, text)
    return text.strip()[:LONGEST_SHAPE]


def fingerprint(kind: str, error_code: str | None, shape: str) -> str:
    """The name of a group, the same in every process and on every day: twelve hexadecimal digits."""
    return sha256("\0".join((kind, error_code or "", shape)).encode()).hexdigest()[:12]
