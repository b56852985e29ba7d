"""Parcels on Postgres, and in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from durable_core.cases.clock import VirtualClock
from durable_core.cases.memory import MemoryStore
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
