"""Who keeps a row locked long past its deadline is ended, and nobody else is."""

import socket
import time

import psycopg
import pytest
from sqlalchemy import text

from durable_core.claims import claim as protocol
from durable_core.deliveries.attempt import _statements
from durable_core.deliveries.stuck import cut_off
from durable_core.deliveries.sweep import reap
from durable_core.sweeps import Bounds, named

GRACE = 30.0


@pytest.fixture
def held(database, make):
    """A claim whose owner has opened the transaction of its step and holds the row's lock."""
    made = make(state="processing")
    with database.connect() as connection:
        assert protocol.lock(connection, _statements, made.held) is not None
        yield made, connection
        connection.invalidate()


def past_the_deadline(clock, seconds=300 + GRACE + 1):
    clock.advance(seconds=seconds)


def alive(engine, pid):
    with engine.connect() as connection:
        return connection.scalar(text("select count(*) from pg_stat_activity where pid = :pid"), {"pid": pid}) == 1


def gone(engine, pid):
    until = time.monotonic() + 20
    while alive(engine, pid):
        assert time.monotonic() < until, "the session is still there"
        time.sleep(0.02)


def backend(connection):
    return connection.connection.dbapi_connection.info.backend_pid


def test_a_holder_past_deadline_and_grace_is_ended_and_its_row_is_reaped(database, engine, held, clock, row, lines):
    made, connection = held
    pid = backend(connection)
    past_the_deadline(clock)
    assert reap(database) == 0, "a locked row is its holder's"
    assert cut_off(database, grace_seconds=GRACE) == 1
    gone(engine, pid)
    assert reap(database) == 1
    assert row(made.id).state == "pending"
    first, second = lines(made.id)
    assert (first.move, first.reason, first.fence, first.facts["backend"]) == (
        "cut off",
        "LOCKED_PAST_DEADLINE",
        1,
        pid,
    )
    assert second.move == "reap"


def test_the_reap_sweep_does_it_with_the_lease_as_the_grace(database, engine, held, clock):
    _, connection = held
    pid = backend(connection)
    clock.advance(seconds=300 + 29)
    named("reap").run(database, Bounds())
    assert alive(engine, pid)
    clock.advance(seconds=2)
    named("reap").run(database, Bounds())
    gone(engine, pid)


def test_a_holder_within_its_deadline_is_left_alone_however_old_its_lease(database, engine, held, clock):
    _, connection = held
    clock.advance(seconds=299)
    assert cut_off(database, grace_seconds=0) == 0
    assert alive(engine, backend(connection))


def test_a_holder_that_shares_the_lock_with_a_foreign_key_is_found(database, engine, other_engine, held, clock):
    made, connection = held
    pid = backend(connection)
    with engine.begin() as host:
        host.execute(text("create table refers (id uuid references durable.deliveries)"))
    try:
        with other_engine.connect() as referring:
            referring.execute(text("insert into refers values (:id)"), {"id": made.id})
            past_the_deadline(clock)
            assert cut_off(database, grace_seconds=GRACE) == 1
            gone(engine, pid)
            assert referring.scalar(text("select count(*) from refers")) == 1, "the other holder goes on"
            referring.rollback()
    finally:
        with engine.begin() as host:
            host.execute(text("drop table refers"))


def test_a_holder_without_the_name_is_somebody_elses_and_is_left_alone(database, engine, other_engine, make, clock):
    made = make(state="processing")
    with other_engine.connect() as psql:
        psql.execute(text("select from durable.deliveries where id = :id for update"), {"id": made.id})
        past_the_deadline(clock)
        assert cut_off(database, grace_seconds=GRACE) == 0
        assert psql.scalar(text("select 1")) == 1


def test_a_session_that_only_bears_the_name_is_left_alone(database, engine, other_engine, held, clock):
    made, connection = held
    with other_engine.connect() as named_alike:
        named_alike.execute(
            text("select set_config('application_name', :name, false)"), {"name": f"durable {made.id} 1"}
        )
        past_the_deadline(clock)
        assert cut_off(database, grace_seconds=GRACE) == 1
        gone(engine, backend(connection))
        assert named_alike.scalar(text("select 1")) == 1
        named_alike.invalidate()


def test_the_name_goes_with_the_transaction(database, held):
    made, connection = held
    driver = connection.connection.dbapi_connection
    assert driver.execute("show application_name").fetchone() == (f"durable {made.id} 1",)
    driver.rollback()
    assert driver.execute("show application_name").fetchone() == ("",)


def test_a_role_that_may_not_end_it_says_whose_lock_it_is(database, engine, held, clock, caplog, monkeypatch):
    """Under a role of its own for the sweeps, without pg_signal_backend."""
    made, connection = held
    past_the_deadline(clock)
    with engine.begin() as admin:
        admin.execute(text("drop role if exists sweeper"))
        admin.execute(text("create role sweeper login password 'sweeper' in role pg_read_all_stats"))
        admin.execute(text("grant usage on schema durable to sweeper"))
        admin.execute(text("grant select, insert, update on all tables in schema durable to sweeper"))
    from sqlalchemy import create_engine

    from durable_core.database.connections import Database

    weak = create_engine(engine.url.set(username="sweeper", password="sweeper"))
    try:
        assert cut_off(Database(weak), grace_seconds=GRACE) == 0
    finally:
        weak.dispose()
        with engine.begin() as admin:
            admin.execute(text("drop owned by sweeper"))
            admin.execute(text("drop role sweeper"))
    (told,) = [record for record in caplog.records if record.message == "lock_holder_not_ended"]
    assert (told.row_id, told.backend) == (made.id, backend(connection))
    assert alive(engine, backend(connection))


def test_a_holder_that_is_frozen_while_the_server_sends_to_it_is_ended_too(database, engine, make, clock):
    """Neither of the server's time-outs ends such a session: it waits for the client to read."""
    made = make(state="processing")
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as client:
        client.execute("select set_config('application_name', %s, true)", [f"durable {made.id} 1"])
        client.execute("select from durable.deliveries where id = %s for no key update", [made.id])
        pid = client.info.backend_pid
        with socket.socket(fileno=client.fileno()) as under:
            under.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            under.detach()
        client.pgconn.send_query(b"select repeat('x', 1000) from generate_series(1, 3000000)")
        client.pgconn.flush()
        _until_it_waits_for_its_client(engine, pid)
        past_the_deadline(clock)
        assert cut_off(database, grace_seconds=GRACE) == 1
        gone(engine, pid)
        client.close()
    assert reap(database) == 1


def _until_it_waits_for_its_client(engine, pid):
    until = time.monotonic() + 20
    question = text("select wait_event from pg_stat_activity where pid = :pid")
    while True:
        with engine.connect() as connection:
            if connection.scalar(question, {"pid": pid}) == "ClientWrite":
                return
        assert time.monotonic() < until, "it does not wait for its client"
        time.sleep(0.02)
