"""A worker that was frozen past its lease and comes back changes nothing."""

import os
import signal

import pytest

from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.shop import Shop
from tests.celery.world import World


@pytest.fixture
def frozen_worker(nodes: Nodes) -> ShopWorker:
    worker = nodes.worker("frozen", "-Q", "durable.frozen", "-c", "2")
    worker.ready()
    return worker


def test_frozen_past_its_lease_and_continued_a_worker_writes_nothing(
    world: World, shop_kinds: Shop, frozen_worker: ShopWorker, celery_worker: ShopWorker
) -> None:
    """Both forms of an effect: in the step's session, and in the commit."""
    by_form = {
        form: world.commit(shop_kinds.held, "calling", form, queue="frozen") for form in ("session", "in_commit")
    }
    pids = {form: world.held_at(row_id) for form, row_id in by_form.items()}
    assert set(pids.values()) <= frozen_worker.children()
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    celery_worker.also_reads("frozen")
    rows = world.sent(*by_form.values())
    before = {row.id: row for row in rows}

    for form, row_id in by_form.items():
        world.open(row_id)
        os.kill(pids[form], signal.SIGCONT)
    wait_until(lambda: frozen_worker.logs().count("stale_write_refused") >= 2, "both stale writes are refused")
    for row_id in by_form.values():
        world.journalled(row_id, "refused")

    celery_worker.reads_no_more("frozen")
    for form, row_id in by_form.items():
        assert [effect.fence for effect in world.effects(row_id)] == [2], form
        (effect,) = world.effects(row_id)
        assert effect.pid in celery_worker.children()
        assert [execution.fence for execution in world.executions(row_id)] == [1, 2]
        # Not one field of the row is the old owner's.
        assert world.row(row_id) == before[row_id]
        assert (before[row_id].attempts, before[row_id].interruptions, before[row_id].error_code) == (2, 1, None)
        reaped, refused = world.lines(row_id)
        assert (reaped.move, reaped.reason, reaped.fence) == ("reap", "CLAIM_EXPIRED", 1)
        assert (refused.move, refused.fence, refused.to_state) == ("refused", 1, "sent")
        assert refused.facts is not None
        assert refused.facts["current_fence"] == 2
