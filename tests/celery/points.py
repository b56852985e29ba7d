"""
The points at which these tests hold a process, and the means: nothing of it is in the product.

In the worker's process (this module is imported there too): Celery's signal before a task, and the product's own
log lines. In the database: triggers that wait on an advisory lock. Between the two: a relay that holds a message.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import signals
from sqlalchemy import Engine, text

from durable_core import Step
from tests.relay import ending

# --- in the worker's process -------------------------------------------------------------------------

LOG_LINES = {"delivery_claimed": "K5", "result_not_stored": "K8"}
"""Lines of `durable.run` that are written right after the claim, and right after the handler has returned."""


Pause = Callable[[str, str], None]


class _HoldAtLines(logging.Filter):
    """Holds the thread that writes one of the lines; the debug lines themselves are not shown."""

    def __init__(self, pause: Pause) -> None:
        super().__init__()
        self._pause = pause

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg in LOG_LINES:
            self._pause(record.__dict__["row_id"], LOG_LINES[record.msg])
        return record.levelno > logging.DEBUG


def connect(pause: Pause) -> None:
    """In a worker of the test's app: hold before the claim (K2), after it (K5), and after the handler (K8)."""

    def before_the_task(kwargs: dict[str, Any], **_: Any) -> None:
        pause(str(kwargs.get("id")), "K2")

    signals.task_prerun.connect(before_the_task, weak=False)
    log = logging.getLogger("durable.run")
    log.setLevel(logging.DEBUG)
    log.addFilter(_HoldAtLines(pause))


def end_the_heartbeat() -> None:
    """Raise in the heartbeat's thread, which ends it: in its wait or in its statement, wherever it is."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "durable-heartbeat")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    thread.join(20)
    assert not thread.is_alive()


def say_when_cancelled(step: Step, seconds: float = 30.0) -> None:
    """Ask `step.cancelled`, as a long handler does, until it says so; then tell the test."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if step.cancelled:
            (Path(os.environ["SHOP_GATES"]) / f"{step.id}.told").touch()
            return
        time.sleep(0.05)


def keep_the_parent_busy(engine: Engine) -> None:
    """
    What a host does at import and should not: its engine connected, its threads running, before the pool forks.

    The threads log and query without end, so that a fork finds their locks taken.
    """
    with engine.connect() as connection:
        connection.execute(text("select 1"))

    def chatter() -> None:
        log = logging.getLogger("shop.chatter")
        while True:
            with engine.connect() as connection:
                connection.execute(text("select pg_sleep(0.005)"))
            log.debug("still here")

    for number in range(2):
        threading.Thread(target=chatter, name=f"chatter-{number}", daemon=True).start()


# --- in the database ---------------------------------------------------------------------------------

CLASS = 7303
"""The first number of our advisory locks; the second is the hash of point and row."""

TRIGGERS = {
    "K3": (
        "after update on durable.deliveries",
        "old.state = 'pending' and new.state = 'processing' and new.fence = 1",
    ),
    "K9": ("before insert on effects", "new.fence = 1"),
    "K10": ("after insert on effects", "new.fence = 1"),
    "K11": ("after update on durable.deliveries", "new.state = 'sent' and new.fence = 1"),
    "K15": (
        "after update on durable.deliveries",
        "old.state = 'processing' and new.state = 'pending' and new.settled_fence = 1 and new.fence = 1",
    ),
    "K17": (
        "after update on durable.deliveries",
        "old.state = 'processing' and new.state = 'pending' and new.settled_fence < new.fence",
    ),
    "K17 after commit": (
        "before update on durable.loops",
        "new.name = 'reap' and new.moved > 0 and new.began_at = old.began_at",
    ),
}
"""Where each waits, and for which rows. One waits only while the test holds its lock, which it does for one row."""

FUNCTION = f"""
    create function wait_at_point() returns trigger language plpgsql as $$
    begin
        perform pg_advisory_xact_lock_shared({CLASS}, hashtext(tg_argv[0] || ' ' || coalesce(
            to_jsonb(new) ->> 'row_id', to_jsonb(new) ->> 'id', to_jsonb(new) ->> 'name')));
        return new;
    end $$
"""


class Locks:
    """The advisory locks at which the triggers wait, held by a connection of the test."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._holder = engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def hold(self, point: str, row_id: str) -> None:
        """From now on whoever comes by this point with this row waits."""
        self._run("select pg_advisory_lock(:class, hashtext(:key))", point, row_id)

    def let_go(self, point: str, row_id: str) -> None:
        self._run("select pg_advisory_unlock(:class, hashtext(:key))", point, row_id)

    def waiting(self, point: str, row_id: str) -> int:
        """The database's pid of whoever waits there; 0 while nobody does."""
        sql = (
            "select pid from pg_locks where locktype = 'advisory' and not granted and classid = :class"
            " and cast(objid as bigint) = cast(hashtext(:key) as bigint) & 4294967295"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        return int(self._run(sql, point, row_id) or 0)

    def end_waiting(self, point: str, row_id: str) -> None:
        """End the session that waits there, as when its host is gone; nothing of its transaction stays."""
        pid = self.waiting(point, row_id)
        assert self._holder.scalar(text("select pg_terminate_backend(:pid, 20000)"), {"pid": pid})
        self.let_go(point, row_id)

    def client_port(self, point: str, row_id: str) -> int:
        """The port of the process whose session waits there."""
        pid = self.waiting(point, row_id)
        port = self._holder.scalar(text("select client_port from pg_stat_activity where pid = :pid"), {"pid": pid})
        return int(port or 0)

    def close(self) -> None:
        self._holder.execute(text("select pg_advisory_unlock_all()"))
        self._holder.close()

    def _run(self, sql: str, point: str, row_id: str) -> Any:
        return self._holder.scalar(text(sql), {"class": CLASS, "key": f"{point} {row_id}"})


@contextmanager
def triggers(engine: Engine) -> Iterator[Locks]:
    """The triggers in this database, as long as this lasts."""
    _execute(engine, FUNCTION)
    for number, (point, (where, when)) in enumerate(TRIGGERS.items()):
        _execute(
            engine,
            f"create trigger zz_point_{number} {where} for each row when ({when})"
            f" execute function wait_at_point('{point}')",
        )
    # COMMIT itself waits in this one.
    _execute(
        engine,
        "create constraint trigger zz_point_commit after insert on effects deferrable initially deferred"
        " for each row when (new.fence = 1) execute function wait_at_point('COMMIT')",
    )
    locks = Locks(engine)
    try:
        yield locks
    finally:
        locks.close()
        _execute(engine, "drop function wait_at_point() cascade")


def _execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("set local lock_timeout = '20s'"))
        connection.execute(text(statement))


# --- between the two ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Held:
    """One message that is held: before it arrives, or with its answer on the way back."""

    row_id: bytes
    words: bytes
    arrives: bool
    reached: threading.Event = field(default_factory=threading.Event)
    decided: threading.Event = field(default_factory=threading.Event)
    passed: bool = False

    def go_on(self) -> None:
        """Let it through after all."""
        self.passed = True
        self.decided.set()

    def cut(self) -> None:
        """Lose the connection: the message, or its answer, never comes."""
        self.decided.set()


class HoldingRelay:
    """Listens on a port of its own, passes everything on to `host:port`, and holds what it was asked to hold."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._asked: list[Held] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, row_id: str, words: bytes = b"", *, arrives: bool) -> Held:
        """
        Hold the next message with these words on a connection that named this row last.

        With `arrives` it is passed on, and what is held is the answer.
        """
        held = Held(row_id.encode(), words, arrives)
        with self._lock:
            self._asked.append(held)
        return held

    def close(self) -> None:
        self._listener.close()
        for held in self._asked:
            held.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            conversation = _Conversation(self, client, server)
            for pump in (conversation.up, conversation.down):
                threading.Thread(target=pump, daemon=True).start()

    def due(self, message: bytes, row_id: bytes) -> tuple[Held | None, bytes]:
        """What is to be held of this message, and the row that its connection has named last."""
        with self._lock:
            row_id = next((held.row_id for held in self._asked if held.row_id in message), row_id)
            for held in self._asked:
                if held.row_id == row_id and held.words in message and not held.reached.is_set():
                    held.reached.set()
                    return held, row_id
        return None, row_id


class _Conversation:
    """One connection, both ways."""

    def __init__(self, relay: HoldingRelay, client: socket.socket, server: socket.socket) -> None:
        self._relay, self._client, self._server = relay, client, server
        self._row_id = b""
        self._answer: Held | None = None

    def up(self) -> None:
        with ending(self._client, self._server):
            while message := self._client.recv(1 << 20):
                held, self._row_id = self._relay.due(message, self._row_id)
                if held is not None and held.arrives:
                    self._answer = held
                elif held is not None:
                    held.decided.wait()
                    if not held.passed:
                        return
                self._server.sendall(message)

    def down(self) -> None:
        with ending(self._client, self._server):
            while message := self._server.recv(1 << 20):
                if (held := self._answer) is not None:
                    held.decided.wait()
                    if not held.passed:
                        return
                    self._answer = None
                self._client.sendall(message)
