"""What `durable probe --ready` makes of a pulse and of what lies in the queues, which are not of the same instant."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from click.testing import Result

from durable_core import pulse
from durable_core.local.services import Addresses
from durable_core.pulse import Pulse, State

QUEUE = "durable.probed"


@pytest.fixture
def valkey(services: Addresses) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(services.redis_url) as client:
        yield client
        client.delete(QUEUE)


@pytest.mark.parametrize("takes", [True, False])
def test_a_worker_that_slept_when_a_burst_came_is_ready_once_it_has_taken_of_it(
    durable: Callable[..., Result],
    services: Addresses,
    valkey: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    takes: bool,
) -> None:
    monkeypatch.setenv(pulse.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("DURABLE_REDIS_URL", services.redis_url)
    now = time.monotonic()
    slept = Pulse(
        worker="mail@box", app="", pid=os.getpid(), space=pulse.space(), began=None, at=now - 1.9,
        state=State.CONSUMING, since=now - 500, turned_at=now,
        runs_tasks_itself=False, waits_for_broker=False, active=0, slots=2, taken_at=now - 400, queues=(QUEUE,),
    )  # fmt: skip
    place = pulse.made_folder()
    pulse.write(slept, place)
    valkey.lpush(QUEUE, "a hint", "another")

    def next_beat() -> None:
        at = time.monotonic()
        pulse.write(replace(slept, at=at, turned_at=at, taken_at=at if takes else slept.taken_at), place)

    beats = [threading.Timer(after, next_beat) for after in (1.5, 3.0)]
    for beat in beats:
        beat.start()
    try:
        done = durable("probe", "--ready", "--worker", "mail")
    finally:
        for beat in beats:
            beat.join()
    assert ("MESSAGES_LIE" in done.stdout, done.exit_code) == ((False, 0) if takes else (True, 6)), done.stdout
