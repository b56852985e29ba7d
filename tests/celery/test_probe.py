"""
The probe of a real worker: gone, stopped, without its broker, before a broker that falls silent, at work, and idle.

Each worker is the test's own, with a folder of its own for its pulse. What takes a minute by default is judged here by
shorter bounds: they are the reader's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from durable_core import pulse
from durable_core.celery_binding.transport import guarded
from durable_core.cli.main import main
from durable_core.database.statements import DEFAULT_SCHEMA, use_schema
from durable_core.pulse import Read, Verdict
from tests.celery.conftest import Nodes
from tests.celery.nodes import Broker, ShopWorker, wait_until
from tests.celery.shop import Shop
from tests.celery.world import World
from tests.relay import Relay

Start = Callable[..., ShopWorker]
Ready = Callable[..., Result]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pulses"
    monkeypatch.setenv(pulse.FOLDER_VARIABLE, str(folder))
    monkeypatch.setattr(pulse, "STOPPED_AFTER", 6.0)
    return folder


@pytest.fixture
def start(place: Path, nodes: Nodes, world: World) -> Start:
    """A worker on a queue of its own, whose pulse lies in the test's folder."""

    def _start(
        *arguments: str, broker: str | None = None, transport: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
    ) -> ShopWorker:  # fmt: skip
        environment = {
            pulse.FOLDER_VARIABLE: str(place), "SHOP_TRANSPORT": json.dumps(transport or {}), **(environment or {})
        }  # fmt: skip
        if broker is not None:
            environment["CELERY_BROKER_URL"] = broker
        return nodes.worker("pulse", "-Q", "durable.pulse", *(arguments or ("-c", "1")), environment=environment)

    return _start


@pytest.fixture
def ready(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ready]:
    """`durable probe --ready` in this process, on the shop's database, and the broker of this address."""

    def _ready(*line: str, broker: str | None = None) -> Result:
        monkeypatch.setenv("DURABLE_REDIS_URL", broker or world.broker.url)
        url = world.engine.url.render_as_string(hide_password=False)
        return CliRunner().invoke(main, ["--database-url", url, "probe", "--ready", *line])

    yield _ready
    use_schema(DEFAULT_SCHEMA)


def read() -> Read:
    (one,) = pulse.judged(None)
    return one


def becomes(verdict: Verdict) -> Read:
    wait_until(lambda: read().verdict is verdict, f"the pulse says {verdict}", every=0.2)
    return read()


def quick() -> int:
    """The exit code of the quick form, as a container asks it."""
    command = [sys.executable, "-m", "durable_core.probe", "--live"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_is_idle_then_at_work_then_idle_and_leaves_nothing_behind(
    start: Start, world: World, shop_kinds: Shop, place: Path, ready: Ready, pool: str
) -> None:
    worker = start("--pool", pool, "-c", "1")
    worker.ready()
    idle = becomes(Verdict.IDLE)
    assert idle.pulse is not None
    assert (idle.pulse.queues, idle.pulse.pid) == (("durable.pulse",), worker.process.pid)
    done = ready("--worker", idle.worker)
    assert (done.exit_code, done.stdout) == (0, f"ready: {idle.says} [IDLE]\n")

    row_id = world.commit(shop_kinds.held, "calling", queue="pulse")
    world.held_at(row_id)
    becomes(Verdict.BUSY)
    assert quick() == 0
    assert ready("--worker", idle.worker).exit_code == 0
    world.open(row_id)
    world.accounted(row_id)
    becomes(Verdict.IDLE)

    worker.kill("SIGTERM")
    assert worker.process.wait(60) == 0
    assert list(place.iterdir()) == []
    assert quick() == 6


def test_a_worker_that_is_stopped_is_not_live_and_is_again_when_it_goes_on(start: Start) -> None:
    worker = start()
    worker.ready()
    becomes(Verdict.IDLE)
    worker.kill("SIGSTOP")
    stopped = becomes(Verdict.PULSE_STOPPED)
    assert not stopped.live
    assert "is stopped, or hangs" in stopped.says
    worker.kill("SIGCONT")
    becomes(Verdict.IDLE)
    worker.kill("SIGKILL")
    gone = becomes(Verdict.PULSE_STOPPED)
    assert not gone.live
    assert "is gone" in gone.says


@pytest.mark.parametrize(
    ("mood", "verdict"), [("SIGKILL", Verdict.BROKER_LOST), ("SIGSTOP", Verdict.BROKER_SILENT)], ids=["gone", "frozen"]
)
def test_a_worker_without_its_broker_is_live_and_not_ready_until_the_broker_is_back(
    start: Start, ready: Ready, another_broker: Broker, monkeypatch: pytest.MonkeyPatch, mood: str, verdict: Verdict
) -> None:
    monkeypatch.setattr(pulse, "STUCK_AFTER", 5.0)
    server = another_broker.container.process
    start(broker=another_broker.url).ready()
    name = becomes(Verdict.IDLE).worker
    server.kill(mood)
    assert becomes(verdict).live
    assert quick() == 0
    away = ready("--worker", name, broker=another_broker.url)
    assert away.exit_code == 6
    assert "not ready: broker: " in away.stdout
    assert f"{name}: alive but not consuming" in away.stdout
    if mood == "SIGSTOP":
        server.kill("SIGCONT")
    else:
        server.start()
    becomes(Verdict.IDLE)
    wait_until(lambda: ready("--worker", name, broker=another_broker.url).exit_code == 0, "it is ready", every=1)


def test_a_worker_that_starts_without_a_broker_is_live(start: Start, another_broker: Broker) -> None:
    another_broker.container.process.kill("SIGKILL")
    worker = start(broker=another_broker.url)
    assert becomes(Verdict.BROKER_AWAITED).live
    another_broker.container.process.start()
    worker.ready()
    becomes(Verdict.IDLE)


def test_a_main_loop_that_waits_for_its_broker_without_a_bound_is_live_however_long(
    start: Start, another_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host set no time-out, so its next look at the broker never ends; a restart would not make that one speak."""
    start(broker=another_broker.url, transport={"socket_timeout": None, "health_check_interval": 2}).ready()
    becomes(Verdict.IDLE)
    monkeypatch.setattr(pulse, "STUCK_AFTER", 5.0)
    monkeypatch.setattr(pulse, "LOST_AFTER", 5.0)
    another_broker.container.process.kill("SIGSTOP")
    assert becomes(Verdict.BROKER_SILENT).live
    another_broker.container.process.kill("SIGCONT")
    becomes(Verdict.IDLE)


def test_a_main_loop_that_hangs_elsewhere_is_told_at_once_and_is_given_up_later(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of the host's own in the main process, here a receiver of a signal, that does not return."""
    monkeypatch.setattr(pulse, "STUCK_AFTER", 5.0)
    start(environment={"SHOP_HANGS": "20"}).ready()
    hangs = becomes(Verdict.LOOP_STUCK)
    assert hangs.live
    monkeypatch.setattr(pulse, "LOST_AFTER", 8.0)
    wait_until(lambda: not read().live, "it is given up", every=0.2)
    becomes(Verdict.IDLE)


def test_a_consumer_whose_connection_alone_fell_silent_is_told_from_an_idle_one(
    start: Start, ready: Ready, world: World, shop_kinds: Shop, celery_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers everybody else; the worker's loop turns, and its read for messages has no end."""
    monkeypatch.setattr(pulse, "UNTAKEN_AFTER", 3.0)
    url = celery_broker.url
    relay = Relay("127.0.0.1", celery_broker.container.port)
    broker = guarded(url.replace(f":{celery_broker.container.port}/", f":{relay.port}/"))
    try:
        start(broker=broker, transport={"health_check_interval": 3600, "socket_timeout": 3600}).ready()
        name = becomes(Verdict.IDLE).worker
        wait_until(lambda: ready("--worker", name).exit_code == 0, "it is idle, and ready")
        # From its next read for messages on, its connection says nothing more.
        relay.silence_before(b"BRPOP")
        rows = [world.commit(shop_kinds.plain, queue="pulse")]

        def told() -> bool:
            # What was on its way before the silence is still carried out.
            if world.row(rows[-1]).state == "sent":
                rows.append(world.commit(shop_kinds.plain, queue="pulse"))
            return "MESSAGES_LIE" in ready("--worker", name).stdout

        wait_until(told, "messages lie and nobody takes them", every=1)
        done = ready("--worker", name)
        assert done.exit_code == 6
        assert "alive but not consuming: it has a free slot and took nothing" in done.stdout
        assert "messages lie in durable.pulse" in done.stdout
        assert read().live
    finally:
        relay.close()
        celery_broker.client.delete("durable.pulse")


def test_ready_without_a_worker_asks_the_servers_alone(ready: Ready, place: Path) -> None:
    done = ready()
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1)
    answer = json.loads(ready("--json").stdout)
    assert (answer["ok"], answer["workers"]) == (True, [])
    assert [one["check"] for one in answer["findings"]] == ["database", "revision", "broker"]
    away = ready(broker="redis://127.0.0.1:1/0")
    assert away.exit_code == 6
    assert "[BROKER_UNREACHABLE]" in away.stdout


def test_ready_with_a_worker_that_has_no_pulse_here_is_no(ready: Ready, place: Path) -> None:
    done = ready("--worker", "nobody")
    assert done.exit_code == 6
    assert "no pulse of nobody" in done.stdout
