"""
Rescue goes on without beat: a thread in each worker's main process runs dispatch and reap when nobody else does.

It has connections of its own, open while it looks, so a busy pool cannot hold it up, and is
no part of the heartbeat, so a frozen broker cannot hold that up. Any number may find a sweep late at once:
one of them runs it.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from durable_core.celery_binding.durable import Durable
from durable_core.database.connections import Database
from durable_core.sweeps import late, run_sweep

SAY_AGAIN_SECONDS = 600.0
"""A missing beat is told by each worker this often, not at every look."""

log = logging.getLogger("durable.worker")


class Rescue:
    """Looks once a heartbeat. It ends with its process and raises at nobody."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._say_again_at = 0.0
        self._database: Database | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="durable-rescue", daemon=True).start()

    def stop(self) -> None:
        if self._pid == os.getpid():
            self._stop.set()

    def after_fork(self) -> None:
        """In a child: the parent's connections, if it was forked amid a look, are left to the parent."""
        if self._database is not None:
            self._database.forget_connections()

    def _run(self) -> None:
        while not self._stop.wait(self._durable.settings.heartbeat_seconds):
            try:
                self._look()
            except Exception:
                # Whatever is away comes back, or somebody else's sweep gets through.
                log.debug("rescue_failed", exc_info=True)
            finally:
                # Kept open it would be one more connection of every worker, at rest almost all the time.
                if self._database is not None:
                    self._database.renew()

    def _look(self) -> None:
        if self._database is None:
            self._database = self._durable.database.background()
        with self._database.autocommit() as connection:
            found = late(connection, self._durable.settings.sweeps())
        if found and time.monotonic() >= self._say_again_at:
            self._say_again_at = time.monotonic() + SAY_AGAIN_SECONDS
            log.warning("sweeps_late_and_run_by_a_worker", extra={"sweeps": [sweep.name for sweep in found]})
        for sweep in found:
            try:
                run_sweep(self._database, sweep, self._durable.settings.bounds(), by_a_worker=True)
            except Exception:
                # A broker that is away fails dispatch, and must not keep reap from its rows.
                log.debug("rescue_failed", extra={"sweep": sweep.name}, exc_info=True)
