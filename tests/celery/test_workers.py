"""What workers and beats do by themselves: which queues they read, what they do with strange kinds, how they end."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from durable_core import enqueue_by_name, sweeps
from durable_core.celery_binding import Durable
from durable_core.local.services import Addresses
from durable_core.testing import create_database, drop_database
from tests.celery.conftest import Nodes
from tests.celery.nodes import ControlWorker, ShopSetup, ShopWorker, wait_until
from tests.celery.rough import Rough
from tests.celery.rough_nodes import rough_worker
from tests.celery.shop import DISPATCH, LEASE, Shop
from tests.celery.world import Events, World


def test_the_set_up_is_ready_and_its_workers_answer(celery_setup: ShopSetup) -> None:
    assert celery_setup.ready(ping=False, control=True, docker=True)
    assert len(celery_setup) == 3
    assert celery_setup.broker is not None


def test_a_worker_started_without_queues_reads_those_of_its_kinds_and_the_sweeps_own(
    celery_setup: ShopSetup, celery_worker: ShopWorker, control_worker: ControlWorker
) -> None:
    assert {"durable.durable", "durable.mail", "durable.control"} <= celery_worker.queues()
    # -Q is the operator's word.
    assert control_worker.queues() == {"durable.control"}


def test_beat_drives_the_sweeps_and_each_is_recorded(world: World) -> None:
    for name in ("dispatch", "reap"):
        began = world.now()
        wait_until(lambda name=name, began=began: world.sweeps_since(began, name), f"{name} is recorded")
    with world.engine.connect() as connection:
        loops = {row["name"]: row for row in sweeps.loops(connection)}
    assert all(row["error"] is None and row["age_seconds"] < 30 for row in loops.values())


def test_five_beats_cause_no_double_work(world: World, shop_kinds: Shop, nodes: Nodes) -> None:
    more = [nodes.beat() for _ in range(4)]
    for beat in more:
        beat.ready()
    with Events(world.app) as events:
        row_ids = [world.commit(shop_kinds.order) for _ in range(10)]
        world.sent(*row_ids)
        time.sleep(6 * DISPATCH)
        received = {e["uuid"] for e in events.seen if e["type"] == "task-received" and e["name"] == "durable.dispatch"}
        results = [
            event["result"]
            for event in list(events.seen)
            if event["type"] == "task-succeeded" and "moved" in str(event.get("result"))
        ]

    assert received
    assert any("one just ran" in result for result in results), "most return at once"
    assert world.counts("effects") == world.counts("executions") == dict.fromkeys(row_ids, 1)


def test_a_sweep_within_half_an_interval_of_another_returns_at_once(durable: Durable, world: World) -> None:
    sweep = sweeps.named("prune")
    bounds = durable.settings.bounds()
    answers = [sweeps.run_sweep(durable.database, sweep, bounds) for _ in range(5)]

    assert answers == [{"moved": 0}] + [{"moved": 0, "skipped": "one just ran"}] * 4


@pytest.mark.field("R70")
def test_a_kind_that_a_worker_lacks_waits_for_one_that_has_it(world: World, nodes: Nodes, shop_kinds: Shop) -> None:
    without = nodes.worker("without", "-Q", "durable.new", "-c", "1", environment={"SHOP_WITHOUT": "later"})
    without.ready()
    with Session(world.engine) as session, session.begin():
        row_id = enqueue_by_name(session, "shop.later", {"note": "from elsewhere"}, queue="new").id

    wait_until(lambda: world.row(row_id).waiting_for == "handler", "the row says what it waits for")
    row = world.row(row_id)
    assert (row.state, row.attempts, row.fence) == ("pending", 0, 0)
    assert "shop.later" in without.logs()

    without.kill("SIGTERM")
    with_it = nodes.worker("with", "-Q", "durable.new", "-c", "1")
    with_it.ready()
    (row,) = world.sent(row_id)
    assert (row.attempts, row.waiting_for) == (1, None)
    assert len(world.effects(row_id)) == 1


@pytest.mark.field("R06")
def test_a_worker_that_takes_more_hints_than_it_can_run_says_so(nodes: Nodes, celery_worker: ShopWorker) -> None:
    hoarder = nodes.worker("hoarder", "-Q", "durable.nobodys", "-c", "1", "--prefetch-multiplier", "4")
    hoarder.ready()
    wait_until(lambda: "prefetch_hoards_hints" in hoarder.logs(), "the hoarder is told")
    assert "prefetch_hoards_hints" not in celery_worker.logs()


def test_an_attempt_past_its_time_is_a_failure_with_a_later_due_time(
    world: World, shop_kinds: Shop, celery_worker: ShopWorker
) -> None:
    """The soft limit ends the handler in its child; the child lives on."""
    children = celery_worker.children()
    row_id = world.commit(shop_kinds.stuck)
    wait_until(lambda: world.row(row_id).error_code, "the attempt is over")

    row = world.row(row_id)
    assert (row.state, row.error_code, row.attempts, row.interruptions, row.failures) == ("pending", "TIMEOUT", 1, 0, 1)
    # Back-off: 600 s ± 15 %.
    assert 500 <= (row.due_at - world.now()).total_seconds() <= 700
    assert world.effects(row_id) == []
    wait_until(lambda: world.executions(row_id)[0].pid in children & celery_worker.children(), "the child lives")
    world.sent(world.commit(shop_kinds.order))


def test_a_worker_told_to_stop_lets_a_running_handler_end(world: World, nodes: Nodes, shop_kinds: Shop) -> None:
    worker = nodes.worker("stopped", "-Q", "durable.stopped", "-c", "1")
    worker.ready()
    row_id = world.commit(shop_kinds.held, "calling", queue="stopped")
    pid = world.held_at(row_id)

    os.kill(worker.process.pid, signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.logs(), "the worker heard it")
    assert world.row(row_id).state == "processing"
    world.open(row_id)

    assert worker.process.wait(60) == 0
    row = world.row(row_id)
    assert (row.state, row.attempts, row.interruptions) == ("sent", 1, 0)
    assert [(effect.fence, effect.pid) for effect in world.effects(row_id)] == [(1, pid)]
    assert world.lines(row_id) == []


def test_a_worker_refuses_to_start_on_a_database_without_the_schema(nodes: Nodes, services: Addresses) -> None:
    url = create_database(services.database_url, "durable_celery_bare")
    try:
        worker = nodes.worker("refused", environment={"SHOP_DATABASE_URL": url.render_as_string(hide_password=False)})
        assert worker.process.wait(90) not in (0, None)
        said = [line for line in worker.logs().splitlines() if line.startswith("durable:")]
        assert len(said) == 1
        assert "is not installed" in said[0]
        assert "durable migrate" in said[0]
        assert "Traceback" not in worker.logs()
    finally:
        drop_database(services.database_url, "durable_celery_bare")


@pytest.mark.parametrize("name", ["dispatch", "reap", "prune"])
def test_a_sweep_that_a_person_sends_is_run_by_the_control_worker(world: World, name: str) -> None:
    with Events(world.app) as events:
        task_id = world.app.send_task(f"durable.{name}", queue="durable.control", ignore_result=True).id
        event = events.wait_for("task-succeeded", task_id)
    assert "moved" in event["result"]


@pytest.fixture
def rough_kinds() -> Iterator[Rough]:
    kinds = Rough()
    yield kinds
    kinds.forget()


CROSSED = ("lost synchronization", "another command is already in progress", "unexpected message", "InterfaceError")
"""What psycopg and libpq say when two processes read from one connection."""


@pytest.mark.field("R51")
@pytest.mark.field("R52")
@pytest.mark.full_size
def test_children_that_are_replaced_after_each_task_do_all_work_once_and_each_of_them_beats(
    world: World, nodes: Nodes, rough_kinds: Rough, sized: Callable[[int, int], int]
) -> None:
    """
    The parent takes and leaves every lock it can while it forks: it enqueues, rolls back, wakes and logs.

    That each child beats is seen by a few handlers that take longer than their lease.
    """
    worker = rough_worker(
        nodes, "recycled", "-Q", "durable.recycled", "-c", "4", "--max-tasks-per-child", "1",
        environment={"ROUGH_BUSY_PARENT": "1", "ROUGH_ENGINE_AT_IMPORT": "1"},
    )  # fmt: skip
    worker.ready()
    long = [world.commit(rough_kinds.plain, 1.5 * LEASE, queue="recycled") for _ in range(sized(4, 12))]
    quick = world.commit_many(rough_kinds.plain, sized(12, 500), queue="recycled")
    rows = world.accounted(*long, *quick, seconds=sized(180, 900))

    assert {(row.attempts, row.interruptions) for row in rows} == {(1, 0)}
    pids = [world.executions(row.id)[0].pid for row in rows]
    assert len(set(pids)) == len(pids), "a child for each"
    assert_no_connection_is_shared(world)
    assert not any(word in worker.logs() for word in (*CROSSED, "heartbeat_failed"))


@pytest.mark.field("R51")
@pytest.mark.full_size
def test_connections_opened_at_import_are_shared_by_no_children_and_no_threads(
    world: World, nodes: Nodes, rough_kinds: Rough, sized: Callable[[Any, Any], Any]
) -> None:
    """Children that are not replaced are tried at full size; those that are, above."""
    for pool in sized(("threads",), ("threads", "prefork")):
        queue = f"imported-{pool}"
        worker = rough_worker(
            nodes, queue, "-Q", f"durable.{queue}", "-c", "4", "--pool", pool,
            environment={"ROUGH_ENGINE_AT_IMPORT": "1"},
        )  # fmt: skip
        worker.ready()
        ids = world.commit_many(rough_kinds.plain, sized(60, 400), queue=queue)
        rows = world.accounted(*ids)

        assert {(row.attempts, row.interruptions) for row in rows} == {(1, 0)}
        assert len({world.executions(row_id)[0].pid for row_id in ids}) == (4 if pool == "prefork" else 1)
        assert not any(word in worker.logs() for word in CROSSED)
    assert_no_connection_is_shared(world)


def assert_no_connection_is_shared(world: World) -> None:
    """No backend of the database ever wrote for two processes."""
    users = defaultdict(set)
    for row_id in world.counts("effects"):
        for effect in world.effects(row_id):
            users[effect.backend].add(effect.pid)
    assert users
    assert {len(pids) for pids in users.values()} == {1}
