"""Wrong clocks: those of workers and beat change nothing, and a jump of the server's costs time and no correctness."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import psutil
import pytest
from pytest_celery import CeleryTestNode

from durable_core import sweeps
from tests.celery.nodes import Beat, BeatContainer, ControlWorker, ShopWorker, wait_until
from tests.celery.shop import DISPATCH, LEASE
from tests.faults.clocks import HOUR, ClockedCluster, faketime, wrong_by
from tests.faults.conftest import Stage

pytestmark = pytest.mark.skipif(faketime() is None, reason="no libfaketime for this platform")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClockedCluster]:
    cluster = ClockedCluster()
    try:
        yield cluster
    finally:
        cluster.remove()


class Clocked:
    """The running shop, in which nobody but the database has the right time."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.beats = [self._beat(HOUR), self._beat(-HOUR), self._beat(0)]
        self.control = self._worker("control", -HOUR, "-Q", "durable.control", "--pool", "solo", cls=ControlWorker)
        self.workers = [
            self._worker("fast", HOUR, "-c", "2"),
            self._worker("slow", -HOUR, "--pool", "threads", "-c", "2"),
        ]
        for node in (*self.beats, self.control, *self.workers):
            node.ready()

    def _beat(self, wrong: int) -> Beat:
        nodes = self.stage.nodes
        beat = Beat(BeatContainer(*nodes._described("beat", (), wrong_by(wrong))), app=self.stage.app)
        nodes._nodes.append(beat)
        return beat

    def _worker(self, name: str, wrong: int, *arguments: str, cls: type[ShopWorker] = ShopWorker) -> ShopWorker:
        return self.stage.nodes.worker(name, *arguments, environment=wrong_by(wrong), cls=cls)

    def owner(self, row_id: str) -> ShopWorker:
        """The worker whose handler has this row, held at its gate."""
        pid = self.stage.held_at(row_id)
        (owner,) = (worker for worker in self.workers if pid in (worker.process.pid, *worker.children()))
        return owner

    def lose(self, row_id: str) -> None:
        """Kill the worker that has this row, whole, and start it again."""
        owner = self.owner(row_id)
        owner.process.kill()
        owner.start()


@pytest.fixture(scope="module")
def clocked(stage: Stage) -> Clocked:
    return Clocked(stage)


@pytest.fixture(autouse=True)
def _right_again(stage: Stage, cluster: ClockedCluster) -> Iterator[None]:
    yield
    cluster.jump_to(0)
    stage.clean_up()


def told(node: CeleryTestNode) -> datetime:
    """The time of the first line in its log."""
    found = re.search(r"\[(\d+-\d+-\d+ \d+:\d+:\d+),\d+: ", node.logs())
    assert found is not None, node.logs()
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S")


def swept(stage: Stage, *names: str) -> None:
    """Return once each of these sweeps has begun and ended anew, by the database's clock."""
    now = stage.now()
    wait_until(lambda: all(stage.sweeps_since(now, name) for name in names or ("dispatch", "reap")), "they sweep")


def test_the_clocks_of_workers_and_beat_change_nothing(clocked: Clocked) -> None:
    """An hour fast or slow: claims, leases, retries, due times and rescue go by the database's clock alone."""
    stage, kinds = clocked.stage, clocked.stage.kinds
    for node, wrong in zip((*clocked.workers, *clocked.beats), (HOUR, -HOUR, HOUR, -HOUR, 0), strict=True):
        off = (told(node) - datetime.now()).total_seconds() - wrong
        assert abs(off) < 600, "its clock is as wrong as meant"

    before = stage.now()
    early = stage.prepare(kinds.order)
    for _ in range(4):
        stage.send(kinds.order.name, early)
    rows = stage.commit_many(kinds.order, 30)
    retried = [stage.commit(kinds.retried, "late") for _ in range(6)]
    lost = stage.commit(kinds.held, "calling")
    stage.held_at(lost)
    stage.accounted(*rows)
    again = stage.sent(*retried)  # before the worker is killed, or it may take one of them along
    held = stage.row(lost)
    assert held.lease_expires_at - held.beat_at == timedelta(seconds=LEASE)
    clocked.lose(lost)

    (rescued,) = stage.accounted(lost)
    after = stage.now()
    assert (rescued.interruptions, rescued.attempts) == (1, 2)
    assert [(row.attempts, row.interruptions) for row in again] == [(2, 0)] * len(again)
    for row in (rescued, *again, *map(stage.row, rows)):
        assert before < row.created_at <= row.claimed_at <= row.finished_at < after
    assert (stage.row(early).state, stage.row(early).attempts) == ("pending", 0), (
        "a hint of a row not due claims nothing"
    )


def test_a_server_clock_an_hour_forward_expires_leases_and_doubles_no_effect(
    clocked: Clocked, cluster: ClockedCluster
) -> None:
    stage, kinds = clocked.stage, clocked.stage.kinds
    waiting = stage.prepare(kinds.order)
    held = [stage.commit(kinds.held, "calling"), stage.commit(kinds.held, "calling", "in_commit")]
    for row in held:
        stage.held_at(row)

    cluster.jump_to(HOUR)

    for row in held:  # its deadline has passed too, so its owner cannot keep it
        stage.journalled(row, "reap")
    (early, *rows) = stage.accounted(waiting, *held)
    for row_id in held:
        stage.open(row_id)  # the first owners come back, too late
        stage.journalled(row_id, "refused")
    assert early.attempts == 1
    assert [(row.attempts, row.interruptions, row.settled_fence) for row in rows] == [(2, 1, 2)] * 2
    stage.accounted(waiting, *held, *stage.commit_many(kinds.order, 10))


def test_a_server_clock_an_hour_back_makes_what_was_agreed_later_and_nothing_else(
    clocked: Clocked, cluster: ClockedCluster
) -> None:
    """Leases live longer and due rows wait; new work, dispatch, reap and the rescue of new claims go on at once."""
    stage, kinds = clocked.stage, clocked.stage.kinds
    cluster.jump_to(HOUR)
    swept(stage)  # the jump forward held reap back until an instant that is soon an hour ahead
    agreed, abandoned = stage.commit(kinds.order, countdown=60), stage.commit(kinds.held, "calling")
    owner = clocked.owner(abandoned)
    os.killpg(owner.process.pid, signal.SIGSTOP)
    cluster.jump_to(0)
    owner.process.kill()
    owner.start()

    swept(stage)
    stage.accounted(*stage.commit_many(kinds.order, 10))
    lost = stage.commit(kinds.held, "calling")
    clocked.lose(lost)
    (rescued,) = stage.accounted(lost)
    assert rescued.interruptions == 1
    assert stage.row(abandoned).lease_expires_at > stage.now() + timedelta(minutes=50)
    assert (stage.row(abandoned).state, stage.row(agreed).state) == ("processing", "pending")

    cluster.jump_to(HOUR + 120)  # and once it has caught up, they have their turn
    stage.accounted(agreed, abandoned)


def real_runs(worker: ShopWorker, sweep: str) -> int:
    """How often this sweep ran in this worker, those not counted that found that another just had."""
    return len(re.findall(rf"durable\.{sweep}\[[^]]*\] succeeded in [^:]*: {{'moved': \d+}}", worker.logs()))


def test_three_beats_cost_one_statement_more_and_no_sweep_more(clocked: Clocked) -> None:
    """One of them is killed and started again and the broker is emptied meanwhile."""
    stage, kinds = clocked.stage, clocked.stage.kinds
    swept(stage)
    began, before = time.monotonic(), real_runs(clocked.control, "dispatch")
    lost = stage.commit(kinds.held, "calling")
    clocked.lose(lost)
    clocked.beats[0].container.process.kill()
    stage.broker.client.flushall()
    clocked.beats[0].container.process.start()
    (rescued,) = stage.accounted(lost, seconds=180)
    swept(stage)
    runs, seconds = real_runs(clocked.control, "dispatch") - before, time.monotonic() - began

    assert rescued.interruptions == 1
    assert [line.move for line in stage.lines(lost)].count("reap") == 1
    assert 0 < runs <= seconds / (DISPATCH / 2) + 2, "a sweep rests half its interval, whoever asks for it"
    wait_until(lambda: stage.broker.depth("control") == 0, "no sweep lies in the queue")


def sent_by(beat: Beat) -> int:
    return beat.logs().count("Sending due task durable-dispatch")


@pytest.mark.field("R82")
@pytest.mark.full_size
def test_a_beat_that_slept_or_lost_its_broker_goes_on_and_catches_up_with_one_sweep(
    clocked: Clocked, sized: Callable[[float, float], float]
) -> None:
    """It holds no connection to the database that could be cut. Meanwhile others say that it is missing."""
    stage = clocked.stage
    beat, *others = clocked.beats
    for other in others:
        other.container.process.kill()
    process = psutil.Process(beat.container.process.pid)
    assert stage.cluster.port not in {link.raddr.port for link in process.net_connections() if link.raddr}

    process.suspend()
    time.sleep(sized(6, 60))  # the sleep of the machine itself
    with stage.engine.connect() as connection:
        late = sweeps.late(connection, stage.durable.settings.sweeps())
        driven = {loop["name"]: loop["host"] for loop in sweeps.loops(connection)}
    assert late or driven["dispatch"].endswith(sweeps.BY_A_WORKER)
    before, woke = sent_by(beat), time.monotonic()
    process.resume()
    wait_until(lambda: sent_by(beat) > before + 2, "beat goes on")
    burst, seconds = sent_by(beat) - before, time.monotonic() - woke
    assert burst <= seconds / DISPATCH + 2, "one for the time it slept, then one an interval"
    swept(stage)

    stage.broker.container.process.kill()
    stage.broker.container.process.start()
    stage.broker.ready()
    before = sent_by(beat)
    wait_until(lambda: sent_by(beat) > before + 2, "beat sends again", 120)
    assert process.is_running()
    swept(stage)
    stage.accounted(*stage.commit_many(stage.kinds.order, 5))
    for other in others:
        other.container.process.start()
