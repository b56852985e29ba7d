"""The two places where cases are kept."""

import pytest

from tests.core.cases.worlds import InMemory, OnPostgres


@pytest.fixture(params=["postgres", "memory"])
def world(request):
    """Postgres, then memory: what a test says of the lifecycle holds on both."""
    if request.param == "memory":
        return InMemory()
    return OnPostgres(request.getfixturevalue("engine"))


@pytest.fixture
def postgres(engine):
    return OnPostgres(engine)
