"""The doctor on a running shop: what is well, and which queues nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from durable_core.celery_binding import doctor as of_celery
from durable_core.database.connections import Database
from durable_core.doctor import work
from durable_core.doctor.database import looking
from durable_core.doctor.findings import Finding, Reason, Status
from tests.celery.nodes import REPOSITORY, ControlWorker, ShopContainer, ShopWorker, wait_until
from tests.celery.world import World


@pytest.fixture
def doctor(
    world: World, celery_worker_cluster_config: dict[str, Any], shop_environment: dict[str, str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`durable -A … doctor --json` as a process of its own: its exit code and its answer."""

    def _doctor(*line: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "durable_core.cli", "-A", "tests.celery.shop_app", "doctor", "--json", *line],
            env={**os.environ, **ShopContainer.initial_env(celery_worker_cluster_config), **shop_environment},
            cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert not done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)

    return _doctor


def test_a_running_shop_is_well(doctor: Callable[..., tuple[int, dict[str, Any]]], shop_engine: Engine) -> None:
    """But for what the suite's machine and its quick server are: it forgets, its role owns all, this is root."""
    excused = {
        Reason.SYNCHRONOUS_COMMIT_OFF, Reason.FSYNC_OFF, Reason.ROLE_SUPERUSER, Reason.RUNS_AS_ROOT,
        # The shop declares kinds for queues whose workers its tests start themselves; a beat that has just begun.
        Reason.QUEUE_UNREAD_IDLE, Reason.SWEEP_HELD_BACK,
    }  # fmt: skip

    def strange() -> list[dict[str, Any]]:
        code, answer = doctor()
        assert (code == 0) == (answer["failed"] == 0) == answer["healthy"]
        return [one for one in answer["findings"] if one["status"] != "pass" and one["reason"] not in excused]

    wait_until(lambda: not strange(), "every sweep has run", 60, every=1)
    code, answer = doctor()
    assert code == 0
    assert answer["not_looked_at"] == {}
    assert doctor("--strict")[0] == 6, "the quick server warns"


@pytest.fixture
def asked(world: World, shop_engine: Engine) -> Callable[[], list[Finding]]:
    """What the workers say, beside what is due in the database."""

    def due() -> dict[str, bool]:
        with looking(Database(shop_engine)) as connection:
            return work.due_queues(connection)

    return lambda: [one for one in of_celery.workers(world.durable, due) if one.reason is not Reason.QUEUE_UNREAD_IDLE]


def test_work_on_a_queue_that_nobody_reads_fails_and_a_worker_that_reads_it_mends_it(
    world: World, asked: Callable[[], list[Finding]], shop_kinds: Any, shop_engine: Engine, celery_worker: ShopWorker
) -> None:
    row_id = world.commit(shop_kinds.plain, queue="unread_by_all")
    assert Status.FAIL not in {one.status for one in asked()}, "what has only become due is no fault"
    with shop_engine.begin() as tx:
        older = "update durable.deliveries set due_at = due_at - interval '61 s' where id = :id"
        tx.execute(text(older), {"id": row_id})
    (finding,) = asked()
    assert (finding.reason, finding.status) == (Reason.QUEUE_UNREAD, Status.FAIL)
    assert finding.fix == "celery -A … worker -Q durable.unread_by_all"
    celery_worker.also_reads("unread_by_all")
    try:
        world.accounted(row_id)
        assert all(one.status is Status.PASS for one in asked())
    finally:
        celery_worker.reads_no_more("unread_by_all")


def test_sweeps_that_nobody_reads_fail(
    asked: Callable[[], list[Finding]], celery_worker: ShopWorker, control_worker: ControlWorker
) -> None:
    both = (celery_worker, control_worker)
    try:
        for worker in both:
            worker.reads_no_more("control")
        (finding,) = wait_until(asked, "they say what they read")
        assert (finding.reason, finding.status) == (Reason.CONTROL_UNREAD, Status.FAIL)
    finally:
        for worker in both:
            worker.also_reads("control")


def test_a_queue_of_a_declared_kind_that_nobody_reads_warns(world: World, celery_worker: ShopWorker) -> None:
    from durable_core.deliveries.declare import delivery, registry

    delivery("test.doctor_lonely", queue="lonely")(lambda step: None)
    try:
        findings = list(of_celery.workers(world.durable, dict))
    finally:
        registry.remove("test.doctor_lonely")
    (finding,) = [one for one in findings if "queue lonely" in one.observed]
    assert (finding.reason, finding.status) == (Reason.QUEUE_UNREAD_IDLE, Status.WARN)


def test_kinds_of_the_app_are_declared_and_others_are_not(
    world: World, doctor: Callable[..., tuple[int, dict[str, Any]]], shop_kinds: Any
) -> None:
    from durable_core.deliveries.declare import delivery, registry

    kind = delivery("test.doctor_foreign", queue="foreign")(lambda step: None)
    try:
        world.commit(kind)
        world.commit(shop_kinds.plain, queue="foreign")
    finally:
        registry.remove("test.doctor_foreign")
    _, answer = doctor()
    (undeclared,) = [one for one in answer["findings"] if one["reason"] == "KIND_UNDECLARED"]
    assert undeclared["observed"].endswith(": 1 row of test.doctor_foreign")
    assert (undeclared["status"], answer["noted"]) == ("note", 1)
