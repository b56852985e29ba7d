"""Servers beside those of the suite, and which tests of the core run once more on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE
from durable_core.local.services import Addresses, Services
from durable_core.testing.servers import QUICK_POSTGRES, server_folder

REPOSITORY = Path(__file__).parents[1]

PART = ["tests/core/test_attempt.py", "tests/core/test_claim.py", "tests/races/test_claims.py"]
"""At test size: a claim's whole way."""
ALL = ["tests/core", "tests/races"]


@contextmanager
def quick_servers(postgres_bin: Path | None = None) -> Iterator[Addresses]:
    """A Postgres and a Valkey in a folder of their own, gone afterwards."""
    with server_folder() as folder:
        servers = Services(folder, postgres_settings=QUICK_POSTGRES, postgres_bin=postgres_bin)
        try:
            yield servers.start()
        finally:
            servers.stop(remove=True)


def run_there(tests: list[str], there: Addresses, *options: str, code: Path = REPOSITORY) -> None:
    """Run these tests of the code in this folder, on the servers of these addresses, and see them pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(code),
        DATABASE_VARIABLE: there.database_url,
        REDIS_VARIABLE: there.redis_url,
    }
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-m", "not serial", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:]
