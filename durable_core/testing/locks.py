"""Waiting for a lock wait: a race is tested when the database says that one connection blocks another."""

from __future__ import annotations

import time

from sqlalchemy import Engine

from durable_core.database.statements import beside
from durable_core.database.transactions import run

_statements = beside(__file__)


def wait_until_blocked(engine: Engine, pid: int, *, by: int | None = None, seconds: float = 20.0) -> None:
    """
    Return once backend `pid` waits for a lock that another one (`by`, where given) holds.

    Raises TimeoutError when that does not happen.
    """
    end = time.monotonic() + seconds
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
        while time.monotonic() < end:
            blockers = [row["pid"] for row in run(watching, _statements.blockers, pid=pid)]
            if blockers and by in (None, *blockers):
                return
            time.sleep(0.005)
    raise TimeoutError(f"backend {pid} did not block within {seconds:g} s")


def wait_until_somebody_blocks(engine: Engine, *, seconds: float = 20.0) -> int:
    """Return the first backend of this database that waits for a lock. Raises TimeoutError when none does."""
    end = time.monotonic() + seconds
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
        while time.monotonic() < end:
            for row in run(watching, _statements.waiting):
                return int(row["pid"])
            time.sleep(0.005)
    raise TimeoutError(f"no backend blocked within {seconds:g} s")
