"""What these tests do and look at: commit deliveries, hold handlers, read rows, journal, counters and events."""

from __future__ import annotations

import base64
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from durable_core import deliveries, kinds, wakes
from durable_core.cases import journal
from durable_core.celery_binding import Durable, install
from durable_core.claims.journal import Line
from durable_core.database import statements
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.read import Delivery
from durable_core.testing import clear
from tests.celery.nodes import Broker, wait_until

PATIENCE = 120.0
"""Seconds a test waits for work to end: far more than it takes, for a machine that others use as well."""

FINISHED = frozenset({"sent", "failed", "dead", "canceled", "expired"})


@contextmanager
def installed_here(app: Celery) -> Iterator[Durable]:
    """`install(app)` in this process, undone at the end: other tests of the process have none."""
    carrier, schema, key = wakes.carrier(), statements._schema, journal._key
    listeners = {registry: list(registry._listeners) for registry in kinds.CONTRACTS.values()}
    try:
        yield install(app)
    finally:
        statements._schema, journal._key = schema, key
        wakes.use_carrier(carrier)
        for registry, before in listeners.items():
            registry._listeners[:] = before


@dataclass(frozen=True)
class Execution:
    """One beginning of the work, counted outside any transaction of the attempt."""

    fence: int
    key: str
    attempt: int
    pid: int
    at: datetime


@dataclass(frozen=True)
class Effect:
    """One committed effect."""

    fence: int
    note: str
    pid: int
    backend: int


class World:
    """The running shop, from the side of its web process and of its database."""

    def __init__(self, engine: Engine, gates: Path, app: Celery, durable: Durable, broker: Broker) -> None:
        self.engine, self.gates, self.app, self.durable, self.broker = engine, gates, app, durable, broker

    # --- doing

    def commit(self, kind: DeliveryKind[..., Any], *arguments: object, **options: Any) -> str:
        """Enqueue in a Session and commit it; the row's id."""
        with Session(self.engine) as session, session.begin():
            return kind.options(**options).enqueue(session, *arguments).id

    def commit_for_its_own_hint(self, kind: DeliveryKind[..., Any], *arguments: object) -> str:
        """The same, left alone by dispatch for a minute: a sweep in this very moment would send a hint of its own."""
        with Session(self.engine) as session, session.begin():
            row_id = kind.enqueue(session, *arguments).id
            later = "update durable.deliveries set hint_at = hint_at + interval '1 minute' where id = :id"
            session.execute(text(later), {"id": row_id})
            return row_id

    def commit_many(self, kind: DeliveryKind[..., Any], count: int, **options: Any) -> list[str]:
        """Enqueue so many in one transaction."""
        with Session(self.engine) as session, session.begin():
            refs = deliveries.enqueue_many(session, [kind.options(**options).new() for _ in range(count)])
            return [ref.id for ref in refs]

    def prepare(self, kind: DeliveryKind[..., Any], *arguments: object, **options: Any) -> str:
        """A committed delivery that is not due for an hour; `make_due` ends that."""
        return self.commit(kind, *arguments, countdown=3600, **options)

    def make_due(self, *row_ids: str) -> None:
        """Make them due now; dispatch hints them."""
        with self.engine.begin() as connection:
            connection.execute(
                text(
                    "update durable.deliveries set due_at = clock_timestamp(), hint_at = clock_timestamp()"
                    " where id = any (cast(:ids as uuid[]))"
                ),
                {"ids": list(row_ids)},
            )

    def lapse(self, queue: str, pids: Collection[int]) -> None:
        """End the leases of what these processes hold, but for the rows that are locked."""
        with self.engine.begin() as connection:
            connection.execute(
                text(
                    "update durable.deliveries set lease_expires_at = clock_timestamp() where id in (select id"
                    " from durable.deliveries where queue = :queue and state = 'processing'"
                    " and owner_pid = any (:pids) for no key update skip locked)"
                ),
                {"queue": queue, "pids": list(pids)},
            )

    def let_the_next_begin(self, sweep: str) -> None:
        """A killed sweep is waited for; let that time be over."""
        with self.engine.begin() as connection:
            connection.execute(
                text("update durable.loops set began_at = began_at - interval '1 minute' where name = :name"),
                {"name": sweep},
            )

    def send(self, kind: str, row_id: str, queue: str = "durable") -> None:
        """One message by hand, as a broker may deliver it once more."""
        self.app.send_task(kind, kwargs={"id": row_id}, queue=f"durable.{queue}", ignore_result=True)

    def open(self, gate: str) -> None:
        """Let the handler that is held there go on."""
        (self.gates / f"{gate}.open").touch()

    @contextmanager
    def commit_held(self, row_id: str) -> Iterator[Connection]:
        """While this lasts, the COMMIT of this row's first attempt waits inside the database."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("select pg_advisory_lock(hashtext(:id))"), {"id": row_id})
            try:
                yield connection
            finally:
                connection.execute(text("select pg_advisory_unlock_all()"))

    # --- waiting

    def held_at(self, gate: str) -> int:
        """The pid of the process whose handler has reached the gate."""
        marker = self.gates / f"{gate}.reached"
        wait_until(lambda: marker.exists() and marker.read_text(), f"a handler reaches {gate}")
        return int(marker.read_text())

    def held_in_commit(self, holder: Connection) -> int:
        """The database's pid of the COMMIT that waits for this holder."""
        mine = holder.scalar(text("select pg_backend_pid()"))
        return int(
            wait_until(
                lambda: self._scalar(
                    "select pid from pg_stat_activity where datname = current_database()"
                    " and :mine = any (pg_blocking_pids(pid)) and query ilike 'commit%'",
                    mine=mine,
                ),
                "a COMMIT waits inside the database",
            )
        )

    def finished(self, *row_ids: str, seconds: float = PATIENCE) -> list[Delivery]:
        """The rows, once all have ended."""
        counting = (
            "select count(*) from durable.deliveries where id = any (cast(:ids as uuid[])) and state = any (:ended)"
        )
        wait_until(
            lambda: self._scalar(counting, ids=list(row_ids), ended=sorted(FINISHED)) == len(row_ids),
            f"{len(row_ids)} deliveries end",
            seconds,
        )
        return [self.row(row_id) for row_id in row_ids]

    def sent(self, *row_ids: str, seconds: float = PATIENCE) -> list[Delivery]:
        """The rows, once all have ended, and all of them sent."""
        rows = self.finished(*row_ids, seconds=seconds)
        assert [row.state for row in rows] == ["sent"] * len(rows)
        return rows

    def journalled(self, row_id: str, move: str) -> None:
        """Return once the row's journal has this move."""
        wait_until(lambda: move in [line.move for line in self.lines(row_id)], f"{move} is in the journal")

    # --- looking

    def row(self, row_id: str) -> Delivery:
        with self.engine.connect() as connection:
            return deliveries.get(connection, row_id)

    def lines(self, row_id: str) -> list[Line]:
        with self.engine.connect() as connection:
            return deliveries.journal(connection, row_id)

    def executions(self, row_id: str) -> list[Execution]:
        return [
            Execution(row.fence, row.key, row.attempt, row.pid, row.at)
            for row in self._rows("select * from executions where row_id = :id order by id", id=row_id)
        ]

    def effects(self, row_id: str) -> list[Effect]:
        return [
            Effect(row.fence, row.note, row.pid, row.backend)
            for row in self._rows("select * from effects where row_id = :id order by id", id=row_id)
        ]

    def keyed(self, key: str) -> str | None:
        """The id of the row that was enqueued with this key."""
        found = self._scalar("select cast(id as text) from durable.deliveries where key = :key", key=key)
        return None if found is None else str(found)

    def held_by(self, pids: Collection[int]) -> list[str]:
        """The rows that these processes hold."""
        found = self._rows(
            "select cast(id as text) as id from durable.deliveries"
            " where state = 'processing' and owner_pid = any (:pids)",
            pids=list(pids),
        )
        return [row.id for row in found]

    def waits_in(self, event: str) -> int:
        """How many sessions wait in this place of the database."""
        return int(
            self._scalar(
                "select count(*) from pg_stat_activity where datname = current_database() and wait_event = :event",
                event=event,
            )
        )

    def holding(self) -> list[str]:
        """The sessions that wait for a lock, hold a row, or are idle in a transaction."""
        found = self._rows(
            "select a.query from pg_stat_activity a where a.datname = current_database() and a.pid <> pg_backend_pid()"
            " and (a.state like 'idle in transaction%' or exists (select from pg_locks l where l.pid = a.pid"
            " and (not l.granted or l.locktype in ('transactionid', 'tuple'))))"
        )
        return [row.query for row in found]

    def counts(self, table: str) -> dict[str, int]:
        """How often each row occurs in `effects` or `executions`."""
        found = self._rows(f"select row_id, count(*) as times from {table} group by row_id")
        return {row.row_id: row.times for row in found}

    def sweeps_since(self, instant: datetime, name: str) -> bool:
        """Whether this sweep began and ended after the instant, by `durable.loops`."""
        return bool(
            self._scalar(
                "select count(*) from durable.loops where name = :name and began_at > :at and ended_at >= began_at",
                name=name, at=instant,
            )
        )  # fmt: skip

    def now(self) -> datetime:
        instant: datetime = self._scalar("select clock_timestamp()")
        return instant

    def _rows(self, sql: str, **parameters: object) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(sql), parameters))

    def _scalar(self, sql: str, **parameters: object) -> Any:
        with self.engine.connect() as connection:
            return connection.scalar(text(sql), parameters)

    def accounted(self, *row_ids: str, seconds: float = PATIENCE) -> list[Delivery]:
        """
        The rows, once all are sent, when the books agree.

        One effect for each receipt, under the fence that settled it; and every other claim that
        was counted as an attempt has its own end in the journal.
        """
        rows = self.sent(*row_ids, seconds=seconds)
        effects = self._rows(
            "select row_id, array_agg(fence) as fences from effects where row_id = any (:ids) group by row_id",
            ids=list(row_ids),
        )
        assert {effect.row_id: effect.fences for effect in effects} == {row.id: [row.settled_fence] for row in rows}
        ended = self._rows(
            "select cast(row_id as text) as row_id, array_agg(distinct fence) as fences from durable.journal"
            " where row_id = any (cast(:ids as uuid[])) and split_part(move, ' ', 1) = any (:ends) group by row_id",
            ids=list(row_ids), ends=["fail", "reap", "release", "postpone"],
        )  # fmt: skip
        fences = {end.row_id: set(end.fences) for end in ended}
        for row in rows:
            given_up = fences.get(row.id, set()) - {row.settled_fence}
            assert row.attempts == 1 + len(given_up), (row, self.lines(row.id))
        return rows

    # --- the end of a test

    def clean_up(self) -> None:
        """Let every held handler go, and delete all rows."""
        for marker in self.gates.glob("*.reached"):
            self.open(marker.stem)
        for again in range(5):
            try:
                clear(self.engine)
                break
            except OperationalError:
                # A sweep that ran at this moment and we were in each other's way.
                if again == 4:
                    raise
                time.sleep(0.2)
        with self.engine.begin() as connection:
            connection.execute(text("truncate effects, executions"))


class Events:
    """Celery's events, as Flower receives them, while this context lasts."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.seen: list[dict[str, Any]] = []

    def of(self, task_id: str) -> list[dict[str, Any]]:
        """What happened to one task, in order."""
        return [event for event in list(self.seen) if event.get("uuid") == task_id]

    def wait_for(self, event_type: str, task_id: str) -> dict[str, Any]:
        """The event of this type of this task, once it has come."""

        def found() -> dict[str, Any] | None:
            return next((event for event in self.of(task_id) if event["type"] == event_type), None)

        event: dict[str, Any] = wait_until(found, f"{event_type} of {task_id}")
        return event

    def __enter__(self) -> Self:
        self._connection = self._app.connection_for_read()
        self._receiver = self._app.events.Receiver(self._connection, handlers={"*": self.seen.append})
        self._thread = threading.Thread(target=self._capture, daemon=True)
        self._thread.start()
        # The sweeps' own events come twice a second: with the first, we know that we hear.
        wait_until(lambda: self.seen, "events are heard")
        return self

    def _capture(self) -> None:
        self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._receiver.should_stop = True
        self._thread.join(20)
        self._connection.release()


class Traffic:
    """Everything that is said to the broker while this context lasts, by its own MONITOR."""

    END = "the end of what was watched"

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.commands: list[str] = []
        self.said_in: defaultdict[int, list[str]] = defaultdict(list)
        """The same by the number of the database in which it was said."""

    def __enter__(self) -> Self:
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self._listening.wait(20)
        return self

    def _listen(self) -> None:
        with self._broker.client.monitor() as monitor:
            self._listening.set()
            for said in monitor.listen():
                self.commands.append(said["command"])
                self.said_in[said["db"]].append(said["command"])
                if self.END in said["command"]:
                    return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broker.client.echo(self.END)
        self._thread.join(20)
        assert not self._thread.is_alive()


def spellings(word: str) -> list[str]:
    """The word as plain text, and as it looks inside base64 at each of its three offsets."""
    inside = []
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + word.encode()).decode().rstrip("=")
        # The first and last characters share bits with their neighbours.
        inside.append(encoded[(0, 2, 3)[offset] : -1])
    return [word, *inside]


def mentions(word: str, texts: list[str]) -> bool:
    return any(spelling in text for text in texts for spelling in spellings(word))


def everything_in(broker: Broker) -> list[str]:
    """The contents of every key of the broker."""
    client = broker.client
    read = {
        "string": client.get,
        "list": lambda key: client.lrange(key, 0, -1),
        "set": client.smembers,
        "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        "hash": client.hgetall,
    }
    return [f"{key} {read[client.type(key)](key)}" for key in client.keys("*")]
