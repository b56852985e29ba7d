"""The sweeps: what beat drives, how often, and what each heals. Any number of beats may drive them."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from durable_core.cases import sweep as cases
from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import (
    DATABASE_ERRORS,
    LOCK_TIMEOUT,
    Row,
    Transaction,
    checked,
    is_infrastructure,
    run,
    said,
    sqlstate,
)
from durable_core.deliveries import sweep as deliveries
from durable_core.deliveries.stuck import cut_off
from durable_core.operations import sweep as operations
from durable_core.periodic import sweep as periodic
from durable_core.plans import sweep as plans

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)

CONTROL_QUEUE = "durable.control"
"""Sweeps have a queue of their own, so that no backlog of work can starve the rescue."""


LATE_AFTER = 3
"""Intervals after which a sweep counts as driven by nobody."""

PATIENT_INTERVAL = 10.0
"""For a gate, sweeps that run oftener are given as long: a beat that a deploy restarts, or a busy slot, is no fault."""

NEW_INSTALLATION = 30.0
"""Seconds after which every sweep that runs often must have begun once."""

BY_A_WORKER = " (a worker)"
"""After the host of a sweep that a worker ran because nobody else did."""

LOOK_WAIT = "2s"
"""How long a sweep that begins waits for a lock, of its own line or of what it looks at."""

PATIENCE_SECONDS = 15.0
"""A sweep that has not ended is taken for killed after so long, and the next one begins."""


@dataclass(frozen=True)
class Bounds:
    """What the sweeps of one installation are told: lease, heartbeat and retention in seconds, and a cap on hints."""

    lease_seconds: float = 30.0
    heartbeat_seconds: float = 8.0
    hints_per_queue: int = deliveries.HINTS_PER_QUEUE
    retention_seconds: float = deliveries.RETENTION_SECONDS


@dataclass(frozen=True)
class Sweep:
    """One sweep. Intervals in seconds: design, section 7."""

    name: str
    interval: float
    heals: str
    run: Callable[[Database, Bounds], int]
    look: Callable[[], tuple[Statement, dict[str, object]]] | None = None
    """A statement that has a row where there is something to do, and its parameters: asked as the sweep begins."""
    takes_from_owners: bool = False
    rescues: bool = False
    """Without it nothing gets on that was lost: a worker runs it where no beat does."""
    offered: float | None = None
    """How often beat offers it, where that is more often than it runs: a beat that restarts within the hour, and
    counts from its start, would else never come to an hourly sweep."""

    @property
    def every(self) -> float:
        return self.offered or self.interval

    @property
    def task(self) -> str:
        return f"durable.{self.name}"


DUE, LAPSED, OVERDUE = _statements.due, _statements.lapsed, _statements.overdue
POLLS = _statements.polls
"""Each has a row where the sweep, dispatch or reap or expire, has something to do."""


class _Contract(Protocol):
    """What the sweep module of a contract offers; each answers how many rows moved."""

    def reap(self, database: Database, *, heartbeat_seconds: float) -> int: ...

    def expire(self, database: Database) -> int: ...

    def prune_all(self, database: Database, *, retention_seconds: float) -> int: ...

    def holding_pids(self, database: Database, owner: str) -> set[int]: ...

    def give_back(self, database: Database, owner: str, pids: Collection[int], *, shutdown: bool) -> int: ...


CONTRACTS: tuple[_Contract, ...] = (deliveries, plans, operations)
HINTED: tuple[deliveries.Hinting, ...] = (plans, operations, operations.POLLS)
"""Those whose rows dispatch hints beside the deliveries, or counts, as it does the polls."""


def holding_pids(database: Database, owner: str) -> set[int]:
    """The process ids of this owner under which something is being carried out."""
    return set().union(*(contract.holding_pids(database, owner) for contract in CONTRACTS))


def give_back(database: Database, owner: str, pids: Collection[int], *, shutdown: bool = False) -> int:
    """
    Take back at once what dead processes of this owner held, as their parent asks; how many rows moved.

    What that means is each contract's. Whoever comes second finds another state.
    """
    return sum(contract.give_back(database, owner, pids, shutdown=shutdown) for contract in CONTRACTS)


def _reap(database: Database, bounds: Bounds) -> int:
    """First those who hold a row past its time, so that a row is not skipped as locked for ever."""
    began = time.monotonic()
    cut_off(database, grace_seconds=bounds.lease_seconds)
    if time.monotonic() - began > bounds.heartbeat_seconds:
        # For a lock on the whole table, say. The owners' beats have waited too, and may come first.
        log.warning("reap_had_to_wait")
        return 0
    return sum(contract.reap(database, heartbeat_seconds=bounds.heartbeat_seconds) for contract in CONTRACTS)


SWEEPS: tuple[Sweep, ...] = (
    Sweep(
        "dispatch", 1.0, "hints that were lost, and rows that have become due",
        lambda database, bounds: deliveries.dispatch(database, cap=bounds.hints_per_queue, others=HINTED),
        look=lambda: (DUE, {}),
        rescues=True,
    ),
    Sweep(
        "reap", 5.0, "rows whose worker was lost",
        _reap,
        look=lambda: (LAPSED, {}),
        takes_from_owners=True,
        rescues=True,
    ),
    Sweep(
        "cron", 1.0, "slots of periodic kinds that are due",
        lambda database, bounds: periodic.fire(database),
        look=periodic.look,
        rescues=True,
    ),
    Sweep(
        "poll", 1.0, "polls of operations that are due",
        lambda database, bounds: operations.poll(
            database, cap=bounds.hints_per_queue, others=(deliveries, plans)
        ),
        look=lambda: (POLLS, {}),
        rescues=True,
    ),
    Sweep(
        "expire", 15.0, "waiting rows whose time to be useful is over",
        lambda database, bounds: sum(contract.expire(database) for contract in CONTRACTS),
        look=lambda: (OVERDUE, {}),
    ),
    Sweep(
        "ingest", 15.0, "events of other systems whose process was lost",
        lambda database, bounds: cases.recover(database),
        look=cases.look,
    ),
    Sweep(
        "prune", 3600.0, "finished rows past their retention",
        lambda database, bounds: sum(
            contract.prune_all(database, retention_seconds=bounds.retention_seconds) for contract in CONTRACTS
        ),
        offered=300.0,
    ),
)  # fmt: skip


def named(name: str) -> Sweep:
    (found,) = (sweep for sweep in SWEEPS if sweep.name == name)
    return found


def run_sweep(database: Database, sweep: Sweep, bounds: Bounds, *, by_a_worker: bool = False) -> dict[str, object]:
    """
    Run a sweep, unless one of its name began less than its rest ago or still runs, by the database's clock.

    The rest is the interval less half of how often it is offered, for beat's ticks are not
    exact: half a second for dispatch. One that still runs after PATIENCE_SECONDS is taken for
    killed. So a backlog of sweep messages, or five beats, cost one statement each; and so does a sweep that has nothing
    to do.

    The answer says what moved, or why nothing was tried. Raises what the sweep raised, after
    noting it in `durable.loops` if the database still takes that.
    `by_a_worker` is noted there too: the sweep was late and its usual driver is missing.
    """
    host = socket.gethostname() + BY_A_WORKER * by_a_worker
    database = database.bounded(PATIENCE_SECONDS)
    asked_at = time.monotonic()
    try:
        rows = _begin(database, sweep, bounds, host, sweep.look() if sweep.look else None)
    except DATABASE_ERRORS as error:
        if sweep.look is None or (is_infrastructure(error) and sqlstate(error) != LOCK_TIMEOUT):
            raise
        # What is wrong with its tables, or who has them locked, the sweep meets next, and says where people look.
        log.warning("sweep_cannot_look", extra={"sweep": sweep.name, "error": said(error)})
        rows = _begin(database, sweep, bounds, host, None)
    if not rows:
        return {"moved": 0, "skipped": "one just ran"}
    if rows[0]["idle"]:
        return {"moved": 0}
    began_at, waited = rows[0]["began_at"], time.monotonic() - asked_at
    had_to_wait = waited > bounds.heartbeat_seconds
    if sweep.takes_from_owners and (rows[0]["held_back"] or had_to_wait):
        # For a lock on the whole table, say: the owners' beats have waited too. An error holds the next one back.
        _end(database, sweep, began_at, 0, f"the database let it wait for {waited:.0f} s" if had_to_wait else None)
        return {"moved": 0, "skipped": "after an outage owners may beat first"}
    try:
        moved = sweep.run(database, bounds)
    except Exception as error:
        with suppress(*DATABASE_ERRORS):  # of a database that went away: what the sweep raised is the news
            _end(database, sweep, began_at, 0, said(error))
        raise
    _end(database, sweep, began_at, moved, None)
    return {"moved": moved}


def _begin(
    database: Database, sweep: Sweep, bounds: Bounds, host: str, look: tuple[Statement, dict[str, object]] | None
) -> list[Row]:
    statement, parameters = (_statements.begin.holding(look[0]), look[1]) if look else (_statements.begin, {})
    with database.autocommit() as connection:
        return run(
            connection, statement, name=sweep.name, host=host, lock_timeout=LOOK_WAIT,
            rest_seconds=sweep.interval - sweep.every / 2, patience_seconds=PATIENCE_SECONDS,
            lease_seconds=bounds.lease_seconds, heartbeat_seconds=bounds.heartbeat_seconds, **parameters,
        )  # fmt: skip


def _end(database: Database, sweep: Sweep, began_at: datetime, moved: int, error: str | None) -> None:
    with database.autocommit() as connection:
        run(connection, _statements.end, name=sweep.name, began_at=began_at, moved=moved, error=error)


def late(tx: Transaction, sweeps: Iterable[Sweep] = SWEEPS) -> list[Sweep]:
    """Those sweeps of rescue that are LATE_AFTER intervals late, by the database's clock: nobody drives them."""
    wanted = {sweep.name: sweep for sweep in sweeps if sweep.rescues}
    allowed = json.dumps([{"name": s.name, "seconds": LATE_AFTER * s.interval} for s in wanted.values()])
    return [wanted[row["name"]] for row in run(checked(tx), _statements.late, allowed=allowed)]


def is_late(age: float | None, interval: float) -> bool:
    """
    Whether a sweep that last began `age` seconds ago is more than three intervals late, or as far ahead of the clock.

    One that never began is late too, unless it runs seldom: beat offers it some minutes after its own
    start. That such a sweep never comes is seen here only once it has run.
    """
    limit = LATE_AFTER * interval
    return limit <= NEW_INSTALLATION if age is None else abs(age) > limit


def loops(tx: Transaction) -> list[Row]:
    """When each sweep last began and ended, what it moved, its error if any, and its age in seconds."""
    return run(checked(tx), _statements.read)


@dataclass(frozen=True)
class Standing:
    """How one sweep stands, by its line in `durable.loops`. Whoever shows or judges it does so by this."""

    sweep: Sweep
    age_seconds: float | None
    """Since it last began; None for one that never has, below 0 where the clock was set back."""
    late: bool
    """More than three of its intervals, as of now: what to show."""
    missing: bool
    """The same with PATIENT_INTERVAL: what to fail a gate for."""
    by_a_worker: bool
    """A worker ran it last, because no beat did."""
    error: str | None
    """What its last run ended with; None where that was well."""
    host: str | None
    began_at: datetime | None
    ended_at: datetime | None
    moved: int | None


def standings(tx: Transaction, sweeps: Iterable[Sweep] = SWEEPS) -> list[Standing]:
    """How each of these sweeps stands, by the clock of the database."""
    rows = {row["name"]: row for row in loops(tx)}
    return [_standing(sweep, rows.get(sweep.name)) for sweep in sweeps]


def _standing(sweep: Sweep, row: Row | None) -> Standing:
    facts = row or {}
    age = None if row is None else float(row["age_seconds"])
    return Standing(
        sweep, age, is_late(age, sweep.interval), is_late(age, max(sweep.interval, PATIENT_INTERVAL)),
        (facts.get("host") or "").endswith(BY_A_WORKER), facts.get("error"), facts.get("host"),
        facts.get("began_at"), facts.get("ended_at"), facts.get("moved"),
    )  # fmt: skip
