from collections.abc import Callable, Mapping

import pytest
from app import Base
from sqlalchemy import Engine


@pytest.fixture(scope="session")
def durable_prepare() -> Callable[[Engine], None]:
    return Base.metadata.create_all


@pytest.fixture(scope="session")
def durable_worker_environment() -> Mapping[str, str]:
    return {"SHOP_LEASE_SECONDS": "1.5", "SHOP_HEARTBEAT_SECONDS": "0.5"}
