"""Workers whose pulse lies in a folder of the test's own, and both ways to ask for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from durable_core import pulse
from durable_core.cases import journal
from durable_core.cli.main import main
from durable_core.database.statements import DEFAULT_SCHEMA, use_schema
from durable_core.pulse import Read, Verdict
from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopWorker, wait_until
from tests.celery.world import World


class Pulses:
    """One worker at a time, on the queue `pulse`. What takes a minute by default is judged by shorter bounds."""

    def __init__(self, world: World, nodes: Nodes, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._world, self._nodes, self._folder, self._patch = world, nodes, folder, patch
        self.started: list[ShopWorker] = []

    def start(
        self, *arguments: str, broker: str | None = None, transport: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
    ) -> ShopWorker:  # fmt: skip
        """A worker that is starting; `ready()` waits for it."""
        given = {pulse.FOLDER_VARIABLE: str(self._folder), "SHOP_TRANSPORT": json.dumps(transport or {})}
        if broker is not None:
            given["CELERY_BROKER_URL"] = broker
        worker = self._nodes.worker(
            "pulse", "-Q", "durable.pulse", *(arguments or ("-c", "1")), environment=given | (environment or {})
        )
        self.started.append(worker)
        return worker

    def ready(self, *line: str, broker: str | None = None) -> Result:
        """`durable probe --ready` in this process, on the world's database, and its broker or that of this address."""
        self._patch.setenv("DURABLE_REDIS_URL", broker or self._world.broker.url)
        url = self._world.engine.url.render_as_string(hide_password=False)
        try:
            return CliRunner().invoke(main, ["--database-url", url, "probe", "--ready", *line])
        finally:
            use_schema(DEFAULT_SCHEMA)
            journal.use_key(None)

    def quick(self) -> int:
        """The exit code of the quick form, as a container asks it."""
        command = [sys.executable, "-m", "durable_core.probe", "--live"]
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    def read(self) -> Read:
        (one,) = pulse.judged(None)
        return one

    def becomes(self, verdict: Verdict) -> Read:
        wait_until(lambda: self.read().verdict is verdict, f"the pulse says {verdict}", every=0.2)
        return self.read()


@contextmanager
def pulses_of(world: World, nodes: Nodes, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Pulses]:
    patch.setenv(pulse.FOLDER_VARIABLE, str(folder))
    patch.setattr(pulse, "STOPPED_AFTER", 6.0)
    pulses = Pulses(world, nodes, folder, patch)
    try:
        yield pulses
    finally:
        for worker in pulses.started:
            worker.process.kill("SIGKILL")
            worker.teardown()
