"""
A deploy costs a delivery nothing: whichever way a worker is told to end, what it held is given back and not counted.

`attempts` of a row is its receipt, and its failures, interruptions, shutdowns and snoozes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, islice
from subprocess import TimeoutExpired

import pytest

from tests.celery.conftest import Nodes
from tests.celery.nodes import Beat, ControlWorker, ShopSetup, ShopWorker, wait_until
from tests.celery.rough import Rough
from tests.celery.rough_nodes import rough_worker, rough_world
from tests.celery.world import World

QUEUE = ("-Q", "durable.deploys")


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, celery_setup: ShopSetup) -> Iterator[tuple[World, Rough]]:
    with rough_world(request, celery_setup) as scene:
        yield scene


def told(worker: ShopWorker, how: str) -> None:
    """Tell the worker to end, as supervisors, orchestrators and people do."""
    main = worker.process.pid
    match how:
        case "TERM" | "QUIT":
            worker.kill(f"SIG{how}")
        case "TERM to the group":
            os.killpg(main, signal.SIGTERM)
        case "TERM twice":
            worker.kill("SIGTERM")
            wait_until(lambda: "Warm shutdown" in worker.logs(), "the worker heard it")
            worker.kill("SIGTERM")
        case "Ctrl-C twice":
            # A terminal sends it to the whole group.
            os.killpg(main, signal.SIGINT)
            wait_until(lambda: "will initiate cold shutdown" in worker.logs(), "the worker heard it")
            os.killpg(main, signal.SIGINT)
        case _:
            raise AssertionError(how)


WAYS = ("TERM", "QUIT", "TERM to the group", "Ctrl-C twice", "TERM twice")


@pytest.mark.field("R36")
@pytest.mark.full_size
def test_a_long_handler_outlives_any_number_of_deploys(
    scene: tuple[World, Rough], nodes: Nodes, sized: Callable[[int, int], int]
) -> None:
    """More deploys than interruptions are allowed, at full size; with the short grace none lets the handler end."""
    world, kinds = scene
    deploys = sized(len(WAYS), 25)
    row_id = world.commit(kinds.held, queue="deploys")
    short = {"ROUGH_GRACE": "1"}
    worker = rough_worker(nodes, "deploy", *QUEUE, "-c", "2", environment=short)
    for number, how in enumerate(islice(cycle(WAYS), deploys), start=1):
        worker.ready()
        pid = world.held_at(f"{row_id}-{number}")
        assert pid in worker.children()
        told(worker, how)
        # The next version starts while the old one is on its way out.
        following = rough_worker(nodes, "deploy", *QUEUE, "-c", "2", environment=short)
        worker.process.wait(90)
        row = world.row(row_id)
        assert (row.shutdowns, row.interruptions, row.failures) == (number, 0, 0), (how, world.lines(row_id))
        worker = following
    worker.ready()
    world.held_at(f"{row_id}-{deploys + 1}")
    world.open(f"{row_id}-{deploys + 1}")

    (row,) = world.accounted(row_id)
    assert (row.attempts, row.shutdowns, row.interruptions, row.failures) == (deploys + 1, deploys, 0, 0)
    lines = world.lines(row_id)
    assert [(line.move, line.reason, line.fence) for line in lines] == [
        ("release", "SHUTDOWN", fence) for fence in range(1, deploys + 1)
    ]


@pytest.mark.field("R39")
def test_what_ends_within_a_soft_shutdown_is_sent_and_what_does_not_is_given_back(
    scene: tuple[World, Rough], nodes: Nodes
) -> None:
    world, kinds = scene
    worker = rough_worker(nodes, "soft", "-Q", "durable.soft", "-c", "2", environment={"ROUGH_SOFT_SHUTDOWN": "4"})
    worker.ready()
    ends, goes_on = (world.commit(kinds.held, queue="soft") for _ in range(2))
    for row_id in (ends, goes_on):
        world.held_at(f"{row_id}-1")
    told(worker, "QUIT")
    wait_until(lambda: "Initiating Soft Shutdown" in worker.logs(), "the worker heard it")
    assert world.row(ends).state == "processing"
    world.open(f"{ends}-1")
    worker.process.wait(90)

    ended, going = world.row(ends), world.row(goes_on)
    assert (ended.state, ended.attempts, ended.shutdowns) == ("sent", 1, 0)
    assert (len(world.executions(ends)), world.lines(ends)) == (1, [])
    assert (going.state, going.shutdowns, going.interruptions, going.failures) == ("pending", 1, 0, 0)
    assert (going.error_code, going.due_at <= world.now()) == ("SHUTDOWN", True)
    assert world.effects(goes_on) == []


@pytest.mark.field("R38")
def test_after_term_to_the_group_five_handlers_resume_elsewhere_and_kill_within_the_grace_is_no_failure_either(
    scene: tuple[World, Rough], nodes: Nodes
) -> None:
    """The second is what a supervisor does that waits for less than the grace: nobody is left to give anything back."""
    world, kinds = scene
    worker = rough_worker(nodes, "grouped", "-Q", "durable.grouped", "-c", "5")
    worker.ready()
    ids = [world.commit(kinds.held, queue="grouped") for _ in range(5)]
    for row_id in ids:
        world.held_at(f"{row_id}-1")
    os.killpg(worker.process.pid, signal.SIGTERM)
    following = rough_worker(nodes, "grouped", "-Q", "durable.grouped", "-c", "5")
    with suppress(TimeoutExpired):
        worker.process.wait(5)
    worker.kill("SIGKILL")
    for row_id in ids:
        world.held_at(f"{row_id}-2")

    *resumed, killed = ids
    for row_id in resumed:
        world.open(f"{row_id}-2")
    for row in world.accounted(*resumed):
        assert (row.attempts, row.failures, row.interruptions, row.shutdowns) == (2, 0, 0, 1)
    following.kill("SIGTERM")
    wait_until(lambda: "Warm shutdown" in following.logs(), "the worker heard it")
    following.kill("SIGKILL")
    wait_until(lambda: world.row(killed).state == "pending", "the lease is over")
    row = world.row(killed)
    assert (row.attempts, row.failures, row.interruptions, row.shutdowns) == (2, 0, 1, 1)
    assert [(line.move, line.reason) for line in world.lines(killed)] == [
        ("release", "SHUTDOWN"), ("reap", "CLAIM_EXPIRED"),
    ]  # fmt: skip


@pytest.mark.field("R19")
def test_workers_and_beat_killed_at_once_and_started_cold_finish_what_they_held(
    scene: tuple[World, Rough], nodes: Nodes, celery_worker: ShopWorker, control_worker: ControlWorker,
    celery_beat: Beat,
) -> None:  # fmt: skip
    world, kinds = scene
    worker = rough_worker(nodes, "cold", "-Q", "durable.cold", "-c", "2")
    worker.ready()
    ids = [world.commit(kinds.held, queue="cold") for _ in range(2)]
    for row_id in ids:
        world.held_at(f"{row_id}-1")
    everybody = (worker, celery_worker, control_worker, celery_beat)
    for node in everybody:
        node.kill("SIGKILL")
    assert {world.row(row_id).state for row_id in ids} == {"processing"}
    for node in everybody:
        node.container.process.start()
    for node in everybody:
        node.ready()
    for row_id in ids:
        world.held_at(f"{row_id}-2")
        world.open(f"{row_id}-2")

    for row in world.accounted(*ids):
        assert (row.attempts, row.interruptions, row.failures) == (2, 1, 0)
        (line,) = world.lines(row.id)
        assert (line.move, line.reason) == ("reap", "CLAIM_EXPIRED")
