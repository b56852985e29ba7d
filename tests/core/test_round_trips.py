"""How often a delivery waits for Postgres, counted on the wire."""

from sqlalchemy import create_engine

from bench.relay import CountingRelay
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Outcome, perform

UNTIL_ALL_IS_PREPARED = 10


def test_the_lock_and_the_commit_of_a_delivery_are_one_round_trip_each(engine, declare, make, make_worker):
    """Claim; BEGIN, which the driver sends by itself; bound and lock; settle and COMMIT."""
    relay = CountingRelay(engine.url.host, engine.url.port)
    through = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    kind, worker = declare(lambda step: None), make_worker(on=Database(through))
    for _ in range(UNTIL_ALL_IS_PREPARED):
        perform(worker, kind, make(kind).id)
    made = make(kind)
    relay.trips = []
    try:
        assert perform(worker, kind, made.id).outcome is Outcome.SENT
        assert [len(trip) for trip in relay.trips] == [1, 1, 2, 2], relay.trips
    finally:
        through.dispose()
        relay.close()
