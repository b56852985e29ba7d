"""Carrying out deliveries in the test's own thread: the claim, the handler and the commit that a worker runs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from sqlalchemy import Engine

from durable_core import kinds
from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import run
from durable_core.deliveries import read
from durable_core.deliveries.attempt import claim_due, perform, perform_due
from durable_core.deliveries.declare import DeliveryKind, Prepared, registry, terms
from durable_core.deliveries.enqueue import enqueue_new
from durable_core.deliveries.rows import New, Ref
from durable_core.deliveries.worker import Attempted, Outcome, Worker
from durable_core.errors import GiveUp, Retry
from durable_core.operations import attempt as operations
from durable_core.plans import attempt as plans
from durable_core.testing.databases import MovableClock
from durable_core.testing.deliveries import Made

log = logging.getLogger(__name__)  # no logger of operation, like those that begin with `durable.`
_statements = beside(__file__)

MIDDLE = 0.5
"""What the back-off's jitter draws here, so that a retry is due at the same time in every run."""

Work: TypeAlias = "DeliveryKind[..., Any] | Prepared[...] | New | Ref | Made | str"
"""What to run: a kind, with or without its options, to be enqueued; or a delivery that is there, by its id."""


def drain(
    on: Engine | Database, *, queue: str | None = None, limit: int = 1000, through: timedelta | None = None
) -> list[Attempted]:
    """
    Carry out what is due, the most overdue first, and what that enqueues, until nothing is; what each attempt came to.

    Deliveries; once none is due, the steps of approved plans; then what operations are to issue or to poll. Committed
    rows only, one after the other, of the kinds declared in this process, in `queue` or in all. What a handler raises
    is that row's outcome, and goes with its traceback to the log, which pytest shows beside a test that failed. With
    `through` the movable clock goes on from due time to due time, so retries and later polls happen as well; at the end
    it has moved by that much.

    No time limit ends a handler here, and rows that another connection has locked are passed over.
    Raises AssertionError when more is due after `limit` attempts: work that enqueues itself has no end.
    """
    database = _database(on)
    done: list[Attempted] = []
    with _worker(database) as worker:
        end = None if through is None else _now(database) + through
        while True:
            _all_due(worker, queue, limit, done)
            if any(_another(worker, other, queue, limit, done) for other in _OTHERS):
                continue
            if end is None:
                return done
            left = (end - _now(database)).total_seconds()
            later = _next_later(database, queue)
            step = left if later is None else min(left, later)
            if step > 0:
                MovableClock(database.engine).advance(step)
            if later is None or later > left:
                return done


def run_one(on: Engine | Database, work: Work, /, *args: Any, raises: bool = True, **kwargs: Any) -> read.Delivery:
    """
    Run one delivery once, in this thread, and return its row as it is then.

    A kind, or `kind.options(...)`, is enqueued with these arguments and committed first; a `Ref` or an id must be of a
    row that is due. With `raises`, what the handler raises comes out here with its traceback, once the failed
    attempt is committed; `Retry` and `GiveUp` do not, for they are outcomes that it asked for.

    A handler's own argument called `raises` goes in by `kind.options().new(raises=…)`.
    Raises AssertionError when there was nothing to claim, and for an effect of `step.in_commit` that failed.
    """
    database = _database(on)
    row_id = _row_id(database, work, args, kwargs)
    with database.transaction() as tx:
        before = read.get(tx, row_id)
    kind, raised = _watched(registry.get(before.kind))
    with _worker(database) as worker:
        attempted = perform(worker, kind, row_id)
    with database.transaction() as tx:
        row = read.get(tx, row_id)
    if attempted.outcome is Outcome.NOTHING_TO_DO:
        held = f", held: {row.held_reason}" if row.held_reason else ""
        raise AssertionError(
            f"nothing to claim: delivery {row.id} of {row.kind} is {row.state}, due {row.due_at}{held}"
        )
    if raises and attempted.outcome is not Outcome.SENT:
        for error in raised:
            if not isinstance(error, Retry | GiveUp):
                raise error
        if not raised:
            raise AssertionError(f"{attempted.outcome}: {attempted.error_code}: {row.error_message}")
    return row


def _database(on: Engine | Database) -> Database:
    if isinstance(on, Database):
        return on
    if isinstance(on, Engine):
        return Database(on)
    raise TypeError(f"work is carried out in transactions of its own, so give an Engine; got {type(on).__name__}")


@contextmanager
def _worker(database: Database) -> Iterator[Worker]:
    worker = Worker(database, random=lambda: MIDDLE)
    try:
        yield worker
    finally:
        worker.heartbeat.stop()


def _all_due(worker: Worker, queue: str | None, limit: int, done: list[Attempted]) -> None:
    taken: list[str] = []
    while True:
        with worker.database.autocommit() as connection:
            found = run(connection, _statements.next_due, kinds=_names(), queue=queue, passed_over=taken)
        if not found:
            return
        due_in = found[0]["queue"]
        if len(done) >= limit and _to_be_had(worker, due_in):
            last = ", ".join(sorted({attempted.kind for attempted in done[-20:]}))
            raise AssertionError(f"drain stopped after {limit} attempts and more is due; the last were of {last}")
        attempted = perform_due(worker, 1, queue=due_in)
        done.extend(attempted)
        for one in attempted:
            if one.error_code is not None and one.outcome is not Outcome.SNOOZED:
                _tell(worker.database, one)
        # Due and not to be had: locked by somebody else, paused, or not the first of its line. The other queues come
        # first, then that is all.
        taken = [] if attempted else [*taken, due_in]


@dataclass(frozen=True)
class _Other:
    """A contract whose rows are carried out beside the deliveries."""

    what: str
    registry: kinds.Registry[Any]
    next: Statement
    perform: Callable[[Worker, Any, str], Attempted]


_OTHERS = (
    _Other("a step of plan", kinds.plan_steps, _statements.next_step, plans.perform),
    _Other("operation", kinds.operations, _statements.next_operation, operations.perform),
)


def _another(worker: Worker, other: _Other, queue: str | None, limit: int, done: list[Attempted]) -> bool:
    """Carry out what of this contract is due longest; whether there was one that nobody else had."""
    passed_over: list[str] = []
    names = [name for kind in other.registry for name in kind.names]
    while True:
        with worker.database.autocommit() as connection:
            found = run(connection, other.next, kinds=names, queue=queue, passed_over=passed_over)
        if not found:
            return False
        if len(done) >= limit:
            raise AssertionError(f"drain stopped after {limit} attempts and {other.what} {found[0]['id']} is due")
        attempted = other.perform(worker, other.registry.get(found[0]["kind"]), found[0]["id"])
        if attempted.outcome is not Outcome.NOTHING_TO_DO:
            done.append(attempted)
            if attempted.error_code is not None:
                said = f"{attempted.outcome}: {attempted.error_code}: {attempted.error_message}"
                log.warning("%s, attempt %d: %s", attempted.kind, attempted.attempt, said)
            return True
        passed_over.append(found[0]["id"])


def _to_be_had(worker: Worker, queue: str) -> bool:
    """Whether this queue has something to claim; the claim itself is rolled back."""
    with worker.database.connect() as connection:
        return bool(claim_due(connection, 1, queue=queue, holder=worker.holder))


def _tell(database: Database, one: Attempted) -> None:
    with database.transaction() as tx:
        row = read.get(tx, one.id)
    log.warning("%s, attempt %d: %s: %s", one.kind, one.attempt, one.outcome, row.error_message)


def _names() -> list[str]:
    return [str(term["kind"]) for term in terms(registry)]


def _now(database: Database) -> Any:
    with database.autocommit() as connection:
        return read.now(connection)


def _next_later(database: Database, queue: str | None) -> float | None:
    """Seconds until the next row that is not due yet."""
    with database.autocommit() as connection:
        found = run(connection, _statements.next_later, kinds=_names(), queue=queue)
        found += run(
            connection, _statements.next_later_operation, kinds=[kind.name for kind in kinds.operations], queue=queue
        )
    return min((float(row["seconds"]) for row in found), default=None)


def _row_id(database: Database, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if isinstance(work, DeliveryKind | Prepared):
        with database.transaction() as tx:
            return work.enqueue(tx, *args, **kwargs).id
    if args or kwargs:
        raise TypeError("a delivery that is there has its arguments already")
    if isinstance(work, New):
        with database.transaction() as tx:
            return enqueue_new(tx, work).id
    return work if isinstance(work, str) else work.id


def _watched(kind: DeliveryKind[..., Any]) -> tuple[DeliveryKind[..., Any], list[BaseException]]:
    """The kind, and what its handler raises the last time it is called."""
    raised: list[BaseException] = []
    watched, handler = copy.copy(kind), kind.handler

    def call(*args: Any, **kwargs: Any) -> Any:
        raised.clear()
        try:
            return handler(*args, **kwargs)
        except Exception as error:
            raised.append(error)
            raise

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        raised.clear()
        try:
            return await handler(*args, **kwargs)
        except Exception as error:
            raised.append(error)
            raise

    chosen: Callable[..., Any] = call_async if kind.is_async else call
    watched.handler = chosen
    return watched, raised
