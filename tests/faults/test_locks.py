"""Somebody else's locks, on a row or on the table, and transactions that never end: only what they lock waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import make_url

from durable_core import deliveries
from durable_core.claims.claim import LOCK_WAIT, Holder
from durable_core.deliveries.attempt import claim_one
from durable_core.errors import RowBusy
from tests.celery.nodes import Beat, ShopWorker, wait_until
from tests.celery.shop import HEARTBEAT, LEASE
from tests.faults.conftest import Stage

LOCK_SECONDS = float(LOCK_WAIT.removesuffix("s"))


@pytest.fixture(scope="module")
def nodes(stage: Stage) -> list[ShopWorker | Beat]:
    return [stage.worker("--pool", "threads", "-c", "8"), stage.control_worker(), stage.beat()]


@pytest.fixture(autouse=True)
def nobody_died(stage: Stage, nodes: list[ShopWorker | Beat]) -> Iterator[None]:
    yield
    assert [node.container.process.status for node in nodes] == ["running"] * len(nodes)


@contextmanager
def foreign_session(stage: Stage) -> Iterator[psycopg.Connection]:
    """As somebody has it open in psql."""
    url = make_url(stage.cluster.url).set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False)) as connection:
        yield connection
        connection.rollback()


def lock(session: psycopg.Connection, *row_ids: str) -> None:
    session.execute(
        "select from durable.deliveries where id = any (%s::uuid[]) order by id for update", [list(row_ids)]
    )


def longest_wait(stage: Stage) -> float:
    """Seconds for which somebody now waits for a lock."""
    return float(
        stage._scalar(
            "select coalesce(max(extract(epoch from clock_timestamp() - query_start)), 0) from pg_stat_activity"
            " where datname = current_database() and wait_event_type = 'Lock'"
        )
    )


@pytest.mark.field("R41")
@pytest.mark.full_size
def test_a_claimed_row_locked_from_psql_waits_alone(stage: Stage, sized: Callable[[int, int], int]) -> None:
    locked = stage.commit(stage.kinds.held, "claimed")
    stage.held_at(locked)
    with foreign_session(stage) as psql:
        lock(psql, locked)
        until = time.monotonic() + sized(6, 60)
        stage.open(locked)  # its handler goes on, and comes to its own row
        wait_until(lambda: longest_wait(stage) > 0, "the owner waits for the row")

        silent = stage.prepare(stage.kinds.order)
        stage.make_due(silent)
        with stage.engine.begin() as connection:
            gone = Holder(owner="a lost worker", pid=1, lease_seconds=LEASE, heartbeat_seconds=HEARTBEAT)
            lost = stage.commit(stage.kinds.later, countdown=0.2, queue="nobody-reads-this")
            wait_until(lambda: claim_one(connection, stage.kinds.later, lost, gone), "the row is due")
        began, longest = stage.now(), 0.0
        beaten = stage.commit(stage.kinds.slow, LEASE * 1.3)
        others = [silent, beaten, *stage.commit_many(stage.kinds.order, sized(30, 500))]
        stage.sent(*others)
        wait_until(lambda: stage.row(lost).interruptions, "the lost row is taken back")
        assert stage.row(beaten).interruptions == 0, "its lease was kept"
        while time.monotonic() < until:
            longest = max(longest, longest_wait(stage))
            time.sleep(0.2)
        wait_until(lambda: stage.sweeps_since(began, "dispatch") and stage.sweeps_since(began, "reap"), "sweeps go on")
        assert stage.row(locked).state == "processing"
        assert longest < 3 * LOCK_SECONDS
    stage.accounted(locked, *others)


def test_a_pending_row_and_a_dead_one_locked_from_psql_stop_nobody_and_go_on_afterwards(stage: Stage) -> None:
    waiting = stage.prepare(stage.kinds.order)
    hopeless = stage.commit(stage.kinds.hopeless, "nobody@nowhere")
    assert stage.finished(hopeless)[0].state == "failed"
    with foreign_session(stage) as psql:
        stage.make_due(waiting)
        lock(psql, hopeless)
        psql.execute("select from durable.deliveries where id = %s for update skip locked", [waiting])
        began = stage.now()
        stage.accounted(*stage.commit_many(stage.kinds.order, 10))
        with stage.engine.begin() as connection, pytest.raises(RowBusy):
            deliveries.redrive(connection, hopeless, by="dana", reason="try again")
        wait_until(lambda: stage.sweeps_since(began, "dispatch"), "dispatch passed over the row")
    stage.accounted(waiting)
    with stage.engine.begin() as connection:
        deliveries.redrive(connection, hopeless, by="dana", reason="try again")
    wait_until(lambda: len(stage.executions(hopeless)) == 2, "it is tried again")


@pytest.mark.full_size
def test_after_a_careless_migration_that_locked_the_table_everything_goes_on_and_no_live_owner_was_robbed(
    stage: Stage, sized: Callable[[int, int], int]
) -> None:
    """The lock lasts longer than a lease, and nobody can beat meanwhile."""
    held = [stage.commit(stage.kinds.held, "calling") for _ in range(4)]
    for row_id in held:
        stage.held_at(row_id)
    more = [stage.prepare(stage.kinds.order) for _ in range(5)]
    stage.make_due(*more)
    with foreign_session(stage) as psql:
        psql.execute("lock table durable.deliveries in access exclusive mode")
        time.sleep(sized(6, 20))  # the length of the migration
    stage.accounted(*more, *stage.commit_many(stage.kinds.order, 10))
    began = stage.now()
    wait_until(lambda: stage.sweeps_since(began, "reap"), "reap has looked again")
    assert [stage.row(row_id).interruptions for row_id in held] == [0] * len(held)
    for row_id in held:
        stage.open(row_id)
    stage.accounted(*held)
    assert {len(stage.executions(row_id)) for row_id in held} == {1}


@pytest.mark.full_size
def test_a_transaction_that_somebody_forgot_holds_nobody_up(stage: Stage, sized: Callable[[int, int], int]) -> None:
    """It keeps the vacuum horizon, and a snapshot of rows that have long moved on."""
    with foreign_session(stage) as report:
        report.execute("set transaction isolation level repeatable read")
        report.execute("select count(*) from durable.deliveries")
        stage.accounted(*stage.commit_many(stage.kinds.order, sized(50, 500)))
        pid = report.info.backend_pid
        blocked = "select count(*) from pg_stat_activity where :pid = any (pg_blocking_pids(pid))"
        assert stage._scalar(blocked, pid=pid) == 0
