"""What one Celery app knows of its durable work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

from billiard import common as billiard
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery

from durable_core.celery_binding.publish import CeleryCarrier
from durable_core.celery_binding.settings import Settings, database_of
from durable_core.database.connections import Database
from durable_core.deliveries.worker import Worker
from durable_core.sweeps import CONTROL_QUEUE

_told_to_end: Callable[[], bool] = getattr(billiard, "terminate_handler_fired", lambda: False)
"""Whether this pool child has received TERM; before billiard 4.3 nobody can tell."""


class Durable:
    """
    What one Celery app knows of its durable work. Settings are read when first needed.

    Nothing connects, starts a thread or reads a setting before that, so that `install` may
    be called at import.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.carrier = CeleryCarrier(app)
        self._lock = threading.Lock()
        self._worker: tuple[int, Worker] | None = None

    @cached_property
    def settings(self) -> Settings:
        return Settings.of(self.app)

    @cached_property
    def database(self) -> Database:
        return database_of(self.app)

    @property
    def worker(self) -> Worker:
        """This process as a worker; anew after a fork, for it holds a pid, a thread and connections."""
        with self._lock:
            if self._worker is None or self._worker[0] != os.getpid():
                holder = self.settings.holder()
                self._worker = (
                    os.getpid(),
                    Worker(
                        self.database,
                        holder,
                        time_limits=(SoftTimeLimitExceeded,),
                        told_to_end=_told_to_end,
                    ),
                )
            return self._worker[1]

    def stop(self) -> None:
        """End this process's heartbeat; what it still holds is left to its lease."""
        with self._lock:
            worker = self._worker
        if worker is not None and worker[0] == os.getpid():
            worker[1].heartbeat.stop()

    def after_fork(self) -> None:
        """In a child: forget the parent's sockets, lock and worker; they belong to the parent."""
        self._lock = threading.Lock()
        self._worker = None
        if "database" in self.__dict__:
            self.database.forget_connections()

    def beat_schedule(self) -> dict[str, dict[str, Any]]:
        """The entries that drive the sweeps, as `beat_schedule.py` spells them out."""
        return {
            f"durable-{sweep.name}": {
                "task": sweep.task,
                "schedule": sweep.every,
                "options": {"queue": CONTROL_QUEUE},
            }
            for sweep in self.settings.sweeps()
        }
