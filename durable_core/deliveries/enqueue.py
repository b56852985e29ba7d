"""Writing deliveries in the caller's own transaction. Nothing here commits, and nothing waits for a broker."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Protocol, TypeAlias, Unpack

from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from durable_core import kinds, wakes
from durable_core.arguments import by_name, digest, packed_freely
from durable_core.database.statements import Statement, beside, current_schema
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
    achecked,
    carried,
    checked,
    sqlstate,
)
from durable_core.deliveries.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_INTERRUPTIONS,
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE,
    Options,
    Placement,
)
from durable_core.errors import DurableError, IdempotencyConflict, InvalidArguments, KeyInFlight, SchemaBehind
from durable_core.kinds import checked_name
from durable_core.states import DeliveryState

_statements = beside(__file__)

KEY_WAIT = "50ms"
"""How long an enqueue waits for another open transaction that is writing the same key; design, section 4."""

BATCH = 1000
"""Rows of `enqueue_many` in one statement."""
BATCH_CHARACTERS = 8 * 1024 * 1024
"""And the size of their arguments, so that memory here and jsonb's own limit (256 MB) stay out of sight."""

MISSING = ("42P01", "3F000")
"""SQLSTATEs of a table or schema that is not there."""

SAVEPOINT_OF_ALL = Statement("savepoint_of_all", "savepoint durable_enqueue_many")
RELEASE_OF_ALL = Statement("release_of_all", "release savepoint durable_enqueue_many")
ROLLBACK_OF_ALL = Statement("rollback_of_all", "rollback to savepoint durable_enqueue_many")

_TRIES_FOR_A_KEY = 3


@dataclass(frozen=True)
class Ref:
    """
    A delivery by its id. `created` is False when the key already named this row.

    `state` is what this transaction saw; read it anew with `deliveries.get`.
    """

    id: str
    kind: str
    created: bool
    state: DeliveryState = DeliveryState.PENDING


class Defaults(Protocol):
    """What a delivery has where its options say nothing: a declared kind, or one whose code is not here."""

    @property
    def name(self) -> str: ...

    @property
    def queue(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def max_attempts(self) -> int: ...

    @property
    def max_interruptions(self) -> int: ...


@dataclass(frozen=True)
class _Elsewhere:
    """A kind whose code is not in this process."""

    name: str
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    max_interruptions: int = DEFAULT_MAX_INTERRUPTIONS


@dataclass(frozen=True)
class New:
    """A row to be: checked, not yet written. `arguments` is their canonical text."""

    kind: str
    queue: str
    priority: int
    key: str | None
    delay_seconds: float
    eta: datetime | None
    arguments: str = field(repr=False)
    max_attempts: int
    max_interruptions: int

    @staticmethod
    def of(kind: Defaults, placement: Placement, arguments: str) -> New:
        return New(
            kind=kind.name,
            queue=placement.queue or kind.queue,
            priority=kind.priority if placement.priority is None else placement.priority,
            key=placement.key,
            delay_seconds=placement.delay_seconds,
            eta=placement.eta,
            arguments=arguments,
            max_attempts=kind.max_attempts,
            max_interruptions=kind.max_interruptions,
        )

    def row(self, row_id: str) -> dict[str, object]:
        return {
            "id": row_id,
            "kind": self.kind,
            "queue": self.queue,
            "priority": self.priority,
            "key": self.key,
            "arguments": self.arguments,
            "digest": digest(self.arguments),
            "max_attempts": self.max_attempts,
            "max_interruptions": self.max_interruptions,
            "delay_seconds": self.delay_seconds,
            "eta": None if self.eta is None else self.eta.isoformat(),
        }

    def hint(self, row_id: str) -> wakes.Hint:
        return wakes.Hint(self.kind, row_id, self.queue, self.priority)

    @property
    def due_now(self) -> bool:
        return self.delay_seconds == 0 and self.eta is None


def enqueue_new(tx: Transaction, new: New) -> Ref:
    """Write one prepared row. See `Prepared.enqueue`."""
    return _write(checked(tx), iter([[new]]))[0]


async def aenqueue_new(tx: AsyncTransaction, new: New) -> Ref:
    """The same in an async transaction."""
    return (await _awrite(achecked(tx), iter([[new]])))[0]


def enqueue_many(tx: Transaction, rows: Iterable[New]) -> list[Ref]:
    """
    Write many deliveries in the caller's transaction, all or none; the refs are in the order of `rows`.

    `rows` are made with `kind.options(...).new(...)`. They are read and written batch by batch,
    in bounded memory but for the refs. Keys are met in sorted order within a batch, so that two
    callers do not deadlock. Raises as `enqueue` does, and whatever `rows` raises; then nothing of
    this call is left in the transaction.
    """
    return _write(checked(tx), _batches(rows))


async def aenqueue_many(tx: AsyncTransaction, rows: Iterable[New]) -> list[Ref]:
    """As `enqueue_many`, in an async transaction."""
    return await _awrite(achecked(tx), _batches(rows))


def enqueue_by_name(tx: Transaction, kind: str, arguments: Mapping[str, object], **options: Unpack[Options]) -> Ref:
    """
    Write a delivery of a kind whose code is not in this process.

    The arguments are checked as JSON only: the worker that has the handler checks them
    against its signature. Where the kind is declared here, its own rules and defaults apply.
    """
    return enqueue_new(tx, _named(kind, arguments, options))


async def aenqueue_by_name(
    tx: AsyncTransaction, kind: str, arguments: Mapping[str, object], **options: Unpack[Options]
) -> Ref:
    """As `enqueue_by_name`, in an async transaction."""
    return await aenqueue_new(tx, _named(kind, arguments, options))


def _named(kind: str, arguments: Mapping[str, object], options: Options) -> New:
    name = checked_name(kind)
    arguments = by_name(name, arguments)
    declared = kinds.deliveries.find(name)
    if declared is not None:
        new: New = declared.options(**options).new(**arguments)
        return new
    return New.of(_Elsewhere(name), Placement.of(name, options), packed_freely(name, arguments))


def _batches(rows: Iterable[New]) -> Iterator[list[New]]:
    batch: list[New] = []
    size = 0
    for row in _each(rows):
        batch.append(row)
        size += len(row.arguments)
        if len(batch) == BATCH or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _each(rows: Iterable[New]) -> Iterator[New]:
    wanted = "rows are made with kind.options(...).new(...)"
    if not isinstance(rows, Iterable):
        raise InvalidArguments("enqueue_many", "rows", f"{wanted}, several of them; got {type(rows).__name__}")
    for row in rows:
        if not isinstance(row, New):
            raise InvalidArguments("enqueue_many", "rows", f"{wanted}; got {type(row).__name__}")
        yield row


def _write(tx: Transaction, batches: Iterator[list[New]]) -> list[Ref]:
    hints = _newest()
    try:
        refs = carried(tx, _all_written(batches, hints))
    except DATABASE_ERRORS as error:
        _tell_missing_schema(error)
        raise
    if hints:
        wakes.after_commit(tx, hints)
    return refs


def _newest() -> deque[wakes.Hint]:
    return deque(maxlen=wakes.MOST_REMEMBERED)


def _tell_missing_schema(error: Exception) -> None:
    """A forgotten `durable migrate`, in one sentence. The caller's transaction has failed with it."""
    if sqlstate(error) in MISSING:
        raise SchemaBehind(current_schema(), None, "one") from error


async def _awrite(tx: AsyncTransaction, batches: Iterator[list[New]]) -> list[Ref]:
    hints = _newest()
    try:
        refs = await acarried(tx, _all_written(batches, hints))
    except DATABASE_ERRORS as error:
        _tell_missing_schema(error)
        raise
    if hints:
        wakes.after_commit(tx.sync_session if isinstance(tx, AsyncSession) else None, hints)
    return refs


def _all_written(batches: Iterator[list[New]], hints: deque[wakes.Hint]) -> Steps[list[Ref]]:
    """Write every batch or, by a savepoint around them where they are several, none."""
    first, second = next(batches, None), next(batches, None)
    if first is None:
        return []
    if second is None:
        refs = yield from _written(first)
        hints.extend(_hints(first, refs))
        return refs
    refs = []
    yield SAVEPOINT_OF_ALL, {}
    try:
        for batch in chain((first, second), batches):
            written = yield from _written(batch)
            refs.extend(written)
            hints.extend(_hints(batch, written))
    except Exception as error:
        yield from _undone(error, ROLLBACK_OF_ALL, RELEASE_OF_ALL)
        if isinstance(error, IdempotencyConflict) and any(ref.id == error.row_id and ref.created for ref in refs):
            raise IdempotencyConflict(error.kind, error.key, None) from None
        raise
    yield RELEASE_OF_ALL, {}
    return refs


def _written(news: list[New]) -> Steps[list[Ref]]:
    """Write one batch: the keyed first, for they may be refused, and then nothing of the batch is written."""
    refs: dict[int, Ref] = {}
    keyed = [(index, new) for index, new in enumerate(news) if new.key is not None]
    if keyed:
        refs.update((yield from _keyed(keyed)))
    plain = [(index, new) for index, new in enumerate(news) if new.key is None]
    if plain:
        ids = {index: str(uuid7()) for index, _ in plain}
        yield _statements.insert, {"rows": json.dumps([new.row(ids[index]) for index, new in plain])}
        refs.update((index, Ref(ids[index], new.kind, created=True)) for index, new in plain)
    return [refs[index] for index in range(len(news))]


def _hints(news: list[New], refs: list[Ref]) -> list[wakes.Hint]:
    return [new.hint(ref.id) for new, ref in zip(news, refs, strict=True) if ref.created and new.due_now]


_Name: TypeAlias = tuple[str, str]
"""A kind and a key: one intention."""


def _keyed(keyed: list[tuple[int, New]]) -> Steps[dict[int, Ref]]:
    """
    Insert what is new and read what was there, inside one savepoint.

    The insert waits for a twin that is still uncommitted, so it runs under a lock timeout of
    its own; and every refusal rolls back to the savepoint, so that it writes nothing and
    leaves the caller's transaction as it was. Twins within one call are one row: the first is
    `created`, the others get it back; with other arguments they are refused before any statement.
    """
    wanted: dict[_Name, New] = {}
    for _, new in keyed:
        twin = wanted.setdefault((new.kind, str(new.key)), new)
        if twin.arguments != new.arguments:
            raise IdempotencyConflict(new.kind, str(new.key), None)
    new_ids = {name: str(uuid7()) for name in wanted}
    yield SAVEPOINT, {}
    try:
        found = yield from _insert_or_find(wanted, new_ids)
    except Exception as error:
        yield from _undone(error, ROLLBACK_TO_SAVEPOINT, RELEASE_SAVEPOINT)
        if sqlstate(error) == LOCK_TIMEOUT:
            raise KeyInFlight(*min(wanted), among=len(wanted)) from None
        raise
    yield RELEASE_SAVEPOINT, {}
    refs: dict[int, Ref] = {}
    told: set[_Name] = set()
    for index, new in keyed:
        name = (new.kind, str(new.key))
        if name in found:
            there = found[name]
            refs[index] = Ref(there["id"], new.kind, created=False, state=DeliveryState(there["state"]))
        else:
            refs[index] = Ref(new_ids[name], new.kind, created=name not in told)
            told.add(name)
    return refs


def _undone(error: Exception, rollback: Statement, release: Statement) -> Steps[None]:
    """
    Roll back to the savepoint and remove it, which a rollback alone does not.

    A refusal promises a transaction that is alive, so there a rollback that fails is the news.
    After any other error, such as a connection that died, the first is, and it is not hidden by a second.
    """
    try:
        yield rollback, {}
        yield release, {}
    except Exception:
        if isinstance(error, DurableError) or sqlstate(error) == LOCK_TIMEOUT:
            raise


def _insert_or_find(wanted: dict[_Name, New], new_ids: dict[_Name, str]) -> Steps[dict[_Name, Row]]:
    """Insert under the new ids what is free; the rows of the other names. Raises IdempotencyConflict, KeyInFlight."""
    rows = json.dumps([new.row(new_ids[name]) for name, new in wanted.items()])
    inserted: set[str] = set()
    found: dict[_Name, Row] = {}
    callers_timeout: str | None = None
    for _ in range(_TRIES_FOR_A_KEY):
        (answer,) = yield _statements.insert_keyed, {"rows": rows, "lock_timeout": KEY_WAIT}
        callers_timeout = callers_timeout if callers_timeout is not None else answer["was"]
        inserted.update(answer["inserted"])
        missing = [name for name in wanted if new_ids[name] not in inserted]
        # No row back from the insert: the key is there. A second statement, with a newer
        # snapshot, sees it, unless its row was deleted in between: then the insert is due again.
        found = {}
        if missing:
            keys = json.dumps([{"kind": kind, "key": key} for kind, key in missing])
            there = yield _statements.keyed, {"keys": keys}
            found = {(row["kind"], row["key"]): row for row in there}
        if len(found) == len(missing):
            break
    else:
        unseen = [name for name in missing if name not in found]
        raise KeyInFlight(*min(unseen), among=len(unseen))
    yield _statements.restore_bound, {"was": callers_timeout}
    for name, row in found.items():
        if row["digest"] != digest(wanted[name].arguments):
            raise IdempotencyConflict(*name, row["id"])
    return found
