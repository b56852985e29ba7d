"""Servers beside those of the suite, and which tests of the core run once more on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE
from durable_core.local.services import Addresses, Services

REPOSITORY = Path(__file__).parents[1]

QUICK_POSTGRES = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""For tests that kill no server: nothing here outlives a crash of Postgres."""

PART = ["tests/core/test_attempt.py", "tests/core/test_claim.py", "tests/races/test_claims.py"]
"""At test size: a claim's whole way."""
ALL = ["tests/core", "tests/races"]


@contextmanager
def quick_servers(postgres_bin: Path | None = None) -> Iterator[Addresses]:
    """A Postgres and a Valkey in a folder of their own, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="durable-tests-"))
    directory.chmod(0o755)  # root's servers run as another account, which must reach their data
    servers = Services(directory, postgres_settings=QUICK_POSTGRES, postgres_bin=postgres_bin)
    try:
        yield servers.start()
    finally:
        servers.stop(remove=True)
        shutil.rmtree(directory, ignore_errors=True)


def run_there(tests: list[str], there: Addresses, *options: str, code: Path = REPOSITORY) -> None:
    """Run these tests of the code in this folder, on the servers of these addresses, and see them pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(code),
        DATABASE_VARIABLE: there.database_url,
        REDIS_VARIABLE: there.redis_url,
    }
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-m", "not serial", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
