"""The probe of a worker whose broker is away, frozen, or silent to that worker alone: live, and not ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from durable_core import pulse
from durable_core.celery_binding.transport import guarded
from durable_core.pulse import Verdict
from tests.celery.nodes import wait_until
from tests.celery.pulses import Pulses, pulses_of
from tests.faults.conftest import Stage
from tests.relay import Relay


@pytest.fixture
def pulses(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulses]:
    with pulses_of(stage, stage.nodes, tmp_path / "pulses", monkeypatch) as pulses:
        yield pulses


@pytest.mark.parametrize(
    ("mood", "verdict"), [("SIGKILL", Verdict.BROKER_LOST), ("SIGSTOP", Verdict.BROKER_SILENT)], ids=["gone", "frozen"]
)
def test_a_worker_without_its_broker_is_live_and_not_ready_until_the_broker_is_back(
    pulses: Pulses, stage: Stage, monkeypatch: pytest.MonkeyPatch, mood: str, verdict: Verdict
) -> None:
    monkeypatch.setattr(pulse, "STUCK_AFTER", 5.0)
    server = stage.broker.container.process
    pulses.start().ready()
    name = pulses.becomes(Verdict.IDLE).worker
    server.kill(mood)
    assert pulses.becomes(verdict).live
    assert pulses.quick() == 0
    away = pulses.ready("--worker", name)
    assert away.exit_code == 6
    assert "not ready: broker: " in away.stdout
    assert f"{name} of shop: alive but not consuming" in away.stdout
    if mood == "SIGSTOP":
        server.kill("SIGCONT")
    else:
        server.start()
    pulses.becomes(Verdict.IDLE)
    wait_until(lambda: pulses.ready("--worker", name).exit_code == 0, "it is ready", every=1)


def test_a_worker_that_starts_without_a_broker_is_live(pulses: Pulses, stage: Stage) -> None:
    stage.broker.container.process.kill("SIGKILL")
    worker = pulses.start()
    assert pulses.becomes(Verdict.BROKER_AWAITED).live
    stage.broker.container.process.start()
    worker.ready()
    pulses.becomes(Verdict.IDLE)


def test_a_main_loop_that_waits_for_its_broker_without_a_bound_is_live_however_long(
    pulses: Pulses, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host set no time-out, so its next look at the broker never ends; a restart would not make that one speak."""
    pulses.start(transport={"socket_timeout": None, "health_check_interval": 2}).ready()
    pulses.becomes(Verdict.IDLE)
    monkeypatch.setattr(pulse, "STUCK_AFTER", 5.0)
    monkeypatch.setattr(pulse, "LOST_AFTER", 5.0)
    stage.broker.container.process.kill("SIGSTOP")
    assert pulses.becomes(Verdict.BROKER_SILENT).live
    stage.broker.container.process.kill("SIGCONT")
    pulses.becomes(Verdict.IDLE)


def test_a_consumer_whose_connection_alone_fell_silent_is_told_from_an_idle_one(
    pulses: Pulses, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers everybody else; the worker's loop turns, and its read for messages has no end."""
    monkeypatch.setattr(pulse, "UNTAKEN_AFTER", 3.0)
    url = stage.broker.url
    relay = Relay("127.0.0.1", stage.broker.container.port)
    broker = guarded(url.replace(f":{stage.broker.container.port}/", f":{relay.port}/"))
    try:
        pulses.start(broker=broker, transport={"health_check_interval": 3600, "socket_timeout": 3600}).ready()
        name = pulses.becomes(Verdict.IDLE).worker
        wait_until(lambda: pulses.ready("--worker", name).exit_code == 0, "it is idle, and ready")
        # From its next read for messages on, its connection says nothing more.
        relay.silence_before(b"BRPOP")
        rows = [stage.commit(stage.kinds.plain, queue="pulse")]

        def told() -> bool:
            # What was on its way before the silence is still carried out.
            if stage.row(rows[-1]).state == "sent":
                rows.append(stage.commit(stage.kinds.plain, queue="pulse"))
            return "MESSAGES_LIE" in pulses.ready("--worker", name).stdout

        wait_until(told, "messages lie and nobody takes them", every=1)
        done = pulses.ready("--worker", name)
        assert done.exit_code == 6
        assert "alive but not consuming: it has a free slot and took nothing" in done.stdout
        assert "messages lie in durable.pulse" in done.stdout
        assert pulses.read().live
    finally:
        relay.close()
        stage.broker.client.delete("durable.pulse")
