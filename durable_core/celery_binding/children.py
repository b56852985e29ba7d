"""
The parent of a prefork pool watches its children: what a dead one held is given back at once, not after its lease.

Two may see one death, this and the reaper; both name state and owner or fence, so it counts
once. At a shutdown the handlers may go on for the grace; then the children that still run
one are killed, and what they held is given back as a shutdown.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

from durable_core.celery_binding.durable import Durable
from durable_core.claims.claim import owner_nonce
from durable_core.deliveries.sweep import give_back, holding_pids

log = logging.getLogger("durable.worker")

LOOK_EVERY_SECONDS = 0.5
PASSES = 4
"""How many looks a dead child's rows are asked for: its backend may still hold a row's lock for a moment. What stays
locked is left to the lease."""


class ChildWatch:
    """A thread in the worker's main process. It ends with the process and raises at nobody."""

    def __init__(self, durable: Durable, pool: Any) -> None:
        self._durable, self._pool = durable, pool
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="durable-children", daemon=True)
        self._seen: set[int] = set()
        self._dead: dict[int, int] = {}
        self._kill_at: float | None = None

    def start(self) -> bool:
        """Whether there are children to watch: threads and solo pools have none."""
        alive = self._alive()
        if alive is None:
            return False
        self._seen = alive
        self._thread.start()
        return True

    def shutting_down(self) -> None:
        """From now on a child's end is part of a shutdown; after the grace the ones still at work are killed."""
        if self._pid == os.getpid() and self._kill_at is None:
            self._kill_at = time.monotonic() + self._durable.settings.shutdown_grace

    def stop(self) -> None:
        """Look a last time, so that no death just before the parent's own end goes unseen."""
        if self._pid != os.getpid() or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=5)
        for _ in range(PASSES):
            self._look()
            if not self._dead:
                return
            time.sleep(0.1)

    def _alive(self) -> set[int] | None:
        processes = getattr(getattr(self._pool, "_pool", None), "_pool", None)
        if not isinstance(processes, list) or not all(hasattr(process, "pid") for process in processes):
            return None
        return {process.pid for process in list(processes) if process.pid and process.exitcode is None}

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            now = self._alive()
            if now is None:
                return
            self._dead.update(dict.fromkeys(self._seen - now, PASSES))
            self._seen = now
            self._give_back(now)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill(now)
        except Exception:
            # The lease does it later; a watch that died would leave every later death to it too.
            log.warning("children_not_watched", exc_info=True)

    def _kill(self, alive: set[int]) -> None:
        """End the children that still run a handler; the others end by themselves."""
        for pid in holding_pids(self._durable.database, owner_nonce()) & alive:
            log.warning("child_killed_at_shutdown", extra={"owner_pid": pid})
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _give_back(self, alive: set[int]) -> None:
        """Ask for the rows of all dead children at once: one that held nothing must not delay the others."""
        # A number that is a child's again belongs to the living.
        self._dead = {pid: passes - 1 for pid, passes in self._dead.items() if passes and pid not in alive}
        if not self._dead:
            return
        moved = give_back(
            self._durable.database,
            owner_nonce(),
            set(self._dead),
            shutdown=self._kill_at is not None,
        )
        if moved:
            log.warning("children_lost", extra={"pids": sorted(self._dead), "rows": moved})
