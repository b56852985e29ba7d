"""A replica that answers questions: a server of its own that replays what the primary sends, and stops when told."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, make_url, text

from durable_core.local.postgres import Postgres, _give
from durable_core.local.server import Account
from tests.celery.nodes import wait_until
from tests.faults.servers import Cluster


class _Copy(Postgres):
    """A cluster that is a copy of another, and follows it."""

    def __init__(self, directory: Path, primary: str) -> None:
        super().__init__(directory)
        self._primary = make_url(primary).set(drivername="postgresql")
        self.folder.mkdir(parents=True)
        (self.folder / "password").write_text(str(self._primary.password))

    def _make_cluster(self, binaries: Path, place: Path, account: Account | None) -> None:
        new = Path(tempfile.mkdtemp(prefix="new-", dir=place))
        if account is not None:
            _give(new, account)
        copying = self._spawn(
            [
                str(binaries / "pg_basebackup"), "-D", str(new / "data"), "--write-recovery-conf", "--checkpoint=fast",
                "--no-sync", "-d", self._primary.render_as_string(hide_password=False),
            ],
            account,
        )  # fmt: skip
        assert copying.wait(60) == 0, self.log.read_text(errors="replace")
        (new / "data").rename(place / "data")

    def _make_usable(self, port: int) -> None:
        """It is the primary's copy: there is nothing to add, and nothing could be."""


class Replica(Cluster):
    """Follows a primary, whose commits do not wait for it."""

    def __init__(self, primary: Cluster) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="durable-faults-"))
        self._folder.chmod(0o755)
        self._server = _Copy(self._folder, primary.url)
        self.url = self._server.start()
        record = self._server._record
        assert record is not None
        self.port, self.pid = record.port, record.pid
        self._engine = create_engine(self.url, isolation_level="AUTOCOMMIT")

    def pause(self) -> None:
        """From now on it lags: what the primary commits reaches it, and is not seen there."""
        self._run("select pg_wal_replay_pause()")
        wait_until(lambda: self._run("select pg_get_wal_replay_pause_state()") == "paused", "the replay stands still")

    def go_on(self) -> None:
        self._run("select pg_wal_replay_resume()")

    def remove(self) -> None:
        self._engine.dispose()
        self._server.stop(remove=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, sql: str) -> object:
        with self._engine.connect() as connection:
            return connection.scalar(text(sql))
