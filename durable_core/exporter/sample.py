"""What is so now: one look after the other, each bounded in what it reads and in its time, whatever the backlog."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from sqlalchemy import Connection

from durable_core import __version__
from durable_core.database import migrate
from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import run
from durable_core.deliveries.read import COUNT_LIMIT
from durable_core.errors import SchemaAhead, SchemaBehind
from durable_core.exporter.metrics import Labels

_statements = beside(__file__)

STATEMENT_SECONDS = 5.0
"""No look of ours runs longer: a struggling database has other work."""

ANSWER_SECONDS = 10.0
"""After which a connection that owes an answer is given up."""

MOST_QUEUES = 200
MOST_NAMES = 1000

Gauges: TypeAlias = dict[str, dict[Labels, float]]
"""The series of some gauges: by the metric's name, and by its labels."""


@contextmanager
def looking(database: Database) -> Iterator[Connection]:
    """A transaction for one look: read-only, and bounded on the server and here. `database` is bounded already."""
    with database.transaction() as connection:
        run(connection, _statements.bound, milliseconds=str(int(STATEMENT_SECONDS * 1000)))
        yield connection


def schema(connection: Connection) -> Gauges:
    """The revision that is installed, and whether this code runs on it."""
    at = migrate.found(connection)
    try:
        migrate.check(connection)
        supported = 1.0
    except (SchemaBehind, SchemaAhead):
        supported = 0.0
    return {"durable_schema": {(at or "none",): 1.0}, "durable_schema_supported": {(): supported}}


def build() -> Gauges:
    return {"durable_build": {(__version__,): 1.0}}


def queues(connection: Connection) -> Gauges:
    rows = run(connection, _statements.queues, most_queues=MOST_QUEUES)
    return {"durable_queue_oldest_ready_timestamp_seconds": {(row["queue"],): row["due_at"] for row in rows}}


def waiting(connection: Connection) -> Gauges:
    return _counted(connection, _statements.waiting, "pending", most_queues=MOST_QUEUES, limit=COUNT_LIMIT)


def processing(connection: Connection) -> Gauges:
    return _counted(connection, _statements.processing, "processing", limit=COUNT_LIMIT)


def dead(connection: Connection) -> Gauges:
    counted = _counted(connection, _statements.dead, "dead", limit=COUNT_LIMIT)
    letters: dict[Labels, float] = defaultdict(float)
    for (_queue, kind, _state), count in counted["durable_deliveries"].items():
        letters[(kind,)] += count
    return {**counted, "durable_dead_letters": dict(letters)}


def _counted(connection: Connection, statement: Statement, index: str, *, limit: int, **how: object) -> Gauges:
    """
    Rows by queue, kind and state, counted up to the limit, and beyond it scaled to the planner's estimate.

    Of a queue that is read in part the kinds keep the shares that they have among the rows read. Several long queues
    share what the estimate has beyond the short ones alike.
    """
    rows = run(connection, statement, limit=limit, **how)
    read: dict[str, int] = defaultdict(int)
    for row in rows:
        read[row["queue"] if index == "pending" else ""] += row["rows"]
    cut = {queue for queue, count in read.items() if count >= limit}
    factor = _factor(connection, index, read, cut) if cut else 1.0
    counts: dict[Labels, float] = {}
    for row in rows:
        there = row["rows"] - row["discarded"]
        if there:
            # Pending rows are limited queue by queue, the others all together.
            in_part = row["queue"] in cut or "" in cut
            counts[row["queue"], row["kind"], row["state"]] = there * (factor if in_part else 1.0)
    marks: dict[Labels, float] = {(queue, index): 1.0 for queue in cut}
    return {"durable_deliveries": counts, "durable_deliveries_estimated": marks}


def _factor(connection: Connection, index: str, read: dict[str, int], cut: set[str]) -> float:
    """How many rows there are for each one that was read, in what was read in part. One where nobody can tell."""
    (estimates,) = run(connection, _statements.estimates)
    beyond = float(estimates[index]) - sum(count for queue, count in read.items() if queue not in cut)
    return max(1.0, beyond / sum(read[queue] for queue in cut))


def pauses(connection: Connection) -> Gauges:
    rows = run(connection, _statements.pauses, limit=MOST_NAMES)
    return {"durable_paused": {(row["scope"], row["name"]): 1.0 for row in rows}}


def schedules(connection: Connection) -> Gauges:
    rows = run(connection, _statements.schedules, limit=MOST_NAMES)
    return {"durable_schedule_next_slot_timestamp_seconds": {(row["kind"],): row["next_slot"] for row in rows}}


def loops(connection: Connection) -> Gauges:
    rows = [row for row in run(connection, _statements.loops) if row["ended_at"] is not None]
    return {
        "durable_loop_last_success_timestamp_seconds": {
            (row["name"],): row["ended_at"] for row in rows if not row["failed"]
        },
        # While one runs, its line holds the end of the run before.
        "durable_loop_last_duration_seconds": {(row["name"],): row["seconds"] for row in rows if row["seconds"] >= 0},
        "durable_loop_failed": {(row["name"],): float(row["failed"]) for row in rows},
    }
