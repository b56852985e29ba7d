"""A synchronous standby: `pg_receivewal`, which acknowledges what it has written to disk, as a standby's disk does."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile

from sqlalchemy import Engine, make_url, text

from durable_core.local.postgres import find_binaries
from tests.celery.nodes import wait_until
from tests.faults.servers import Cluster

NAME = "standby"


class Standby:
    """Commits wait for it from `require` on; frozen it acknowledges nothing, and its connection stays."""

    def __init__(self, cluster: Cluster, engine: Engine) -> None:
        self._cluster, self._engine = cluster, engine
        self._folder = tempfile.TemporaryDirectory(prefix="durable-standby-")
        url = make_url(cluster.url).set(drivername="postgresql", query={"application_name": NAME})
        self._process = subprocess.Popen(
            [
                str(find_binaries() / "pg_receivewal"), "--synchronous", "--no-password", "--status-interval=1",
                "-D", self._folder.name, "-d", url.render_as_string(hide_password=False),
            ],
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "LC_ALL": "C"},
        )  # fmt: skip
        wait_until(lambda: self._scalar("select count(*) from pg_stat_replication") == 1, "the standby streams")

    def require(self) -> None:
        """From now on a COMMIT returns when the standby has it on its disk too."""
        self._cluster.set(synchronous_standby_names=NAME)
        wait_until(
            lambda: self._scalar("select count(*) from pg_stat_replication where sync_state = 'sync'") == 1,
            "the standby is synchronous",
        )

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def give_up(self) -> None:
        """What an operator does when the standby will not come back: commits wait for it no more."""
        self._cluster.set(synchronous_standby_names="")

    def waiting(self) -> list[int]:
        """The sessions whose COMMIT waits for it."""
        with self._engine.connect() as connection:
            found = connection.execute(text("select pid from pg_stat_activity where wait_event = 'SyncRep'"))
            return [row.pid for row in found]

    def remove(self) -> None:
        self.give_up()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _scalar(self, sql: str) -> object:
        with self._engine.connect() as connection:
            return connection.scalar(text(sql))
