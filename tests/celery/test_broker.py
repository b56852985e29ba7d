"""Messages are hints: lost, doubled or piled up, they lose, double and pile up no work."""

import time

import pytest

from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.shop import DISPATCH, Shop
from tests.celery.world import World


@pytest.mark.field("R07")
def test_a_flushed_broker_loses_none_of_300_due_deliveries(
    world: World, shop_kinds: Shop, celery_worker: ShopWorker
) -> None:
    """Flushed before any worker reads them, and once more in the middle of the work."""
    row_ids = world.commit_many(shop_kinds.quick, 300, queue="flood")
    wait_until(lambda: world.broker.depth("flood") >= 300, "all are hinted")
    world.broker.client.flushall()

    celery_worker.also_reads("flood")
    wait_until(lambda: len(world.counts("effects")) > 50, "the work has begun")
    world.broker.client.flushall()
    world.sent(*row_ids)
    celery_worker.reads_no_more("flood")

    assert world.counts("effects") == dict.fromkeys(row_ids, 1)
    assert world.counts("executions") == dict.fromkeys(row_ids, 1)


@pytest.mark.field("R11")
def test_a_broker_flushed_under_live_workers_still_carries_new_work(world: World, shop_kinds: Shop) -> None:
    world.sent(world.commit(shop_kinds.order))
    world.broker.client.flushall()

    hinted = world.commit(shop_kinds.order)
    left_to_dispatch = world.prepare(shop_kinds.order)
    world.make_due(left_to_dispatch)

    world.sent(hinted, left_to_dispatch)
    assert world.counts("effects")[hinted] == world.counts("effects")[left_to_dispatch] == 1


@pytest.mark.spec("deliveries", 8)
def test_twenty_messages_of_one_delivery_start_it_once(world: World, shop_kinds: Shop) -> None:
    row_id = world.prepare(shop_kinds.slow, 0.5)
    world.make_due(row_id)
    for _ in range(20):
        world.send("shop.slow", row_id)

    (row,) = world.sent(row_id)
    wait_until(lambda: world.broker.depth("durable") == 0, "all messages are read")
    assert (row.attempts, row.interruptions, row.fence) == (1, 0, 1)
    assert len(world.executions(row_id)) == len(world.effects(row_id)) == 1
    assert world.lines(row_id) == []


@pytest.mark.spec("deliveries", 25)
def test_when_the_broker_loses_every_message_rows_are_hinted_again_within_a_tick(
    world: World, shop_kinds: Shop
) -> None:
    """No row waits longer than one tick past its due time; three are allowed here, and a loaded machine's second."""
    bound = 3 * DISPATCH + 1.0
    world.commit_many(shop_kinds.order, 5, queue="lossy")
    wait_until(lambda: world.broker.depth("lossy") >= 5, "all are hinted")
    for _ in range(3):
        # As after FLUSHALL, but the other queues keep the test's own clockwork.
        lost = time.monotonic()
        world.broker.lose("lossy")
        wait_until(lambda: world.broker.depth("lossy") >= 5, "all are hinted again", every=0.01)
        assert time.monotonic() - lost < bound

    later = world.commit(shop_kinds.order, queue="lossy-later", countdown=2.0)
    wait_until(lambda: world.broker.depth("lossy-later") > 0, "it is hinted when due", every=0.01)
    assert 0 <= (world.now() - world.row(later).due_at).total_seconds() < bound


def test_200_due_deliveries_without_a_worker_stay_200_messages(world: World, shop_kinds: Shop) -> None:
    """Once all are hinted, no dispatch adds one."""
    world.make_due(*world.commit_many(shop_kinds.order, 200, queue="unread", countdown=3600))
    wait_until(lambda: world.broker.depth("unread") >= 200, "all are hinted")
    # A dispatch that began while another was still publishing does not know of those hints.
    time.sleep(4 * DISPATCH)
    settled = world.broker.depth("unread")
    assert 200 <= settled < 600

    began = world.now()
    wait_until(lambda: world.sweeps_since(began, "dispatch"), "dispatch goes on")
    time.sleep(4 * DISPATCH)

    assert world.broker.depth("unread") == settled
