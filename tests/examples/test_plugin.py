"""The pytest plugin as its users meet it: in runs of pytest of their own, against the servers of this suite."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from durable_core.local import Addresses
from tests.examples.conftest import Programs
from tests.examples.pages import EXAMPLES

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.fixture
def programs(programs: Programs, services: Addresses) -> Programs:
    """With a Redis database of its own: other tests of this process use the first."""
    return replace(programs, redis_url=services.redis_url.rsplit("/", 1)[0] + "/9")


def made_by_tests(programs: Programs) -> list[str]:
    with programs.engine.connect() as tx:
        names = "select datname from pg_database where datname ~ '^durable_test_.*_[0-9a-f]{8}$'"
        return list(tx.scalars(text(names)))


@pytest.mark.serial
def test_the_tests_of_a_small_app_pass_and_leave_nothing_behind(programs: Programs) -> None:
    said = programs.run(
        *PYTEST, "-p", "no:xdist", "-c", str(EXAMPLES / "shop_tests" / "pytest.ini"), str(EXAMPLES / "shop_tests")
    )
    assert re.search(r"^6 passed", said, re.MULTILINE), said
    assert made_by_tests(programs) == []


def test_each_process_of_xdist_has_a_database_of_its_own(programs: Programs) -> None:
    (programs.directory / "test_two.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_one(n, durable_engine, worker_id):\n"
        "    assert f'durable_test_{worker_id}_' in durable_engine.url.database\n"
    )
    assert "2 passed" in programs.run(*PYTEST, "-n", "2", "test_two.py")
    assert made_by_tests(programs) == []


def test_tests_leave_the_next_an_empty_database_and_real_time(programs: Programs) -> None:
    (programs.directory / "test_traces.py").write_text(
        "from durable_core import deliveries, enqueue_by_name\n"
        "def test_session(durable_session):\n"
        "    enqueue_by_name(durable_session, 'a.kind', {})\n"
        "    durable_session.commit()\n"
        "def test_engine(durable_engine, durable_session):\n"
        "    assert deliveries.page(durable_session) == []\n"
        "    with durable_engine.begin() as tx:\n"
        "        enqueue_by_name(tx, 'a.kind', {})\n"
        "def test_clock(durable_session, durable_clock):\n"
        "    assert deliveries.page(durable_session) == []\n"
        "    durable_clock.advance(7200)\n"
        "def test_time(durable_clock):\n"
        "    from datetime import datetime, timedelta, UTC\n"
        "    assert abs(durable_clock.now() - datetime.now(UTC)) < timedelta(hours=1)\n"
    )
    assert "4 passed" in programs.run(*PYTEST, "-p", "no:xdist", "test_traces.py")


def test_a_run_that_uses_no_fixture_of_it_starts_nothing_and_imports_no_celery(programs: Programs) -> None:
    (programs.directory / "test_none.py").write_text(
        "import sys\n"
        "def test_none(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('durable')\n"
        "    assert not {'celery', 'kombu', 'billiard', 'redis'} & set(sys.modules)\n"
    )
    assert "1 passed" in programs.run(*PYTEST, "-p", "no:xdist", "-p", "no:celery", "test_none.py")


def test_a_worker_without_an_app_says_what_to_set(programs: Programs) -> None:
    (programs.directory / "test_app.py").write_text("def test_app(durable_worker): pass\n")
    done = subprocess.run(
        [sys.executable, *PYTEST, "-p", "no:xdist", "test_app.py"], cwd=programs.directory, env=programs.environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "set durable_app = " in done.stdout


@pytest.mark.serial
def test_a_worker_ends_with_a_test_run_that_is_killed(programs: Programs) -> None:
    (programs.directory / "pytest.ini").write_text(
        f"[pytest]\ndurable_app = app:app\npythonpath = {EXAMPLES}/shop_tests\n"
    )
    pid_file = programs.directory / "pid"
    (programs.directory / "test_killed.py").write_text(
        "import os, pathlib, signal\n"
        "def test_killed(durable_worker):\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(durable_worker.pid))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, *PYTEST, "-p", "no:xdist", "test_killed.py"], cwd=programs.directory,
        env=programs.environment, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stdout
    end = time.monotonic() + 20
    while Path(f"/proc/{pid_file.read_text()}").exists() and _runs(int(pid_file.read_text())):
        assert time.monotonic() < end, "the worker outlived its test run"
        time.sleep(0.1)
    for name in made_by_tests(programs):
        admin = create_engine(programs.engine.url.set(database="postgres"), isolation_level="AUTOCOMMIT")
        with admin.connect() as tx:
            tx.execute(text(f'drop database "{name}" with (force)'))
        admin.dispose()


def _runs(pid: int) -> bool:
    """Whether it is more than an entry that nobody has waited for."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
