"""Postgres answers, and says no: no connection left, read-only, in recovery, disk full, time-outs. Nothing is spent."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from durable_core.local.server import account_for_servers
from tests.celery.nodes import ShopWorker, wait_until
from tests.faults.conftest import Stage

POSTGRES = {"max_connections": "36"}
"""Room for two workers with all their connections open at once, which are 26, and for the test itself."""

CONCURRENCY = 8
LEASE, HEARTBEAT = 5.0, 1.0
MORE_THAN_A_LEASE = 6.0


@dataclass
class Workers:
    prefork: ShopWorker
    threads: ShopWorker

    def logs(self) -> str:
        return self.prefork.container.logs() + self.threads.container.logs()


@pytest.fixture(scope="module")
def workers(stage: Stage) -> Iterator[Workers]:
    """Two workers of concurrency 8, who are still the same processes when all is over."""
    stage.beat()
    longer = {"SHOP_LEASE": str(LEASE), "SHOP_HEARTBEAT": str(HEARTBEAT)}
    workers = Workers(
        stage.worker("-c", str(CONCURRENCY), environment=longer),
        stage.worker("--pool", "threads", "-c", str(CONCURRENCY), environment=longer),
    )
    processes = workers.prefork.children()
    yield workers
    assert workers.prefork.children() == processes
    assert workers.threads.process.status == "running"


@contextmanager
def by_hand(stage: Stage, **settings: str) -> Iterator[psycopg.Connection]:
    """A connection of the test's own, with settings of its own, opened before the trouble begins."""
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    url = stage.cluster.url.replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True, options=options, application_name="test") as connection:
        yield connection


def make_due(connection: psycopg.Connection, *row_ids: str) -> None:
    connection.execute(
        "update durable.deliveries set due_at = clock_timestamp(), hint_at = clock_timestamp() where id = any (%s)",
        [list(row_ids)],
    )


def hint(stage: Stage, *row_ids: str) -> None:
    """By hand: no dispatch gets as far as hinting them now."""
    for row_id in row_ids:
        stage.send(stage.kinds.plain.name, row_id)


def claims_wait(workers: Workers, before: int) -> None:
    """Return once workers were given hints and could not claim."""
    wait_until(lambda: workers.logs().count("claim_not_answered") > before + 3, "claims are not answered")


def pass_time(seconds: float) -> None:
    """The length of the trouble itself; nothing is waited for."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, f"{seconds} s pass")


def beating(stage: Stage, count: int) -> list[str]:
    """So many deliveries held inside their handlers, each of whose heart has beaten."""
    held = [stage.commit(stage.kinds.held, "calling") for _ in range(count)]
    for row_id in held:
        stage.held_at(row_id)
        wait_until(lambda row_id=row_id: stage.row(row_id).beat_at > stage.row(row_id).claimed_at, "its heart beats")
    return held


def went_on(stage: Stage, workers: Workers, held: list[str], waiting: list[str]) -> None:
    """Those that were held kept their claims, and those that waited are sent; nothing failed."""
    for row_id in held:
        stage.open(row_id)
    for row in stage.accounted(*held):
        assert (row.attempts, row.failures, row.interruptions) == (1, 0, 0), stage.lines(row.id)
        assert len(stage.executions(row.id)) == 1
    for row in stage.accounted(*waiting):
        assert row.failures == 0, stage.lines(row.id)
    # To a claim and to a sweep it was no answer for now, and no error of theirs.
    assert "raised unexpected" not in workers.logs()


# --- connections ---------------------------------------------------------------------------------------------


def sockets(stage: Stage, pid: int) -> set[int]:
    """The connections to Postgres that a process has, by their local ports."""
    return {
        connection.laddr.port
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.raddr and connection.raddr.port == stage.cluster.port and connection.status == "ESTABLISHED"
    }


def at_rest(stage: Stage, pids: set[int], parent: int | None = None) -> dict[int, int]:
    """The fewest connections each process had, in a few looks. What a child inherits of its parent's is none of its."""
    fewest = dict.fromkeys(pids, 1000)
    for _ in range(20):
        inherited = sockets(stage, parent) if parent is not None else set()
        for pid in pids:
            fewest[pid] = min(fewest[pid], len(sockets(stage, pid) - inherited))
        time.sleep(0.05)  # between two looks, so that they differ
    return fewest


@pytest.mark.field("R53")
def test_a_child_keeps_two_connections_and_a_server_without_room_is_waited_for(stage: Stage, workers: Workers) -> None:
    """One for its work, one for its heartbeat; a process of threads one for each thread at work, at most."""
    stage.accounted(*stage.commit_many(stage.kinds.plain, 40))
    stage.accounted(*[stage.commit(stage.kinds.slow, 1.5 * HEARTBEAT) for _ in range(2 * CONCURRENCY)])
    parent, threads = workers.prefork.process.pid, workers.threads.process.pid
    assert max(at_rest(stage, workers.prefork.children(), parent).values()) <= 2
    assert max(at_rest(stage, {parent}).values()) <= 1
    assert max(at_rest(stage, {threads}).values()) <= CONCURRENCY + 1

    waiting = [stage.prepare(stage.kinds.plain) for _ in range(40)]
    held = beating(stage, 4)
    turned_away = stage.cluster.log().count("too many clients")
    unanswered = workers.logs().count("claim_not_answered")
    with by_hand(stage) as connection, no_room(stage, connection):
        make_due(connection, *waiting)
        hint(stage, *waiting)
        pass_time(MORE_THAN_A_LEASE)
        over = connection.execute(
            "select count(*) from durable.deliveries where id = any (%s) and lease_expires_at < clock_timestamp()",
            [held],
        )
        assert over.fetchone() == (0,)
    assert stage.cluster.log().count("too many clients") > turned_away + 3
    claims_wait(workers, unanswered)
    went_on(stage, workers, held, waiting)


@contextmanager
def no_room(stage: Stage, connection: psycopg.Connection) -> Iterator[None]:
    """Every connection but the heartbeats' is ended, and somebody else takes each before its owner is back."""
    url = stage.cluster.url.replace("+psycopg", "")
    taken: list[psycopg.Connection] = []

    def take_all() -> bool:
        while True:
            try:
                taken.append(psycopg.connect(url, application_name="test"))
            except psycopg.OperationalError:
                return True

    def others() -> int:
        found = connection.execute(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity where backend_type = 'client backend'"
            " and application_name <> 'test' and query not like '%%the lease runs anew%%'"
        ).fetchone()
        assert found is not None
        return int(found[0])

    take_all()
    wait_until(lambda: others() == 0 and take_all(), "nobody else has a connection")
    try:
        yield
    finally:
        for one in taken:
            one.close()


# --- read-only, and in recovery --------------------------------------------------------------------------------


@pytest.mark.full_size
@pytest.mark.field("R59")
def test_a_server_that_is_read_only_for_a_while_fails_nothing_and_takes_nothing_from_the_living(
    stage: Stage, workers: Workers, sized: Callable[[float, float], float]
) -> None:
    waiting = [stage.prepare(stage.kinds.plain) for _ in range(20)]
    held = beating(stage, 4)
    unanswered = workers.logs().count("claim_not_answered")
    with by_hand(stage, default_transaction_read_only="off") as connection:
        stage.cluster.set(default_transaction_read_only="on")
        make_due(connection, *waiting)
        hint(stage, *waiting)
        claims_wait(workers, unanswered)
        pass_time(sized(MORE_THAN_A_LEASE, 10.0))
        states = connection.execute("select distinct state from durable.deliveries where id = any (%s)", [waiting])
        assert states.fetchall() == [("pending",)]
        stage.cluster.set(default_transaction_read_only="off")
    went_on(stage, workers, held, waiting)


def test_a_server_still_in_recovery_is_waited_for_until_it_is_promoted(stage: Stage, workers: Workers) -> None:
    """It answers every question and takes no write, as a standby does to which a name already points."""
    waiting = [stage.prepare(stage.kinds.plain) for _ in range(20)]
    stage.make_due(*waiting)
    held = beating(stage, 4)
    stage.cluster.end("fast")
    (stage.cluster.data / "standby.signal").touch()
    stage.cluster.start_again()
    assert stage._scalar("select pg_is_in_recovery()")
    refused = stage.cluster.log().count("in a read-only transaction")
    unanswered = workers.logs().count("claim_not_answered")
    hint(stage, *waiting)
    claims_wait(workers, unanswered)
    pass_time(MORE_THAN_A_LEASE)
    assert stage.cluster.log().count("in a read-only transaction") > refused
    with by_hand(stage) as connection:
        connection.execute("select pg_promote()")
    went_on(stage, workers, held, waiting)


# --- a full disk -------------------------------------------------------------------------------------------------


class SmallDisk:
    """
    The shop's deliveries and effects on a disk of their own that is full when a test says so.

    As root a real one: a tablespace on a tmpfs. Else the same SQLSTATE, 53100, raised by triggers.
    """

    TABLES = ("durable.deliveries", "effects")

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._place = Path(tempfile.mkdtemp(prefix="durable-small-"))
        self.real = os.geteuid() == 0 and self._mounted()

    def move_in(self) -> None:
        if self.real:
            with by_hand(self._stage) as connection:
                connection.execute(f"create tablespace small location '{self._place}'")
                for table in self.TABLES:
                    connection.execute(f"alter table {table} set tablespace small")

    def _mounted(self) -> bool:
        account = account_for_servers()
        owner = f"uid={account.uid},gid={account.gid}," if account is not None else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{owner}mode=0700,size=2m", "tmpfs", str(self._place)]
        return subprocess.run(command, check=False).returncode == 0

    def fill(self) -> None:
        with by_hand(self._stage) as connection:
            if self.real:
                connection.execute("create table filler (words text) tablespace small")
                connection.execute("alter table filler alter words set storage plain")
                for length in (7000, 1000):
                    _until_full(connection, length)
                return
            connection.execute(
                "create function full_disk() returns trigger language plpgsql as"
                " $$ begin raise exception 'No space left on device' using errcode = '53100'; end $$"
            )
            for table in self.TABLES:
                connection.execute(
                    f"create trigger zz_full_disk before insert or update on {table} for each row"
                    " execute function full_disk()"
                )

    def make_room(self) -> None:
        with by_hand(self._stage) as connection:
            connection.execute("drop table filler" if self.real else "drop function full_disk() cascade")

    def remove(self) -> None:
        try:
            with by_hand(self._stage) as connection:
                connection.execute("drop table if exists filler")
                if self.real:
                    for table in self.TABLES:
                        connection.execute(f"alter table {table} set tablespace pg_default")
                    connection.execute("drop tablespace small")
        finally:
            if self.real:
                subprocess.run(["umount", "--lazy", str(self._place)], check=True)
            self._place.rmdir()


def _until_full(connection: psycopg.Connection, length: int) -> None:
    while True:
        try:
            connection.execute("insert into filler values (repeat('x', %s))", [length])
        except psycopg.errors.DiskFull:
            return


@pytest.fixture
def small_disk(stage: Stage) -> Iterator[SmallDisk]:
    disk = SmallDisk(stage)
    try:
        disk.move_in()
        yield disk
    finally:
        disk.remove()


def test_a_full_disk_spends_no_attempt_and_all_resumes_when_there_is_room(
    stage: Stage, workers: Workers, small_disk: SmallDisk
) -> None:
    # So long that a new version of a row, and each effect, needs a new page.
    waiting = [stage.commit(stage.kinds.plain, "x" * 1200, queue="large") for _ in range(20)]
    small_disk.fill()

    def enqueue_many() -> None:
        for _ in range(100):  # there may be room for a row or two on a page that was not full
            stage.commit(stage.kinds.plain, "y" * 1200, queue="unread")

    with pytest.raises(DBAPIError):
        enqueue_many()
    before = stage.cluster.log().count("No space left on device")
    workers.prefork.also_reads("large")
    wait_until(lambda: stage.cluster.log().count("No space left on device") > before + 3, "workers meet the full disk")
    assert {stage.row(row_id).state for row_id in waiting} != {"sent"}
    small_disk.make_room()
    went_on(stage, workers, [], waiting)


# --- time-outs of the host's role --------------------------------------------------------------------------------


@pytest.mark.full_size
@pytest.mark.field("R54")
def test_a_long_call_outside_holds_no_transaction_open_and_no_idle_time_out_ends_it(
    stage: Stage, workers: Workers, sized: Callable[[float, float], float]
) -> None:
    stage.worker(
        "--pool", "threads", "-c", "4", "-Q", "durable.hasty",
        environment={
            "PGAPPNAME": "hasty",
            "PGOPTIONS": "-c idle_in_transaction_session_timeout=2000 -c statement_timeout=2000 -c lock_timeout=2000",
        },
    )  # fmt: skip
    long = [stage.commit(stage.kinds.slow, sized(4.0, 10.0), queue="hasty") for _ in range(2)]
    wait_until(lambda: all(stage.executions(row_id) for row_id in long), "both are calling")
    assert stage._scalar("select count(*) from pg_stat_activity where application_name = 'hasty'") > 0
    # A step's transaction bears the name of its row instead.
    open_for_long = (
        "select count(*) from pg_stat_activity where (application_name = 'hasty' or application_name like 'durable %')"
        " and clock_timestamp() - xact_start > interval '1 s'"
    )

    def ended_without_an_open_transaction() -> bool:
        assert stage._scalar(open_for_long) == 0
        return {stage.row(row_id).state for row_id in long} == {"sent"}

    wait_until(ended_without_an_open_transaction, "both calls end", seconds=120)
    after = stage.commit_many(stage.kinds.order, 20, queue="hasty")
    for row in stage.accounted(*long, *after):
        assert (row.attempts, row.failures, row.interruptions) == (1, 0, 0)
        # An attempt whose transaction was ended is made again at no cost, its call too.
        assert len(stage.executions(row.id)) == 1
