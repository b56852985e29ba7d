"""
Plans on real workers, which are lost at every boundary of their steps: killed, frozen past the lease, shut down.

| point | where the process is | how it is held there |
| --- | --- | --- |
| arrived | the hint of the first step has arrived, nothing is claimed | Celery's signal |
| claiming | the claim of the second step is sent; it is undone with its session | trigger |
| claimed late | the same; it commits after all, and nobody hears of it | trigger |
| claimed | the second step is claimed, its row not locked | the line `step_claimed` |
| inside | in the second step, its effect written | the handler |
| receipt | the receipt of the second step is written, no COMMIT sent | trigger |
| commit unsent | COMMIT of the only step is sent, and never arrives | relay |
| commit unheard | COMMIT of the only step stands, and its answer never comes | relay |
| between | the first step has committed, no hint of the second is out | the host's event after commit |
| last | the last step has committed, nothing else is done | the host's event after commit |
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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
from tests.celery.points import CLASS, Held, HoldingRelay, Locks
from tests.celery.world import Events, World

HASTY = {"SHOP_PLANS": "1", "SHOP_POINTS": "1", "SHOP_LEASE": "1.5", "SHOP_HEARTBEAT": "0.4", "SHOP_GRACE": "0.5"}
"""The lease of a step is four of these: six seconds."""

GATES = {
    "claimed": "1.claimed", "inside": "1.inside", "between": "0.after", "last": "1.after", "arrived": "K2",
}  # fmt: skip
"""Points that a gate holds; the last two of these come last: nobody else shall be free to go on with their plans."""
LOCKED = {"claiming": "claim 1", "claimed late": "claim 1", "receipt": "receipt 1"}
"""Points in a trigger, by what is written there and for which step."""
COMMIT = b"COMMIT\0"
RELAYED = {"commit unsent": False, "commit unheard": True}
"""Points at the COMMIT of a plan of one step, and whether it arrives."""
POINTS = (*LOCKED, *RELAYED, *GATES)

WAIT_AT_POINT = f"""
    create function wait_at_plan_point() returns trigger language plpgsql as $$
    declare
        j jsonb := to_jsonb(new);
    begin
        perform pg_advisory_xact_lock_shared({CLASS}, hashtext(concat(
            tg_argv[0], ' ', coalesce(j ->> 'step', j ->> 'receipts'), ' ', coalesce(j ->> 'plan_id', j ->> 'id'))));
        return null;
    end $$;
    create trigger zz_receipt after insert on durable.plan_receipts
        for each row execute function wait_at_plan_point('receipt');
    create trigger zz_claim after update on durable.plans
        for each row when (old.owner is null and new.owner is not null) execute function wait_at_plan_point('claim')
"""


@pytest.fixture(scope="module")
def plan_kinds(durable: Durable) -> Iterator[PlanKinds]:
    kinds = PlanKinds()
    yield kinds
    kinds.forget()


@pytest.fixture(scope="module")
def relay(shop_engine: Engine) -> Iterator[HoldingRelay]:
    url = shop_engine.url
    relay = HoldingRelay(url.host or "", url.port or 5432)
    yield relay
    relay.close()


@pytest.fixture(scope="module")
def plan_worker(shop_engine: Engine, lasting_nodes: Nodes, relay: HoldingRelay) -> Iterator[ShopWorker]:
    """A worker with a child for each point, and the relay between it and its database."""
    url = shop_engine.url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    worker = lasting_nodes.worker(
        "plans", "-Q", f"durable.{QUEUE}", "-c", str(len(POINTS)), environment={**HASTY, "SHOP_DATABASE_URL": url}
    )
    yield worker
    worker.teardown()


class Scene:
    """Plans of two steps, each held at a point of its own."""

    def __init__(self, world: World, kinds: PlanKinds) -> None:
        self.world, self.kinds = world, kinds
        self.plans: dict[str, Plan] = {}

    def hold(self, point: str, gate: str | None, steps: int = 2) -> Plan:
        """A committed plan, which is held there once it is approved; the gate is a step and a point of it."""
        with Session(self.world.engine) as session, session.begin():
            planned = [self.kinds.noted.planned(n) for n in range(steps)]
            plan = plans.propose(session, planned, by="assistant", expires=900)
            if gate is not None:
                (self.world.gates / f"{plan.id}.{gate}.asked").touch()
        self.plans[point] = plan
        return plan

    def approve(self, *points: str) -> None:
        """All of them, if none is named."""
        for plan in [self.plans[point] for point in points or self.plans]:
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


class Stage:
    """One plan at each of the points, and what holds it there."""

    def __init__(self, scene: Scene, locks: Locks, relay: HoldingRelay) -> None:
        self.scene, self.world, self.locks, self.relay = scene, scene.world, locks, relay
        self.messages: dict[str, Held] = {}

    def set(self, *points: str) -> None:
        """Bring each plan to its point."""
        for point in points:
            plan = self.scene.hold(point, GATES.get(point), steps=1 if point in RELAYED else 2)
            if point in LOCKED:
                self.locks.hold(LOCKED[point], plan.id)
            elif point in RELAYED:
                self.messages[point] = self.relay.hold(plan.id, COMMIT, arrives=RELAYED[point])
        alone = [point for point in ("between", "arrived") if point in points]
        for some in ([point for point in points if point not in alone], *([point] for point in alone)):
            if some:
                self.scene.approve(*some)
            for point in some:
                self.reached(point)

    def reached(self, point: str) -> None:
        plan_id = self.scene.plans[point].id
        if point in GATES:
            self.world.held_at(f"{plan_id}.{GATES[point]}")
        elif point in LOCKED:
            wait_until(lambda: self.locks.waiting(LOCKED[point], plan_id), f"the database holds {point}")
        else:
            wait_until(self.messages[point].reached.is_set, f"the relay holds {point}")
        if point == "commit unheard":
            wait_until(lambda: self.scene.raw(point).finished_at, "it is done, and unheard")

    def release(self, *points: str) -> None:
        """What is held there goes its way: on, or to its end."""
        for point in points:
            plan_id = self.scene.plans[point].id
            if point in GATES:
                self.world.open(f"{plan_id}.{GATES[point]}")
            elif point == "claiming":
                self.locks.end_waiting(LOCKED[point], plan_id)
            elif point in LOCKED:
                self.locks.let_go(LOCKED[point], plan_id)
            else:
                self.messages[point].cut()


@pytest.fixture
def stage(scene: Scene, relay: HoldingRelay) -> Iterator[Stage]:
    with scene.world.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as own:
        own.execute(text(WAIT_AT_POINT))
        locks = Locks(scene.world.engine)
        try:
            yield Stage(scene, locks, relay)
        finally:
            locks.close()
            # Whoever waited there ends; its table is free then.
            own.execute(text("drop function wait_at_plan_point() cascade"))


NOTHING_RAN = ("failed", "INTERRUPTED", [], [])
ONE_RAN = ("executed", None, [(0, "ok")], ["0:0"])
GOES_ON = {"arrived": EXECUTED, "claiming": EXECUTED, "between": EXECUTED, "last": EXECUTED, "commit unheard": ONE_RAN}


@pytest.mark.spec("plans", 12, 13, 14)
@pytest.mark.parametrize("loss", ["children", "whole group"])
def test_killed_at_every_boundary_of_a_step_a_plan_goes_on_or_is_interrupted_and_no_step_runs_twice(
    scene: Scene, world: World, stage: Stage, plan_worker: ShopWorker, loss: str
) -> None:
    stage.set(*POINTS)
    for point in ("claimed", "inside", "receipt", "commit unsent"):
        assert scene.read(point).in_flight
    assert scene.raw("arrived").state == "approved"
    if loss == "children":
        pids = plan_worker.children()
        assert len(pids) == len(POINTS)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    else:
        plan_worker.kill("SIGKILL")
    stage.release(*POINTS)
    if loss != "children":
        plan_worker.start()
        plan_worker.ready()
    scene.ended(*scene.plans)
    came = {point: scene.came_to(point) for point in scene.plans}
    assert came == {
        **GOES_ON, "claimed late": INTERRUPTED, "claimed": INTERRUPTED, "inside": INTERRUPTED, "receipt": INTERRUPTED,
        "commit unsent": NOTHING_RAN,
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
    scene: Scene, world: World, stage: Stage, plan_worker: ShopWorker
) -> None:
    """Who had its row's lock is alive, however long; a claim that came to be while its process slept is nobody's."""
    stage.set(*POINTS)
    pids = plan_worker.children()
    assert len(pids) == len(POINTS)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    early = ("claiming", "claimed late")
    stage.release(*early)
    scene.ended("claimed", "claimed late", "last", "commit unheard")
    assert (scene.came_to("claimed"), scene.came_to("claimed late")) == (INTERRUPTED, INTERRUPTED)
    wait_until(lambda: scene.raw("inside").lease_expires_at < world.now(), "the lease of the others is over too")
    for point in ("inside", "receipt", "commit unsent"):
        assert (scene.read(point).state, scene.read(point).in_flight) == ("executing", True)
    stage.release(*(point for point in POINTS if point not in early))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    scene.ended(*scene.plans)
    assert {point: scene.came_to(point) for point in scene.plans} == {
        **GOES_ON, "claimed late": INTERRUPTED, "claimed": INTERRUPTED, "inside": EXECUTED, "receipt": EXECUTED,
        "commit unsent": ONE_RAN,
    }  # fmt: skip
    for point in ("claimed", "claimed late"):
        wait_until(
            lambda point=point: "refused" in [line.move for line in world.lines(scene.plans[point].id)],
            f"the late one of {point} is refused",
        )
        assert scene.came_to(point) == INTERRUPTED


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
