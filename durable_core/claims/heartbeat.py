"""One thread per process that keeps the leases of everything the process holds."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field

from sqlalchemy import Connection

from durable_core.claims.claim import Claim, Holder
from durable_core.database.connections import Database, raw
from durable_core.database.statements import Statements
from durable_core.database.transactions import run, said

log = logging.getLogger("durable.heartbeat")


@dataclass(eq=False)
class Held:
    """A claim under the heartbeat's care. `lost` is set when the database says somebody else has the row."""

    claim: Claim
    statements: Statements
    kept_until: float
    """By `time.monotonic()`: a lease after the claim, or the beat, was sent by which the database last said it ours."""
    lost: threading.Event = field(default_factory=threading.Event)

    @property
    def given_up(self) -> bool:
        """Whether somebody else has the row, or may have it: no beat got through for a whole lease."""
        return self.lost.is_set() or time.monotonic() >= self.kept_until


class Heartbeat:
    """
    Beats for all claims of this process in one statement, on a connection of its own.

    It proves that the process lives, not that its work gets on: the statement never
    carries a lease past the row's deadline. It never raises into a handler; when the
    database does not answer, the leases lapse and the fences keep the rest right.
    """

    def __init__(self, database: Database, holder: Holder) -> None:
        self._database, self._holder = database, holder
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._held: set[Held] = set()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._connection: Connection | None = None

    def hold(self, claim: Claim, statements: Statements) -> Held:
        """Take a claim into care; the thread starts with the first, anew in a forked child."""
        if self._pid != os.getpid():
            self._reset()
        held = Held(claim, statements, claim.taken_at + self._holder.lease_seconds)
        with self._lock:
            self._held.add(held)
            if self._thread is None or not self._thread.is_alive():
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="durable-heartbeat", daemon=True
                )
                self._thread.start()
        return held

    def let_go(self, held: Held) -> None:
        with self._lock:
            self._held.discard(held)

    def stop(self) -> None:
        """End the thread and its connection; what is still held is left to its lease."""
        if self._pid != os.getpid():
            return
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=self._holder.heartbeat_seconds)

    def _run(self, stop: threading.Event) -> None:
        pause = self._holder.heartbeat_seconds
        while not stop.wait(pause):
            try:
                self.beat()
                pause = self._holder.heartbeat_seconds
            except Exception as error:
                # Not the handler's business: leases lapse, others take the rows, the fence refuses us.
                log.warning("heartbeat_failed", extra={"error": said(error)})
                self._drop_connection()
                # When the database is back, reap waits for one heartbeat: ours is to come well before.
                pause = self._holder.heartbeat_seconds / 4
        self._drop_connection()

    def beat(self) -> None:
        """Renew every lease once. A locked row is skipped: its holder is our own step, and healers skip it too."""
        with self._lock:
            held = list(self._held)
        for statements in {id(h.statements): h.statements for h in held}.values():
            mine = [h for h in held if h.statements is statements]
            if self._connection is None or self._connection.closed:
                self._connection = self._database.detached()
            with (
                self._database.watch.over(raw(self._connection), self._holder.answer_seconds),
                self._connection.begin(),
            ):
                sent_at = time.monotonic()
                rows = run(
                    self._connection,
                    statements.keep,
                    ids=[h.claim.id for h in mine],
                    fences=[h.claim.fence for h in mine],
                    lease_seconds=self._holder.lease_seconds,
                )
            lost = {(str(row["id"]), row["fence"]) for row in rows if not row["still_ours"]}
            for h in mine:
                if (h.claim.id, h.claim.fence) not in lost:
                    h.kept_until = sent_at + self._holder.lease_seconds
                elif not h.lost.is_set():
                    h.lost.set()
                    log.warning(
                        "claim_lost",
                        extra={"row_id": h.claim.id, "kind": h.claim.kind, "fence": h.claim.fence},
                    )

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.invalidate()
                connection.close()
            except Exception:
                log.debug("heartbeat_connection_close_failed", exc_info=True)
