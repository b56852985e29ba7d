"""A synchronous standby is lost while commits wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.shop import LEASE
from tests.faults.conftest import Stage
from tests.faults.standby import Standby


@pytest.fixture(scope="module")
def worker(stage: Stage) -> ShopWorker:
    stage.beat()
    return stage.worker("--pool", "threads", "-c", "4")


@pytest.fixture
def standby(stage: Stage) -> Iterator[Standby]:
    standby = Standby(stage.cluster, stage.engine)
    standby.require()
    yield standby
    standby.remove()


def test_a_commit_without_its_standby_is_unknown_until_the_standby_is_back_and_is_never_done_again(
    stage: Stage, worker: ShopWorker, standby: Standby
) -> None:
    done, going_on = (stage.commit(stage.kinds.held, "calling") for _ in range(2))
    stage.held_at(done)
    stage.held_at(going_on)
    standby.freeze()
    stage.open(done)
    wait_until(lambda: "commit_unknown" in worker.logs(), "the worker says that it does not know")

    # The row is its commit's: nobody takes it, though its worker has let go of it and its lease is over.
    beaten_at = stage.row(going_on).beat_at
    wait_until(lambda: stage.row(done).lease_expires_at < stage.now(), "its lease is over", 4 * LEASE)
    assert (stage.row(done).state, stage.row(done).fence) == ("processing", 1)
    # Meanwhile the other one's lease is kept: a beat does not wait for a standby.
    wait_until(lambda: stage.row(going_on).beat_at > beaten_at, "the beats go on")
    assert stage.row(going_on).lease_expires_at > stage.now()

    standby.thaw()
    stage.open(going_on)
    rows = stage.accounted(done, going_on)
    assert [(row.attempts, row.interruptions) for row in rows] == [(1, 0), (1, 0)]
    assert [len(stage.executions(row.id)) for row in rows] == [1, 1]


def test_a_commit_whose_wait_was_canceled_is_not_taken_for_acknowledged(
    stage: Stage, worker: ShopWorker, standby: Standby
) -> None:
    """The server says success, and in a warning that the standby does not have it."""
    row_id = stage.commit(stage.kinds.held, "calling")
    stage.held_at(row_id)
    said_before = worker.logs().count("commit_unknown")
    standby.freeze()
    stage.open(row_id)
    wait_until(lambda: stage.row(row_id).state == "processing" and standby.waiting(), "COMMIT waits for the standby")
    with stage.engine.connect() as connection:
        for pid in standby.waiting():
            connection.execute(text("select pg_cancel_backend(:pid)"), {"pid": pid})
    wait_until(lambda: worker.logs().count("commit_unknown") > said_before, "the worker says that it does not know")
    # It stands here, and a failover may take it back: whatever comes, this worker has not called it done.
    assert stage.row(row_id).state == "sent"
    standby.thaw()
    assert [row.attempts for row in stage.accounted(row_id)] == [1]


def test_a_claim_without_its_standby_starts_nothing(stage: Stage, worker: ShopWorker, standby: Standby) -> None:
    """A claim that a failover takes back would be made again under the same fence, by another."""
    row_id = stage.commit(stage.kinds.order, countdown=1)
    given_up_before = worker.logs().count("claim_not_answered")
    due_at = stage.row(row_id).due_at
    standby.freeze()
    wait_until(lambda: stage.now() > due_at, "it is due")
    stage.send("shop.order", row_id)
    wait_until(lambda: worker.logs().count("claim_not_answered") > given_up_before, "the claim is given up")
    assert stage.executions(row_id) == []
    standby.thaw()
    (row,) = stage.accounted(row_id)
    assert [execution.fence for execution in stage.executions(row_id)] == [row.settled_fence]
