"""Counters read from outside: processor time of process trees, what Postgres counted, and the marks of the tasks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
from sqlalchemy import make_url

from bench.candidates import MARK
from durable_core.database.statements import Statements, in_schema


def driver_url(url: str, database: str | None = None) -> str:
    """The URL as libpq takes it, of another database of the same server where one is named."""
    made = make_url(url).set(drivername="postgresql")
    return (made.set(database=database) if database else made).render_as_string(hide_password=False)


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all below it that live."""
    return [root, *root.children(recursive=True)]


def processor_seconds(roots: Iterable[psutil.Process]) -> float:
    """Of these processes and all below them, those that have ended and were waited for included."""
    seconds = 0.0
    for root in roots:
        for process in tree(root):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # it ended just now: its parent has its time
            seconds += times.user + times.system
            seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return seconds


class Marks:
    """The file in which every task notes its number and when it began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"")

    @property
    def count(self) -> int:
        return self.path.stat().st_size // MARK.size

    def began(self) -> dict[int, float]:
        """When each task first began."""
        first: dict[int, float] = {}
        for number, at in MARK.iter_unpack(self.path.read_bytes()):
            first.setdefault(number, at)
        return first

    def wait(self, count: int, seconds: float, check: Callable[[], None]) -> None:
        """Until so many have begun; `check` raises when that is not to be expected. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while self.count < count:
            check()
            if time.monotonic() > end:
                raise TimeoutError(f"{self.count} of {count} tasks began within {seconds:g} s")
            time.sleep(0.005)


@dataclass(frozen=True)
class Reading:
    """All counters at one moment."""

    at: float
    begun: int
    worker_seconds: float
    postgres_seconds: float
    statements: int
    wal: int


class Server:
    """The Postgres under measure, looked at over one connection to another of its databases."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection: psycopg.Connection[Any] = psycopg.connect(driver_url(url, "postgres"), autocommit=True)
        self._connection.execute("create extension if not exists pg_stat_statements")
        (backend,) = self._one("select pg_backend_pid()")
        parent = psutil.Process(backend).parent()
        assert parent is not None, "a backend has the server's main process for its parent"
        self.process = parent

    def _one(self, query: str, *parameters: object) -> Any:
        return self._connection.execute(query.encode(), parameters).fetchone()

    def checkpoint(self) -> None:
        """So that none comes in the middle of a measure."""
        self._connection.execute("checkpoint")

    def settle(self, url: str) -> None:
        """What autovacuum would do to a full table some time, now and not in the middle of a measure."""
        with psycopg.connect(driver_url(url), autocommit=True) as connection:
            connection.execute("vacuum analyze")
        self.checkpoint()

    def read(self, database: str, workers: Iterable[psutil.Process], marks: Marks | None) -> Reading:
        statements, wal = self._one(
            "select coalesce(sum(s.calls), 0)::bigint, (pg_current_wal_insert_lsn() - '0/0')::bigint"
            " from pg_stat_statements s join pg_database d on d.oid = s.dbid and d.datname = %s",
            database,
        )
        begun, at = marks.count if marks else 0, time.monotonic()
        return Reading(
            at, begun, processor_seconds(workers), processor_seconds([self.process]), int(statements), int(wal)
        )

    def transactions(self, database: str) -> int:
        """Of a database that everybody has left: backends hand in their counts when they end."""
        (count,) = self._one("select xact_commit + xact_rollback from pg_stat_database where datname = %s", database)
        return int(count)

    def wait_until_left(self, database: str) -> None:
        """Until no session is in that database. Raises TimeoutError."""
        self._wait("select count(*) = 0 from pg_stat_activity where datname = %s", database, 30)

    def wait_for_statements(self, database: str) -> None:
        """Until somebody works in that database. Raises TimeoutError."""
        running = "select count(*) > 0 from pg_stat_activity where datname = %s"
        self._wait(running, database, 60)

    def _wait(self, query: str, database: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._one(query, database)[0]:
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds:g} s: {query}")
            time.sleep(0.05)

    def calls(self, database: str) -> dict[str, int]:
        """How often each statement was run in this database, by its text."""
        rows = self._connection.execute(
            "select s.query, sum(s.calls)::bigint from pg_stat_statements s"
            " join pg_database d on d.oid = s.dbid and d.datname = %s group by 1",
            (database,),
        )
        return {query: int(calls) for query, calls in rows}

    def close(self) -> None:
        self._connection.close()


def own_memory(process: psutil.Process) -> int:
    """Bytes that this process alone has: what would be free again without it."""
    return int(process.memory_full_info().uss)


PACKAGE = Path(__file__).resolve().parent.parent / "durable_core"


def names_of_statements() -> dict[str, str]:
    """From the bare text of each named statement to `contract/act:name`."""
    names: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.sql")):
        if "migrations" not in path.parts:
            for statement in Statements(path):
                place = path.relative_to(PACKAGE).with_suffix("")
                key = bare(in_schema(statement.driver))
                names[key] = " or ".join(filter(None, (names.get(key), f"{place}:{statement.name}")))
    return names


def bare(query: str) -> str:
    """A statement without comments, constants, parameters and the shape of its lines."""
    query = re.sub(r"--[^\n]*", " ", query)
    query = re.sub(r"%\(\w+\)s|\$\d+|'[^']*'|\b(?:\d+|true|false|null)\b", "?", query)
    return re.sub(r"\s+", " ", query.replace("%%", "%")).strip().rstrip(";").lower()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
