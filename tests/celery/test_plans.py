"""
Plans on real workers, which are lost at every boundary of their steps: killed, frozen past the lease, shut down.

| point | where the process is | how it is held there |
| --- | --- | --- |
| between | the first step has committed, no hint of the second is out | the host's event after commit |
| claimed | the second step is claimed, its row not locked | the line `step_claimed` |
| inside | in the second step, its effect written | the handler |
| receipt | the receipt of the second step is written, no COMMIT sent | trigger |
| last | the last step has committed, nothing else is done | the host's event after commit |
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from durable_core import plans
from durable_core.celery_binding import Durable
from durable_core.plans.rows import Plan
from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.plan_kinds import QUEUE, PlanKinds
from tests.celery.world import Events, World

HASTY = {"SHOP_PLANS": "1", "SHOP_LEASE": "1.5", "SHOP_HEARTBEAT": "0.4", "SHOP_GRACE": "0.5"}
"""The lease of a step is four of these: six seconds."""

WAIT_AT_RECEIPT = """
    create function wait_at_receipt() returns trigger language plpgsql as $$
    begin
        perform pg_advisory_xact_lock_shared(hashtext(concat(new.plan_id, ' ', new.step)));
        return null;
    end $$
"""


@pytest.fixture(scope="module")
def plan_kinds(durable: Durable) -> Iterator[PlanKinds]:
    kinds = PlanKinds()
    yield kinds
    kinds.forget()


@pytest.fixture(scope="module")
def plan_worker(lasting_nodes: Nodes) -> Iterator[ShopWorker]:
    worker = lasting_nodes.worker("plans", "-Q", f"durable.{QUEUE}", "-c", "5", environment=HASTY)
    yield worker
    worker.teardown()


class Scene:
    """Plans of two steps, each held at a point of its own."""

    def __init__(self, world: World, kinds: PlanKinds) -> None:
        self.world, self.kinds = world, kinds
        self.plans: dict[str, Plan] = {}

    def hold(self, point: str, gate: str | None, expires: float = 900) -> Plan:
        """A committed, approved plan, which is held there; the gate is a step and a point of it."""
        with Session(self.world.engine) as session, session.begin():
            steps = [self.kinds.noted.planned(n) for n in range(2)]
            plan = plans.propose(session, steps, by="assistant", expires=expires)
            if gate is not None:
                (self.world.gates / f"{plan.id}.{gate}.asked").touch()
        self.plans[point] = plan
        return plan

    def approve(self) -> None:
        for plan in self.plans.values():
            with Session(self.world.engine) as session, session.begin():
                plans.approve(session, plan.id, by="dana", digest=plan.digest)

    def raw(self, point: str) -> Any:
        with self.world.engine.connect() as tx:
            return tx.execute(text("select * from durable.plans where id = :id"), {"id": self.plans[point].id}).one()

    def came_to(self, point: str) -> tuple[str, str | None, list[tuple[int, str]], list[str]]:
        """Its state and reason, its receipts and its effects."""
        row = self.raw(point)
        with self.world.engine.connect() as tx:
            found = text("select step, outcome from durable.plan_receipts where plan_id = :id order by step")
            receipts = [(one.step, one.outcome) for one in tx.execute(found, {"id": row.id})]
        return row.state, row.error_code, receipts, [effect.note for effect in self.world.effects(str(row.id))]

    def ended(self, *points: str) -> None:
        for point in points:
            wait_until(lambda point=point: self.raw(point).finished_at, f"the plan held at {point} ends")

    def read(self, point: str) -> Plan:
        with Session(self.world.engine) as session, session.begin():
            return plans.get(session, self.plans[point].id)


EXECUTED = ("executed", None, [(0, "ok"), (1, "ok")], ["0:0", "1:1"])
INTERRUPTED = ("failed", "INTERRUPTED", [(0, "ok")], ["0:0"])


@pytest.fixture
def scene(world: World, plan_kinds: PlanKinds, plan_worker: ShopWorker) -> Scene:
    if plan_worker.process.status == "exited":
        plan_worker.start()
    plan_worker.ready()
    return Scene(world, plan_kinds)


@contextmanager
def receipts_held(engine: Engine, plan_id: str) -> Iterator[None]:
    """While this lasts, the receipt of the plan's second step waits inside the database."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as holder:
        holder.execute(text(WAIT_AT_RECEIPT))
        holder.execute(
            text(
                "create trigger zz_receipt after insert on durable.plan_receipts"
                " for each row execute function wait_at_receipt()"
            )
        )
        holder.execute(text("select pg_advisory_lock(hashtext(:key))"), {"key": f"{plan_id} 1"})
        try:
            yield
        finally:
            holder.execute(text("select pg_advisory_unlock_all()"))
            # Whoever waited there ends; its table is free then.
            holder.execute(text("drop trigger zz_receipt on durable.plan_receipts"))
            holder.execute(text("drop function wait_at_receipt()"))


def waits_at_receipt(world: World) -> bool:
    with world.engine.connect() as tx:
        return bool(
            tx.scalar(
                text(
                    "select count(*) from pg_stat_activity where datname = current_database()"
                    " and wait_event_type = 'Lock' and query like '%plan_receipts%' and pid <> pg_backend_pid()"
                )
            )
        )


GATES = {"between": "0.after", "claimed": "1.claimed", "inside": "1.inside", "last": "1.after"}


@pytest.mark.spec("plans", 12, 13, 14)
@pytest.mark.parametrize("loss", ["children", "whole group"])
def test_killed_at_every_boundary_of_a_step_a_plan_goes_on_or_is_interrupted_and_no_step_runs_twice(
    scene: Scene, world: World, plan_worker: ShopWorker, loss: str
) -> None:
    for point, gate in GATES.items():
        scene.hold(point, gate)
    scene.hold("receipt", None)
    with receipts_held(world.engine, scene.plans["receipt"].id):
        scene.approve()
        for point, gate in GATES.items():
            world.held_at(f"{scene.plans[point].id}.{gate}")
        wait_until(lambda: waits_at_receipt(world), "a receipt waits")
        for point in ("claimed", "inside", "receipt"):
            assert scene.read(point).in_flight
        if loss == "children":
            pids = {scene.raw(point).owner_pid for point in scene.plans}
            assert pids == plan_worker.children()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            plan_worker.kill("SIGKILL")
        for point in scene.plans:
            world.open(f"{scene.plans[point].id}.{GATES.get(point, 'none')}")
    if loss != "children":
        plan_worker.start()
        plan_worker.ready()
    scene.ended(*scene.plans)
    came = {point: scene.came_to(point) for point in scene.plans}
    assert came == {
        "between": EXECUTED, "claimed": INTERRUPTED, "inside": INTERRUPTED, "last": EXECUTED, "receipt": INTERRUPTED,
    }  # fmt: skip
    for plan in scene.plans.values():
        world.send("shop.noted", plan.id, queue=QUEUE)
    wait_until(lambda: not world.broker.depth(QUEUE), "the hints are taken")
    later = Scene(world, scene.kinds)
    later.hold("marker", None)
    later.approve()
    later.ended("marker")
    assert came == {point: scene.came_to(point) for point in scene.plans}, "hints that come again do nothing"


def test_frozen_past_its_lease_a_step_that_has_its_row_commits_and_one_that_had_not_is_refused(
    scene: Scene, world: World, plan_worker: ShopWorker
) -> None:
    scene.hold("claimed", "1.claimed")
    scene.hold("inside", "1.inside")
    scene.approve()
    pids = [world.held_at(f"{scene.plans[point].id}.{GATES[point]}") for point in scene.plans]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    scene.ended("claimed")
    assert scene.came_to("claimed") == INTERRUPTED
    wait_until(lambda: scene.raw("inside").lease_expires_at < world.now(), "the lease of the other is over too")
    assert (scene.read("inside").state, scene.read("inside").in_flight) == ("executing", True)
    for point in scene.plans:
        world.open(f"{scene.plans[point].id}.{GATES[point]}")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    scene.ended("inside")
    assert scene.came_to("inside") == EXECUTED
    wait_until(
        lambda: "refused" in [line.move for line in world.lines(scene.plans["claimed"].id)], "the late one is refused"
    )
    assert scene.came_to("claimed") == INTERRUPTED


def test_a_step_that_outlasts_the_grace_of_a_shutdown_runs_again_elsewhere_and_once(
    scene: Scene, world: World, plan_worker: ShopWorker
) -> None:
    plan = scene.hold("inside", "1.inside")
    scene.approve()
    world.held_at(f"{plan.id}.1.inside")
    plan_worker.kill("SIGTERM")
    wait_until(lambda: plan_worker.process.status == "exited", "the worker has ended")
    row = scene.raw("inside")
    assert (row.state, row.owner, row.receipts) == ("executing", None, 1)
    plan_worker.start()
    scene.ended("inside")
    assert scene.came_to("inside") == EXECUTED
    assert [line.reason for line in world.lines(plan.id) if line.move == "release"] == ["SHUTDOWN"]


@pytest.mark.spec("plans", 22)
def test_a_hint_lost_after_the_approval_is_made_good_by_dispatch(scene: Scene, world: World) -> None:
    plan = scene.hold("lost", None)
    with Session(world.engine) as session, session.begin():
        plans.approve(session, plan.id, by="dana", digest=plan.digest)
        session.info.clear()  # no hint goes out
    scene.ended("lost")
    assert scene.came_to("lost") == EXECUTED


@pytest.mark.spec("plans", 8)
def test_a_plan_in_flowers_events_is_known_by_kind_id_and_step(scene: Scene, world: World) -> None:
    with Events(world.app) as events:
        plan = scene.hold("seen", None)
        scene.approve()
        scene.ended("seen")
        received = events.wait_for("task-received", plan.id)
        done = events.wait_for("task-succeeded", plan.id)
        seconds = [
            event
            for event in list(events.seen)
            if event["type"] == "task-received" and event["uuid"] != plan.id and plan.id in event.get("kwargs", "")
        ]
    assert received["name"] == "shop.noted"
    assert plan.id in received["kwargs"]
    assert "done" in done["result"]
    assert len(seconds) == 1
    assert scene.came_to("seen") == EXECUTED
