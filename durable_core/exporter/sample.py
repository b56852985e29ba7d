"""What is so now: one look after the other, each bounded in what it reads and in its time, whatever the backlog."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import TypeAlias

from sqlalchemy import Connection

from durable_core import __version__
from durable_core.database import looking as bounds
from durable_core.database import migrate
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, run
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

MOST_DUE = 6000
"""Due rows that are looked at for one that is free to run, over all queues."""

SINCE_SECONDS = (None, 24 * 3600.0, 3600.0, 600.0, 300.0, 120.0)
"""Where to look for it: among the rows due longest, and among those that became due since so long ago."""

Gauges: TypeAlias = dict[str, dict[Labels, float]]
"""The series of some gauges: by the metric's name, and by its labels."""


def looking(database: Database) -> AbstractContextManager[Connection]:
    """A transaction for one look: read-only, and bounded on the server and here."""
    return bounds.looking(database, statement_seconds=STATEMENT_SECONDS, answer_seconds=ANSWER_SECONDS)


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
    rows = run(connection, _statements.queues, most_queues=MOST_QUEUES, limit=MOST_DUE, ages=list(SINCE_SECONDS))
    return {"durable_queue_oldest_ready_timestamp_seconds": {(row["queue"],): row["due_at"] for row in rows}}


def waiting(connection: Connection) -> Gauges:
    """
    At most COUNT_LIMIT pending rows are read in all.

    Half of them is shared out alike, and what that leaves goes to the queues that have more than their share.
    """
    names = [row["queue"] for row in run(connection, _statements.waiting_queues, most_queues=MOST_QUEUES)]
    share = max(1, COUNT_LIMIT // 2 // max(1, len(names)))
    rows = run(connection, _statements.waiting, queues=names, share=share)
    cut = _cut(rows, share)
    if cut:
        longer = sorted(queue for queue, _state in cut)
        kept = [row for row in rows if row["queue"] not in longer]
        share = max(share, (COUNT_LIMIT - sum(row["rows"] for row in rows)) // len(longer))
        rows = [*kept, *run(connection, _statements.waiting, queues=longer, share=share)]
        cut = _cut(rows, share)
    return _counted(connection, rows, cut)


def processing(connection: Connection) -> Gauges:
    rows = run(connection, _statements.processing, limit=COUNT_LIMIT)
    return _counted(connection, rows, _cut(rows, COUNT_LIMIT))


def dead(connection: Connection) -> Gauges:
    rows = run(connection, _statements.dead, limit=COUNT_LIMIT)
    counted = _counted(connection, rows, _cut(rows, COUNT_LIMIT))
    letters: dict[Labels, float] = defaultdict(float)
    for (_queue, kind, _state), count in counted["durable_deliveries"].items():
        letters[(kind,)] += count
    del counted["durable_held"]
    return {**counted, "durable_dead_letters": dict(letters)}


def _group(row: Row) -> Labels:
    """What has a limit of its own: pending rows queue by queue, the others of one state all together."""
    return (row["queue"] if row["state"] == "pending" else "", row["state"])


def _cut(rows: list[Row], limit: int) -> set[Labels]:
    """The groups of which no more was read than the limit."""
    read: dict[Labels, int] = defaultdict(int)
    for row in rows:
        read[_group(row)] += row["rows"]
    return {group for group, count in read.items() if count >= limit}


def _counted(connection: Connection, rows: list[Row], cut: set[Labels]) -> Gauges:
    """
    Rows by queue, kind and state; and those among them that a sweep holds.

    What was read in part has at least so many. Where that is one queue, or one state, the planner's estimate says how
    many there are, and the kinds keep the shares that they have among the rows read. How several queues share what is
    beyond them nobody can tell.
    """
    factor = {group: 1.0 for group in cut}
    for state in {state for _queue, state in cut}:
        groups = [group for group in cut if group[1] == state]
        if len(groups) == 1:
            factor[groups[0]] = _factor(connection, rows, groups[0])
    counts: dict[Labels, float] = {}
    held: dict[Labels, float] = {}
    for row in rows:
        labels = (row["queue"], row["kind"], row["state"])
        counts[labels] = row["rows"] * factor.get(_group(row), 1.0)
        if row["held"]:
            held[labels] = float(row["held"])
    marks: dict[Labels, float] = dict.fromkeys(cut, 1.0)
    return {"durable_deliveries": counts, "durable_deliveries_estimated": marks, "durable_held": held}


def _factor(connection: Connection, rows: list[Row], cut: Labels) -> float:
    """How many rows there are for each one that was read, in what was read in part. One where nobody can tell."""
    (estimates,) = run(connection, _statements.estimates)
    read: int = sum(row["rows"] for row in rows if _group(row) == cut)
    others: int = sum(row["rows"] for row in rows if row["state"] == cut[1]) - read
    return max(1.0, (float(estimates[cut[1]]) - others) / read)


def pauses(connection: Connection) -> Gauges:
    rows = run(connection, _statements.pauses, limit=MOST_NAMES)
    return {"durable_paused": {(row["scope"], row["name"]): 1.0 for row in rows}}


def schedules(connection: Connection) -> Gauges:
    rows = run(connection, _statements.schedules, limit=MOST_NAMES)
    return {"durable_schedule_next_slot_timestamp_seconds": {(row["kind"],): row["next_slot"] for row in rows}}


def plans(connection: Connection) -> Gauges:
    rows = run(connection, _statements.plans, limit=COUNT_LIMIT)
    oldest = [row["oldest"] for row in rows if row["state"] == "pending"]
    return {
        "durable_plans": _summed(rows, "rows", "state"),
        "durable_plan_oldest_pending_timestamp_seconds": {(): min(oldest)} if oldest else {},
        "durable_held": _summed(rows, "held", "queue", "kind", "state"),
    }


def operations(connection: Connection) -> Gauges:
    rows = run(connection, _statements.operations, limit=COUNT_LIMIT)
    return {
        "durable_operations": _summed(rows, "rows", "kind", "state"),
        "durable_operations_overdue": _summed(rows, "overdue", "kind"),
        "durable_held": _summed(rows, "held", "queue", "kind", "state"),
    }


def _summed(rows: list[Row], count: str, *labels: str) -> dict[Labels, float]:
    """One count of the rows by these labels; no series where it is none."""
    found: dict[Labels, float] = defaultdict(float)
    for row in rows:
        if row[count]:
            found[tuple(row[label] for label in labels)] += row[count]
    return dict(found)


def loops(rows: list[Row]) -> Gauges:
    """What the sweeps' own lines say, as `sweeps.loops` reads them; what a line holds of an error stays there."""
    ended = [row for row in rows if row["ended_at"] is not None]
    # While one runs, its line holds the end of the run before.
    done = [row for row in ended if row["ended_at"] >= row["began_at"]]
    return {
        "durable_loop_last_success_timestamp_seconds": {
            (row["name"],): row["ended_at"].timestamp() for row in ended if row["error"] is None
        },
        "durable_loop_last_duration_seconds": {
            (row["name"],): (row["ended_at"] - row["began_at"]).total_seconds() for row in done
        },
        "durable_loop_failed": {(row["name"],): float(row["error"] is not None) for row in ended},
    }
