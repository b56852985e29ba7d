"""Starting an operation in the caller's own transaction. Nothing here commits, and nothing calls anybody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from durable_core import wakes
from durable_core.arguments import digest
from durable_core.claims.operate import who_or_why
from durable_core.database.statements import beside, current_schema
from durable_core.database.transactions import (
    DATABASE_ERRORS,
    LOCK_TIMEOUT,
    RELEASE_SAVEPOINT,
    ROLLBACK_TO_SAVEPOINT,
    SAVEPOINT,
    AsyncTransaction,
    Row,
    Steps,
    Transaction,
    acarried,
    carried,
    sqlstate,
)
from durable_core.deliveries import options
from durable_core.deliveries.enqueue import MISSING
from durable_core.deliveries.keys import KEY_WAIT, undone
from durable_core.errors import IdempotencyConflict, InvalidOption, KeyInFlight, SchemaBehind
from durable_core.refusals import NotConfigured, OperationInFlight, TargetsUnresolved
from durable_core.states import OperationState

log = logging.getLogger("durable.enqueue")
_statements = beside(__file__)

_TRIES = 3
SCHEDULED = "scheduled"
TRIGGERS = ("manual", SCHEDULED)


@dataclass(frozen=True)
class OperationRef:
    """
    An operation by its id. `replayed`: the key named this one already, and nothing was started.

    `skipped`: a scheduled start that did nothing, for its flag is off (then there is no `id`) or one is in flight (then
    the `id` is that one's, if it could be told). `state` is what this transaction saw.
    """

    id: str
    kind: str
    created: bool
    replayed: bool = False
    skipped: bool = False
    state: OperationState = OperationState.QUEUED


@dataclass(frozen=True)
class Placement:
    """Options, checked."""

    key: str | None = None
    queue: str | None = None
    priority: int | None = None

    @staticmethod
    def of(kind: str, key: str | None, queue: str | None, priority: int | None) -> Placement:
        """Raises InvalidOption, naming the option."""
        given = {"key": key, "queue": queue, "priority": priority}
        checked = options.Placement.of(kind, {name: value for name, value in given.items() if value is not None})
        return Placement(checked.key, checked.queue, checked.priority)


@dataclass(frozen=True)
class Start:
    """An operation before it is written. `arguments` is their canonical text."""

    kind: str
    placement: Placement
    by: str
    trigger: str
    one_in_flight: bool
    finds: bool
    patience_seconds: float
    every_seconds: float
    start_seconds: float
    arguments: str = field(default="{}", repr=False)
    targets: Callable[[], object] | None = None
    """Asked what it would act on, once it is known that the key starts something new."""

    @staticmethod
    def of(
        kind: str, configured: Callable[[], object] | None, *, by: str, trigger: str, placement: Placement,
        one_in_flight: bool, finds: bool, patience_seconds: float, every_seconds: float, start_seconds: float,
    ) -> Start:  # fmt: skip
        """Raises NotConfigured before anything else is looked at, then InvalidOption."""
        if configured is not None and not configured():
            raise NotConfigured(kind)
        if trigger not in TRIGGERS:
            raise InvalidOption(kind, "trigger", f"it is one of {', '.join(TRIGGERS)}")
        return Start(
            kind, placement, who_or_why(kind, "by", by), trigger, one_in_flight, finds, patience_seconds,
            every_seconds, start_seconds,
        )  # fmt: skip

    @property
    def key(self) -> str | None:
        return self.placement.key

    def row(self, row_id: str) -> dict[str, object]:
        return {
            "id": row_id, "kind": self.kind, "queue": self.placement.queue, "priority": self.placement.priority,
            "key": self.key, "arguments": self.arguments, "digest": digest(self.arguments), "trigger": self.trigger,
            "by": self.by, "one_in_flight": self.one_in_flight, "finds": self.finds,
            "patience_seconds": self.patience_seconds, "every_seconds": self.every_seconds,
            "start_seconds": self.start_seconds, "lock_timeout": KEY_WAIT,
        }  # fmt: skip


def started(tx: Transaction, new: Start) -> OperationRef:
    """Write one. See `OperationKind.start`."""
    try:
        ref = carried(tx, _written(new))
    except DATABASE_ERRORS as error:
        _tell_missing_schema(error)
        raise
    if ref.created:
        wakes.after_commit(tx, [_hint(new, ref)])
    return _noted(ref)


async def astarted(tx: AsyncTransaction, new: Start) -> OperationRef:
    """The same in an async transaction."""
    try:
        ref = await acarried(tx, _written(new))
    except DATABASE_ERRORS as error:
        _tell_missing_schema(error)
        raise
    if ref.created:
        wakes.after_commit(tx.sync_session if isinstance(tx, AsyncSession) else None, [_hint(new, ref)])
    return _noted(ref)


def _tell_missing_schema(error: Exception) -> None:
    if sqlstate(error) in MISSING:
        raise SchemaBehind(current_schema(), None, "one") from error


def _noted(ref: OperationRef) -> OperationRef:
    facts = {"row_id": ref.id, "kind": ref.kind, "is_new": ref.created, "skipped": ref.skipped}
    log.debug("operation_started", extra=facts)
    return ref


def _hint(new: Start, ref: OperationRef) -> wakes.Hint:
    return wakes.Hint(new.kind, ref.id, str(new.placement.queue), int(new.placement.priority or 0))


def _written(new: Start) -> Steps[OperationRef]:
    """
    Insert it where its key and its slot are free; both are unique indexes, so this needs no check before.

    Inside a savepoint and under a lock timeout of its own, as every refusal writes nothing and leaves the
    caller's transaction as it was.
    """
    yield SAVEPOINT, {}
    try:
        ref = yield from _inserted(new)
    except Exception as error:
        yield from undone(error, ROLLBACK_TO_SAVEPOINT, RELEASE_SAVEPOINT)
        if sqlstate(error) == LOCK_TIMEOUT:
            ref = yield from _waited_for(new)
            return ref
        if isinstance(error, OperationInFlight):
            return _in_flight(new, error.row_id)
        raise
    yield RELEASE_SAVEPOINT, {}
    return ref


def _waited_for(new: Start) -> Steps[OperationRef]:
    """
    What another open transaction has in hand: the key, or the slot alone.

    The error does not say at which index it waited. So the row is written once more without its slot, and taken back:
    where that waits too, it is the key. A scheduled start is skipped whichever it is.
    """
    if new.key is None or not new.one_in_flight or new.trigger == SCHEDULED:
        return _in_flight(new, None)
    yield SAVEPOINT, {}
    try:
        (answer,) = yield _statements.insert, {**new.row(str(uuid7())), "one_in_flight": False}
    except Exception as error:
        yield from undone(error, ROLLBACK_TO_SAVEPOINT, RELEASE_SAVEPOINT)
        if sqlstate(error) == LOCK_TIMEOUT:
            raise KeyInFlight(new.kind, new.key) from None
        raise
    yield ROLLBACK_TO_SAVEPOINT, {}
    yield RELEASE_SAVEPOINT, {}
    if not answer["inserted"]:
        # Whoever wrote it has committed meanwhile.
        there = yield _statements.keyed, {"kind": new.kind, "key": new.key}
        if there:
            return _replayed(new, there[0])
    return _in_flight(new, None)


def _in_flight(new: Start, row_id: str | None) -> OperationRef:
    """One is in flight: no reason for a scheduled start to fail."""
    if not new.one_in_flight:
        # Then it was the key that another transaction is writing.
        raise KeyInFlight(new.kind, str(new.key))
    if new.trigger == SCHEDULED:
        return OperationRef(row_id or "", new.kind, created=False, skipped=True)
    raise OperationInFlight(new.kind, row_id)


def _inserted(new: Start) -> Steps[OperationRef]:
    if new.key is not None:
        there = yield _statements.keyed, {"kind": new.kind, "key": new.key}
        if there:
            return _replayed(new, there[0])
    if new.targets is not None and not new.targets():
        raise TargetsUnresolved(new.kind)
    row_id, callers_timeout = str(uuid7()), None
    for _ in range(_TRIES):
        (answer,) = yield _statements.insert, new.row(row_id)
        callers_timeout = callers_timeout if callers_timeout is not None else answer["was"]
        if answer["inserted"]:
            yield _statements.restore_bound, {"was": callers_timeout}
            return OperationRef(row_id, new.kind, created=True)
        # A second statement, with a newer snapshot, sees who was faster, unless that one ended in between.
        there = yield _statements.taken, {"kind": new.kind, "key": new.key}
        by_key = [row for row in there if row["by_key"]]
        if by_key:
            yield _statements.restore_bound, {"was": callers_timeout}
            return _replayed(new, by_key[0])
        if there:
            raise OperationInFlight(new.kind, there[0]["id"])
    raise OperationInFlight(new.kind, None)


def _replayed(new: Start, row: Row) -> OperationRef:
    if row["digest"] != digest(new.arguments):
        raise IdempotencyConflict(new.kind, str(new.key), row["id"], "operation")
    return OperationRef(row["id"], new.kind, created=False, replayed=True, state=OperationState(row["state"]))
