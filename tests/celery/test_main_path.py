"""The main path on real Celery: a commit, a hint, a worker, a receipt with its effect."""

from collections.abc import Iterator

import pytest
from sqlalchemy.orm import Session

from durable_core import deliveries
from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopSetup, ShopWorker
from tests.celery.shop import Shop
from tests.celery.world import World


@pytest.fixture(scope="module")
def other_pools(celery_setup: ShopSetup, lasting_nodes: Nodes) -> Iterator[dict[str, ShopWorker]]:
    """A worker of each kind on a queue of its own; they start at the same time."""
    workers = {
        "threads": lasting_nodes.worker("threads", "-Q", "durable.threads", "--pool", "threads", "-c", "4"),
        "solo": lasting_nodes.worker("solo", "-Q", "durable.solo", "--pool", "solo"),
        "recycling": lasting_nodes.worker(
            "recycling", "-Q", "durable.recycling", "-c", "2", "--max-tasks-per-child", "5"
        ),
    }
    for worker in workers.values():
        worker.ready()
    yield workers
    for worker in workers.values():
        worker.teardown()


def assert_sent_once(world: World, row_id: str) -> None:
    (row,) = world.sent(row_id)
    assert (row.attempts, row.interruptions, row.fence, row.settled_fence) == (1, 0, 1, 1)
    assert [effect.fence for effect in world.effects(row_id)] == [1]
    assert len(world.executions(row_id)) == 1
    # The happy path costs no line.
    assert world.lines(row_id) == []


def test_a_committed_delivery_is_carried_out_once_by_a_child_of_a_prefork_worker(
    world: World, shop_kinds: Shop, celery_worker: ShopWorker
) -> None:
    row_id = world.commit(shop_kinds.order, "first")

    assert_sent_once(world, row_id)
    assert world.row(row_id).result == "taken"
    assert world.effects(row_id)[0].pid in celery_worker.children()


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_other_pools_carry_it_out_once_as_well(
    world: World, shop_kinds: Shop, other_pools: dict[str, ShopWorker], pool: str
) -> None:
    row_ids = [world.commit(shop_kinds.order, queue=pool) for _ in range(8)]

    for row_id in row_ids:
        assert_sent_once(world, row_id)
        assert world.effects(row_id)[0].pid == other_pools[pool].process.pid


def test_no_connection_is_shared_between_processes_however_often_children_are_replaced(
    world: World, shop_kinds: Shop, other_pools: dict[str, ShopWorker]
) -> None:
    row_ids = world.commit_many(shop_kinds.order, 40, queue="recycling")

    rows = world.sent(*row_ids)
    assert {(row.attempts, row.interruptions) for row in rows} == {(1, 0)}
    effects = [effect for row_id in row_ids for effect in world.effects(row_id)]
    assert len(effects) == 40
    assert world.counts("executions") == dict.fromkeys(row_ids, 1)
    owners: dict[int, set[int]] = {}
    for effect in effects:
        owners.setdefault(effect.backend, set()).add(effect.pid)
    assert all(len(pids) == 1 for pids in owners.values())
    # At most five tasks a child: it took at least eight of them.
    assert len({effect.pid for effect in effects}) >= 8
    assert other_pools["recycling"].process.pid not in {effect.pid for effect in effects}


def test_what_a_caller_rolls_back_is_never_hinted(world: World, shop_kinds: Shop) -> None:
    with Session(world.engine) as session:
        with session.begin_nested():
            shop_kinds.order.options(queue="unread-rollback").enqueue(session)
        # The SAVEPOINT is released: for SQLAlchemy that was a commit.
        session.rollback()
        world.commit(shop_kinds.order, queue="unread-marker")

    assert world.durable.carrier.flush(10)
    assert world.broker.depth("unread-marker") == 1
    assert world.broker.depth("unread-rollback") == 0
    with world.engine.connect() as connection:
        assert [row.queue for row in deliveries.page(connection)] == ["unread-marker"]
