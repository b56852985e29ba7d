"""Executions of cases on real workers, which are lost inside a handler and around its commit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from durable_core.cases.event import Event
from durable_core.celery_binding import Durable
from tests.celery.case_types import LEASE, NAME, QUEUE, CaseTypes
from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.world import Events, World


@pytest.fixture(scope="module")
def types(durable: Durable) -> Iterator[CaseTypes]:
    declared = CaseTypes()
    yield declared
    declared.forget()


@pytest.fixture(scope="module")
def case_worker(lasting_nodes: Nodes) -> Iterator[ShopWorker]:
    queues = f"durable.{QUEUE},durable.durable"
    worker = lasting_nodes.worker("cases", "-Q", queues, "-c", "3", environment={"SHOP_CASES": "1"})
    yield worker
    worker.teardown()


class Scene:
    """Cases whose state is a count, and what was asked of them."""

    def __init__(self, world: World, types: CaseTypes) -> None:
        self.world, self.cases = world, types.cases

    def made(self, *, held: bool = False) -> str:
        with Session(self.world.engine) as session, session.begin():
            case_id = self.cases.create(session, NAME, {"count": 0}).id
            self.cases.correlate(session, case_id, "shop", case_id, step="count")
        if held:
            (self.world.gates / f"{case_id}.inside.asked").touch()
        return case_id

    def ask(self, case_id: str) -> str:
        with Session(self.world.engine) as session, session.begin():
            return self.cases.execute_later(session, case_id, "count", actor={"person": "dana"}).id

    def request(self, request_id: str) -> Any:
        with self.world.engine.connect() as tx:
            found = text("select * from durable.deliveries where id = :id")
            return tx.execute(found, {"id": request_id}).one()

    def journal(self, case_id: str) -> list[Any]:
        with Session(self.world.engine) as session:
            return self.cases.journal(session, case_id)

    def begun(self, key: str) -> list[str]:
        with self.world.engine.connect() as tx:
            found = text("select row_id from executions where key = :key order by id")
            return list(tx.scalars(found, {"key": key}))

    def came_to(self, case_id: str) -> tuple[int, int, list[str]]:
        """Count, effects and entries."""
        with Session(self.world.engine) as session:
            state = self.cases.get(session, case_id).state
        return state["count"], len(self.world.effects(case_id)), [str(one.entry) for one in self.journal(case_id)]


@pytest.fixture
def scene(world: World, types: CaseTypes, case_worker: ShopWorker) -> Scene:
    if case_worker.process.status == "exited":
        case_worker.start()
    case_worker.ready()
    return Scene(world, types)


def test_a_request_is_executed_and_flower_sees_neither_actor_nor_state(scene: Scene, world: World) -> None:
    with Events(world.app) as events:
        case_id = scene.made()
        request = scene.ask(case_id)
        wait_until(lambda: scene.request(request).state == "sent", "the request is done")
        received = events.wait_for("task-received", request)
        done = events.wait_for("task-succeeded", request)
    assert received["name"] == f"case.{NAME}"
    assert "dana" not in f"{received}{done}"
    assert scene.came_to(case_id) == (1, 1, ["claimed", "completed"])


@pytest.mark.spec("cases", 42)
@pytest.mark.parametrize("loss", ["child", "whole group"])
def test_killed_inside_its_handler_a_request_is_a_new_execution_after_one_expired_entry(
    scene: Scene, world: World, case_worker: ShopWorker, loss: str
) -> None:
    case_id = scene.made(held=True)
    request = scene.ask(case_id)
    pid = world.held_at(f"{case_id}.inside")
    with Session(world.engine) as session:
        claim = scene.cases.get(session, case_id).claim
    assert claim is not None
    if loss == "child":
        os.kill(pid, signal.SIGKILL)
    else:
        case_worker.kill("SIGKILL")
        case_worker.start()
        case_worker.ready()
    wait_until(lambda: scene.request(request).state == "sent", "the request is done")

    assert scene.came_to(case_id) == (1, 1, ["claimed", "expired", "claimed", "completed"])
    first, expired, second, completed = scene.journal(case_id)
    assert first.execution_id == expired.execution_id != second.execution_id == completed.execution_id
    assert scene.begun(request) == [first.execution_id, second.execution_id], "under one key, the request's"
    # Its last beat may have come after this look, by one more lease at most.
    assert (second.recorded_at - claim.expires_at).total_seconds() < 3 * LEASE + 30
    assert second.recorded_at >= claim.expires_at


@pytest.mark.spec("cases", 42)
def test_a_message_that_comes_again_starts_no_second_execution(scene: Scene, world: World) -> None:
    case_id = scene.made(held=True)
    request = scene.ask(case_id)
    world.held_at(f"{case_id}.inside")
    for _ in range(3):
        world.send(f"case.{NAME}", request, queue=QUEUE)
    wait_until(lambda: not world.broker.depth(QUEUE), "the messages are taken")
    world.open(f"{case_id}.inside")
    wait_until(lambda: scene.request(request).state == "sent", "the request is done")
    world.send(f"case.{NAME}", request, queue=QUEUE)
    marker = scene.ask(scene.made())
    wait_until(lambda: scene.request(marker).state == "sent", "what came behind it is done")
    assert scene.came_to(case_id) == (1, 1, ["claimed", "completed"])
    assert len(scene.begun(request)) == 1


@pytest.mark.spec("cases", 33)
def test_an_event_whose_process_was_killed_is_brought_to_its_end_by_the_sweep_and_a_worker(
    scene: Scene, world: World
) -> None:
    """The process is this one: it writes the event down and ends there. The control worker does not know the type."""
    case_id = scene.made()
    event = Event("shop", case_id, "counted", event_id="1")
    lifecycle = scene.cases.lifecycle

    def killed(_: Any) -> Any:
        raise KeyboardInterrupt

    lifecycle.execute = killed  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            scene.cases.ingest(event)
    finally:
        del lifecycle.execute  # type: ignore[method-assign]
    assert scene.cases.ingest(event).was == "pending"
    with world.engine.begin() as connection:
        connection.execute(
            text("update durable.case_events set pending_at = pending_at - interval '1 min' where external_id = :id"),
            {"id": case_id},
        )
    world.let_the_next_begin("ingest")
    world.app.send_task("durable.ingest", queue=f"durable.{QUEUE}", ignore_result=True)
    wait_until(lambda: scene.cases.ingest(event).was == "executed", "a sweep and a worker have come by", 90)
    assert scene.came_to(case_id) == (1, 1, ["claimed", "completed"])
