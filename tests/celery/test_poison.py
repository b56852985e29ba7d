"""Work that kills its process or hangs its slot each time ends, and takes nothing down with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopSetup, ShopWorker, wait_until
from tests.celery.rough import Rough
from tests.celery.rough_nodes import rough_worker, rough_world
from tests.celery.world import World


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, celery_setup: ShopSetup, lasting_nodes: Nodes
) -> Iterator[tuple[World, Rough, ShopWorker]]:
    worker = rough_worker(lasting_nodes, "poison", "-Q", "durable.poison", "-c", "2")
    worker.ready()
    with rough_world(request, celery_setup) as (world, kinds):
        yield world, kinds, worker
    worker.teardown()


def test_a_payload_that_kills_its_process_each_time_is_dead_after_its_interruptions_and_nobody_else_suffers(
    scene: tuple[World, Rough, ShopWorker],
) -> None:
    """Two at once, so that both children die again and again while others' hints lie in front of them."""
    world, kinds, worker = scene
    poison = [world.commit(kinds.dies, "SIGKILL", 99, queue="poison") for _ in range(2)]
    others = world.commit_many(kinds.plain, 60, queue="poison")
    for row_id in poison:
        wait_until(lambda row_id=row_id: world.row(row_id).interruptions == 2, "it was lost twice")
        # From now on it waits for half a minute, so that it cannot keep a child busy dying.
        assert 15 < (world.row(row_id).due_at - world.now()).total_seconds() < 36
    world.make_due(*poison)
    rows = world.finished(*poison)

    for row in rows:
        assert (row.state, row.error_code) == ("dead", "WORKER_LOST")
        # Two interruptions are allowed; the third ends it.
        assert (row.attempts, row.interruptions, row.failures) == (3, 3, 0)
        assert [execution.fence for execution in world.executions(row.id)] == [1, 2, 3]
        *lost, end = [line.reason for line in world.lines(row.id)]
        assert (len(lost), set(lost) <= {"CHILD_LOST", "CLAIM_EXPIRED"}, end) == (2, True, "WORKER_LOST")
        assert world.effects(row.id) == []
    for row in world.accounted(*others):
        assert (row.attempts, row.interruptions) == (1, 0), world.lines(row.id)
    assert worker.process.status == "running"


@pytest.mark.field("R37")
def test_a_payload_that_may_run_at_most_once_is_not_run_again_and_says_that_nobody_knows(
    scene: tuple[World, Rough, ShopWorker],
) -> None:
    world, kinds, _ = scene
    row_id = world.commit(kinds.dies_once, "SIGKILL", 99, queue="poison")
    (row,) = world.finished(row_id)
    assert (row.state, row.error_code, row.attempts, row.interruptions) == ("dead", "WORKER_LOST", 1, 1)
    assert "outcome is unknown" in row.error_message
    # Not even by a hint that comes late.
    world.send("rough.dies_once", row_id, queue="poison")
    world.accounted(world.commit(kinds.plain, queue="poison"))
    assert [execution.fence for execution in world.executions(row_id)] == [1]


@pytest.mark.field("R34")
def test_two_handlers_that_always_hang_do_not_starve_fresh_work_of_two_slots(
    scene: tuple[World, Rough, ShopWorker],
) -> None:
    world, kinds, _ = scene
    hanging = [world.commit(kinds.wedged, queue="poison") for _ in range(2)]
    wait_until(lambda: all(world.executions(row_id) for row_id in hanging), "both slots hang")
    fresh = [world.commit(kinds.plain, queue="poison") for _ in range(20)]
    world.accounted(*fresh)
    wait_until(lambda: all(world.row(row_id).failures >= 2 for row_id in hanging), "the hanging ones are tried again")

    for row_id in hanging:
        row = world.row(row_id)
        assert row.interruptions == 0
        waited = [
            (after.at - line.at).total_seconds()
            for line, after in zip(world.lines(row_id), world.executions(row_id)[1:], strict=False)
        ]
        assert waited[0] >= 1.7, "back-off of 2 s, less its jitter"
        assert {line.reason for line in world.lines(row_id)} == {"TIMEOUT"}


@pytest.mark.field("R72")
def test_max_attempts_counts_how_often_the_body_runs_and_the_last_error_stays(
    scene: tuple[World, Rough, ShopWorker],
) -> None:
    """There is no override for one call; the row's journal has one line for each failure."""
    world, kinds, _ = scene
    once, thrice = world.commit(kinds.fails_once, queue="poison"), world.commit(kinds.fails_thrice, queue="poison")
    world.finished(once, thrice)

    for row_id, times in ((once, 1), (thrice, 3)):
        row = world.row(row_id)
        assert (row.state, row.error_code, row.attempts, row.failures) == ("dead", "WORKER_ERROR", times, times)
        assert (row.error_message or "").startswith(f"RuntimeError: error number {times}")
        assert [execution.attempt for execution in world.executions(row_id)] == list(range(1, times + 1))
        assert [line.to_state for line in world.lines(row_id)] == ["pending"] * (times - 1) + ["dead"]
