"""
The main path on pytest-celery's own containers: `pytest tests/celery --celery-nodes=docker`.

Needs a Docker engine. The worker runs in the image of the project's Dockerfile, with this checkout mounted for the
app of these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import docker
import docker.errors
import pytest
from celery import Celery
from pytest_celery import CeleryTestContainer, CeleryTestWorker, CeleryWorkerContainer, RedisContainer, RedisTestBroker
from pytest_docker_tools import build, container, fetch, fxtr
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from durable_core.testing import migrated
from tests.celery import shop
from tests.celery.nodes import REPOSITORY, wait_until
from tests.celery.world import installed_here

pytestmark = pytest.mark.docker

DATABASE = {"POSTGRES_USER": "shop", "POSTGRES_PASSWORD": "only-in-this-test", "POSTGRES_DB": "shop"}


class PostgresContainer(CeleryTestContainer):
    """The database, reachable for workers by its name in their network and for the test by a port of the host."""

    @property
    def ready_prompt(self) -> str:
        return "PostgreSQL init process complete"

    def url(self, address: str) -> str:
        user, password, name = DATABASE.values()
        return f"postgresql+psycopg://{user}:{password}@{address}/{name}"


class WorkerContainer(CeleryWorkerContainer):
    """A `celery worker` of the test's app, started without -Q, with the sweeps' beat inside."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return [
            "celery", "-A", "tests.celery.shop_app", "worker", "--beat", "--scheduler", "celery.beat:Scheduler",
            f"--loglevel={cls.log_level()}", "-n", f"{cls.worker_name()}@%h", *args,
        ]  # fmt: skip


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """Skips where no Docker engine answers."""
    try:
        client = docker.from_env(timeout=10)
        client.ping()
        client.close()
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker engine answers: {error}")


postgres_image = fetch(repository="postgres:18")
redis_image = fetch(repository=RedisContainer.image())
shop_image = build(path=str(REPOSITORY), tag="durable-core/shop:tests")

postgres_container = container(
    image="{postgres_image.id}",
    environment=DATABASE,
    ports={"5432/tcp": ("127.0.0.1", None)},
    network="{default_pytest_celery_network.name}",
    wrapper_class=PostgresContainer,
    timeout=120,
)
redis_container = container(
    image="{redis_image.id}",
    command=RedisContainer.command(),
    ports={"6379/tcp": ("127.0.0.1", None)},
    network="{default_pytest_celery_network.name}",
    wrapper_class=RedisContainer,
    timeout=60,
)
worker_container = container(
    image="{shop_image.id}",
    command=WorkerContainer.command(),
    environment=fxtr("worker_environment"),
    volumes={str(REPOSITORY): {"bind": "/checkout", "mode": "ro"}},
    working_dir="/checkout",
    network="{default_pytest_celery_network.name}",
    wrapper_class=WorkerContainer,
    timeout=120,
)


@pytest.fixture
def containers_engine(docker_engine: None, postgres_container: PostgresContainer) -> Iterator[Engine]:
    port = postgres_container.get_addr("5432/tcp")[1]
    url = postgres_container.url(f"127.0.0.1:{port}")
    migrated(url).dispose()
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in shop.TABLES:
            connection.execute(text(statement))
    yield engine
    engine.dispose()


@pytest.fixture
def worker_environment(
    containers_engine: Engine, postgres_container: PostgresContainer, redis_container: RedisContainer
) -> dict[str, str]:
    return {
        "CELERY_BROKER_URL": redis_container.url,
        "SHOP_DATABASE_URL": postgres_container.url(f"{postgres_container.hostname}:5432"),
        "SHOP_GATES": "/tmp",
        "PYTHONPATH": "/checkout",
    }


def test_a_committed_delivery_is_carried_out_once_by_a_worker_in_a_container(
    docker_engine: None,
    containers_engine: Engine,
    redis_container: RedisContainer,
    worker_container: WorkerContainer,
    shop_kinds: shop.Shop,
) -> None:
    app = Celery("shop", broker=redis_container.host_url)
    shop.configure(app)
    broker, worker = RedisTestBroker(redis_container), CeleryTestWorker(worker_container, app=app)
    assert broker.ready()
    assert worker.ready()

    with installed_here(app), Session(containers_engine) as session, session.begin():
        row_id = shop_kinds.order.enqueue(session, "in a container").id

    def effects() -> list[int]:
        with containers_engine.connect() as connection:
            return list(connection.scalars(text("select fence from effects where row_id = :id"), {"id": row_id}))

    assert wait_until(effects, "the effect is committed") == [1]
