"""One candidate's turn in a round: drain a backlog, start under a steady rate, rest."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import create_engine, text

from bench import stack
from bench.arithmetic import percentile
from bench.measure import Marks, Server, bare, names_of_statements, own_memory
from durable_core.database.migrate import migrate
from durable_core.testing import create_database, drop_database

PER_SECOND = 50
"""The steady rate at which the time from enqueue to start is taken."""

SETTLE_SECONDS = 8.0
TAIL = 40
"""Tasks behind the measured ones, so that no child runs dry before the last reading."""

EFFECTS = "create table effects (number bigint, pid int, at timestamptz default clock_timestamp())"


@dataclass(frozen=True)
class Candidate:
    name: str
    module: str
    durable: bool = False
    """Needs the schema, and a beat beside the worker."""


CANDIDATES = (
    Candidate("plain Celery", "bench.candidates.plain"),
    Candidate("plain Celery, one INSERT", "bench.candidates.plain_insert"),
    Candidate("durable-core", "bench.candidates.ours", durable=True),
    Candidate("durable-core, one INSERT", "bench.candidates.ours_insert", durable=True),
)
BASE, OURS = CANDIDATES[1].name, CANDIDATES[2].name
MEMORY_BASE = Candidate("plain Celery, SQLAlchemy and psycopg imported", "bench.candidates.imports")


@dataclass(frozen=True)
class Sizes:
    jobs: int
    warm_up: int
    rounds: int
    steady_seconds: float
    idle_seconds: float


@dataclass
class Turn:
    """What one turn measured, per delivery where the name says nothing else; None is what was not looked at."""

    candidate: str
    round: int
    worker_cpu_ms: float | None = None
    postgres_cpu_ms: float | None = None
    per_second: float | None = None
    statements: float | None = None
    transactions: float | None = None
    wal_bytes: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    idle_statements_per_second: float | None = None
    child_uss: float | None = None
    idle_by: dict[str, float] = field(default_factory=dict)

    @property
    def cpu_ms(self) -> float | None:
        if self.worker_cpu_ms is None or self.postgres_cpu_ms is None:
            return None
        return self.worker_cpu_ms + self.postgres_cpu_ms

    def as_line(self) -> dict[str, Any]:
        return {"record": "turn", **asdict(self)}


class Bench:
    """The servers of a run, and a turn of one candidate on a database of its own."""

    def __init__(self, addresses: stack.Addresses, folder: Path, sizes: Sizes) -> None:
        self._folder, self.sizes = folder, sizes
        self.server = Server(addresses.database_url)
        self._broker = redis.Redis.from_url(addresses.redis_url)
        self._turns = 0

    def close(self) -> None:
        self.server.close()
        self._broker.close()

    def turn(self, candidate: Candidate, round_number: int) -> Turn:
        """A fresh database and an empty broker, a backlog, and workers started on it; then the steady rate."""
        turn = Turn(candidate.name, round_number)
        with self._database(candidate) as (name, url):
            module: Any = importlib.import_module(candidate.module)
            marks = Marks(self._folder / "marks")
            jobs = self.sizes.warm_up + self.sizes.jobs + TAIL
            module.send_all(url, range(jobs))
            self.server.settle(url)
            before = self.server.transactions(name)
            with self._running(candidate, url) as worker:
                self._drain(turn, name, worker, marks, jobs)
                if self.sizes.steady_seconds:
                    with module.sender(url) as send:
                        jobs += self._steady(turn, send, worker, marks, first=jobs)
                turn.child_uss = max(own_memory(child) for child in worker.process.children())
            self.server.wait_until_left(name)
            turn.transactions = (self.server.transactions(name) - before) / jobs
        return turn

    def rest(self, candidate: Candidate) -> Turn:
        """What runs in a stack that has nothing to do, and whose statements they are."""
        turn = Turn(candidate.name, -1)
        with self._database(candidate) as (name, url), self._running(candidate, url):
            self.server.wait_for_statements(name)
            time.sleep(SETTLE_SECONDS)
            before, began = self.server.calls(name), time.monotonic()
            time.sleep(self.sizes.idle_seconds)
            after, seconds = self.server.calls(name), time.monotonic() - began
        known = names_of_statements()
        for query, calls in after.items():
            if more := calls - before.get(query, 0):
                label = known.get(bare(query), " ".join(query.split())[:60])
                turn.idle_by[label] = turn.idle_by.get(label, 0.0) + more / seconds
        turn.idle_statements_per_second = sum(turn.idle_by.values())
        return turn

    @contextmanager
    def _database(self, candidate: Candidate) -> Iterator[tuple[str, str]]:
        """Name and URL of a database of its own, and an empty broker."""
        self._turns += 1
        name = f"bench_{self._turns}"
        made = create_database(self.server.url, name)
        engine = create_engine(made)
        with engine.begin() as connection:
            connection.execute(text(EFFECTS))
        if candidate.durable:
            migrate(engine)
        engine.dispose()
        self._broker.flushall()
        yield name, made.render_as_string(hide_password=False)
        drop_database(self.server.url, name)

    @contextmanager
    def _running(self, candidate: Candidate, url: str) -> Iterator[stack.Running]:
        """The worker, and a beat before it where the candidate has one."""
        with ExitStack() as running:
            if candidate.durable:
                running.callback(stack.beat(candidate.module, url, self._folder / "beat.log").stop)
            worker = stack.worker(candidate.module, url, self._folder / "worker.log")
            running.callback(worker.stop)
            yield worker

    def _drain(self, turn: Turn, name: str, worker: stack.Running, marks: Marks, total: int) -> None:
        workers = [worker.process]
        marks.wait(self.sizes.warm_up, 120, worker.check)
        first = self.server.read(name, workers, marks)
        marks.wait(self.sizes.warm_up + self.sizes.jobs, 600, worker.check)
        last = self.server.read(name, workers, marks)
        marks.wait(total, 60, worker.check)
        jobs = last.begun - first.begun
        turn.worker_cpu_ms = 1e3 * (last.worker_seconds - first.worker_seconds) / jobs
        turn.postgres_cpu_ms = 1e3 * (last.postgres_seconds - first.postgres_seconds) / jobs
        turn.per_second = jobs / (last.at - first.at)
        turn.statements = (last.statements - first.statements) / jobs
        turn.wal_bytes = (last.wal - first.wal) / jobs

    def _steady(self, turn: Turn, send: Any, worker: stack.Running, marks: Marks, first: int) -> int:
        """Send at the steady rate; the time from the return of each enqueue, its commit included, to its start."""
        send(first)  # connections, imports and threads of the sender
        marks.wait(first + 1, 60, worker.check)
        time.sleep(1)
        returned: dict[int, float] = {}
        begin = time.monotonic()
        count = int(PER_SECOND * self.sizes.steady_seconds)
        for step in range(count):
            time.sleep(max(0.0, begin + step / PER_SECOND - time.monotonic()))
            number = first + 1 + step
            send(number)
            returned[number] = time.monotonic()
        marks.wait(first + 1 + count, 60, worker.check)
        began = marks.began()
        waits = [1e3 * (began[number] - at) for number, at in returned.items()]
        turn.p50_ms, turn.p99_ms = percentile(waits, 0.50), percentile(waits, 0.99)
        return count + 1
