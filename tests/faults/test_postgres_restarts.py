"""
Postgres goes away under load and comes back: what it acknowledged is kept, and no worker had to be started again.

The web process of these tests notes of each delivery what it was told: acknowledged, unknown, or refused.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from durable_core.claims.claim import Holder
from durable_core.deliveries.attempt import claim_due
from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.shop import HEARTBEAT, LEASE
from tests.faults.conftest import Stage

ENDINGS = ("fast", "immediate", "killed")
TEN = 10
EVERY_SECONDS = 0.1
"""The web process enqueues this often: no faster than workers of a busy machine can follow."""


@dataclass
class Workers:
    """A prefork worker and one of threads, with the processes that they were."""

    prefork: ShopWorker
    threads: ShopWorker
    processes: set[int] = field(default_factory=set)

    def now(self) -> set[int]:
        return {
            self.prefork.process.pid, self.threads.process.pid, *self.prefork.children(),
        }  # fmt: skip

    def logs(self, since: tuple[int, int] = (0, 0)) -> str:
        nodes = (self.prefork, self.threads)
        return "".join(node.container.logs()[begin:] for node, begin in zip(nodes, since, strict=True))

    def logged(self) -> tuple[int, int]:
        """How much they have logged by now, for `logs`."""
        return len(self.prefork.container.logs()), len(self.threads.container.logs())


@pytest.fixture(scope="module")
def workers(stage: Stage) -> Workers:
    """The shop at work: beat, two workers, one of which also drives the sweeps."""
    stage.beat()
    started = Workers(stage.worker("-c", "3"), stage.worker("--pool", "threads", "-c", str(TEN)))
    stage.accounted(*stage.commit_many(stage.kinds.order, 20))
    started.processes = started.now()
    return started


@pytest.fixture(autouse=True)
def the_workers_are_those_they_were(workers: Workers) -> Iterator[None]:
    yield
    assert workers.now() == workers.processes


class Producer:
    """A web process that enqueues one order after the other, and notes of each what it was told."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        # Its own engine, without a look before each use: it meets the errors of a connection that is gone.
        self._engine: Engine = create_engine(stage.cluster.url, connect_args={"application_name": "test"})
        self.its = f"% of {id(self)}"
        self.acknowledged: dict[str, str] = {}
        self.unknown: set[str] = set()
        self.refused: set[str] = set()
        self.troubled = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Producer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._engine.dispose()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(EVERY_SECONDS):
            number += 1
            self._one(f"{number} of {id(self)}")

    def _one(self, key: str) -> None:
        with Session(self._engine) as session:
            try:
                ref = self._stage.kinds.plain.options(key=key).enqueue(session, key)
            except DBAPIError:
                self.refused.add(key)
                self.troubled = True
                return
            try:
                session.commit()
            except DBAPIError:
                self.unknown.add(key)
                self.troubled = True
                return
        self.acknowledged[key] = ref.id

    def goes_on(self, more: int = 10, carried_out: bool = True) -> None:
        """Return once so many more are acknowledged, and all until now are carried out."""
        self.troubled = False
        until_now, wanted = list(self.acknowledged.values()), len(self.acknowledged) + more
        wait_until(lambda: len(self.acknowledged) >= wanted, "deliveries are acknowledged")
        if carried_out:
            self._stage.sent(*until_now)


def is_kept(stage: Stage, producer: Producer) -> None:
    """Every acknowledged delivery is there and was carried out once; of the others none is there that was refused."""
    found = stage._rows(
        "select key, cast(id as text) as id from durable.deliveries where key like :its", its=producer.its
    )
    there = {row.key: row.id for row in found}
    assert producer.acknowledged.items() <= there.items()
    assert not producer.refused & there.keys()
    assert there.keys() <= producer.acknowledged.keys() | producer.unknown
    for key in producer.unknown:
        with Session(stage.engine) as session, session.begin():
            again = stage.kinds.plain.options(key=key).enqueue(session, key)
        assert again.created is (key not in there)
        assert again.id == there.get(key, again.id)
        producer.acknowledged[key] = again.id
    for row in stage.accounted(*producer.acknowledged.values()):
        assert row.failures == 0


# --- it goes away and comes back -------------------------------------------------------------------------


@pytest.mark.full_size
def test_what_postgres_acknowledged_is_kept_and_done_once_however_it_was_restarted(
    stage: Stage, workers: Workers, sized: Callable[[int, int], int]
) -> None:
    with Producer(stage) as producer:
        producer.goes_on()
        for how in ENDINGS * sized(1, 2):
            stage.cluster.end(how)
            wait_until(lambda: producer.troubled, "callers hear of it")
            stage.cluster.start_again()
            producer.goes_on()
        # One backend killed: Postgres throws out everybody and starts anew by itself.
        kill_a_backend(stage)
        producer.goes_on()
    is_kept(stage, producer)


def kill_a_backend(stage: Stage) -> None:
    started = stage._scalar("select pg_postmaster_start_time()")
    victim = psycopg.connect(stage.cluster.url.replace("+psycopg", ""))
    os.kill(victim.info.backend_pid, signal.SIGKILL)
    wait_until(lambda: "all server processes terminated" in stage.cluster.log(), "everybody is thrown out")
    victim.close()
    wait_until(lambda: answers(stage), "Postgres has recovered by itself")
    assert stage._scalar("select pg_postmaster_start_time()") == started


def answers(stage: Stage) -> bool:
    try:
        return stage._scalar("select 1") == 1
    except DBAPIError:
        return False


def test_any_of_our_connections_may_be_ended_and_no_attempt_is_spent(stage: Stage, workers: Workers) -> None:
    """One after the other, whatever it was last used for: heartbeats, claims, step sessions, sweeps."""
    held = stage.commit(stage.kinds.held, "calling")
    stage.held_at(held)
    wait_until(lambda: stage.row(held).beat_at > stage.row(held).claimed_at, "its heart beats")
    used_for: set[str] = set()
    with Producer(stage) as producer:
        producer.goes_on()
        for backend in others(stage):
            ended = stage._rows(
                "select query, pg_terminate_backend(pid, 5000) from pg_stat_activity where pid = :pid", pid=backend
            )
            used_for |= {use for use, words in USES.items() for row in ended if words in row.query}
            producer.goes_on(2, carried_out=False)
        producer.goes_on()
        assert "heartbeat" in used_for
        before = stage.row(held).beat_at
        wait_until(lambda: stage.row(held).beat_at > before, "its heart beats again")
    is_kept(stage, producer)
    stage.open(held)
    (row,) = stage.accounted(held)
    assert (row.attempts, row.failures, row.interruptions, len(stage.executions(held))) == (1, 0, 0, 1)


USES = {"heartbeat": "the lease runs anew", "claim": "there was nothing to take", "sweep": "this sweep"}
"""What a connection was last used for, by the words of the statement's contract."""


def others(stage: Stage) -> list[int]:
    """The backends of everybody but this process's own pool."""
    found = stage._rows(
        "select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
        " and application_name <> 'test' order by backend_start"
    )
    return [row.pid for row in found]


# --- longer than a lease -----------------------------------------------------------------------------------


@pytest.mark.full_size
@pytest.mark.parametrize("how", ["immediate", "frozen"])
def test_after_an_outage_of_twice_the_lease_the_living_keep_what_they_hold(
    stage: Stage, workers: Workers, how: str
) -> None:
    """Every lease is over although every worker lives: those who hold beat before the reaper takes anything."""
    ten = [stage.commit(stage.kinds.held, "calling") for _ in range(TEN)]
    for row_id in ten:
        stage.held_at(row_id)
    if how == "frozen":
        stage.cluster.freeze()
    else:
        stage.cluster.end(how)
    gone_at = time.monotonic()
    wait_until(lambda: time.monotonic() - gone_at > 2 * LEASE, "twice the lease is over")
    stage.cluster.thaw() if how == "frozen" else stage.cluster.start_again()
    back_at = stage.now()
    wait_until(lambda: stage.row(ten[0]).beat_at > back_at, "hearts beat again")
    the_reaper_runs(stage)
    wait_until(lambda: stage.now() - back_at > timedelta(seconds=3 * HEARTBEAT), "the reaper is held back no more")
    the_reaper_runs(stage)
    for row_id in ten:
        stage.open(row_id)
    for row in stage.accounted(*ten):
        assert (row.attempts, row.failures, row.interruptions) == (1, 0, 0)
        assert stage.lines(row.id) == []
        assert len(stage.executions(row.id)) == 1


def the_reaper_runs(stage: Stage) -> None:
    since = stage.now()
    wait_until(lambda: stage.sweeps_since(since, "reap"), "the reaper runs")


# --- in the middle of a rescue -------------------------------------------------------------------------------

ORPHANS = 250

SLOW_REAP = """
create function public.slowly() returns trigger language plpgsql as $$
begin
    perform pg_sleep(0.004);
    return new;
end $$
"""


@pytest.fixture
def slow_reaper(stage: Stage) -> Iterator[None]:
    """A pass of the reaper over all orphans takes a second."""
    with stage.engine.begin() as connection:
        connection.execute(text(SLOW_REAP))
        connection.execute(
            text(
                "create trigger zz_slowly before insert on durable.journal for each row"
                " when (new.move = 'reap') execute function public.slowly()"
            )
        )
    yield
    with stage.engine.begin() as connection:
        connection.execute(text("drop function public.slowly() cascade"))


@pytest.mark.field("R31")
def test_orphans_are_all_recovered_though_postgres_restarts_in_the_middle_of_their_rescue(
    stage: Stage, workers: Workers, slow_reaper: None
) -> None:
    """
    The broken pass is told once, by the task that ran it; and none but the pass itself undoes what it had done.

    A pass that kept its error to itself would still be told here, by its line in the book, which meets no server
    either: that the error is raised is proved with one session ended, in `test_sweeps`.
    """
    logged = workers.logged()
    orphans = stage.commit_many(stage.kinds.plain, ORPHANS, queue="nobody")
    gone = Holder(owner="gone", lease_seconds=LEASE, heartbeat_seconds=HEARTBEAT)
    with stage.engine.begin() as connection:
        assert len(claim_due(connection, ORPHANS, queue="nobody", holder=gone)) == ORPHANS
    wait_until(lambda: reaping_for(stage, 0.2), "the reaper has been at it for 0.2 s", every=0.01)
    stage.cluster.end("immediate")
    stage.cluster.start_again()
    wait_until(lambda: recovered(stage) == ORPHANS, "all orphans are recovered")
    assert {len(stage.lines(row_id)) for row_id in orphans} == {1}
    assert {stage.row(row_id).interruptions for row_id in orphans} == {1}
    workers.prefork.also_reads("nobody")
    for row in stage.accounted(*orphans):
        assert row.failures == 0
    # A pass that met no database is told in one line, whichever worker ran it.
    told = workers.logs(logged)
    failed = re.findall(r"Task durable\.(\w+)\[(\S+)\] retry: no answer from the database", told)
    assert "reap" in {name for name, _ in failed}
    assert len(failed) == len(set(failed)) == told.count("sweep_not_answered")
    assert "raised unexpected" not in told


def reaping_for(stage: Stage, seconds: float) -> bool:
    return bool(
        stage._scalar(
            "select count(*) from pg_stat_activity where state = 'active' and query like '%locked by `lapsed`%'"
            " and clock_timestamp() - query_start > make_interval(secs => :seconds)",
            seconds=seconds,
        )
    )


def recovered(stage: Stage) -> int:
    return int(
        stage._scalar(
            "select count(*) from durable.deliveries where queue = 'nobody' and state = 'pending' and interruptions = 1"
        )
    )
