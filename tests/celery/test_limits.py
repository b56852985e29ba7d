"""
Time limits, signals and code that no heartbeat gets past: an attempt ends when its time is over, and is booked once.

One worker, one child for each handler, all begun at once; the tests look at what each came to.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from durable_core.claims.journal import Line
from durable_core.deliveries.read import Delivery
from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopSetup, ShopWorker, wait_until
from tests.celery.rough import TIMEOUT, Rough
from tests.celery.rough_nodes import rough_worker, rough_world
from tests.celery.shop import LEASE, REAP
from tests.celery.world import World

LONG = 5.5 * LEASE
"""Seconds that the healthy handler takes."""

IDLE_BOUND = "2s"
"""What the server lets a transaction idle; every connection of this worker asks for it."""


class Scene:
    def __init__(self, world: World, kinds: Rough, worker: ShopWorker) -> None:
        self.world, self.worker = world, worker
        self.children = worker.children()
        self.ids = {
            "healthy": world.commit(kinds.plain, LONG, queue="limits"),
            "deaf to exceptions": world.commit(kinds.deaf, "exceptions", queue="limits"),
            "deaf to anything": world.commit(kinds.deaf, "anything", queue="limits"),
            "starved": world.commit(kinds.clutches, 4 * LEASE, "in the commit", queue="limits"),
            "starved and swallows": world.commit(kinds.clutches, 4 * LEASE, "swallowed", queue="limits"),
        }
        wait_until(lambda: all(world.executions(row_id) for row_id in self.ids.values()), "all have begun")
        self.pids = {name: world.executions(row_id)[0].pid for name, row_id in self.ids.items()}
        # TERM, as an operator's kill, and SEGV, as a broken extension; nobody else is at work in these two children.
        self.ids |= {of: world.commit(kinds.dies, of, 1, queue="limits") for of in ("SIGSEGV", "SIGTERM")}
        world.sent(*self.ids.values())
        # The children that obey no limit end by the hard one, ten seconds after it.
        deaf = {self.pids["deaf to exceptions"], self.pids["deaf to anything"]}
        wait_until(lambda: not deaf & worker.children(), "the hard limit ended the deaf")

    def row(self, name: str) -> Delivery:
        return self.world.row(self.ids[name])

    def lines(self, name: str) -> list[Line]:
        return self.world.lines(self.ids[name])

    def effects(self, name: str) -> list[int]:
        return [effect.fence for effect in self.world.effects(self.ids[name])]


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, celery_setup: ShopSetup, lasting_nodes: Nodes) -> Iterator[Scene]:
    environment = {"PGOPTIONS": f"-c idle_in_transaction_session_timeout={IDLE_BOUND}"}
    worker = rough_worker(lasting_nodes, "limits", "-Q", "durable.limits", "-c", "7", environment=environment)
    worker.ready()
    with rough_world(request, celery_setup) as (world, kinds):
        yield Scene(world, kinds, worker)
    worker.teardown()


@pytest.mark.field("R20")
@pytest.mark.field("R54")
def test_a_healthy_handler_of_five_leases_runs_once_and_holds_no_transaction_open(scene: Scene) -> None:
    """The server ends transactions that idle for 2 s, and the handler sleeps for longer before it opens its session."""
    row = scene.row("healthy")
    assert (row.state, row.attempts, row.fence) == ("sent", 1, 1)
    assert [execution.fence for execution in scene.world.executions(row.id)] == [1]
    assert scene.effects("healthy") == [1]
    assert scene.lines("healthy") == []
    assert "idle-in-transaction" not in scene.worker.logs()


@pytest.mark.field("R20")
@pytest.mark.field("R40")
@pytest.mark.parametrize("name", ["deaf to exceptions", "deaf to anything"])
def test_a_handler_that_swallows_its_limit_loses_its_row_at_the_deadline_and_its_process_after_it(
    scene: Scene, name: str
) -> None:
    """Heartbeats go out while the handler hangs, but not past its deadline: a failure, tried again by policy."""
    row = scene.row(name)
    assert (row.attempts, row.failures, row.interruptions, row.shutdowns) == (2, 1, 0, 0), scene.lines(name)
    (line,) = scene.lines(name)
    assert (line.reason, line.fence, line.to_state) == ("TIMEOUT", 1, "pending")
    began: datetime = scene.world.executions(row.id)[0].at
    assert line.at - began <= 3 * timedelta(seconds=TIMEOUT + REAP)
    lease_before = scene.world._scalar("select lease_before from durable.journal where row_id = :id", id=row.id)
    assert lease_before <= began + timedelta(seconds=TIMEOUT), "no lease reached past the deadline"
    assert scene.effects(name) == [2], "what the first attempt might have written is gone with it"
    assert "child_killed_at_shutdown" not in scene.worker.logs()


@pytest.mark.field("R21")
@pytest.mark.parametrize("name", ["starved", "starved and swallows"])
def test_a_handler_that_starves_its_heartbeat_is_rescued_and_its_late_report_is_refused(
    scene: Scene, name: str
) -> None:
    row = scene.row(name)
    wait_until(lambda: [line.move for line in scene.lines(name)][-1:] == ["refused"], "the first came back")
    assert (row.attempts, row.interruptions, row.failures) == (2, 1, 0), scene.lines(name)
    assert (row.fence, row.settled_fence, row.result) == (2, 2, "attempt 2 is content")
    assert scene.effects(name) == [2]
    reaped, refused = scene.lines(name)
    assert (reaped.move, reaped.reason, reaped.fence) == ("reap", "CLAIM_EXPIRED", 1)
    assert (refused.move, refused.fence) == ("refused", 1)
    assert scene.world.row(row.id) == row
    # Of the process nothing was wrong: it goes on.
    assert scene.pids[name] in scene.worker.children()


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGTERM"])
def test_a_child_that_a_signal_ended_before_the_deadline_is_one_interruption(scene: Scene, name: str) -> None:
    row = scene.row(name)
    assert (row.attempts, row.interruptions, row.failures, row.shutdowns) == (2, 1, 0, 0)
    (line,) = scene.lines(name)
    assert (line.move, line.reason) in {("release", "CHILD_LOST"), ("reap", "CLAIM_EXPIRED")}
    assert scene.effects(name) == [2]


def test_a_worker_that_lost_children_has_as_many_as_before(scene: Scene) -> None:
    wait_until(lambda: len(scene.worker.children()) == len(scene.children), "the pool is full again")
