"""
A worker that is killed loses nothing and doubles nothing: whatever is killed, and at whichever point.

One kill hits five deliveries, each held at another point of its first attempt. It is done three times: to the
pool's children, to the main process, and to the whole group, as when a host is lost.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime

import pytest
from sqlalchemy import text

from durable_core.deliveries.read import Delivery
from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopSetup, ShopWorker, wait_until
from tests.celery.shop import LEASE, Shop
from tests.celery.world import Effect, Execution, World


@dataclass
class Seen:
    """What a delivery came to, read after all had ended."""

    row: Delivery
    executions: list[Execution]
    effects: list[Effect]
    moves: list[tuple[str, str | None]]


@dataclass
class Crash:
    """One kill and what became of the five."""

    victim: str
    killed_at: datetime
    state_under_commit: tuple[str, int]
    """Of the row whose COMMIT was still held in the database, long after its worker was gone."""
    at: dict[str, Seen] = field(default_factory=dict)

    @property
    def booked(self) -> set[tuple[str, str]]:
        """How the loss may be booked. Nobody sees a dead parent, so leases lapse; a parent sees a dead child."""
        lapsed = ("reap", "CLAIM_EXPIRED")
        return {lapsed, ("release", "CHILD_LOST")} if self.victim == "children" else {lapsed}


POINTS = ("claimed", "calling", "in commit", "in commit, undone", "after commit")


@pytest.fixture(scope="module")
def victim(celery_setup: ShopSetup, lasting_nodes: Nodes) -> Iterator[ShopWorker]:
    """A worker on a queue of its own, with a child for each point."""
    worker = lasting_nodes.worker("victim", "-Q", "durable.crashes", "-c", str(len(POINTS)))
    worker.ready()
    yield worker
    worker.teardown()


@pytest.fixture(scope="module")
def lasting_world(request: pytest.FixtureRequest, celery_setup: ShopSetup) -> Iterator[World]:
    """As `world`, for a whole module."""
    world = World(
        request.getfixturevalue("shop_engine"),
        request.getfixturevalue("gates"),
        celery_setup.app,
        request.getfixturevalue("durable"),
        request.getfixturevalue("celery_broker"),
    )
    yield world
    world.clean_up()


@pytest.fixture(scope="module", params=["children", "main process", "whole group"])
def crash(request: pytest.FixtureRequest, victim: ShopWorker, shop_kinds: Shop, lasting_world: World) -> Crash:
    """Five deliveries held at five points, then the kill, then a new start; waits until all have ended."""
    world = lasting_world
    if victim.process.status == "exited":
        victim.start()
    victim.ready()
    with ExitStack() as commits:
        ids, holders = {}, {}
        for point in POINTS:
            ids[point] = world.prepare(shop_kinds.held, point.removesuffix(", undone"), queue="crashes")
            if point.startswith("in commit"):
                holders[point] = commits.enter_context(world.commit_held(ids[point]))
        world.make_due(*ids.values())
        pids = {world.held_at(ids[point]) for point in ("claimed", "calling", "after commit")}
        waiting = {point: world.held_in_commit(holder) for point, holder in holders.items()}
        pids |= {world.row(ids[point]).owner_pid or 0 for point in holders}
        assert pids <= victim.children()
        assert len(pids) == len(POINTS)

        killed_at = world.now()
        match request.param:
            case "children":
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            case "main process":
                victim.process.kill_leader()
            case "whole group":
                victim.kill("SIGKILL")
        gone = time.monotonic()
        # With the host, its connections end: this COMMIT never came to anything. The other one is left to wait.
        with world.engine.begin() as connection:
            connection.execute(text("select pg_terminate_backend(:pid)"), {"pid": waiting["in commit, undone"]})
        if request.param != "children":
            victim.start()
            victim.ready()
        world.sent(*(ids[point] for point in ("claimed", "calling", "in commit, undone", "after commit")))
        wait_until(lambda: time.monotonic() > gone + LEASE + 1.5, "the lease of the held commit is over")
        held = world.row(ids["in commit"])
        crash = Crash(request.param, killed_at, (held.state, held.fence))
    world.sent(*ids.values())
    for point, row_id in ids.items():
        crash.at[point] = Seen(
            world.row(row_id),
            world.executions(row_id),
            world.effects(row_id),
            [(line.move, line.reason) for line in world.lines(row_id)],
        )
    return crash


def assert_done_again_once(crash: Crash, seen: Seen) -> None:
    """Taken over once: two claims, one interruption, no failure, one effect under the second fence."""
    row = seen.row
    assert (row.state, row.attempts, row.interruptions, row.failures) == ("sent", 2, 1, 0)
    assert (row.fence, row.settled_fence, row.result) == (2, 2, None)
    assert [effect.fence for effect in seen.effects] == [2]
    (move,) = seen.moves
    assert move in crash.booked


@pytest.mark.spec("deliveries", 15)
def test_killed_after_its_claim_and_before_the_call_it_is_taken_over_at_once_and_nothing_is_doubled(
    crash: Crash,
) -> None:
    seen = crash.at["claimed"]

    assert_done_again_once(crash, seen)
    # The call was not made before the kill, so it was made once.
    assert [(execution.fence, execution.attempt) for execution in seen.executions] == [(2, 1)]


@pytest.mark.spec("deliveries", 16)
def test_killed_after_the_call_it_calls_again_with_the_same_key_once_and_never_in_parallel(crash: Crash) -> None:
    seen = crash.at["calling"]

    assert_done_again_once(crash, seen)
    first, second = seen.executions
    assert (first.fence, second.fence) == (1, 2)
    assert first.key == second.key == f"shop.held:{seen.row.id}"
    assert first.attempt == second.attempt == 1, "a lost worker costs no attempt of the budget"
    assert first.at < crash.killed_at < second.at
    assert first.pid != second.pid


def test_killed_inside_a_commit_that_never_came_about_its_effect_is_written_by_the_next_owner_alone(
    crash: Crash,
) -> None:
    seen = crash.at["in commit, undone"]

    assert_done_again_once(crash, seen)
    assert [execution.fence for execution in seen.executions] == [1, 2]


def test_killed_inside_a_commit_that_stands_it_is_left_alone_until_then_and_not_done_again(crash: Crash) -> None:
    seen = crash.at["in commit"]

    # Its lease was over, and other workers were at work: the row's lock kept them out.
    assert crash.state_under_commit == ("processing", 1)
    assert_done_once(seen)


def test_killed_right_after_its_commit_it_is_not_done_again(crash: Crash) -> None:
    assert_done_once(crash.at["after commit"])


def assert_done_once(seen: Seen) -> None:
    row = seen.row
    assert (row.state, row.attempts, row.interruptions, row.failures) == ("sent", 1, 0, 0)
    assert (row.fence, row.settled_fence) == (1, 1)
    assert [effect.fence for effect in seen.effects] == [1]
    assert [execution.fence for execution in seen.executions] == [1]
    assert seen.moves == []
