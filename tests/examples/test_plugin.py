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
from tests.examples.conftest import SECONDS, Programs
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
    assert re.search(r"^7 passed", said, re.MULTILINE), said
    assert made_by_tests(programs) == []


def ended(programs: Programs, *arguments: str, code: int = 1) -> str:
    """What a run of pytest prints that ends with this code: 1 where tests fail."""
    done = subprocess.run(
        [sys.executable, *PYTEST, *arguments], cwd=programs.directory, env=programs.environment, check=False,
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_each_process_of_xdist_has_a_database_of_its_own_prepared_once(programs: Programs) -> None:
    (programs.directory / "conftest.py").write_text(
        "import pytest\n"
        "from sqlalchemy import text\n"
        "@pytest.fixture(scope='session')\n"
        "def durable_prepare():\n"
        "    def prepare(engine):\n"
        "        with engine.begin() as tx:\n"
        "            tx.execute(text('create table shop (n integer)'))\n"
        "    return prepare\n"
    )
    # Each process runs both tests, and holds its row until the other process has one too.
    (programs.directory / "test_two.py").write_text(
        "import os, pathlib, time\n"
        "import pytest\n"
        "from sqlalchemy import text\n"
        "from durable_core import deliveries, enqueue_by_name\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_one(n, durable_engine, worker_id):\n"
        "    assert f'durable_test_{worker_id}_' in durable_engine.url.database\n"
        "    assert os.environ['DURABLE_DATABASE_URL'].endswith('/' + durable_engine.url.database)\n"
        "    with durable_engine.begin() as tx:\n"
        "        enqueue_by_name(tx, 'a.kind', {})\n"
        "        tx.execute(text('insert into shop values (1)'))\n"
        "    pathlib.Path(f'{worker_id}.{n}').touch()\n"
        "    end = time.monotonic() + 30\n"
        "    while not all(pathlib.Path(f'gw{process}.{n}').exists() for process in (0, 1)):\n"
        "        assert time.monotonic() < end\n"
        "        time.sleep(0.02)\n"
        "    with durable_engine.begin() as tx:\n"
        "        assert len(deliveries.page(tx)) == 1\n"
        "        assert tx.scalar(text('select count(*) from shop')) == 1\n"
    )
    assert "4 passed" in programs.run(*PYTEST, "-n", "2", "--dist", "each", "test_two.py")
    assert made_by_tests(programs) == []


def test_tests_leave_the_next_an_empty_database_and_real_time(programs: Programs) -> None:
    (programs.directory / "test_traces.py").write_text(
        "from datetime import datetime, timedelta, UTC\n"
        "from sqlalchemy import text\n"
        "from durable_core import deliveries, enqueue_by_name\n"
        "from durable_core.testing import drain\n"
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
        "    assert abs(durable_clock.now() - datetime.now(UTC)) < timedelta(hours=1)\n"
        "def test_through(durable_engine):\n"
        "    assert drain(durable_engine, through=timedelta(hours=2)) == []\n"
        "def test_time_again(durable_clock):\n"
        "    assert abs(durable_clock.now() - datetime.now(UTC)) < timedelta(hours=1)\n"
        # The session is made before the engine, so its locks would be in the way when the tables are emptied.
        "def test_both(durable_session, durable_engine):\n"
        "    enqueue_by_name(durable_session, 'a.kind', {})\n"
        "    durable_session.execute(text('lock table durable.deliveries in share mode'))\n"
        "    durable_session.commit()\n"
        "    with durable_engine.connect() as tx:\n"
        "        assert deliveries.page(tx) == []\n"
    )
    assert "7 passed" in programs.run(*PYTEST, "-p", "no:xdist", "test_traces.py")


def test_a_transaction_left_open_is_that_tests_error_and_nobody_elses(programs: Programs) -> None:
    (programs.directory / "test_open.py").write_text(
        "import pytest\n"
        "from durable_core import deliveries, enqueue_by_name\n"
        "from durable_core.testing import databases\n"
        "databases.LOCK_SECONDS = 0.5\n"
        "kept = []\n"
        "def test_forgetful(durable_engine):\n"
        "    databases.MovableClock(durable_engine).advance(7200)\n"
        "    with durable_engine.begin() as tx:\n"
        "        ref = enqueue_by_name(tx, 'a.kind', {})\n"
        "    kept.append(durable_engine.connect())\n"
        "    deliveries.cancel(kept[0], ref.id, by='dana', reason='x')\n"
        "def test_next(durable_engine, durable_clock):\n"
        "    from datetime import datetime, timedelta, UTC\n"
        "    assert abs(durable_clock.now() - datetime.now(UTC)) < timedelta(hours=1)\n"
        "    with durable_engine.connect() as tx:\n"
        "        assert deliveries.page(tx) == []\n"
    )
    said = ended(programs, "-p", "no:xdist", "test_open.py")
    assert re.search(r"^2 passed, 1 error", said, re.MULTILINE), said
    assert "AssertionError: a transaction was left open, so the tables could not be emptied; it last said: " in said
    assert len(said.splitlines()) < 60, said
    assert made_by_tests(programs) == []


def test_a_run_without_its_fixtures_starts_nothing_and_imports_neither_celery_nor_alembic(programs: Programs) -> None:
    (programs.directory / "test_none.py").write_text(
        "import sys\n"
        "def test_none(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('durable')\n"
        "    assert not {'celery', 'kombu', 'billiard', 'redis', 'alembic'} & set(sys.modules)\n"
    )
    assert "1 passed" in programs.run(*PYTEST, "-p", "no:xdist", "-p", "no:celery", "test_none.py")


def test_a_worker_without_an_app_says_what_to_set(programs: Programs) -> None:
    (programs.directory / "test_app.py").write_text("def test_app(durable_worker): pass\n")
    assert "set durable_app = " in ended(programs, "-p", "no:xdist", "test_app.py")


def test_a_worker_that_does_not_start_is_tried_once_and_told_with_its_log(programs: Programs) -> None:
    (programs.directory / "pytest.ini").write_text("[pytest]\ndurable_app = shop:app\npythonpath = .\n")
    (programs.directory / "shop.py").write_text("open('starts', 'a').write('.')\nraise LookupError('no such shop')\n")
    (programs.directory / "test_app.py").write_text(
        "def test_one(durable_worker): pass\ndef test_two(durable_worker): pass\n"
    )
    said = ended(programs, "-p", "no:xdist", "test_app.py")
    assert (programs.directory / "starts").read_text() == "."
    assert said.count("\nthe worker of shop:app ended with 2 and took no work; it wrote:\n") == 2
    assert "LookupError: no such shop" in said
    assert "self._process" not in said, "the kit's own lines explain nothing to its user"
    assert made_by_tests(programs) == []


WORKER_APP = """\
import os, subprocess, sys, time
from celery import Celery
from durable_core import Step, delivery
from durable_core.celery_binding import install
from durable_core.celery_binding.environment import broker_url_from_environment, engine_from_environment

app = Celery("shop", broker=broker_url_from_environment())
app.conf.update(durable_engine=engine_from_environment, durable_lease_seconds=1.5, durable_heartbeat_seconds=0.5)
install(app)

@delivery("shop.look")
def look(step: Step) -> dict[str, object]:
    pytests = [name for name in os.environ if name.startswith("PYTEST_")]
    return {"said": os.environ.get("SHOP_SAID"), "pid": os.getpid(), "pytests": pytests}

@delivery("shop.hang")
def hang(step: Step) -> None:
    time.sleep(600)
"""

WORKER_TESTS = """\
import pathlib
import time
import pytest
from durable_core import deliveries
from durable_core.testing import frozen_worker, killed_worker, wait_for
from worker_app import hang, look

pids = []

def sent(engine, kind):
    with engine.begin() as tx:
        return kind.enqueue(tx)

def test_it_works_as_the_project_says(durable_engine, durable_worker):
    result = wait_for(durable_engine, sent(durable_engine, look)).result
    assert (result["said"], result["pytests"]) == ("hello", [])
    pids.append(durable_worker.pid)

def test_killed_for_good_it_stays_down_with_its_children(durable_engine, durable_worker):
    assert [durable_worker.pid] == pids, "one for the whole run"
    child = wait_for(durable_engine, sent(durable_engine, look)).result["pid"]
    ref = sent(durable_engine, hang)
    wait_for(durable_engine, ref, state="processing")
    with killed_worker(durable_worker, restart=False) as same:
        assert same is durable_worker
    assert not durable_worker.alive
    end = time.monotonic() + 5
    while (stat := pathlib.Path(f"/proc/{child}/stat")).exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < end, "its child went on"
        time.sleep(0.05)
    waiting = sent(durable_engine, look)
    with pytest.raises(TimeoutError):
        wait_for(durable_engine, waiting, seconds=2)
    # Nobody takes back what it held either: that needs a worker or a beat.
    with durable_engine.connect() as tx:
        assert deliveries.get(tx, ref.id).state == "processing"

def test_the_next_test_has_it_back_and_nothing_of_the_last(durable_engine, durable_worker):
    assert durable_worker.alive
    assert durable_worker.pid not in pids
    with durable_engine.connect() as tx:
        assert deliveries.page(tx) == []
    wait_for(durable_engine, sent(durable_engine, look))

def test_killed_it_is_started_again_even_when_the_block_fails(durable_engine, durable_worker):
    before = durable_worker.pid
    with pytest.raises(LookupError), killed_worker(durable_worker):
        assert not durable_worker.alive
        raise LookupError
    assert durable_worker.alive
    assert durable_worker.pid != before

def test_frozen_it_goes_on_even_when_the_block_fails(durable_engine, durable_worker):
    with pytest.raises(LookupError), frozen_worker(durable_worker):
        ref = sent(durable_engine, look)
        with pytest.raises(TimeoutError):
            wait_for(durable_engine, ref, seconds=1)
        raise LookupError
    wait_for(durable_engine, ref)

def test_left_frozen_in_a_handler_that_hangs(durable_engine, durable_worker):
    wait_for(durable_engine, sent(durable_engine, hang), state="processing")
    with durable_engine.begin() as tx:
        look.options(countdown=1).enqueue(tx)
    durable_worker.freeze()
    pids.append(durable_worker.pid)

def test_it_is_awake_and_has_nothing_to_do(durable_engine, durable_worker):
    assert durable_worker.pid not in pids, "killed with the handler that hung"
    with durable_engine.connect() as tx:
        assert deliveries.page(tx) == []
    wait_for(durable_engine, sent(durable_engine, look))

def test_that_fails_beside_the_log(durable_engine, durable_worker):
    before = durable_worker.log().count("delivery_committed")
    ref = sent(durable_engine, look)
    wait_for(durable_engine, ref)
    while durable_worker.log().count("delivery_committed") == before:
        time.sleep(0.02)  # the row ends before its line is written
    assert durable_worker.log().count("shop@") > durable_worker.said().count("shop@"), "that of every start is kept"
    wait_for(durable_engine, sent(durable_engine, look))
    raise LookupError("shown")
"""


@pytest.mark.long
@pytest.mark.serial
def test_a_worker_is_one_for_the_run_and_gets_over_what_each_test_does_to_it(programs: Programs) -> None:
    (programs.directory / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (programs.directory / "worker_app.py").write_text(WORKER_APP)
    (programs.directory / "test_worker.py").write_text(WORKER_TESTS)
    (programs.directory / "conftest.py").write_text(
        "import pytest\n"
        "@pytest.fixture(scope='session')\n"
        "def durable_app(): return 'worker_app:app'\n"
        "@pytest.fixture(scope='session')\n"
        "def durable_worker_arguments(): return ['--concurrency', '1', '--hostname', 'shop@%h']\n"
        "@pytest.fixture(scope='session')\n"
        "def durable_worker_environment(): return {'SHOP_SAID': 'hello'}\n"
    )
    said = ended(programs, "-p", "no:xdist", "test_worker.py")
    assert re.search(r"^1 failed, 7 passed", said, re.MULTILINE), said
    shown = said.split("Captured stdout teardown")
    assert len(shown) == 2, "the log, beside the test that failed and no other"
    assert shown[1].count("delivery_committed") == 1, "what was not read yet"
    assert made_by_tests(programs) == []


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
