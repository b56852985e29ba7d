"""Round trips to Postgres, counted on the wire: a delivery from claim to commit, and a caller's transaction."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

from bench.candidates import ours
from bench.measure import bare, names_of_statements
from bench.relay import CountingRelay
from bench.rounds import EFFECTS
from durable_core.database.connections import Database
from durable_core.database.migrate import migrate
from durable_core.deliveries.attempt import perform
from durable_core.deliveries.worker import Outcome, Worker
from durable_core.testing import create_database, drop_database

WARM_UP = 10
"""Until every statement is prepared and what is asked once per connection has been asked."""


@dataclass(frozen=True)
class Counted:
    """One act, and the statements of each of its round trips, by name where they are ours."""

    act: str
    trips: tuple[tuple[str, ...], ...]

    def as_line(self) -> dict[str, Any]:
        return {"record": "round trips", "act": self.act, "count": len(self.trips), "trips": self.trips}


def count(server_url: str) -> list[Counted]:
    """From claim to commit, and of the caller's transaction with and without an enqueue."""
    made = make_url(create_database(server_url, "bench_trips"))
    direct = create_engine(made)
    migrate(direct)
    with direct.begin() as connection:
        connection.execute(text(EFFECTS))
    relay = CountingRelay(made.host or "127.0.0.1", made.port or 5432)
    through = made.set(port=relay.port)
    names = names_of_statements()
    found: list[Counted] = []

    def counted(name: str, act: Callable[[], object]) -> None:
        for _ in range(WARM_UP):
            act()
        relay.trips = []
        act()
        trips = tuple(tuple(_named(one, names) for one in trip) for trip in relay.trips)
        found.append(Counted(name, trips))

    try:
        for ping in (False, True):
            engine = create_engine(through, pool_pre_ping=ping)
            worker = Worker(Database(engine))
            how = ", engine with pool_pre_ping" if ping else ""
            for kind, what in ((ours.note, "no database"), (ours.note_and_insert, "one INSERT by step.session")):
                counted(f"claim to commit, handler: {what}{how}", lambda w=worker, k=kind: _deliver(w, k, direct))
            worker.heartbeat.stop()
            engine.dispose()
        engine = create_engine(through)
        counted("the caller's transaction: one INSERT", lambda: _call(engine, None))
        counted("the same with an enqueue", lambda: _call(engine, {}))
        counted("the same with an enqueue with a key", lambda: _call(engine, {"key": str(uuid.uuid4())}))
        engine.dispose()
    finally:
        relay.close()
        direct.dispose()
        drop_database(server_url, "bench_trips")
    return found


def _deliver(worker: Worker, kind: Any, direct: Engine) -> None:
    with direct.begin() as tx:
        ref = kind.enqueue(tx, 1)
    attempted = perform(worker, kind, ref.id)
    assert attempted.outcome is Outcome.SENT, attempted


def _call(engine: Engine, options: dict[str, Any] | None) -> None:
    with Session(engine) as session, session.begin():
        session.execute(ours.INSERT, {"number": 1, "pid": 1})
        if options is not None:
            ours.note.options(**options).enqueue(session, 1)


def _named(query: str, names: dict[str, str]) -> str:
    if query.strip() in ("", ";"):
        return "(the pool's ping)"
    return names.get(bare(query)) or re.sub(r"\s+", " ", query).strip()[:60]
