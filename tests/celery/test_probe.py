"""The probe of a real worker: idle, at work, stopped, killed, and hanging. Without its broker: tests/faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from durable_core import pulse
from durable_core.pulse import Verdict
from tests.celery.conftest import Nodes
from tests.celery.nodes import wait_until
from tests.celery.pulses import Pulses, pulses_of
from tests.celery.shop import Shop
from tests.celery.world import World


@pytest.fixture
def pulses(world: World, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulses]:
    with pulses_of(world, nodes, tmp_path / "pulses", monkeypatch) as pulses:
        yield pulses


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_is_idle_then_at_work_then_idle_and_leaves_nothing_behind(
    pulses: Pulses, world: World, shop_kinds: Shop, pool: str
) -> None:
    worker = pulses.start("--pool", pool, "-c", "1")
    worker.ready()
    idle = pulses.becomes(Verdict.IDLE)
    assert idle.pulse is not None
    assert (idle.pulse.queues, idle.pulse.pid) == (("durable.pulse",), worker.process.pid)
    done = pulses.ready("--worker", idle.worker)
    assert (done.exit_code, done.stdout) == (0, f"ready: {idle.says} [IDLE]\n")

    row_id = world.commit(shop_kinds.held, "calling", queue="pulse")
    world.held_at(row_id)
    pulses.becomes(Verdict.BUSY)
    assert pulses.quick() == 0
    assert pulses.ready("--worker", idle.worker).exit_code == 0
    world.open(row_id)
    world.accounted(row_id)
    pulses.becomes(Verdict.IDLE)

    worker.kill("SIGTERM")
    assert worker.process.wait(60) == 0
    assert list(pulse.folder().iterdir()) == []
    assert pulses.quick() == 6


@pytest.mark.long
def test_a_worker_that_is_stopped_is_not_live_and_is_again_when_it_goes_on(pulses: Pulses) -> None:
    worker = pulses.start()
    worker.ready()
    pulses.becomes(Verdict.IDLE)
    worker.kill("SIGSTOP")
    stopped = pulses.becomes(Verdict.PULSE_STOPPED)
    assert not stopped.live
    assert "is stopped, or hangs" in stopped.says
    worker.kill("SIGCONT")
    pulses.becomes(Verdict.IDLE)
    worker.kill("SIGKILL")
    gone = pulses.becomes(Verdict.PULSE_STOPPED)
    assert not gone.live
    assert "is gone" in gone.says


@pytest.mark.long
def test_a_main_loop_that_hangs_elsewhere_is_told_at_once_and_is_given_up_later(
    pulses: Pulses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of the host's own in the main process, here a receiver of a signal, that does not return."""
    monkeypatch.setattr(pulse, "STUCK_AFTER", 5.0)
    # It says that it is ready once that receiver has returned: by then all that is to be seen here is over.
    pulses.start(environment={"SHOP_HANGS": "20"})
    hangs = pulses.becomes(Verdict.LOOP_STUCK)
    assert hangs.live
    monkeypatch.setattr(pulse, "LOST_AFTER", 8.0)
    wait_until(lambda: not pulses.read().live, "it is given up", every=0.2)
    pulses.becomes(Verdict.IDLE)


def test_ready_without_a_worker_asks_the_servers_alone(pulses: Pulses) -> None:
    done = pulses.ready()
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1)
    answer = json.loads(pulses.ready("--json").stdout)
    assert (answer["ok"], answer["workers"]) == (True, [])
    assert [one["check"] for one in answer["findings"]] == ["database", "revision", "broker"]
    away = pulses.ready(broker="redis://127.0.0.1:1/0")
    assert away.exit_code == 6
    assert "[BROKER_UNREACHABLE]" in away.stdout


def test_ready_with_a_worker_that_has_no_pulse_here_is_no(pulses: Pulses) -> None:
    done = pulses.ready("--worker", "nobody")
    assert done.exit_code == 6
    assert "no pulse of nobody" in done.stdout
