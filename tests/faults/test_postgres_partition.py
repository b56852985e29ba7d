"""
A worker and Postgres lose sight of each other, and neither is told: no packet comes through, and no end of it.

The handler goes on, another worker does the work, and what the first has to say when it is back is refused.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, event, make_url

from durable_core import Step, delivery
from durable_core.celery_binding.environment import engine_from_environment
from durable_core.claims.claim import Holder
from durable_core.database.connections import Database
from durable_core.database.environment import DATABASE_VARIABLE
from durable_core.deliveries.attempt import Outcome, perform
from durable_core.deliveries.declare import registry
from durable_core.deliveries.worker import Worker
from tests.celery.nodes import wait_until
from tests.faults.conftest import Stage
from tests.relay import ending


class Wire:
    """A way to Postgres that can be cut without a word to either end. What was on it arrives once it is whole again."""

    def __init__(self, target: tuple[str, int], listen: str = "127.0.0.1") -> None:
        self._target = target
        self._listener = socket.create_server((listen, 0))
        self.port: int = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self.mend()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        self._whole.wait()
        server = socket.create_connection(self._target)
        for ends in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with ending(source, sink):
            while message := source.recv(1 << 16):
                self._whole.wait()
                sink.sendall(message)


@pytest.fixture(scope="module")
def wire(stage: Stage) -> Iterator[Wire]:
    wire = Wire(("127.0.0.1", stage.cluster.port))
    yield wire
    wire.close()


def test_a_worker_cut_off_from_postgres_alone_loses_its_row_and_is_refused_when_it_is_back(
    stage: Stage, wire: Wire
) -> None:
    """It still hears the broker, so it may go on taking hints; none of them is lost with it."""
    through_the_wire = make_url(stage.cluster.url).set(port=wire.port).render_as_string(hide_password=False)
    stage.beat()
    far = stage.worker(
        "--pool", "threads", "-c", "2", "-Q", "durable.far", name="far",
        environment={"SHOP_DATABASE_URL": through_the_wire},
    )  # fmt: skip
    near = stage.worker("-c", "2", name="near")
    before = near.children() | {near.process.pid, far.process.pid}

    held = stage.commit(stage.kinds.held, "calling", queue="far")
    assert stage.held_at(held) == far.process.pid
    # Over a connection that is open by then: making one is bounded by the host's `connect_timeout`.
    wait_until(lambda: stage.row(held).beat_at > stage.row(held).claimed_at, "its heart beats")
    wire.cut()
    near.also_reads("far")
    (done,) = stage.sent(held)
    assert (done.fence, done.failures, done.interruptions) == (2, 0, 1)
    # The first owner's handler goes on and comes to its session: while nothing gets through, nothing is written.
    stage.open(held)
    more = stage.commit_many(stage.kinds.order, 10, queue="far")
    stage.sent(*more)
    assert [effect.fence for effect in stage.effects(held)] == [2]
    wait_until(lambda: "database_answer_overdue" in far.logs(), "it waits no longer for an answer that is lost")

    wire.mend()
    stage.journalled(held, "refused")
    assert stage.row(held) == done
    assert [effect.fence for effect in stage.effects(held)] == [2]
    assert [execution.fence for execution in stage.executions(held)] == [1, 2]
    stage.accounted(held, *more)
    assert "stale_write_refused" in far.container.logs()

    # And it works on: the same process, over connections that are whole.
    near.reads_no_more("far")
    again = stage.commit_many(stage.kinds.order, 10, queue="far")
    stage.accounted(*again)
    assert {execution.pid for row_id in again for execution in stage.executions(row_id)} == {far.process.pid}
    assert near.children() | {near.process.pid, far.process.pid} == before


def test_a_handler_cut_off_from_postgres_is_told_once_its_lease_is_over(stage: Stage, wire: Wire) -> None:
    """No beat gets through, so nobody can say that the claim is lost; but from then on somebody else may have it."""
    url = make_url(stage.cluster.url).set(port=wire.port)
    engine = create_engine(url)
    worker = Worker(Database(engine), Holder(lease_seconds=1.5, heartbeat_seconds=0.5))
    told: list[float] = []

    def handler(step: Step) -> None:
        assert not step.cancelled
        wire.cut()
        began = time.monotonic()
        try:
            wait_until(lambda: step.cancelled, "the handler is told")
        finally:
            wire.mend()  # or what the handler raises could not be recorded, and the test would hang
        told.append(time.monotonic() - began)

    kind = delivery("partition.told", queue="nobody")(handler)
    try:
        row_id = stage.commit(kind)
        # Nobody took the row meanwhile, so what it has to report still lands.
        assert perform(worker, kind, row_id).outcome is Outcome.SENT
    finally:
        registry.remove(kind.name)
        worker.heartbeat.stop()
        engine.dispose()
    assert 0 < told[0] < 3 * 1.5


# --- a peer that is gone without a word ---------------------------------------------------------------------------

CLONE_NEWNET = 0x40000000


class Island:
    """A network namespace with one cable to this one: pulled out, packets vanish and nobody is told."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        # A name and a net of its own each time: a cable goes some time after its namespace.
        number = next(self._numbers)
        self.name = f"durable-{os.getpid()}-{number}"
        self._cable = f"d{os.getpid()}{number}"
        self.here, there = f"10.213.{number}.1", f"10.213.{number}.2"
        for command in (
            f"ip netns add {self.name}",
            f"ip link add {self._cable}a type veth peer name {self._cable}b netns {self.name}",
            f"ip addr add {self.here}/30 dev {self._cable}a",
            f"ip link set {self._cable}a up",
            f"ip -n {self.name} addr add {there}/30 dev {self._cable}b",
            f"ip -n {self.name} link set {self._cable}b up",
        ):
            subprocess.run(command.split(), check=True)

    def pull_the_cable(self) -> None:
        subprocess.run(["ip", "link", "set", f"{self._cable}a", "down"], check=True)

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=True)

    def live_there(self) -> None:
        """Move the calling thread over: the sockets that it makes from now on are there."""
        with open(f"/run/netns/{self.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


@pytest.fixture
def island() -> Iterator[Island]:
    try:
        island = Island()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs `ip`, and the right to make a network namespace")
    yield island
    island.remove()


def advised(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `docs/operating.md` says to connect with, as the deployable app does."""
    monkeypatch.setenv(DATABASE_VARIABLE, url)
    given: dict[str, Any] = {}
    engine = engine_from_environment()
    event.listen(engine, "do_connect", lambda dialect, record, arguments, named: given.update(named))
    engine.connect().close()
    engine.dispose()
    return {name: value for name, value in given.items() if name.startswith(("keepalives", "tcp_", "connect_"))}


NOTICED_SECONDS = 30.0
"""What `docs/operating.md` promises. A number of its own: taken from the settings, it would grow with them."""

SLACK_SECONDS = 3.0
"""For the machine, and for probes that cannot be counted in less than whole seconds."""


@pytest.mark.full_size
@pytest.mark.parametrize("waiting", ["for an answer", "for nothing"])
def test_a_postgres_that_is_gone_without_a_word_is_noticed_by_the_advised_settings(
    stage: Stage, island: Island, sized: Callable[[float, float], float], monkeypatch: pytest.MonkeyPatch, waiting: str
) -> None:
    """Also while the server is at work on a statement, and nothing of ours is on its way that could be missed."""
    settings = advised(stage.cluster.url, monkeypatch)
    assert settings["connect_timeout"] == 5
    shorter = sized(10.0, 1.0)
    bound = NOTICED_SECONDS / shorter + SLACK_SECONDS
    settings = {name: max(1, int(value / shorter)) for name, value in settings.items()}
    cable = Wire(("127.0.0.1", stage.cluster.port), listen=island.here)
    url = make_url(stage.cluster.url).set(drivername="postgresql", host=island.here, port=cable.port)
    ready, pulled, noticed = threading.Event(), threading.Event(), []

    def client() -> None:
        island.live_there()
        with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True, **settings) as connection:
            connection.execute("select 1")
            ready.set()
            if waiting == "for an answer":
                threading.Timer(0.5, pulled.set).start()
                statement = "select pg_sleep(600)"
            else:
                pulled.wait()
                wait_until(lambda: gone.is_set(), "the cable is out")
                statement = "select 1"
            began = time.monotonic()
            try:
                connection.execute(statement)
            except psycopg.OperationalError:
                noticed.append(time.monotonic() - began)

    gone = threading.Event()
    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    assert ready.wait(60)
    if waiting == "for nothing":
        pulled.set()
    assert pulled.wait(60)
    island.pull_the_cable()
    gone.set()
    thread.join(bound + 5)
    cable.close()
    assert len(noticed) == 1
    assert noticed[0] <= bound
