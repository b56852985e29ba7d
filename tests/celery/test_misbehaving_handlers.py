"""Whatever a handler does to its session, its process or its exceptions: its row says so, and the worker goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from durable_core.deliveries.read import Delivery
from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopSetup, ShopWorker, wait_until
from tests.celery.rough import HABITS, Rough
from tests.celery.rough_nodes import rough_worker, rough_world
from tests.celery.world import World


class Scene:
    """All habits, lived out on one worker, side by side; then some ordinary work on it."""

    def __init__(self, world: World, kinds: Rough, worker: ShopWorker) -> None:
        self.world, self.worker = world, worker
        self.ids = {habit: world.commit(kinds.misbehaves, habit, queue="rough") for habit in HABITS}
        self.others = world.commit_many(kinds.plain, 20, queue="rough")
        world.finished(*self.ids.values(), *self.others)

    def row(self, habit: str) -> Delivery:
        return self.world.row(self.ids[habit])

    def notes(self, habit: str) -> list[str]:
        return [effect.note for effect in self.world.effects(self.ids[habit])]


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, celery_setup: ShopSetup, lasting_nodes: Nodes) -> Iterator[Scene]:
    worker = rough_worker(lasting_nodes, "rough", "-Q", "durable.rough", "-c", "3")
    worker.ready()
    with rough_world(request, celery_setup) as (world, kinds):
        yield Scene(world, kinds, worker)
    worker.teardown()


def assert_failed_once(row: Delivery, code: str = "WORKER_ERROR") -> None:
    assert (row.state, row.error_code, row.attempts, row.failures, row.interruptions) == ("dead", code, 1, 1, 0)


@pytest.mark.parametrize("habit", ["commits", "rolls_back", "closes"])
def test_a_handler_that_ends_its_session_is_refused(scene: Scene, habit: str) -> None:
    row = scene.row(habit)
    assert_failed_once(row)
    assert "is not yours to call" in (row.error_message or "")
    assert scene.notes(habit) == []


def test_a_commit_in_sql_is_found_and_is_no_success(scene: Scene) -> None:
    assert_failed_once(scene.row("commits_in_sql"), "EFFECT_ESCAPED")


@pytest.mark.parametrize(
    ("habit", "notes"),
    [
        ("opens_its_own_connection", ["beside its own connection"]),
        ("shares_its_session_with_threads", ["with threads"]),
        ("leaves_the_process_in_a_thread", ["goes on"]),
        ("prints", ["prints"]),
        ("changes_signal_handlers", ["ignores signals"]),
        ("empties_the_environment", ["without an environment"]),
    ],
)
def test_what_harms_nobody_is_sent(scene: Scene, habit: str, notes: list[str]) -> None:
    assert (scene.row(habit).state, scene.notes(habit)) == ("sent", notes)


def test_a_forked_copy_that_leaves_by_itself_is_nobodys_business(scene: Scene) -> None:
    assert scene.row("forks_and_leaves").result == "the copy left with 7"
    assert scene.notes("forks_and_leaves") == ["the parent's"]


@pytest.mark.parametrize("habit", ["forks_and_returns", "forks_with_its_session_open_and_returns", "forks_and_raises"])
def test_a_forked_copy_that_comes_back_to_us_ends_there_and_reports_nothing(scene: Scene, habit: str) -> None:
    row = scene.row(habit)
    assert (row.state, row.result) == ("sent", "the copy left with 70")
    assert (row.attempts, row.failures, row.interruptions) == (1, 0, 0)
    assert scene.notes(habit) == ["the parent's"]
    assert scene.world.lines(row.id) == []


def test_a_copy_forked_inside_the_commit_ends_there_too(scene: Scene) -> None:
    assert scene.row("forks_in_its_commit").state == "sent"
    assert scene.notes("forks_in_its_commit") == ["the copy left with 70"]


def test_a_forked_copy_gets_no_session(scene: Scene) -> None:
    """It would share its parent's connection."""
    assert scene.row("forks_and_uses_the_session").result == "the copy left with 70"
    assert scene.notes("forks_and_uses_the_session") == ["the parent's"]


@pytest.mark.field("R67")
@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("raises_a_base_exception", "_Own: not an Exception"),
        ("raises_the_unprintable", "_Unprintable: <exception str() failed>"),
        ("raises_the_unpicklable", "_Unpicklable: cannot be pickled"),
        ("raises_50_megabytes", "RuntimeError: the text begins here "),
        ("raises_with_a_note", "ValueError: what went wrong"),
        ("recurses", "RecursionError: maximum recursion depth exceeded"),
        ("returns_a_generator", "the handler returned a generator that never ran"),
        ("returns_a_coroutine", "the handler returned a coroutine that never ran"),
    ],
)
def test_whatever_is_raised_is_a_failed_attempt_with_a_short_readable_text(scene: Scene, habit: str, says: str) -> None:
    row = scene.row(habit)
    assert_failed_once(row)
    message = row.error_message or ""
    assert says in message.split("\n", 1)[0]
    assert len(message) < 20_000
    assert "\x1b" not in message
    assert scene.notes(habit) == []


@pytest.mark.field("R67")
@pytest.mark.parametrize("habit", ["leaves_the_process", "interrupts", "aborts"])
def test_a_handler_that_ends_its_process_is_an_interruption_and_leaves_no_effect(scene: Scene, habit: str) -> None:
    """Of this kind one is too many, so it is dead; the worker starts another child."""
    row = scene.row(habit)
    assert (row.state, row.error_code, row.attempts, row.failures, row.interruptions) == (
        "dead",
        "WORKER_LOST",
        1,
        0,
        1,
    )
    assert scene.notes(habit) == []


def test_a_child_left_without_descriptors_makes_way_for_another(scene: Scene) -> None:
    """It could act on no hint, and would take them all: what it held is given back, and the others go on."""
    row = scene.row("exhausts_descriptors")
    assert (row.state, row.error_code, row.attempts, row.interruptions) == ("dead", "WORKER_LOST", 1, 1)
    assert scene.worker.logs().count("child_without_descriptors") == 1


def test_a_handler_that_closes_every_descriptor_leaves_no_effect(scene: Scene) -> None:
    row = scene.row("closes_descriptors")
    assert (row.state, row.attempts) == ("dead", 1)
    assert scene.notes("closes_descriptors") == []


def test_nobody_else_on_that_worker_suffers(scene: Scene) -> None:
    rows = [scene.world.row(row_id) for row_id in scene.others]
    assert {(row.state, row.attempts, row.interruptions) for row in rows} == {("sent", 1, 0)}
    assert set(scene.world.counts("executions").values()) == {1}
    scene.world.accounted(*scene.others)
    assert scene.worker.process.status == "running"
    wait_until(lambda: len(scene.worker.children()) == 3, "the pool is full again")


def test_even_then_it_ends_as_it_is_told_to(scene: Scene) -> None:
    """The last test of this module: the worker is gone after it."""
    scene.worker.kill("SIGTERM")
    assert scene.worker.process.wait(60) == 0
