"""Messages are hints: lost, doubled or piled up, they lose, double and pile up no work."""

import json
import time
import uuid

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from durable_core import deliveries
from durable_core.errors import InvalidArguments
from durable_core.wakes import Hint
from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.shop import DISPATCH, Shop
from tests.celery.world import Events, World


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


@pytest.mark.field("R74")
@pytest.mark.parametrize("broker", ["forgets everything", "keeps every hint"])
def test_what_was_canceled_before_any_worker_came_never_runs_whatever_the_broker_knows(
    world: World, shop_kinds: Shop, celery_worker: ShopWorker, broker: str
) -> None:
    due = world.commit(shop_kinds.order, queue="taken-back")
    wait_until(lambda: world.broker.depth("taken-back") >= 1, "it is hinted")
    far = world.prepare(shop_kinds.order)
    with Session(world.engine) as session, session.begin():
        for row_id in (due, far):
            deliveries.cancel(session, row_id, by="dana", reason="the order was withdrawn")
    if broker == "forgets everything":
        world.broker.client.flushall()
    else:
        world.send("shop.order", far, queue="taken-back")
    world.make_due(far)
    other = world.commit(shop_kinds.order, queue="taken-back")

    celery_worker.also_reads("taken-back")
    world.accounted(other)
    wait_until(lambda: world.broker.depth("taken-back") == 0, "all hints are read")
    celery_worker.reads_no_more("taken-back")
    assert [(world.row(row_id).state, world.executions(row_id)) for row_id in (due, far)] == [("canceled", [])] * 2
    assert [line.move for row_id in (due, far) for line in world.lines(row_id)] == ["cancel"] * 2


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


def test_hints_doubled_reversed_early_late_and_wrong_start_each_delivery_once_and_are_no_errors(
    world: World, shop_kinds: Shop, celery_worker: ShopWorker
) -> None:
    """All lie in one queue before a worker reads it; what finds nothing to claim is not worth a line in the log."""
    late = world.commit_many(shop_kinds.order, 3)
    world.accounted(*late)
    age(world, late)
    rows = world.commit_many(shop_kinds.order, 5, queue="piled")
    wait_until(lambda: world.broker.depth("piled") >= 5, "all are hinted")
    famous = world.commit(shop_kinds.slow, 0.5, queue="piled")
    renamed = world.commit(shop_kinds.renamed, queue="piled")
    former = world.commit(shop_kinds.renamed, queue="piled")
    call_it(world, former, "shop.former")
    elsewhere = world.commit(shop_kinds.order, queue="unread-by-all")
    soon = world.commit(shop_kinds.order, countdown=4.0, queue="piled")
    far = world.prepare(shop_kinds.order)

    def hints(kind: str, row_ids: list[str], times: int) -> list[Hint]:
        return [Hint(kind, row_id, "piled", 0, first=False) for row_id in row_ids for _ in range(times)]

    logged = len(celery_worker.process.logs())
    world.durable.carrier.publish(
        [
            *hints("shop.order", [*late, soon, far, *reversed(rows)], 20),
            *hints("shop.order", [str(uuid.uuid4()) for _ in range(20)], 1),
            *hints("shop.quick", [elsewhere, *late, far], 20),
            *hints("shop.former", [renamed, former], 20),
            *hints("shop.renamed", [renamed, former], 20),
            *hints("shop.slow", [famous], 1000),
        ]
    )
    with Events(world.app) as events:
        celery_worker.also_reads("piled")
        finished = world.accounted(*rows, famous, renamed, former, soon)
        wait_until(lambda: world.broker.depth("piled") == 0, "all hints are read", seconds=300)
        celery_worker.reads_no_more("piled")
    said = celery_worker.process.logs()[logged:].decode()

    assert {(row.attempts, row.fence, row.interruptions) for row in finished} == {(1, 1, 0)}
    began = {row.id: world.executions(row.id) for row in finished}
    assert {len(executions) for executions in began.values()} == {1}
    assert began[soon][0].at >= world.row(soon).due_at
    for row_id in (elsewhere, far):
        assert (world.row(row_id).state, world.row(row_id).fence, world.executions(row_id)) == ("pending", 0, [])
    assert world.counts("executions") == dict.fromkeys([*late, *(row.id for row in finished)], 1)
    assert [event for event in events.seen if event["type"] in ("task-failed", "task-retried")] == []
    assert said.count("'nothing to do'") > 1000, "each was looked at"
    assert "ERROR" not in said
    assert "Traceback" not in said
    assert "nothing_to_claim" not in said, "told at debug level only"
    # Rows that are in no database of ours are worth a line, once in a while, from each process.
    assert 1 <= said.count("hint_without_row") <= len(celery_worker.children()) + 1


def age(world: World, row_ids: list[str]) -> None:
    """Ended ten minutes ago; the guards of the database are looked past for it."""
    alter(world, row_ids, "finished_at = finished_at - interval '10 min', created_at = created_at - interval '10 min'")


def call_it(world: World, row_id: str, kind: str) -> None:
    """As if the app had enqueued it before its kind was renamed."""
    alter(world, [row_id], f"kind = '{kind}'")


def alter(world: World, row_ids: list[str], change: str) -> None:
    with world.engine.begin() as connection:
        connection.execute(text("set local session_replication_role = replica"))
        connection.execute(
            text(f"update durable.deliveries set {change} where id = any (cast(:ids as uuid[]))"), {"ids": row_ids}
        )


@pytest.mark.field("R18")
def test_the_message_of_a_large_argument_is_as_small_as_any_and_one_too_large_is_refused_at_the_call(
    world: World, shop_kinds: Shop
) -> None:
    sizes = []
    for queue, note in (("small", "x" * 10), ("large", "x" * 200_000)):
        world.prepare(shop_kinds.order, note, queue=queue)
        row_id = world.commit(shop_kinds.order, note, queue=queue)
        wait_until(lambda queue=queue: world.broker.depth(queue) > 0, "it is hinted")
        key = next(key for key in world.broker.client.keys("*") if key.split("\x06")[0] == f"durable.{queue}")
        message = world.broker.client.lindex(key, 0)
        assert row_id in message
        assert len(message) < 2_000
        # Headers tell who sent it, the caller or a sweep, and differ by a few bytes for that.
        sizes.append(len(json.loads(message)["body"]))
    assert sizes[0] == sizes[1]

    with pytest.raises(InvalidArguments, match="note"):
        world.commit(shop_kinds.order, "x" * 20_000_000)
