"""
Redis ends, hangs and refuses under live workers of every pool, and under an app that enqueues meanwhile.

Whatever it does: no caller waits or fails, nothing is lost or doubled, and the same processes go on by themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from sqlalchemy import text

from tests.celery.nodes import Broker, ShopWorker, wait_until
from tests.faults import redis_moods as moods
from tests.faults.conftest import Stage

BACK_WITHIN = 60.0
"""Seconds after Redis is well again within which all work is finished."""

CALL_WITHIN = 1.0
BROKER_GIVES_UP = 5.0
"""Seconds: the shortest of the time-outs that the apps give their broker."""
"""Seconds that an enqueue and its commit may take, whatever Redis does."""

SLOTS = {"prefork": 2, "threads": 2, "solo": 1, "recycled": 2}
POOLS = {
    # Nothing of ours may need remote control; and with it, a worker listens on a socket that tells of an outage.
    "prefork": ("-c", "2", "--", "worker.enable_remote_control=off"),
    "threads": ("--pool", "threads", "-c", "2"),
    "solo": ("--pool", "solo"),
    "recycled": ("-c", "2", "--max-tasks-per-child", "1"),
}
STEADY = ("prefork", "threads", "solo")


class Workers:
    """One worker of each pool, on a queue of its name; the sweeps; and a beat."""

    def __init__(self, stage: Stage) -> None:
        control = stage.nodes.worker("control", "-Q", "durable.control", "--pool", "solo")
        self.of = {
            pool: stage.nodes.worker(pool, "-Q", f"durable.{pool}", *arguments) for pool, arguments in POOLS.items()
        }
        beat = stage.nodes.beat()
        self.all: list[ShopWorker] = [control, *self.of.values()]
        for node in (*self.all, beat):
            node.ready()
        self._pids = [node.process.pid for node in self.all]

    def are_the_same(self) -> None:
        """No main process has ended, and none was started anew."""
        for node in self.all:
            assert node.process.status == "running", f"{node.name()} has ended:\n{node.process.logs()[-3000:].decode()}"
        assert [node.process.pid for node in self.all] == self._pids


@pytest.fixture(scope="module")
def workers(stage: Stage) -> Workers:
    return Workers(stage)


@pytest.fixture(autouse=True)
def _swept(stage: Stage) -> Iterator[None]:
    yield
    stage.clean_up()


def in_flight(stage: Stage) -> list[str]:
    """A delivery inside its handler in every slot of the steady pools."""
    row_ids = [stage.commit(stage.kinds.held, "calling", queue=pool) for pool in STEADY for _ in range(SLOTS[pool])]
    for row_id in row_ids:
        stage.held_at(row_id)
    return row_ids


def finished_once(stage: Stage, row_ids: list[str], returned: float) -> None:
    """All are sent within the bound after Redis was well again, each after one execution with one effect."""
    stage.accounted(*row_ids, seconds=max(1.0, returned + BACK_WITHIN - time.monotonic()))
    assert stage.counts("effects") == stage.counts("executions") == dict.fromkeys(row_ids, 1)


def enqueued(stage: Stage, pool: str) -> tuple[str, float]:
    """One delivery of the app's, and how long its call and commit took; they leave no connection behind."""
    began = time.monotonic()
    row_id = stage.commit(stage.kinds.order, queue=pool)
    took = time.monotonic() - began
    assert stage.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    return row_id, took


def long_transactions(stage: Stage) -> list[str]:
    """What anybody does in a transaction that is idle, or older than it takes."""
    with stage.engine.connect() as connection:
        rows = connection.execute(
            text(
                "select state || ': ' || query from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
                " and (state like 'idle in transaction%' and state_change < clock_timestamp() - interval '1 s'"
                "      or xact_start < clock_timestamp() - interval '2 s')"
            )
        )
        return list(rows.scalars())


def no_steady_worker_asks(stage: Stage, workers: Workers) -> bool:
    """Who has received what it may hold asks for no more: only the others wait in a BRPOP, at each of five looks."""
    others = len(workers.all) - len(STEADY)
    for _ in range(5):
        clients: Any = stage.broker.client.info("clients")
        if clients["blocked_clients"] > others:
            return False
        time.sleep(0.3)
    return True


def endured(stage: Stage, workers: Workers, mood: AbstractContextManager[None], seconds: float) -> None:
    """Work is in flight and waits; meanwhile an app enqueues 50 more; all is done after it, by the same workers."""
    held = in_flight(stage)
    # Received and not begun: what a lost connection would have to give back to a Redis that is not there.
    rows = [row_id for pool in STEADY for row_id in stage.commit_many(stage.kinds.order, 20, queue=pool)]
    wait_until(lambda: no_steady_worker_asks(stage, workers), "every worker has received one more")
    late = []
    with mood:
        until = time.monotonic() + seconds
        for number in range(50):
            row_id, took = enqueued(stage, STEADY[number % len(STEADY)])
            rows.append(row_id)
            if took >= CALL_WITHIN:
                late.append(took)
            if number == 25:
                # These end while Redis is away, the others after its return.
                for row_id in held[::2]:
                    stage.open(row_id)
            assert long_transactions(stage) == []
            time.sleep(max(0.0, (until - time.monotonic()) / (50 - number)))
    returned = time.monotonic()
    # A call that waited for Redis would be late by its time-outs, and each of them would. One may be the machine's.
    assert len(late) <= 1, late
    assert max(late, default=0.0) < BROKER_GIVES_UP, late
    for row_id in held:
        stage.open(row_id)
    finished_once(stage, held + rows, returned)
    workers.are_the_same()


@pytest.mark.field("R11")
@pytest.mark.full_size
def test_after_a_restart_of_redis_every_pool_finishes_its_work(
    stage: Stage, workers: Workers, sized: Callable[[list[float], list[float]], list[float]]
) -> None:
    """Killed or shut down, back with nothing, or with what it had appended to its file."""
    for number, seconds in enumerate(sized([1.0, 4.0], [1.0, 4.0, 40.0, 4.0])):
        if number == 3:
            stage.broker.client.config_set("appendonly", "yes")
            stage.broker.client.config_rewrite()
        endured(stage, workers, moods.away(stage.broker, ("shut down", "killed")[number % 2]), seconds)
        stage.clean_up()


Mood = Callable[[Broker], AbstractContextManager[None]]


@pytest.mark.field("R13")
@pytest.mark.full_size
@pytest.mark.parametrize("mood", [moods.writes_paused, moods.frozen])
def test_a_redis_that_hangs_holds_up_no_caller_and_no_transaction(
    stage: Stage, workers: Workers, mood: Mood, sized: Callable[[float, float], float]
) -> None:
    endured(stage, workers, mood(stage.broker), sized(5.0, 30.0))


@pytest.mark.field("R09")
@pytest.mark.full_size
@pytest.mark.parametrize("mood", [moods.read_only, moods.full])
def test_a_redis_that_refuses_writes_costs_a_warning_and_no_work(
    stage: Stage,
    workers: Workers,
    mood: Mood,
    sized: Callable[[float, float], float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Over its memory limit, or a replica since a failover. A worker is refused too, when it takes or acknowledges."""
    # After the mood of another test, nothing may be tried for a while: then there is nothing to warn of.
    breaker = stage.durable.carrier
    wait_until(lambda: time.monotonic() >= breaker._paused_until, "hints are tried again")
    with caplog.at_level(logging.WARNING, "durable"):
        endured(stage, workers, mood(stage.broker), sized(4.0, 20.0))

    said = [record for record in caplog.records if record.name.startswith("durable.")]
    assert {record.message for record in said} == {"wake_publish_failed"}
    # The breaker lets through one try after 1 s, 2 s, 4 s and so on, not one for each of 50 calls.
    assert 1 <= len(said) <= 6
    assert all(any(word in vars(record)["error"] for word in ("read only replica", "maxmemory")) for record in said)


@pytest.mark.field("R09")
def test_a_queue_that_redis_evicts_is_filled_again(stage: Stage, workers: Workers) -> None:
    held = stage.commit(stage.kinds.held, "calling", queue="solo")
    stage.held_at(held)
    rows = stage.commit_many(stage.kinds.order, 20, queue="solo")
    wait_until(lambda: stage.broker.depth("solo") > 10, "most are hinted")
    with moods.evicting(stage.broker):
        wait_until(lambda: stage.broker.depth("solo") == 0, "the queue is evicted", every=0.01)
    wait_until(lambda: stage.broker.depth("solo") > 10, "most are hinted again")
    stage.open(held)
    finished_once(stage, [held, *rows], time.monotonic())
    workers.are_the_same()


def test_a_worker_without_remote_control_is_stopped_by_no_message(stage: Stage, workers: Workers) -> None:
    stage.app.control.shutdown(destination=[workers.of["prefork"].hostname()])
    rows = stage.commit_many(stage.kinds.order, 10, queue="prefork")
    finished_once(stage, rows, time.monotonic())
    workers.are_the_same()


@pytest.mark.full_size
def test_quick_restarts_of_redis_leave_every_pool_at_work(
    stage: Stage, workers: Workers, sized: Callable[[int, int], int]
) -> None:
    rows: list[str] = []
    for _ in range(sized(3, 20)):
        rows += [stage.commit(stage.kinds.order, queue=pool) for pool in POOLS]
        with moods.away(stage.broker):
            rows += [stage.commit(stage.kinds.order, queue=pool) for pool in POOLS]
    finished_once(stage, rows, time.monotonic())
    workers.are_the_same()


@pytest.mark.field("R12")
@pytest.mark.full_size
def test_children_replaced_after_each_task_go_on_after_a_restart_and_all_beat(
    stage: Stage, workers: Workers, sized: Callable[[int, int], int]
) -> None:
    rows = stage.commit_many(stage.kinds.order, sized(8, 200), queue="recycled")
    wait_until(lambda: len(stage.counts("effects")) > len(rows) // 4, "the work has begun")
    with moods.away(stage.broker):
        # Longer than a lease: only a child that beats keeps its claim to the end.
        rows += [stage.commit(stage.kinds.slow, 4.0, queue="recycled") for _ in range(sized(2, 6))]
        time.sleep(2)
    finished_once(stage, rows, time.monotonic() + sized(30, 120))
    assert len({stage.executions(row_id)[0].pid for row_id in rows}) == len(rows), "each in a child of its own"
    workers.are_the_same()


def final_states(stage: Stage, flush_every: float | None, count: int) -> list[tuple[object, ...]]:
    """What has become of deliveries of three kinds, after a run in which Redis was flushed so often, or never."""
    kinds = (stage.kinds.order, stage.kinds.quick, stage.kinds.retried)
    rows: list[str] = []
    next_flush = time.monotonic()
    for _ in range(count // 9):
        for kind in kinds:
            arguments = ("done",) if kind is stage.kinds.retried else ()
            rows += [stage.commit(kind, *arguments, queue=pool) for pool in STEADY]
        if flush_every is not None and time.monotonic() >= next_flush:
            stage.broker.client.flushall()
            next_flush = time.monotonic() + flush_every
        if flush_every is not None and flush_every > 1:
            time.sleep(0.5)
    end = time.monotonic() + BACK_WITHIN
    while flush_every is not None and len(stage.counts("executions")) < len(rows) and time.monotonic() < end:
        stage.broker.client.flushall()
        time.sleep(flush_every)
    stage.sent(*rows)
    with stage.engine.connect() as connection:
        found = connection.execute(
            text(
                "select d.kind, d.queue, d.state, d.attempts, d.interruptions, d.result::text,"
                " (select count(*) from effects e where e.row_id = d.id::text),"
                " (select count(*) from executions e where e.row_id = d.id::text),"
                " (select string_agg(j.move, ',' order by j.seq) from durable.journal j where j.row_id = d.id),"
                " count(*) from durable.deliveries d group by 1, 2, 3, 4, 5, 6, 7, 8, 9 order by 1, 2, 3, 4, 5, 6"
            )
        )
        return [tuple(row) for row in found]


@pytest.mark.full_size
def test_a_redis_that_is_flushed_again_and_again_changes_no_outcome(
    stage: Stage, workers: Workers, sized: Callable[[float, float], float]
) -> None:
    untroubled = final_states(stage, None, 207)
    stage.clean_up()
    assert final_states(stage, sized(1.0, 5.0), 207) == untroubled
    workers.are_the_same()
