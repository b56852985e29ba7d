"""
The parent of a prefork pool watches its children: what a killed one held is given back at once, not after its lease.

Two may see one death, this and the reaper; both name state and owner or fence, so it counts once.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from durable_core.celery_binding.durable import Durable
from durable_core.claims.claim import owner_nonce
from durable_core.deliveries.sweep import give_back

log = logging.getLogger("durable.worker")

LOOK_EVERY_SECONDS = 0.5
PASSES = 3
"""A killed child's backend may still hold a row's lock for a moment; what stays locked is left to the lease."""


class ChildWatch:
    """A thread in the worker's main process. It ends with the process and raises at nobody."""

    def __init__(self, durable: Durable, pool: Any) -> None:
        self._durable, self._pool = durable, pool
        self._pid = os.getpid()
        self._stop = threading.Event()

    def start(self) -> bool:
        """Whether there are children to watch: threads and solo pools have none."""
        if self._alive() is None:
            return False
        threading.Thread(target=self._run, name="durable-children", daemon=True).start()
        return True

    def stop(self) -> None:
        if self._pid == os.getpid():
            self._stop.set()

    def _alive(self) -> set[int] | None:
        processes = getattr(getattr(self._pool, "_pool", None), "_pool", None)
        if not isinstance(processes, list) or not all(hasattr(process, "pid") for process in processes):
            return None
        return {process.pid for process in list(processes) if process.pid and process.exitcode is None}

    def _run(self) -> None:
        before = self._alive() or set()
        while not self._stop.wait(LOOK_EVERY_SECONDS):
            try:
                now = self._alive()
                if now is None:
                    continue
                for pid in before - now:
                    self._give_back(pid)
                before = now
            except Exception:
                # The lease does it later; a watch that died would leave every later death to it too.
                log.warning("children_not_watched", exc_info=True)

    def _give_back(self, pid: int) -> None:
        holder = self._durable.settings.holder()
        for _ in range(PASSES):
            moved = give_back(self._durable.database, owner_nonce(), pid, heartbeat_seconds=holder.heartbeat_seconds)
            if moved:
                log.warning("child_lost", extra={"owner_pid": pid, "rows": moved})
                return
            if self._stop.wait(LOOK_EVERY_SECONDS / 2):
                return
