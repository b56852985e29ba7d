"""
A shop of a test module's own, to break: its Postgres, its Valkey, its workers, and this process as its web process.

Nothing here is shared with other tests, so a module may stop, freeze, fill and flush what it likes. A module that
needs a server of a certain kind says so: `POSTGRES = {"max_connections": "25"}`, `VALKEY = ["appendonly yes"]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pytest_celery import CeleryBrokerCluster
from sqlalchemy import text

from durable_core.testing import migrated
from tests.celery import shop
from tests.celery.conftest import Nodes
from tests.celery.nodes import Beat, Broker, ControlWorker, ShopSetup, ShopWorker, ValkeyContainer
from tests.celery.world import World, installed_here
from tests.faults.servers import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.serial)


class Stage(World):
    """The running shop, with the servers under it."""

    cluster: Cluster
    nodes: Nodes
    kinds: shop.Shop

    def beat(self) -> Beat:
        beat = self.nodes.beat()
        beat.ready()
        return beat

    def control_worker(self) -> ShopWorker:
        """A worker for the sweeps alone."""
        node = self.nodes.worker("control", "-Q", "durable.control", "--pool", "solo", cls=ControlWorker)
        node.ready()
        return node

    def worker(self, *arguments: str, name: str = "work", environment: dict[str, str] | None = None) -> ShopWorker:
        """A worker that is ready: `worker("--pool", "threads", "-c", "4")`."""
        node = self.nodes.worker(name, *arguments, environment=environment)
        node.ready()
        return node


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A Postgres of the module's own, with the module's settings `POSTGRES`."""
    cluster = Cluster(getattr(request.module, "POSTGRES", None))
    try:
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="module")
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A Valkey of the module's own, with the lines of `VALKEY` in its configuration."""
    lines: Sequence[str] = getattr(request.module, "VALKEY", ())
    broker = Broker(ValkeyContainer(tmp_path_factory.mktemp("broker"), lines))
    try:
        broker.ready()
        yield broker
    finally:
        broker.teardown()


@pytest.fixture(scope="module")
def stage(cluster: Cluster, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The shop without workers and without beat; the module starts those it needs, once."""
    migrated(cluster.url).dispose()
    gates = tmp_path_factory.mktemp("gates")
    environment = {"SHOP_DATABASE_URL": cluster.url, "SHOP_GATES": str(gates)}
    config = {
        "celery_broker_cluster_config": CeleryBrokerCluster(broker).config(),
        "celery_backend_cluster_config": None,
    }
    app = ShopSetup.create_setup_app(ShopSetup.config(config), ShopSetup.name())
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), config, environment, app)
    kinds = shop.Shop()
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("SHOP_DATABASE_URL", cluster.url)
        engine = shop.engine()
        try:
            with engine.begin() as connection:
                for statement in shop.TABLES:
                    connection.execute(text(statement))
            with installed_here(app) as durable:
                stage = Stage(engine, gates, app, durable, broker)
                stage.cluster, stage.nodes, stage.kinds = cluster, nodes, kinds
                yield stage
        finally:
            nodes.end()
            kinds.forget()
            engine.dispose()
            shop.engine.cache_clear()
            shop.sessions.cache_clear()
