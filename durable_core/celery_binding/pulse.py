"""
A worker's pulse: a thread of its main process writes it, and the main loop says there that it turns.

The thread proves that the process runs, and asks nobody else for it: a worker that waits for its broker has a pulse,
one that is stopped has none. Whether the consumer stands, and the loop turns, are two more facts in it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from celery import bootsteps, signals
from celery.worker import state as worker_state

from durable_core import pulse
from durable_core.celery_binding.durable import Durable
from durable_core.pulse import Pulse, State

log = logging.getLogger("durable.worker")

_ENDS = {getattr(bootsteps, "CLOSE", 2), getattr(bootsteps, "TERMINATE", 3)}
"""The states of a blueprint, which Celery's stubs do not name, in which it does not come back."""


_CLIENTS = frozenset({"redis", "kombu", "amqp"})
_SOCKETS = frozenset({"socket", "ssl", "selectors"})


class Heart:
    """One worker of this process: what is known of its consumer, written down until it ends."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._folder: Path | None = None
        self._file: Path | None = None
        now = time.monotonic()
        self._state, self._since = State.STARTING, now
        self._turned_at: float | None = None
        self._taken, self._taken_at = 0, now
        self._consumer: Any = None
        self._loop_thread: int | None = None

    def start(self) -> None:
        try:
            self._folder = pulse.made_folder()
            pulse.tidy(self._folder)
        except Exception as error:
            # Without a pulse the worker works all the same.
            log.warning("pulse_not_written", extra={"error": str(error)[:300]})
            return
        threading.Thread(target=self._run, name="durable-pulse", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        if self._file is not None:
            pulse.forget(self._file)

    def consumes(self, consumer: Any) -> Any:
        """From now on; the entry of the loop's timer that says so, to be cancelled with it."""
        self._consumer, self._loop_thread = consumer, threading.get_ident()
        self._turned_at = time.monotonic() if consumer.hub is not None else None
        self._becomes(State.CONSUMING)
        if consumer.hub is None:
            return None  # its timer is a thread of its own, and proves nothing
        return consumer.timer.call_repeatedly(pulse.WRITTEN_EVERY, self._turned)

    def consumes_no_more(self, consumer: Any) -> None:
        """Its connection is lost, or its worker ends."""
        self._consumer = None
        ends = consumer.blueprint.state in _ENDS
        self._becomes(State.ENDING if ends else State.RECONNECTING)

    def _turned(self) -> None:
        self._turned_at = time.monotonic()

    def _becomes(self, state: State) -> None:
        self._state, self._since = state, time.monotonic()

    def _run(self) -> None:
        said = stopped = False
        while not stopped:
            try:
                self._beat()
                said = False
            except Exception as error:
                # A full disk, most likely: a pulse that grows old says that nobody knows.
                if not said:
                    log.warning("pulse_not_written", extra={"error": str(error)[:300]})
                said = True
            stopped = self._stop.wait(pulse.WRITTEN_EVERY)
        if self._file is not None:
            pulse.forget(self._file)

    def _beat(self) -> None:
        assert self._folder is not None
        self._file = pulse.write(self._now(), self._folder)

    def _now(self) -> Pulse:
        now = time.monotonic()
        taken = sum(worker_state.total_count.values())
        if taken != self._taken:
            self._taken, self._taken_at = taken, now
        task_consumer = getattr(self._consumer, "task_consumer", None)
        return Pulse(
            worker=self._worker.hostname,
            app=str(self._worker.app.main or ""),
            pid=os.getpid(),
            space=pulse.space(),
            began=pulse.began(os.getpid()),
            at=now,
            state=self._state,
            since=self._since,
            turned_at=self._turned_at,
            runs_tasks_itself=self._runs_tasks_itself,
            waits_for_broker=_inside_the_client(self._loop_thread),
            active=len(worker_state.active_requests),
            slots=self._slots(),
            taken_at=self._taken_at,
            queues=tuple(sorted(queue.name for queue in getattr(task_consumer, "queues", ()) or ())),
        )

    def _slots(self) -> int:
        """As many as the pool has now: it may be scaled, and a solo pool is one whatever `-c` says."""
        if self._runs_tasks_itself:
            return 1
        size = getattr(self._worker.pool, "num_processes", None)
        return size if isinstance(size, int) else int(self._worker.concurrency)

    @property
    def _runs_tasks_itself(self) -> bool:
        return bool(self._worker.pool_cls.__module__.endswith(".solo"))


def _inside_the_client(thread: int | None) -> bool:
    """
    Whether the innermost code that this thread runs is the broker's client. A broker that takes connections and says
    nothing keeps a main loop there for minutes, whatever its time-outs, for the client tries again.
    """
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None and frame.f_globals.get("__name__") in _SOCKETS:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).split(".", 1)[0] in _CLIENTS


def connect(durable: Durable) -> None:
    """Give this app's workers a pulse: from the moment their pool stands, so that no thread is there when it forks."""
    app: Any = durable.app

    class PulseOfWorker(bootsteps.StartStopStep):
        requires = ("celery.worker.components:Pool",)

        def start(self, parent: Any) -> None:
            parent._durable_heart = Heart(parent)
            parent._durable_heart.start()

        def stop(self, parent: Any) -> None:
            """Nothing yet: handlers may still end, and a worker that lets them is alive."""

        terminate = stop

    class PulseOfConsumer(bootsteps.StartStopStep):
        requires = ("celery.worker.consumer:Tasks",)

        def __init__(self, parent: Any, **options: Any) -> None:
            self._entry: Any = None
            super().__init__(parent, **options)

        def start(self, parent: Any) -> None:
            self._entry = _heart(parent).consumes(parent)

        def stop(self, parent: Any) -> None:
            entry, self._entry = self._entry, None
            if entry is not None:
                entry.cancel()
            _heart(parent).consumes_no_more(parent)

        shutdown = stop

    def ends(sender: Any = None, **_: Any) -> None:
        heart = getattr(sender, "_durable_heart", None)
        if getattr(sender, "app", None) is app and heart is not None:
            heart.stop()

    app.steps["worker"].add(PulseOfWorker)
    app.steps["consumer"].add(PulseOfConsumer)
    signals.worker_shutdown.connect(ends, weak=False, dispatch_uid=f"durable-{id(app)}-pulse")


def _heart(consumer: Any) -> Heart:
    heart: Heart = consumer.controller._durable_heart
    return heart
