"""
Hints on their way to the broker, which may be down, slow or frozen: no caller waits for it, no hook raises.

What is not published is no loss: `durable.dispatch` finds the row.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import Connection, Queue, exceptions
from kombu.exceptions import OperationalError
from kombu.utils.uuid import uuid

from durable_core.wakes import Hint

log = logging.getLogger("durable.wake")

QUEUE_PREFIX = "durable."
"""The Redis queue behind `queue="mail"` is `durable.mail`: never shared with other tasks."""

MOST_WAITING = 10_000
"""Hints that wait in memory for the publishing thread; more are dropped and counted."""

SOCKET_SECONDS = 2.0
"""A publish or a connect that takes longer is given up; kombu's own default is to wait for ever."""

BATCH = 100
"""Messages in one round trip: of an error in it, any number of them may have gone out."""

BATCH_FAILED: tuple[type[Exception], ...] = (
    (exceptions.BatchPublishError,) if hasattr(exceptions, "BatchPublishError") else ()  # from kombu 5.7
)

BREAKER_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0)
"""After each failure in a row nothing is tried for so long; hints of that time are left to dispatch."""


def broker_queue(name: str) -> Queue:
    """
    The broker's queue of a durable queue, on the default exchange.

    A named exchange would keep its bindings in Redis, where FLUSHALL takes them away under
    live workers; the default exchange needs none.
    """
    full = f"{QUEUE_PREFIX}{name}"
    return Queue(full, routing_key=full, durable=True)


class _Line:
    """One bounded connection to the broker, opened when needed and dropped after an error. For one thread."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._queues: dict[str, Queue] = {}

    def _open(self) -> Connection:
        if self._connection is None:
            self._connection = self._app.connection_for_write(
                connect_timeout=SOCKET_SECONDS,
                transport_options={
                    "socket_timeout": SOCKET_SECONDS,
                    "socket_connect_timeout": SOCKET_SECONDS,
                    "retry_on_timeout": False,
                    "max_retries": 0,
                },
            )
        return self._connection

    @property
    def usable(self) -> bool:
        """Not in a forked child: the socket is its parent's."""
        return self._pid == os.getpid()

    def drop(self) -> None:
        connection, self._connection = self._connection, None
        self._queues = {}
        if connection is not None and self.usable:
            try:
                connection.release()
            except Exception:
                log.debug("broker_connection_close_failed", exc_info=True)

    def __del__(self) -> None:
        """A thread's line ends with its thread."""
        self.drop()

    def _declared(self, name: str) -> Queue:
        """The broker's queue, declared once per connection: kombu would bind it anew for every message."""
        if name not in self._queues:
            made = broker_queue(name)
            made(self._open().default_channel).declare()
            self._queues[name] = made
        return self._queues[name]

    def publish(self, hints: Iterable[Hint]) -> int:
        count = 0
        app: Any = self._app
        with app.amqp.Producer(self._open(), auto_declare=False) as producer, _batch(producer):
            for hint in hints:
                app.send_task(
                    hint.kind,
                    kwargs={"id": hint.id},
                    # The first hint of a row goes by the row's id, so that Flower's search finds it.
                    task_id=hint.id if hint.first else uuid(),
                    queue=self._declared(hint.queue),
                    declare=[],
                    priority=hint.priority,
                    kwargsrepr=repr({"kind": hint.kind, "id": hint.id, "attempt": hint.attempt}),
                    argsrepr="()",
                    producer=producer,
                    retry=False,
                    ignore_result=True,
                    add_to_parent=False,
                )
                count += 1
        return count

    def depths(self, queues: Iterable[str]) -> dict[str, int]:
        channel = self._open().default_channel
        found: dict[str, int] = {}
        for name in queues:
            # Not passive: a passive declare of an empty Redis queue is a 404.
            declared: Any = broker_queue(name)(channel).queue_declare(passive=False)
            found[name] = int(declared.message_count)
        return found


@contextmanager
def _batch(producer: Any) -> Iterator[None]:
    """Messages on their way in one round trip for BATCH of them, where kombu can (from 5.7); else one by one."""
    if not hasattr(producer, "batch"):
        yield
        return
    try:
        with producer.batch(max_size=BATCH):
            yield
    except BATCH_FAILED as failed:
        # It says no more than that; the reason is in its cause, there after the whole first message of the batch.
        cause = failed.__cause__ or failed
        reason = str(cause).rpartition(" of pipeline caused error: ")[2]
        raise OperationalError(f"{type(cause).__name__}: {reason}") from failed


class CeleryCarrier:
    """Carries hints by Celery messages: a kind and an id, never a payload."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.dropped = 0
        self.failures = 0
        self._lines = threading.local()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: queue.Queue[Hint] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._in_a_row = 0
        self._paused_until = 0.0

    def offer(self, hints: Iterable[Hint]) -> None:
        """Queue hints for the publishing thread, which starts with the first, anew in a forked child."""
        if self._pid != os.getpid():
            self._begin()
        if time.monotonic() < self._paused_until:
            self.dropped += sum(1 for _ in hints)
            return
        for hint in hints:
            try:
                self._waiting.put_nowait(hint)
            except queue.Full:
                self.dropped += 1
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="durable-hints", daemon=True)
                self._thread.start()

    def publish(self, hints: Iterable[Hint]) -> int:
        """Publish now, on the calling thread. Raises what the broker raises, within seconds."""
        with self._own_line() as line:
            return line.publish(hints)

    def depths(self, queues: Iterable[str]) -> Mapping[str, int]:
        with self._own_line() as line:
            return line.depths(queues)

    def flush(self, seconds: float) -> bool:
        """Wait until the thread has published what waits, at most so long; for tests and short scripts."""
        until = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)
        return not self._waiting.unfinished_tasks

    @contextmanager
    def _own_line(self) -> Iterator[_Line]:
        """The calling thread's line, kept for its next use unless this one fails."""
        line: _Line | None = getattr(self._lines, "own", None)
        if line is None or not line.usable:
            line = self._lines.own = _Line(self._app)
        try:
            yield line
        except BaseException:
            line.drop()
            raise

    def _run(self) -> None:
        while True:
            hints = [self._waiting.get()]
            while len(hints) < 500:
                try:
                    hints.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            self._publish_or_pause(hints)
            for _ in hints:
                self._waiting.task_done()

    def _publish_or_pause(self, hints: list[Hint]) -> None:
        if time.monotonic() < self._paused_until:
            self.dropped += len(hints)
            return
        try:
            self.publish(hints)
            self._in_a_row = 0
        except Exception as error:
            self.failures += 1
            self.dropped += len(hints)
            pause = BREAKER_SECONDS[min(self._in_a_row, len(BREAKER_SECONDS) - 1)]
            self._in_a_row += 1
            self._paused_until = time.monotonic() + pause
            log.warning(
                "wake_publish_failed",
                extra={"hints": len(hints), "pause_s": pause, "error": f"{type(error).__name__}: {error}"[:200]},
            )
