"""The demo's tools: processes that never outlive it, logs that can be counted, sinks that write before they answer."""

import io
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from durable_core.demo.logs import JsonLines
from durable_core.demo.nemesis import Broker, Nemesis, RedisInUse, planned
from durable_core.demo.processes import Processes
from durable_core.demo.tally import json_lines
from durable_core.local.services import Addresses


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end(patience=0.2)


def sink(processes: Processes, which: str) -> tuple[Any, int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = processes.start(
            f"{which}-sink", "durable_core.demo.sinks", which, str(listening.fileno()),
            str(processes.folder / "calls"), "7", environment={}, listening=listening,
        )  # fmt: skip
        return process, listening.getsockname()[1]


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_call_is_in_the_file_before_it_is_answered(processes: Processes, tmp_path: Path) -> None:
    _, port = sink(processes, "web")
    answers = {}
    for order in range(30):
        for _ in range(3):
            response = httpx.post(
                f"http://127.0.0.1:{port}/", json={"order": order}, headers={"Idempotency-Key": f"k{order}"}, timeout=10
            )
            answers.setdefault(order, []).append(response.status_code)
            if response.status_code == 200:
                assert {"order": order, "key": f"k{order}"}.items() <= json_lines(tmp_path / "calls")[-1].items()
                break
    assert all(codes[-1] == 200 for codes in answers.values())
    assert any(len(codes) > 1 for codes in answers.values()), "now and then the first go is refused"


def test_a_frozen_process_that_a_killed_run_left_is_ended_by_the_next(processes: Processes, tmp_path: Path) -> None:
    process, _ = sink(processes, "web")
    os.kill(process.pid, signal.SIGSTOP)
    assert Processes.end_leftovers(tmp_path) == 1
    assert gone(process.pid)
    assert Processes.end_leftovers(tmp_path / "elsewhere") == 0


def test_what_the_demo_started_ends_when_the_demo_is_killed(tmp_path: Path) -> None:
    """The lifeline: nobody is there to end them."""
    script = (
        "import sys, time; from pathlib import Path; from durable_core.demo.processes import Processes\n"
        "from tests.demo.test_stage import sink\n"
        "print(sink(Processes(Path(sys.argv[1])), 'mail')[0].pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    assert gone(pid)


def test_a_log_line_is_one_json_object_with_its_extras() -> None:
    stream = io.StringIO()
    logger = logging.Logger("test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    try:
        raise ValueError("bad\nnews")
    except ValueError:
        logger.warning("stale_write_refused", extra={"row_id": "x", "fence": 3, "odd": {1}}, exc_info=True)

    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["event"], found["fence"], found["row_id"], found["level"]) == (
        "stale_write_refused", 3, "x", "warning",
    )  # fmt: skip
    assert "bad" in found["exception"]


def test_a_seed_repeats_the_plan() -> None:
    plans = [planned(4, 2, 1, random.Random(seed)) for seed in (5, 5, 6)]
    assert plans[0] == plans[1] != plans[2]
    assert sorted(act.__name__ for act in plans[0]) == sorted(
        ["kill_a_child"] * 2 + ["kill_a_worker"] * 2 + ["freeze"] * 2 + ["flush"]
    )
    assert planned(0, 0, 1, random.Random(1)) == [Nemesis.flush]


def test_a_redis_that_is_somebody_elses_is_not_emptied(services: Addresses) -> None:
    import redis

    url = services.redis_url.rpartition("/")[0] + "/9"
    client = redis.Redis.from_url(url)
    client.flushdb()
    try:
        client.set("theirs", 1)
        with pytest.raises(RedisInUse, match="not empty"):
            Broker(url, ours=False).begin()
        assert client.get("theirs") == b"1"

        client.flushdb()
        killed = Broker(url, ours=False)
        killed.begin()
        client.set("unacked", 1)
        after = Broker(url, ours=False)
        after.begin()
        assert client.get("unacked") is None
        after.end()
        assert client.dbsize() == 0
    finally:
        client.flushdb()
        client.close()
