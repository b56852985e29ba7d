"""One look at one delivery: a single snapshot, read-only, and over within seconds whatever the database does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection

from durable_core.claims import journal
from durable_core.claims.journal import Line
from durable_core.database import migrate as migrations
from durable_core.database.connections import Database
from durable_core.database.looking import looking
from durable_core.deliveries import read
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.waiting import Wait, waits_of
from durable_core.errors import NotFound
from durable_core.operations import read as operations
from durable_core.operations.why import why
from durable_core.plans import read as plans
from durable_core.plans.rows import Report

READ_SECONDS = 5.0
"""No statement runs longer: looking at a struggling database must not add to its load."""

ANSWER_SECONDS = 8.0
"""A page is answered within so long, also where the database accepts connections and says nothing."""

AT_ONCE = 4
"""Looks under way at a time. One that hangs ends with psycopg's own bound of a connect; more must not heap up."""

T = TypeVar("T")


class Busy(Exception):
    """So many looks are under way, and none of them has been answered."""


@dataclass(frozen=True)
class Seen:
    """A delivery as one snapshot had it. `lines` are the newest of its journal, oldest first."""

    row: Delivery
    waits: list[Wait]
    lines: list[Line]
    now: datetime


def look(database: Database, row_id: str) -> Seen | Report | str:
    """
    The row, what it waits for and its journal: three looks at an index, of any backlog. Of a plan its report, of an
    operation a sentence.

    On a connection of its own, made as the host's engine makes them: one that rested in a pool may have died, and
    behind a pooler statements prepared long ago may be mixed up. Raises NotFound, SchemaBehind or what the database
    raises.
    """
    own = database.background()
    try:
        with looking(own, statement_seconds=READ_SECONDS, answer_seconds=READ_SECONDS, snapshot=True) as connection:
            migrations.check(connection)
            try:
                row = read.get(connection, row_id)
            except NotFound:
                with suppress(NotFound):
                    return plans.report(connection, row_id)
                with suppress(NotFound):
                    return _of_an_operation(connection, row_id)
                raise
            return Seen(row, waits_of(connection, row), journal.read(connection, row.id), read.now(connection))
    finally:
        own.engine.dispose()


def _of_an_operation(connection: Connection, row_id: str) -> str:
    """What it waits for, or how it ended, and the command that shows more. Raises NotFound."""
    row = operations.get(connection, row_id)
    said = why(row, read.now(connection))
    return f"Operation {row.id} of {row.kind} is {row.state.value}: {said}. More: durable operations show {row.id}"


_free = threading.BoundedSemaphore(AT_ONCE)


async def aside(act: Callable[[], T]) -> T:
    """
    Run a look on a thread of its own; raises TimeoutError after ANSWER_SECONDS, and Busy where AT_ONCE hang already.

    A daemon thread, not Flower's executor: that one serves Flower's own pages, and waits for its threads at the end.
    """
    if not _free.acquire(blocking=False):
        raise Busy
    answer: Future[T] = Future()
    # Begun, so that nobody who stops waiting can cancel it under the thread.
    answer.set_running_or_notify_cancel()

    def run_it() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)
        finally:
            _free.release()

    threading.Thread(target=run_it, name="durable-flower", daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_SECONDS)
