"""The demo as a user starts it: a small run, an interrupted one, and one after another that was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE
from durable_core.demo.processes import RUN_VARIABLE

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

SMALL = ("--orders", "40", "--kills", "2", "--freezes", "1", "--flushes", "1")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "demo"


ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in (DATABASE_VARIABLE, REDIS_VARIABLE)}
"""The demo brings its own servers here: it would refuse those of the other tests."""


def demo(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "durable_core.cli", "demo", "--json", "--directory", str(directory), *arguments],
        env=ENVIRONMENT, cwd=directory.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def marked(token: str) -> list[psutil.Process]:
    """The processes of a run, children of children too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == token:
                found.append(process)
        except psutil.Error:
            continue
    return found


def under_way(directory: Path, process: subprocess.Popen[str]) -> str:
    """Wait until deliveries are made; the mark of the run."""
    calls = directory / "logs" / "mail.calls"
    until = time.monotonic() + 120
    while not (calls.exists() and calls.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    return (directory / "logs" / "run").read_text()


def ended(pids: list[int]) -> bool:
    """Whether these processes are gone; one whose parent has just died may wait a moment to be buried by init."""
    until = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def servers(directory: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in directory.glob("*/record.json")]


def test_a_small_run_loses_nothing_and_says_so(directory: Path, seed: int) -> None:
    process = demo(directory, *SMALL, "--seed", str(seed))
    out, err = process.communicate(timeout=280)

    figures = json.loads(out.splitlines()[-1])
    assert process.returncode == 0, (figures, err)
    assert len(out.splitlines()) == 1
    assert figures["accepted"] == figures["sent"] == 80
    for name in ("failed", "dead", "lost", "missing_calls", "phantoms", "doubled_database_effects",
                 "lost_database_effects", "effects_apart_from_receipt", "calls_with_another_key"):  # fmt: skip
        assert figures[name] == 0, name
    assert (figures["kills"], figures["freezes"], figures["flushes"], figures["seed"]) == (2, 1, 1, seed)
    assert figures["rescued"] >= 2, "a kill and a freeze each take a worker from a delivery"
    assert figures["refused_stale_writes"] >= 1, "the frozen owner came back with a write"
    assert figures["doubled_external_calls"] >= 0
    operation = figures["operation"]
    assert operation["kept"], operation
    # Where a worker died around the call itself, nobody could tell its ids.
    assert operation["supplier_killed"] or operation["error_code"], "it was polled through the death of its supplier"
    assert figures["rolled_back"] > 0
    assert figures["duplicates"] > 0
    assert figures["plan"] == "2 of 4 steps done, the next failed, and what was done was made up for"
    assert 0 < figures["seconds"] < 240
    assert not directory.exists()


@pytest.mark.long
def test_an_interrupted_run_ends_everything_and_exits_130(directory: Path) -> None:
    process = demo(directory, *SMALL)
    token = under_way(directory, process)
    pids = servers(directory)
    assert marked(token)
    assert len(pids) == 2
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # an impatient user changes nothing
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    assert (out, marked(token)) == ("", [])
    assert ended(pids)
    assert not directory.exists()


@pytest.mark.long
def test_a_killed_run_leaves_no_worker_and_does_not_break_the_next(directory: Path) -> None:
    """Without freezes: a process that is frozen when the demo is killed hears nothing, and the next run ends it."""
    process = demo(directory, "--orders", "40", "--kills", "2", "--freezes", "0", "--flushes", "1")
    token = under_way(directory, process)
    process.kill()
    process.communicate()
    until = time.monotonic() + 20
    while marked(token):
        assert time.monotonic() < until, "the workers outlive the demo"
        time.sleep(0.1)

    after = demo(directory, "--orders", "4", "--kills", "0", "--freezes", "0", "--flushes", "0")
    out, err = after.communicate(timeout=200)
    assert after.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["accepted"] == 8
    assert not directory.exists()


@pytest.mark.long
def test_a_run_that_cannot_finish_says_what_is_open_and_exits_1(directory: Path) -> None:
    """Workers that do not read the mail's queue: the checker must see what is left."""
    script = (
        "import sys; from pathlib import Path; from durable_core.demo import run\n"
        "run.DRAINED_WITHIN = 4.0; start = run._Stage._celery\n"
        "run._Stage._celery = lambda self, name, *a: start(self, name, *(x.replace('durable.mail,', '') for x in a))\n"
        "sys.exit(run.main(6, 0, 0, 0, as_json=True, directory=Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip

    figures = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1, done.stderr
    assert (figures["sent"], figures["lost"], figures["missing_calls"], figures["kept"]) == (6, 6, 6, False)
    assert "6 shop.email pending" in done.stderr
    assert (directory / "logs" / "worker-1.log").exists(), "the evidence stays"


def test_what_makes_no_sense_is_refused(directory: Path) -> None:
    process = demo(directory, "--orders", "0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--orders" in err
