"""Writing deliveries in the caller's own transaction. Nothing here commits, and nothing waits for a broker."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Unpack

from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from durable_core import kinds, wakes
from durable_core.arguments import by_name, packed_freely
from durable_core.database.statements import Statement, beside, current_schema
from durable_core.database.transactions import (
    DATABASE_ERRORS,
    AsyncTransaction,
    Steps,
    Transaction,
    acarried,
    achecked,
    carried,
    checked,
    sqlstate,
)
from durable_core.deliveries.keys import undone, write_keyed
from durable_core.deliveries.options import (
    Options,
    Placement,
)
from durable_core.deliveries.rows import Elsewhere, New, Ref
from durable_core.deliveries.traced import sending
from durable_core.errors import IdempotencyConflict, InvalidArguments, SchemaBehind
from durable_core.kinds import checked_name

log = logging.getLogger("durable.enqueue")
_statements = beside(__file__)

BATCH = 1000
"""Rows of `enqueue_many` in one statement."""
BATCH_CHARACTERS = 8 * 1024 * 1024
"""And the size of their arguments, so that memory here and jsonb's own limit (256 MB) stay out of sight."""

MISSING = ("42P01", "3F000")
"""SQLSTATEs of a table or schema that is not there."""

SAVEPOINT_OF_ALL = Statement("savepoint_of_all", "savepoint durable_enqueue_many")
RELEASE_OF_ALL = Statement("release_of_all", "release savepoint durable_enqueue_many")
ROLLBACK_OF_ALL = Statement("rollback_of_all", "rollback to savepoint durable_enqueue_many")


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
    return New.of(Elsewhere(name), Placement.of(name, options), packed_freely(name, arguments))


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
        with sending(batches) as (marked, told):
            refs = told(carried(tx, _all_written(marked, hints)))
    except DATABASE_ERRORS as error:
        _tell_missing_schema(error)
        raise
    if hints:
        wakes.after_commit(tx, hints)
    return _noted(refs)


def _newest() -> deque[wakes.Hint]:
    return deque(maxlen=wakes.MOST_REMEMBERED)


def _tell_missing_schema(error: Exception) -> None:
    """A forgotten `durable migrate`, in one sentence. The caller's transaction has failed with it."""
    if sqlstate(error) in MISSING:
        raise SchemaBehind(current_schema(), None, "one") from error


async def _awrite(tx: AsyncTransaction, batches: Iterator[list[New]]) -> list[Ref]:
    hints = _newest()
    try:
        with sending(batches) as (marked, told):
            refs = told(await acarried(tx, _all_written(marked, hints)))
    except DATABASE_ERRORS as error:
        _tell_missing_schema(error)
        raise
    if hints:
        wakes.after_commit(tx.sync_session if isinstance(tx, AsyncSession) else None, hints)
    return _noted(refs)


def _noted(refs: list[Ref]) -> list[Ref]:
    if log.isEnabledFor(logging.DEBUG):
        for ref in refs:
            log.debug("delivery_enqueued", extra={"row_id": ref.id, "kind": ref.kind, "is_new": ref.created})
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
        yield from undone(error, ROLLBACK_OF_ALL, RELEASE_OF_ALL)
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
        refs.update((yield from write_keyed(keyed)))
    plain = [(index, new) for index, new in enumerate(news) if new.key is None]
    if plain:
        ids = {index: str(uuid7()) for index, _ in plain}
        yield _statements.insert, {"rows": json.dumps([new.row(ids[index]) for index, new in plain])}
        refs.update((index, Ref(ids[index], new.kind, created=True)) for index, new in plain)
    return [refs[index] for index in range(len(news))]


def _hints(news: list[New], refs: list[Ref]) -> list[wakes.Hint]:
    return [new.hint(ref.id) for new, ref in zip(news, refs, strict=True) if ref.created and new.due_now]
