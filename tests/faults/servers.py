"""A Postgres of a test's own: stopped, killed and started again on the same port and the same data."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil
from sqlalchemy import NullPool, create_engine, text

from durable_core.local.postgres import Postgres
from durable_core.local.server import Record, account_for_servers, born_at
from tests.celery.nodes import wait_until

ENDINGS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT, "killed": signal.SIGKILL}
"""How Postgres may end: `fast` rolls back and leaves, `immediate` leaves and recovers at the next start."""


class Cluster:
    """One Postgres. Its settings are those of a server that keeps what it acknowledged, unless the test says other."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="durable-faults-"))
        self._folder.chmod(0o755)  # root's servers run as another account, which must reach their data
        self._server = Postgres(self._folder, settings=settings)
        self.url = self._server.start()
        record = self._server._record
        assert record is not None
        self.port, self.pid = record.port, record.pid

    @property
    def data(self) -> Path:
        """The data folder, for a test that adds to its configuration."""
        place = self._server._recorded_place()
        assert place is not None
        return place / "data"

    def log(self) -> str:
        """What the server wrote since it was last started."""
        return self._server.log.read_text(errors="replace")

    def backends(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.pid).children()}

    def end(self, how: str = "fast") -> None:
        """End it and return when it is gone, its backends with it."""
        backends = self.backends()
        os.kill(self.pid, ENDINGS[how])
        child = self._server._child
        assert child is not None
        child.wait(60)
        wait_until(lambda: not any(_runs(pid) for pid in backends), "its backends are gone")

    def start_again(self) -> None:
        """Start it on its port and data; it answers when this returns."""
        place = self._server._recorded_place()
        assert place is not None
        child = self._server._launch(place, self.port, account_for_servers())
        self._server._child, self.pid = child, child.pid
        record = self._server._record
        assert record is not None
        self._server._record = Record(child.pid, born_at(child.pid) or "", self.port, record.recipe)
        assert self._server._became_ready(self.port, within=60.0, child=child), self.log()

    def freeze(self) -> None:
        """Stop the postmaster and every backend: the server answers nobody and ends nothing."""
        for pid in (self.pid, *self.backends()):
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in (*self.backends(), self.pid):
            os.kill(pid, signal.SIGCONT)

    def set(self, **settings: str) -> None:
        """ALTER SYSTEM and reload, until a new session has it; open ones follow where the setting allows it."""
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        loaded = text("select pg_conf_load_time()")
        with engine.connect() as connection:
            before = connection.scalar(loaded)
            for name, value in settings.items():
                connection.execute(text(f"alter system set {name} = '{value}'"))
            connection.execute(text("select pg_reload_conf()"))

        def has_it() -> bool:
            with engine.connect() as connection:
                return bool(connection.scalar(loaded) > before)

        wait_until(has_it, "the server has read its settings again")

    def remove(self) -> None:
        self._server.stop(remove=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
