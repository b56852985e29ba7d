"""
The parent of a prefork pool watches its children: what a dead one held is given back at once, not after its lease.

Two may see one death, this and the reaper; both name state and owner or fence, so it counts
once. At a shutdown the handlers may go on for the grace; then the children that still run
one are killed, and what they held is given back as a shutdown. So is what Celery's own cold
shutdown or a TERM to the whole process group took from them.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from durable_core.celery_binding.durable import Durable
from durable_core.claims.claim import owner_nonce
from durable_core.sweeps import give_back, holding_pids

log = logging.getLogger("durable.worker")

LOOK_EVERY_SECONDS = 0.5
PASSES = 4
"""How many looks a dead child's rows are asked for: its backend may still hold a row's lock for a moment. What stays
locked is left to the lease."""

SAY_AGAIN_SECONDS = 600.0
"""That the database cannot be asked is told this often, not at every look."""

LAST_LOOK_SECONDS = 5.0
"""The parent's own end waits no longer for this."""


class ChildWatch:
    """A thread in the worker's main process. It ends with the process and raises at nobody."""

    def __init__(self, durable: Durable, pool: Any) -> None:
        self._durable, self._pool = durable, pool
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="durable-children", daemon=True)
        self._alive: dict[int, Any] = {}
        self._dead: dict[int, _Dead] = {}
        self._kill_at: float | None = None
        self._say_again_at = 0.0

    def start(self) -> bool:
        """Whether there are children to watch: threads and solo pools have none."""
        children = self._children()
        if children is None:
            return False
        self._alive = children
        self._thread.start()
        # Celery says `worker_shutdown` at the end of a warm shutdown only.
        atexit.register(self.stop)
        return True

    def shutting_down(self) -> None:
        """From now on a child's end is part of a shutdown; after the grace the ones still at work are killed."""
        if self._pid == os.getpid() and self._kill_at is None:
            self._kill_at = time.monotonic() + self._durable.settings.shutdown_grace

    def stop(self) -> None:
        """Look a last time, so that no death just before the parent's own end goes unseen."""
        if self._pid != os.getpid() or self._stop.is_set():
            return
        # Not on this thread: it may have been interrupted by a signal while it held a lock of the connection pool.
        self._stop.set()
        self._thread.join(LAST_LOOK_SECONDS)

    def _children(self) -> dict[int, Any] | None:
        """The pool's processes, as far as it still has any."""
        processes = getattr(getattr(self._pool, "_pool", None), "_pool", None)
        if not isinstance(processes, list) or not all(hasattr(process, "pid") for process in processes):
            return None
        return {process.pid: process for process in list(processes) if process.pid}

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_SECONDS):
            self._look()
        # The kernel kills what outlives this process.
        self._kill_at = time.monotonic()
        for _ in range(PASSES):
            self._look()
            if not self._alive and not self._dead:
                return
            time.sleep(0.1)

    def _look(self) -> None:
        try:
            # A pool that is closed has no list any more; its children are known from before.
            now = {
                pid: process for pid, process in {**self._alive, **(self._children() or {})}.items() if _runs(process)
            }
            for pid in self._alive.keys() - now.keys():
                self._dead[pid] = _Dead(self._alive[pid], PASSES)
            self._alive = now
            self._give_back()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill(set(now))
        except Exception:
            # The lease does it later; a watch that died would leave every later death to it too.
            if time.monotonic() >= self._say_again_at:
                self._say_again_at = time.monotonic() + SAY_AGAIN_SECONDS
                log.warning("children_not_watched", exc_info=True)

    def _kill(self, alive: set[int]) -> None:
        """End the children that still run a handler; the others end by themselves."""
        for pid in holding_pids(self._durable.database, owner_nonce()) & alive:
            log.warning("child_killed_at_shutdown", extra={"owner_pid": pid})
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _give_back(self) -> None:
        """Ask for the rows of all dead children at once: one that held nothing must not delay the others."""
        # A number that is a child's again belongs to the living.
        self._dead = {pid: dead for pid, dead in self._dead.items() if dead.passes and pid not in self._alive}
        for dead in self._dead.values():
            dead.passes -= 1
        stopping = self._kill_at is not None
        for shutdown in (False, True):
            pids = {
                pid
                for pid, dead in self._dead.items()
                if (stopping or dead.cancelled) is shutdown and (shutdown or not dead.is_fresh_and_was_told)
            }
            if pids and (moved := give_back(self._durable.database, owner_nonce(), pids, shutdown=shutdown)):
                log.warning("children_lost", extra={"pids": sorted(pids), "rows": moved})


@dataclass
class _Dead:
    """A child that has ended, and for how many looks more its rows are asked for."""

    process: Any
    passes: int

    @property
    def cancelled(self) -> bool:
        """Whether Celery ended it: in a cold shutdown, of which it says nothing before, or as a person asked."""
        return bool(getattr(self.process, "_job_terminated", False))

    @property
    def is_fresh_and_was_told(self) -> bool:
        """Ended by TERM just now: if that went to the whole group, our own is on its way, so it waits for a look."""
        # In a child billiard turns TERM into an exit with its number; the second one strikes it down.
        return self.passes == PASSES - 1 and abs(self.process.exitcode or 0) == signal.SIGTERM


def _runs(process: Any) -> bool:
    if process.exitcode is not None:
        return False
    try:
        os.kill(process.pid, 0)  # who else waited for it has its exit code
    except ProcessLookupError:
        return False
    return True
