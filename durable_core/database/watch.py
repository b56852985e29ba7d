"""
A bound on what the database has no bound for, and a look at what it acknowledged.

COMMIT has no time limit on the server: it may wait for a standby that is gone, and the answer
may be lost on a path that drops packets. A thread of this process shuts the socket of an answer that is
overdue; to the caller that is a lost connection, whose COMMIT is unknown and is asked of the row.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg.pq import TransactionStatus

log = logging.getLogger("durable.commit")

LOOK_EVERY_SECONDS = 1.0
IDLE_LOOKS = 60
"""The thread ends after so many looks at nothing, and starts again with the next answer that is waited for."""

NOT_REPLICATED = "SyncRepWaitForLSN"
"""The function of Postgres that says, in a warning, that a commit did not wait for its standby. It names itself in
every language, as the warning's text does not."""


class ReplicationUnconfirmed(psycopg.OperationalError):
    """COMMIT came back without its standby: it stands here and now, and may be gone after a failover."""


@dataclass(eq=False)
class _Open:
    """One answer that is waited for. `socket` is our own duplicate: the driver may close its number at any time."""

    driver: psycopg.Connection[object]
    socket: int
    seconds: float
    until: float = math.inf
    replicated: bool = True

    def begin(self) -> None:
        """The time runs from here."""
        self.until = time.monotonic() + self.seconds

    @property
    def overdue(self) -> bool:
        """Whether the time is up and the server still owes an answer; a session that is idle was answered."""
        return self.until <= time.monotonic() and self.driver.info.transaction_status != TransactionStatus.IDLE

    def heard(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.source_function == NOT_REPLICATED:
            self.replicated = False


class Watch:
    """Bounds answers of the database, for any number of threads and connections of one process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: set[_Open] = set()
        self._running = False

    @contextmanager
    def over(
        self, driver: psycopg.Connection[object], seconds: float, *, begun: bool = True
    ) -> Iterator[Callable[[], None]]:
        """
        While this lasts, the connection has so many seconds to answer, and a second more; then it is lost.

        The time runs at once, or, unless `begun`, from a call of what this gives.

        Raises ReplicationUnconfirmed at the end, when a commit inside did not wait for its standby.
        """
        if self._pid != os.getpid():
            self._reset()
        waited_for = _Open(driver, os.dup(driver.fileno()), seconds)
        if begun:
            waited_for.begin()
        driver.add_notice_handler(waited_for.heard)
        with self._lock:
            self._open.add(waited_for)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="durable-watch", daemon=True).start()
        try:
            yield waited_for.begin
        finally:
            with self._lock:
                self._open.discard(waited_for)
            os.close(waited_for.socket)
            driver.remove_notice_handler(waited_for.heard)
        if not waited_for.replicated:
            raise ReplicationUnconfirmed("COMMIT did not wait for the synchronous standby")

    def _run(self) -> None:
        looks_at_nothing = 0
        while True:
            time.sleep(LOOK_EVERY_SECONDS)
            with self._lock:
                for overdue in [one for one in self._open if one.overdue]:
                    self._open.discard(overdue)
                    log.warning("database_answer_overdue")
                    _shut(overdue.socket)
                looks_at_nothing = 0 if self._open else looks_at_nothing + 1
                if looks_at_nothing > IDLE_LOOKS:
                    self._running = False
                    return


def _shut(number: int) -> None:
    """End the conversation on a socket that another thread reads from; that one gets an error."""
    shared = socket.socket(fileno=os.dup(number))
    try:
        shared.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself
    finally:
        shared.close()
