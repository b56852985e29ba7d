"""What several tests of the core share beside the fixtures of all."""

import pytest
from sqlalchemy import create_engine

from durable_core.database.connections import Database
from tests.relay import Relay


@pytest.fixture
def relay(engine):
    relay = Relay(engine.url.host, engine.url.port)
    yield relay
    relay.close()


@pytest.fixture
def far(engine, relay):
    """The same database, seen through the relay."""
    far = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    yield Database(far)
    far.dispose()
