"""How often a delivery waits for Postgres, counted on the wire."""

import pytest
from sqlalchemy import create_engine, text

from bench.relay import CountingRelay
from durable_core.database.connections import Database, ping_rested_connections
from durable_core.deliveries.attempt import Outcome, perform

UNTIL_ALL_IS_PREPARED = 10


def test_a_delivery_whose_handler_has_no_effect_waits_twice(engine, declare, make, make_worker):
    """For its claim, and for its receipt: each is a transaction of one statement."""
    relay = CountingRelay(engine.url.host, engine.url.port)
    through = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    kind, worker = declare(lambda step: None), make_worker(on=Database(through))
    for _ in range(UNTIL_ALL_IS_PREPARED):
        perform(worker, kind, make(kind).id)
    made = make(kind)
    relay.trips = []
    try:
        assert perform(worker, kind, made.id).outcome is Outcome.SENT
        assert [len(trip) for trip in relay.trips] == [1, 1], relay.trips
    finally:
        through.dispose()
        relay.close()


@pytest.mark.parametrize("rested", [True, False])
def test_a_connection_is_pinged_before_its_use_only_where_it_rested(engine, rested):
    relay = CountingRelay(engine.url.host, engine.url.port)
    through = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    ping_rested_connections(through, seconds=0.0 if rested else 60.0)
    try:
        for _ in range(2):
            relay.trips = []
            with through.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("select 42"))
        assert len(relay.trips) == (2 if rested else 1), relay.trips
    finally:
        through.dispose()
        relay.close()


def test_connections_that_died_while_they_rested_are_replaced_unseen(engine):
    used = create_engine(engine.url)
    ping_rested_connections(used, seconds=0.0)
    try:
        with used.connect() as one, used.connect() as another:
            pids = [each.scalar(text("select pg_backend_pid()")) for each in (one, another)]
        with engine.begin() as killer:
            killer.execute(text("select pg_terminate_backend(pid, 5000) from unnest(:pids) as pid"), {"pids": pids})
        with used.connect() as one, used.connect() as another:
            assert {each.scalar(text("select pg_backend_pid()")) for each in (one, another)}.isdisjoint(pids)
    finally:
        used.dispose()
