"""Pausing a queue or a kind: nothing of it is claimed until it is resumed, by a person or at a given time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from durable_core.claims.operate import who_or_why
from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.options import QUEUE_RULE, in_utc, is_queue
from durable_core.errors import InvalidOption, RowBusy
from durable_core.kinds import checked_name

_statements = beside(__file__)

_TRIES = 3

What = Literal["queue", "kind"]


@dataclass(frozen=True)
class Pause:
    """A pause in force. `until` None is until somebody resumes it."""

    what: str
    name: str
    by: str
    reason: str
    since: datetime
    until: datetime | None


def pause(
    tx: Transaction, what: What, name: str, *, by: str, reason: str, until: datetime | None = None
) -> Pause:  # fmt: skip
    """
    Claim nothing more of a queue or a kind, in the caller's transaction, until `until` or `resume`.

    What runs goes on. What waits keeps its place, and what expires meanwhile expires. A second pause of the same
    replaces the first. The hole: a claim that is being made at this very moment may still come through. A kind is
    paused under the name its rows have. Raises InvalidOption, and RowBusy where others pause the same all the while.
    """
    _checked(what, name)
    told = {
        "what": what, "name": name, "by": who_or_why("pause", "by", by),
        "reason": who_or_why("pause", "reason", reason),
        "until": None if until is None else in_utc("pause", "until", until),
    }  # fmt: skip
    for _ in range(_TRIES):
        rows = run(checked(tx), _statements.pause, **told)
        if rows:
            return Pause(**rows[0])
    raise RowBusy("pause", name, what)


def resume(tx: Transaction, what: What, name: str, *, by: str) -> bool:
    """
    End a pause, in the caller's transaction; whether there was one in force.

    Dispatch hints what waits within seconds of the commit.
    """
    _checked(what, name)
    rows = run(checked(tx), _statements.resume, what=what, name=name, by=who_or_why("resume", "by", by))
    return bool(rows) and bool(rows[0]["was_in_force"])


def pauses(tx: Transaction) -> list[Pause]:
    """The pauses in force, the oldest first."""
    return [Pause(**row) for row in run(checked(tx), _statements.pauses)]


def _checked(what: str, name: str) -> None:
    if what == "kind":
        checked_name(name)
    elif what != "queue":
        raise InvalidOption("pause", "what", "a queue or a kind is paused")
    elif not is_queue(name):
        raise InvalidOption("pause", "name", QUEUE_RULE)
