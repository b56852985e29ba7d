"""`install(app)`: the kinds and the sweeps as Celery tasks, the hints after commit, the missing beat entries."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from durable_core import kinds, tracing, wakes
from durable_core.cases import journal, passing
from durable_core.celery_binding import pulse, tasks, transport, workers
from durable_core.celery_binding.durable import Durable
from durable_core.database.statements import use_schema
from durable_core.errors import NotInstalled
from durable_core.sweeps import SWEEPS

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
        tasks.register_sweep(durable, sweep.name)
    for contract, registry in kinds.CONTRACTS.items():
        register = partial(tasks.register_kind, durable, contract)
        for kind in registry:
            register(kind)
        registry.when_added(register)
    workers.connect(durable)
    pulse.connect(durable)
    wakes.use_carrier(durable.carrier)
    # Asked at the first statement, for a process that only enqueues reads no other setting.
    use_schema(lambda: durable.settings.schema)
    tracing.use(lambda: durable.settings.trace)
    passing.use(SoftTimeLimitExceeded)
    journal.use_key(lambda: durable.settings.journal_key)

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
