"""One act on all deliveries that a filter chooses: bounded transactions, a rate, and resumable by asking again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from durable_core.claims.operate import Act, act_on_each
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.read import COUNT_LIMIT
from durable_core.errors import InvalidOption
from durable_core.states import DeliveryState

_statements = beside(__file__)

BATCH = 100
"""Rows moved in one transaction: their locks are held for milliseconds."""
SAMPLE = 5


@dataclass(frozen=True)
class Filter:
    """
    Which deliveries: each that is given must hold. `older_seconds` counts from when a delivery was enqueued.

    `ids` are those that somebody saw: of them the ones for which the rest still holds.
    """

    kind: str | None = None
    queue: str | None = None
    error_code: str | None = None
    ordering_key: str | None = None
    older_seconds: float | None = None
    state: DeliveryState | None = None
    ids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Chosen:
    """What a filter chooses just now: how many, counted up to COUNT_LIMIT, and the first few ids."""

    count: int
    sample: list[str]


@dataclass(frozen=True)
class Moved:
    """What came of an act: rows done; rows that had moved on meanwhile; rows that somebody was at work on."""

    done: int = 0
    moved_on: int = 0
    busy: int = 0


def look(tx: Transaction, act: Act, which: Filter) -> Chosen:
    """How many deliveries the act would take, and a sample of them."""
    ids = _chosen(checked(tx), act, which, None, COUNT_LIMIT)
    return Chosen(len(ids), ids[:SAMPLE])


def act_on_all(
    database: Database,
    act: Act,
    which: Filter,
    *,
    by: str,
    reason: str,
    rate: float | None = None,
    progress: Callable[[Moved], None] = lambda moved: None,
    pause: Callable[[float], None] = time.sleep,
    **more: object,
) -> Moved:
    """
    Carry out one act on every delivery that the filter chooses, oldest first, in transactions of at most 100 rows.

    At most `rate` rows a second. Broken off, what is done is done and journalled, and the same call goes on with the
    rest. Rows that come to be chosen behind the point reached are left to the next call; rows that somebody is at work
    on are counted, not waited for. Raises InvalidOption.
    """
    if rate is not None and not rate > 0:
        raise InvalidOption(act.name, "rate", "a rate is more than 0 rows a second")
    size = BATCH if rate is None else max(1, min(BATCH, int(rate)))
    so_far = Moved()
    for ids in _batches(database, act, which, size):
        began = time.monotonic()
        with database.transaction() as connection:
            rows = act_on_each(connection, act, ids, by=by, reason=reason, **more)
        done, busy = sum(row["done"] for row in rows), sum(row["busy"] for row in rows)
        so_far = Moved(so_far.done + done, so_far.moved_on + len(ids) - done - busy, so_far.busy + busy)
        progress(so_far)
        if rate is not None:
            pause(max(len(ids) / rate - (time.monotonic() - began), 0.0))
    return so_far


def _batches(database: Database, act: Act, which: Filter, size: int) -> Iterator[list[str]]:
    after: str | None = None
    while True:
        with database.autocommit() as connection:
            ids = _chosen(connection, act, which, after, size)
        if not ids:
            return
        yield ids
        after = ids[-1]


def _chosen(tx: Transaction, act: Act, which: Filter, after: str | None, limit: int) -> list[str]:
    if which.state is not None and which.state not in act.states:
        raise InvalidOption(act.name, "state", f"it takes deliveries that are {act.needed}")
    wanted = asdict(which)
    state = wanted.pop("state")
    wanted["ids"] = None if which.ids is None else list(which.ids)
    states = [each.value for each in (act.states if state is None else (state,))]
    return [row["id"] for row in run(tx, _statements.chosen, states=states, after=after, limit=limit, **wanted)]
