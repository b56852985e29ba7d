"""Parcels on Postgres, and in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from durable_core.cases.clock import VirtualClock
from durable_core.cases.memory import MemoryStore
from durable_core.database.connections import Database
from durable_core.local.server import free_port
from tests.core.outside.desk import Desk


@pytest.fixture
def desk(engine: Engine) -> Iterator[Desk]:
    """Parcels on Postgres."""
    made = Desk(engine)
    yield made
    made.forget()


@pytest.fixture(params=["postgres", "memory"])
def either(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Desk]:
    """Parcels on Postgres, and in memory."""
    made = Desk(engine if request.param == "postgres" else MemoryStore(VirtualClock()))
    yield made
    made.forget()


@pytest.fixture
def nowhere(engine: Engine) -> Iterator[Database]:
    """A database that does not answer."""
    gone = create_engine(engine.url.set(host="127.0.0.1", port=free_port()))
    yield Database(gone)
    gone.dispose()
