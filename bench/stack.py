"""Servers, workers and beats of one run: started here, ended here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.candidates import BROKER_VARIABLE, MARKS_VARIABLE
from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE
from durable_core.local import Addresses, Services

REPOSITORY = Path(__file__).resolve().parent.parent

POSTGRES_SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "shared_buffers": "256MB",
    # No checkpoint in the middle of a measure.
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
}
"""Durability is as it comes: fsync, synchronous_commit and full_page_writes are on."""

CHILDREN = 2
BOOT_SECONDS = 90.0


@contextmanager
def servers(folder: Path) -> Iterator[Addresses]:
    """Our own Postgres and Valkey, whatever the environment names: it may name real ones."""
    for variable in (DATABASE_VARIABLE, REDIS_VARIABLE):
        os.environ.pop(variable, None)
    services = Services(folder, postgres_settings=POSTGRES_SETTINGS)
    try:
        yield services.start()
    finally:
        services.stop(remove=True)


class Running:
    """One `celery` command in a process group of its own."""

    def __init__(self, module: str, arguments: list[str], database_url: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", module, *arguments],
                cwd=REPOSITORY,
                env={**os.environ, DATABASE_VARIABLE: database_url},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def check(self) -> None:
        """Raises RuntimeError, with its last words, once it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"a celery process ended:\n{self._log.read_text(errors='replace')[-3000:]}")

    def wait_for(self, words: str) -> None:
        """Until it says so in its log."""
        end = time.monotonic() + BOOT_SECONDS
        while words not in self._log.read_text(errors="replace"):
            self.check()
            if time.monotonic() > end:
                raise TimeoutError(f"no {words!r} within {BOOT_SECONDS:g} s")
            time.sleep(0.05)

    def stop(self) -> None:
        """TERM, so that nothing is left half done; KILL to the group where that does not end it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                pass  # the group is killed next
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody is left of it
        self._process.wait(30)


def worker(module: str, database_url: str, log: Path) -> Running:
    """A prefork worker at Celery's own log level; that it is ready shows when the first task begins."""
    arguments = ["worker", "-c", str(CHILDREN), "-l", "WARNING", "--without-gossip", "--without-mingle"]
    return Running(module, arguments, database_url, log)


def beat(module: str, database_url: str, log: Path) -> Running:
    """A beat that has begun."""
    arguments = ["beat", "-l", "INFO", "--scheduler", "celery.beat:Scheduler"]
    running = Running(module, arguments, database_url, log)
    running.wait_for("beat: Starting...")
    return running


def environment(addresses: Addresses, marks: Path) -> None:
    """What the candidates read when they are imported, here and in the processes started from here."""
    os.environ[BROKER_VARIABLE] = addresses.redis_url
    os.environ[MARKS_VARIABLE] = str(marks)
