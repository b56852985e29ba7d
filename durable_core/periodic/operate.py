"""What a person does to a schedule: pause, resume, run now. Each names who and why, and is journalled with the act."""

from __future__ import annotations

from datetime import datetime

from durable_core.arguments import clean_text
from durable_core.claims.operate import who_or_why
from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.declare import registry
from durable_core.deliveries.enqueue import enqueue_new
from durable_core.deliveries.options import Placement, in_utc
from durable_core.deliveries.rows import New, Ref
from durable_core.deliveries.slots import Cadence
from durable_core.errors import InvalidOption, NotFound

_statements = beside(__file__)


def pause(tx: Transaction, kind: str, *, by: str, reason: str, until: datetime | None = None) -> None:
    """
    Let no slot of this kind run until then, or until it is resumed; in the caller's transaction.

    Slots that pass meanwhile are not made up for. Rows that are written already go on: these
    are deliveries like others. Pausing twice replaces the first. Raises NotFound and InvalidOption.
    """
    if until is not None:
        until = in_utc("pause", "until", until)
    who, why = who_or_why("pause", "by", by), who_or_why("pause", "reason", reason)
    if not run(checked(tx), _statements.pause, kind=kind, by=who, reason=why, until=until):
        raise NotFound("schedule", kind)


def resume(tx: Transaction, kind: str, *, by: str, reason: str | None = None) -> bool:
    """
    Let the slots that come from now on run again; False when it was not paused, and nothing was written.

    Raises NotFound and InvalidOption.
    """
    who, why = who_or_why("resume", "by", by), _maybe(reason)
    rows = run(checked(tx), _statements.lock, kind=kind)
    if not rows:
        raise NotFound("schedule", kind)
    (row,) = rows
    if row["paused_at"] is None:
        return False
    cadence = Cadence(row["cron"], row["timezone"], row["missed"])
    next_slot = cadence.after(max(row["now"], row["last_slot"] or row["now"]))
    run(tx, _statements.resume, id=row["id"], next_slot=next_slot, by=who, reason=why)
    return True


def run_now(tx: Transaction, kind: str, *, by: str, reason: str | None = None) -> Ref:
    """
    Write a delivery of this kind at once, beside its slots: the next one runs as if nothing had been.

    A handler that takes the slot is given the present instant. It works for a paused schedule
    too. Raises UnknownHandler where the kind is not declared in this process, and InvalidOption.
    """
    declared = registry.get(kind)
    if declared.cadence is None:
        raise InvalidOption(kind, "run now", "it has no cron; enqueue it as any other kind")
    who, why = who_or_why("run now", "by", by), _maybe(reason)
    tx = checked(tx)
    now = run(tx, _statements.now)[0]["now"]
    ref = enqueue_new(tx, New.of(declared, Placement(), declared.slot_arguments(now)))
    run(tx, _statements.journal_run, id=ref.id, by=who, reason=why)
    return ref


def _maybe(reason: str | None) -> str | None:
    return None if reason is None else clean_text(reason, 1000)
