"""`install(app)`: the kinds and the sweeps as Celery tasks, the hints after commit, the missing beat entries."""

from __future__ import annotations

import os
import threading
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery

from durable_core import kinds, wakes
from durable_core.celery_binding import tasks, transport, workers
from durable_core.celery_binding.children import ChildWatch
from durable_core.celery_binding.publish import CeleryCarrier
from durable_core.celery_binding.settings import Settings, database_of
from durable_core.database.connections import Database
from durable_core.database.statements import use_schema
from durable_core.deliveries.attempt import Worker
from durable_core.errors import DefinitionError, NotInstalled
from durable_core.sweeps import CONTROL_QUEUE, SWEEPS


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
        self.children: ChildWatch | None = None

    @cached_property
    def settings(self) -> Settings:
        return Settings.of(self.app)

    @cached_property
    def database(self) -> Database:
        use_schema(self.settings.schema)
        return database_of(self.app)

    @property
    def worker(self) -> Worker:
        """This process as a worker; anew after a fork, for it holds a pid, a thread and connections."""
        with self._lock:
            if self._worker is None or self._worker[0] != os.getpid():
                holder = self.settings.holder()
                self._worker = (
                    os.getpid(),
                    Worker(self.database, holder, time_limits=(SoftTimeLimitExceeded, TimeoutError)),
                )
            return self._worker[1]

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
                "schedule": self.settings.interval(sweep.name),
                "options": {"queue": CONTROL_QUEUE},
            }
            for sweep in SWEEPS
        }

    def check_names(self) -> None:
        """Raises DefinitionError when a kind is named like a task of the host's."""
        registered = self.app.tasks
        for kind in kinds.deliveries:
            if not tasks.is_ours(registered.get(kind.name)):
                raise DefinitionError(f"kind {kind.name!r} is named like an existing Celery task; rename one of them.")


_installed: WeakKeyDictionary[Celery, Durable] = WeakKeyDictionary()


def install(app: Celery) -> Durable:
    """
    Give a Celery app its durable work: explicit, once, and the second call returns the first's object.

    Registers one task per kind (those declared later too) and the sweeps, publishes hints
    after commits of this process, and adds the beat entries that are missing when the app
    is finalised (`durable_beat=False` turns that off). Changes no setting of the app.
    """
    if app in _installed:
        return _installed[app]
    durable = _installed[app] = Durable(app)
    transport.register()
    for sweep in SWEEPS:
        tasks.register_sweep(durable, sweep)
    for kind in kinds.deliveries:
        tasks.register_kind(durable, kind)
    kinds.deliveries.when_added(lambda kind: tasks.register_kind(durable, kind))
    workers.connect(durable)
    wakes.use_carrier(durable.carrier)

    def add_missing_entries(sender: Celery, **_: Any) -> None:
        if not durable.settings.beat:
            return
        schedule = sender.conf.beat_schedule
        present = {entry.get("task") for entry in schedule.values() if isinstance(entry, dict)}
        for name, entry in durable.beat_schedule().items():
            if entry["task"] not in present:
                schedule[name] = entry

    app.on_after_finalize.connect(add_missing_entries, weak=False, dispatch_uid="durable-beat")
    return durable


def installed(app: Celery) -> Durable:
    """The app's durable work. Raises NotInstalled when `install(app)` was never called."""
    try:
        return _installed[app]
    except KeyError:
        raise NotInstalled(
            f"Celery app {app.main!r} has no durable work: call durable_core.celery_binding.install(app)."
        ) from None
