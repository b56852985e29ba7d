"""What hints and workers do to Redis and through it: delays, long runs, floods, stops, and a Redis that two share."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from sqlalchemy import Engine, create_engine, text

from durable_core.testing import create_database, migrated
from tests.celery import shop
from tests.celery.nodes import REPOSITORY, ShopWorker, wait_until
from tests.celery.world import Traffic, World
from tests.faults import redis_moods as moods
from tests.faults.conftest import Stage

IMPATIENT = {
    "SHOP_TRANSPORT": json.dumps(
        {"visibility_timeout": 5, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    )
}
"""Redis hands out again after 5 s what no worker has acknowledged."""

RESCUED_WITHIN = 3 * (shop.LEASE + shop.REAP + shop.DISPATCH)


class Workers:
    """Two workers of one child each, with prefetch as we recommend it; the sweeps; and a beat."""

    def __init__(self, stage: Stage) -> None:
        control = stage.nodes.worker("control", "-Q", "durable.control", "--pool", "solo")
        self.two = [
            stage.nodes.worker(name, "-Q", "durable.work", "-c", "1", environment=IMPATIENT) for name in ("one", "two")
        ]
        beat = stage.nodes.beat()
        for node in (control, *self.two, beat):
            node.ready()

    def also_read(self, queue: str) -> None:
        for node in self.two:
            node.also_reads(queue)


@pytest.fixture(scope="module")
def workers(stage: Stage) -> Workers:
    return Workers(stage)


@pytest.fixture(autouse=True)
def _swept(stage: Stage) -> Iterator[None]:
    yield
    stage.clean_up()


def seconds_between(earlier: object, later: object) -> float:
    return (later - earlier).total_seconds()  # type: ignore[operator]


# --- delays and long runs ----------------------------------------------------------------------------


@pytest.mark.field("R01")
@pytest.mark.field("R02")
@pytest.mark.field("R06")
@pytest.mark.full_size
def test_waits_and_long_runs_are_the_rows_own_and_no_message_waits_with_them(
    stage: Stage, workers: Workers, sized: Callable[[float, float], float]
) -> None:
    """A retry later and a run of four leases, both longer than Redis waits; ten short runs do not wait for it."""
    delay, run = sized(8.0, 20.0), sized(4 * shop.LEASE, 30.0)
    with Traffic(stage.broker) as traffic:
        long = stage.commit(stage.kinds.slow, run, queue="work")
        wait_until(lambda: stage.executions(long), "the long one has begun")
        patient = stage.commit(stage.kinds.patient, delay, queue="work")
        short = [stage.commit(stage.kinds.slow, 0.1, queue="work") for _ in range(10)]
        stage.accounted(*short)
        assert stage.row(long).state == "processing", "the short ones did not wait for it"
        for _ in range(5):
            stage.send("shop.slow", long, "work")
        stage.sent(long, patient)

    assert len(stage.executions(long)) == len(stage.effects(long)) == 1
    first, second = stage.executions(patient)
    assert seconds_between(first.at, second.at) >= delay
    etas = [eta for command in traffic.commands for eta in re.findall(r'\\*"eta\\*": (\\*"[^"]*"|null)', command)]
    assert len(etas) > 20, "messages were seen"
    assert set(etas) == {"null"}


@pytest.mark.field("R05")
@pytest.mark.full_size
def test_work_that_is_due_in_an_hour_lies_in_no_queue_and_in_no_worker(
    stage: Stage, workers: Workers, sized: Callable[[int, int], int]
) -> None:
    memory = [psutil.Process(node.process.pid).memory_info().rss for node in workers.two]
    for _ in range(sized(2_000, 20_000) // 1_000):
        stage.commit_many(stage.kinds.order, 1_000, queue="work", countdown=3600)

    for _ in range(5):
        began = stage.now()
        wait_until(lambda began=began: stage.sweeps_since(began, "dispatch"), "dispatch has looked")
        assert stage.broker.depth("work") == 0
        due = stage.commit(stage.kinds.order, queue="work")
        (row,) = stage.accounted(due)
        (execution,) = stage.executions(due)
        assert seconds_between(row.created_at, execution.at) < 3 * 1.0
    for node, before in zip(workers.two, memory, strict=True):
        assert psutil.Process(node.process.pid).memory_info().rss - before < 20 * 2**20


# --- workers that end --------------------------------------------------------------------------------


@pytest.mark.field("R04")
def test_fifty_claims_of_a_killed_worker_resume_after_their_lease_whatever_redis_waits_for(
    stage: Stage, workers: Workers
) -> None:
    doomed = stage.worker("-Q", "durable.fifty", "--pool", "threads", "-c", "50", name="doomed")
    rows = [stage.commit(stage.kinds.held, "claimed", queue="fifty") for _ in range(50)]
    for row_id in rows:
        stage.held_at(row_id)

    doomed.kill("SIGKILL")
    killed = stage.now()
    workers.also_read("fifty")
    began = stage.now()
    stage.accounted(*rows)

    assert stage.counts("executions") == stage.counts("effects") == dict.fromkeys(rows, 1)
    assert {(stage.row(row_id).interruptions, stage.row(row_id).attempts) for row_id in rows} == {(1, 2)}
    resumed = [seconds_between(killed, stage.executions(row_id)[0].at) for row_id in rows]
    asking = seconds_between(killed, began)
    # Two children share them; a tenth of a second each is plenty.
    assert max(resumed) < max(asking, RESCUED_WITHIN) + 50 * 0.1


@pytest.mark.field("R08")
@pytest.mark.full_size
def test_a_worker_that_is_stopped_in_every_way_again_and_again_loses_nothing(
    stage: Stage, workers: Workers, sized: Callable[[int, int], int]
) -> None:
    node = stage.worker("-Q", "durable.unrest", "-c", "2", name="unrest")
    rows: list[str] = []
    over = threading.Event()
    count = sized(60, 500)
    pause = sized(10, 120) / count

    def publish() -> None:
        while len(rows) < count and not over.wait(pause):
            rows.append(stage.commit(stage.kinds.quick, queue="unrest"))

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for number in range(sized(3, 30)):
            so_far = len(stage.counts("effects"))
            wait_until(lambda so_far=so_far: len(stage.counts("effects")) > so_far or len(rows) == count, "it works")
            node.kill(("SIGTERM", "SIGQUIT", "SIGKILL")[number % 3])
            node.process.wait(60)
            node.start()
            node.ready()
        publisher.join(sized(60, 300))
        assert len(rows) == count
    finally:
        over.set()
        publisher.join(60)
    stage.accounted(*rows)
    assert stage.counts("effects") == dict.fromkeys(rows, 1)


# --- who else uses Redis -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere(stage: Stage) -> Iterator[World]:
    """Another installation: a database of its own, and the same Redis, queue names and kinds."""
    url = create_database(stage.cluster.url, "elsewhere")
    migrated(url).dispose()
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in shop.TABLES:
            connection.execute(text(statement))
    yield World(engine, stage.gates, stage.app, stage.durable, stage.broker)
    engine.dispose()


def worker_of(stage: Stage, engine: Engine, queue: str, **transport: object) -> ShopWorker:
    """A worker of the installation whose database this is."""
    node = stage.nodes.worker(
        "elsewhere",
        "-Q",
        f"durable.{queue}",
        "-c",
        "1",
        environment={
            "SHOP_DATABASE_URL": engine.url.render_as_string(hide_password=False),
            "SHOP_TRANSPORT": json.dumps(transport),
        },
    )
    node.ready()
    return node


def everything(engine: Engine) -> list[object]:
    with engine.connect() as connection:
        return [
            # That it was hinted is no more than a note of dispatch's own.
            connection.execute(text(f"select to_jsonb(t) - 'hint_at' from {table} t order by 1")).scalars().all()
            for table in ("durable.deliveries", "durable.journal", "effects", "executions")
        ]


def enqueue_unhinted(engine: Engine, stage: Stage, queue: str) -> str:
    """On a plain Connection without `wake`: only a dispatch on this database hints it."""
    with engine.begin() as connection:
        return stage.kinds.order.options(queue=queue).enqueue(connection).id


@pytest.mark.field("R16")
def test_a_hint_that_another_installation_takes_changes_nothing_there_and_its_row_still_completes(
    stage: Stage, workers: Workers, elsewhere: World
) -> None:
    theirs = enqueue_unhinted(elsewhere.engine, stage, "unread")
    before = everything(elsewhere.engine)
    other = worker_of(stage, elsewhere.engine, "shared")
    rows = [stage.commit(stage.kinds.order, queue="shared") for _ in range(5)]

    def taken() -> int:
        return other.process.logs().count(b"'nothing to do'")

    wait_until(lambda: taken() > 9, "dispatch hints them again, and the other worker takes these hints too", 120)
    assert everything(elsewhere.engine) == before
    assert other.process.logs().count(b"hint_without_row") == 1, "one line, not one for each hint"
    assert b"ERROR" not in other.process.logs()
    workers.also_read("shared")

    stage.accounted(*rows)
    assert stage.counts("effects") == stage.counts("executions") == dict.fromkeys(rows, 1)
    assert elsewhere.row(theirs).state == "pending"
    other.kill("SIGTERM")


@pytest.mark.field("R16")
def test_installations_with_a_key_prefix_of_their_own_share_a_redis_and_meet_no_hint_of_each_other(
    stage: Stage, workers: Workers, elsewhere: World
) -> None:
    other = worker_of(stage, elsewhere.engine, "apart", global_keyprefix="elsewhere:")
    ours = [stage.commit(stage.kinds.order, queue="apart") for _ in range(5)]
    # Its own dispatch, which its worker runs as it has no beat, and its own worker meet under the prefix.
    theirs = [enqueue_unhinted(elsewhere.engine, stage, "apart") for _ in range(5)]
    elsewhere.accounted(*theirs)

    assert not any(word in other.process.logs() for word in (b"hint_without_row", b"'nothing to do'", b"ERROR"))
    assert {stage.row(row_id).state for row_id in ours} == {"pending"}
    workers.also_read("apart")
    stage.accounted(*ours)
    other.kill("SIGTERM")


@pytest.mark.field("R17")
@pytest.mark.full_size
def test_asking_how_it_is_says_nothing_to_redis(
    stage: Stage, workers: Workers, sized: Callable[[int, int], int]
) -> None:
    """Some of those who ask are killed half-way. A question by broadcast would leave its answers behind then."""
    # In a database of their own in this Redis, in which nobody else speaks.
    aside = 7
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CELERY_BROKER_URL": f"{stage.broker.url.rpartition('/')[0]}/{aside}",
        "SHOP_DATABASE_URL": stage.cluster.url,
        "SHOP_GATES": str(stage.gates),
    }
    command = [sys.executable, "-m", "durable_core.cli", "-A", "tests.celery.shop_app", "status", "--check"]
    took = 0.0
    with Traffic(stage.broker) as traffic:
        for number in range(sized(3, 30)):
            began = time.monotonic()
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if number % 3 == 2:
                # Most of its time goes into imports.
                with_a_head_start = threading.Timer(0.9 * took, process.kill)
                with_a_head_start.start()
                process.communicate(timeout=120)
            else:
                said, _ = process.communicate(timeout=120)
                took = time.monotonic() - began
                # Where beat is late on a busy machine, the answer is a true 6.
                assert process.returncode in (0, 6), said
    assert traffic.commands, "we hear what is said"
    assert traffic.said_in[aside] == []


@pytest.mark.field("R07")
def test_300_due_deliveries_outlive_a_redis_that_forgot_them_before_any_worker_came(
    stage: Stage, workers: Workers
) -> None:
    rows = stage.commit_many(stage.kinds.quick, 300, queue="forgotten")
    wait_until(lambda: stage.broker.depth("forgotten") >= 300, "all are hinted")
    with moods.away(stage.broker, "shut down"):
        pass
    assert stage.broker.depth("forgotten") < 300, "Redis came back without them"
    stage.worker("-Q", "durable.forgotten", "-c", "2", name="late")

    stage.accounted(*rows)
    assert stage.counts("executions") == dict.fromkeys(rows, 1)
