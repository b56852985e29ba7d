"""
Workers that are frozen, and workers whose processes are put together in an unlucky way.

Z1: frozen past its lease in its handler. Z2: between the row's lock and COMMIT. Z3: while its database sends it more
than it reads. Z8, Z9: forked from a parent with an open engine and busy threads. Z10: a lease shorter than its pauses.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.shop import LEASE, Shop
from tests.celery.world import World

QUEUE = "frozen"


@pytest.fixture(scope="module")
def frozen_worker(lasting_nodes: Nodes) -> Iterator[ShopWorker]:
    worker = lasting_nodes.worker("frozen", "-Q", f"durable.{QUEUE}", "-c", "5")
    yield worker
    worker.teardown()


@pytest.fixture(scope="module")
def hasty_worker(lasting_nodes: Nodes) -> Iterator[ShopWorker]:
    """A worker whose lease is a second."""
    hasty = {"SHOP_LEASE": "1.0", "SHOP_HEARTBEAT": "0.3"}
    worker = lasting_nodes.worker("hasty", "-Q", "durable.hasty", "-c", "2", environment=hasty)
    yield worker
    worker.teardown()


@pytest.fixture(scope="module")
def busy_worker(lasting_nodes: Nodes) -> Iterator[ShopWorker]:
    """
    A worker whose parent has a connected engine and threads in the midst of queries and log lines whenever it forks.

    It forks often: a child lives for five deliveries.
    """
    worker = lasting_nodes.worker(
        "busy", "-Q", "durable.busy", "-c", "4", "--max-tasks-per-child", "5", environment={"SHOP_BUSY_PARENT": "1"}
    )
    yield worker
    worker.teardown()


def test_frozen_past_its_lease_and_continued_a_worker_writes_nothing(
    world: World,
    shop_kinds: Shop,
    frozen_worker: ShopWorker,
    hasty_worker: ShopWorker,
    busy_worker: ShopWorker,
    celery_worker: ShopWorker,
) -> None:
    """
    Z1 in both forms of an effect, Z2 and Z3: in five children at once, all frozen and all continued.

    The one that keeps its row's lock keeps its row, however late it commits.
    """
    frozen_worker.ready()
    ids = {
        "Z1 session": world.commit(shop_kinds.held, "calling", "session", queue=QUEUE),
        "Z1 in_commit": world.commit(shop_kinds.held, "calling", "in_commit", queue=QUEUE),
        "Z2 kept": world.prepare(shop_kinds.point, "Z2 kept", queue=QUEUE),
        "Z2 ended": world.prepare(shop_kinds.point, "Z2 ended", queue=QUEUE),
        "Z3": world.commit(shop_kinds.flooded, queue=QUEUE),
    }
    gates = {case: f"{row_id}.Z2" if case.startswith("Z2") else row_id for case, row_id in ids.items()}
    for case in ("Z2 kept", "Z2 ended"):
        (world.gates / f"{gates[case]}.asked").touch()
    world.make_due(ids["Z2 kept"], ids["Z2 ended"])
    pids = {world.held_at(gate) for gate in gates.values()}
    assert pids == frozen_worker.children()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    frozen_at = time.monotonic()
    assert world.waits_in("ClientWrite") == 1
    celery_worker.also_reads(QUEUE)

    others = [row_id for case, row_id in ids.items() if case != "Z2 kept"]
    before = {row.id: row for row in world.sent(*others)}
    wait_until(lambda: time.monotonic() > frozen_at + LEASE + 1.0, "the lease of the one with the lock is over")
    kept = world.row(ids["Z2 kept"])
    assert (kept.state, kept.fence) == ("processing", 1)
    assert kept.lease_expires_at is not None
    assert kept.lease_expires_at < world.now()

    for gate in gates.values():
        world.open(gate)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for row_id in others:
        world.journalled(row_id, "refused")
    wait_until(lambda: frozen_worker.logs().count("stale_write_refused") >= len(others), "stale writes are refused")
    world.accounted(*ids.values())
    celery_worker.reads_no_more(QUEUE)

    for case, row_id in ids.items():
        fence = 1 if case == "Z2 kept" else 2
        called = [execution.fence for execution in world.executions(row_id)]
        # Whose transaction had been ended runs its handler anew before its commit is refused, or is told before.
        assert called[:2] == [1, 2][:fence], case
        assert set(called[2:]) <= ({1} if case in ("Z2 ended", "Z3") else set()), case
        assert len({execution.key for execution in world.executions(row_id)}) == 1
        (effect,) = world.effects(row_id)
        assert effect.fence == fence
        assert (effect.pid in celery_worker.children()) == (fence == 2)
        row = world.row(row_id)
        assert (row.attempts, row.interruptions, row.error_code) == (fence, fence - 1, None)
    for row_id in others:
        # Not one field of the row is the old owner's.
        assert world.row(row_id) == before[row_id]
        *_, reaped, refused = world.lines(row_id)
        assert (reaped.move, reaped.reason, reaped.fence) == ("reap", "CLAIM_EXPIRED", 1)
        assert (refused.move, refused.fence, refused.to_state) == ("refused", 1, "sent")
        assert refused.facts is not None
        assert refused.facts["current_fence"] == 2
    assert world.lines(ids["Z2 kept"]) == []
    # Z3: a session that sends to nobody is ended past its deadline, by no time-out of the database's own.
    assert [line.move for line in world.lines(ids["Z3"])] == ["cut off", "reap", "refused"]


@pytest.mark.full_size
def test_children_of_a_parent_with_an_open_engine_and_busy_threads_share_nothing_and_never_hang(
    world: World, shop_kinds: Shop, busy_worker: ShopWorker, sized: Callable[[int, int], int]
) -> None:
    """Z8 and Z9: every fork finds sockets open and locks taken."""
    busy_worker.ready()
    ids = world.commit_many(shop_kinds.order, sized(80, 1000), queue="busy")

    rows = world.accounted(*ids, seconds=600)

    assert {(row.fence, row.attempts) for row in rows} == {(1, 1)}, "nobody hung, or was taken for lost"
    effects = [effect for row_id in ids for effect in world.effects(row_id)]
    processes = defaultdict(set)
    for effect in effects:
        processes[effect.backend].add(effect.pid)
    assert all(len(pids) == 1 for pids in processes.values()), "one session of the database, one process"
    assert len({effect.pid for effect in effects}) >= len(ids) // 5
    assert "lost synchronization" not in busy_worker.logs()


@pytest.mark.full_size
def test_a_lease_shorter_than_the_pauses_of_its_worker_costs_rescues_and_doubles_nothing(
    world: World,
    shop_kinds: Shop,
    hasty_worker: ShopWorker,
    celery_worker: ShopWorker,
    sized: Callable[[int, int], int],
) -> None:
    """Z10: the lease is a second; whole children stand still for longer, as in a long collection of garbage."""
    hasty_worker.ready()
    celery_worker.also_reads("hasty")
    rescued = 0
    for _ in range(sized(2, 20)):
        ids = [world.commit(shop_kinds.slow, 0.5, queue="hasty") for _ in range(4)]
        ids += world.commit_many(shop_kinds.order, 20, queue="hasty")
        children = hasty_worker.children()
        held = wait_until(lambda: world.held_by(children), "the hasty worker has begun")  # noqa: B023
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        paused = time.monotonic()
        # Until another has one of its rows; those whose lock it has it keeps.
        wait_until(
            lambda: any(world.row(row_id).fence > 1 for row_id in held) or time.monotonic() > paused + 20,  # noqa: B023
            "the pause is over",
        )
        for pid in children:
            os.kill(pid, signal.SIGCONT)
        rescued += sum(row.interruptions for row in world.accounted(*ids))
    celery_worker.reads_no_more("hasty")

    assert rescued > 0
