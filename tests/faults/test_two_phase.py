"""
Callers that commit in two phases: prepared by one connection, decided later, by it or by another, or never.

The server has `max_prepared_transactions`, which is 0 where nobody asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import durable_core
from durable_core import IdempotencyConflict, KeyInFlight, deliveries
from durable_core.claims.claim import Holder
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker, perform_due
from durable_core.deliveries.sweep import dispatch
from durable_core.testing import clear, migrated
from tests.conftest import EFFECTS, Recorded
from tests.faults.servers import Cluster

POSTGRES = {"max_prepared_transactions": "10"}

CALLERS = ("Session", "Connection", "psycopg")


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Engine]:
    engine = migrated(cluster.url)
    with engine.begin() as connection:
        connection.execute(text(EFFECTS))
    yield engine
    engine.dispose()


@pytest.fixture
def engine(server: Engine) -> Iterator[Engine]:
    """The server of this module in place of the shared one; nothing prepared is left on it."""
    yield server
    for xid in prepared(server):
        decide(server, "rollback", xid)
    clear(server)
    with server.begin() as connection:
        connection.execute(text("truncate effects"))


@pytest.fixture
def worker(engine: Engine) -> Iterator[Worker]:
    worker = Worker(Database(engine), Holder())
    yield worker
    worker.heartbeat.stop()


def prepared(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("select gid from pg_prepared_xacts")))


def decide(engine: Engine, how: str, xid: str) -> None:
    """As a transaction manager does: over a connection of its own."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"{how} prepared '{xid}'")


def kept(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("select key from durable.deliveries order by key")))


class Phases:
    """A caller's transaction in two phases: `tx` to work in, then `prepare`, then `commit` or `rollback`."""

    def __init__(self, tx: Any, prepare: Callable[[], Any], commit: Callable[[], Any], rollback: Callable[[], Any]):
        self.tx, self.prepare, self.commit, self.rollback = tx, prepare, commit, rollback

    def execute(self, sql: str) -> None:
        self.tx.execute(sql if isinstance(self.tx, psycopg.Connection) else text(sql))


@contextmanager
def two_phases(engine: Engine, name: str) -> Iterator[Phases]:
    if name == "Session":
        with Session(engine, twophase=True) as session:
            yield Phases(session, session.prepare, session.commit, session.rollback)
    elif name == "Connection":
        with engine.connect() as connection:
            transaction = connection.begin_twophase()
            yield Phases(connection, transaction.prepare, transaction.commit, transaction.rollback)
    else:
        url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url) as connection:
            connection.tpc_begin(connection.xid(1, "global", "branch"))
            yield Phases(connection, connection.tpc_prepare, connection.tpc_commit, connection.tpc_rollback)


def enqueue_all(caller: Phases, kind: Any) -> None:
    """Plain, keyed, many, and some in savepoints that are undone."""
    caller.execute("insert into effects (row_id) values ('own')")
    kind.options(key="a").enqueue(caller.tx, 1)
    assert not kind.options(key="a").enqueue(caller.tx, 1).created
    with pytest.raises(IdempotencyConflict):
        kind.options(key="a").enqueue(caller.tx, 2)
    caller.execute("savepoint mine")
    kind.options(key="undone").enqueue(caller.tx, 1)
    caller.execute("rollback to savepoint mine")
    deliveries.enqueue_many(caller.tx, [kind.options(key="b").new(3), kind.options(key="c").new(4)])


@pytest.mark.parametrize("name", CALLERS)
def test_what_a_caller_enqueues_in_two_phases_is_there_after_the_second_and_no_sooner(
    engine: Engine, kind: Any, carrier: Recorded, worker: Worker, name: str
) -> None:
    with two_phases(engine, name) as caller:
        enqueue_all(caller, kind)
        caller.prepare()
        assert len(prepared(engine)) == 1
        assert carrier.offered == [], "prepared is not committed"
        assert kept(engine) == []
        assert perform_due(worker, 10) == []
        assert dispatch(worker.database) == 0
        caller.commit()
        durable_core.wake()

    assert kept(engine) == ["a", "b", "c"]
    # The savepoint was SQL of the caller's own: the hint of what it took back is a look that finds nothing.
    assert len(carrier.offered) == 4
    assert dispatch(worker.database) == 3
    assert [done.outcome for done in perform_due(worker, 10)] == ["sent"] * 3
    assert prepared(engine) == []


@pytest.mark.parametrize("name", CALLERS)
def test_a_two_phase_commit_in_one_call_hints_after_it(engine: Engine, kind: Any, carrier: Recorded, name: str) -> None:
    with two_phases(engine, name) as caller:
        ref = kind.options(key="k").enqueue(caller.tx, 1)
        caller.commit()
        durable_core.wake()
    assert [hint.id for hint in carrier.offered] == [ref.id]
    assert kept(engine) == ["k"]


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("when", ["before it was prepared", "after it was prepared"])
def test_what_is_rolled_back_in_either_phase_never_existed(
    engine: Engine, kind: Any, carrier: Recorded, name: str, when: str
) -> None:
    with two_phases(engine, name) as caller:
        enqueue_all(caller, kind)
        if when == "after it was prepared":
            caller.prepare()
        caller.rollback()
    assert kept(engine) == []
    assert prepared(engine) == []
    if name == "Session":
        assert carrier.offered == []
    assert dispatch(Database(engine)) == 0


def leave_prepared(engine: Engine, kind: Any) -> str:
    """A caller that prepared and went away; the transaction stays on the server. Its name there."""
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    connection = psycopg.connect(url)
    connection.tpc_begin("forgotten")
    connection.execute("insert into effects (row_id) values ('of the one that left')")
    kind.options(key="k").enqueue(connection, 1)
    connection.tpc_prepare()
    connection.close()
    (xid,) = prepared(engine)
    return xid


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_a_transaction_decided_by_somebody_else_is_found_by_dispatch_without_any_hint(
    engine: Engine, kind: Any, carrier: Recorded, worker: Worker, decision: str
) -> None:
    xid = leave_prepared(engine, kind)
    assert dispatch(worker.database) == 0
    decide(engine, decision, xid)
    assert carrier.offered == []
    assert dispatch(worker.database) == (1 if decision == "commit" else 0)
    assert [done.outcome for done in perform_due(worker, 10)] == (["sent"] if decision == "commit" else [])


def test_a_forgotten_prepared_transaction_holds_its_key_over_a_restart_and_nothing_else(
    engine: Engine, cluster: Cluster, kind: Any, carrier: Recorded, worker: Worker
) -> None:
    xid = leave_prepared(engine, kind)
    for restarted in (False, True):
        if restarted:
            cluster.end("immediate")
            cluster.start_again()
            engine.dispose()
        with Session(engine) as session:
            session.execute(text("insert into effects (row_id) values ('own')"))
            with pytest.raises(KeyInFlight):
                kind.options(key="k").enqueue(session, 1)
            kind.options(key=f"other {restarted}").enqueue(session, 1)
            session.commit()
        assert dispatch(worker.database) == 1
        assert [done.outcome for done in perform_due(worker, 10)] == ["sent"], "other work goes on"
        carrier.lying.clear()
    decide(engine, "rollback", xid)
    with Session(engine) as session:
        assert kind.options(key="k").enqueue(session, 2).created
        session.commit()
    with engine.connect() as connection:
        assert list(connection.scalars(text("select row_id from effects where row_id !~ '-'"))) == ["own", "own"]
