"""
Real workers on a real broker and a real database: pytest-celery's set-up over processes.

One broker, one worker, one control worker and one beat live as long as the tests of this folder. A test that
kills or freezes a worker starts its own, on a queue that no other reads. All waits are bounded polls.

`pytest tests/celery --celery-nodes=docker` runs the tests marked `docker` on pytest-celery's own containers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pytest_celery import CeleryBrokerCluster, CeleryTestNode
from sqlalchemy import Engine, text

from durable_core.celery_binding import Durable
from durable_core.local.services import Addresses
from durable_core.testing import create_database, drop_database, migrated
from tests.celery import shop
from tests.celery.nodes import (
    Beat,
    BeatContainer,
    Broker,
    ControlWorker,
    ShopCluster,
    ShopContainer,
    ShopSetup,
    ShopWorker,
    ValkeyContainer,
)
from tests.celery.world import World, installed_here

DATABASE = "durable_celery"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--celery-nodes",
        choices=("process", "docker"),
        default="process",
        help="what Celery's nodes run in: processes of this machine, or pytest-celery's own containers",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    in_containers = config.getoption("celery_nodes", default="process") == "docker"
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.serial)
        wants_containers = item.get_closest_marker("docker") is not None
        if wants_containers and not in_containers:
            item.add_marker(pytest.mark.skip(reason="runs in containers: needs --celery-nodes=docker"))
        elif in_containers and not wants_containers:
            item.add_marker(pytest.mark.skip(reason="needs processes: runs without --celery-nodes=docker"))


# --- the database and the app of this process ------------------------------------------------------


@pytest.fixture(scope="package")
def shop_engine(services: Addresses) -> Iterator[Engine]:
    """A migrated database with the shop's own tables; what this process, the web process, works on."""
    url = create_database(services.database_url, DATABASE)
    migrated(url).dispose()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SHOP_DATABASE_URL", url.render_as_string(hide_password=False))
        engine = shop.engine()
        with engine.begin() as connection:
            for statement in shop.TABLES:
                connection.execute(text(statement))
        yield engine
        engine.dispose()
        shop.engine.cache_clear()
        shop.sessions.cache_clear()
    drop_database(services.database_url, DATABASE)


@pytest.fixture(scope="package")
def shop_kinds() -> Iterator[shop.Shop]:
    """The shop's kinds, declared in this process too."""
    declared = shop.Shop()
    yield declared
    declared.forget()


@pytest.fixture(scope="package")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which handlers say where they are held."""
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="package")
def shop_environment(shop_engine: Engine, gates: Path) -> dict[str, str]:
    return {
        "SHOP_DATABASE_URL": shop_engine.url.render_as_string(hide_password=False),
        "SHOP_GATES": str(gates),
    }


# --- pytest-celery's fixtures, over processes and for the whole folder ---------------------------------


@pytest.fixture(scope="package")
def celery_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = Broker(ValkeyContainer(tmp_path_factory.mktemp("broker")))
    try:
        broker.ready()
        yield broker
    finally:
        broker.teardown()


@pytest.fixture(scope="package")
def celery_broker_cluster(celery_broker: Broker) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(celery_broker)


@pytest.fixture(scope="package")
def celery_backend_cluster() -> None:
    """No result backend: results are in the rows."""


@pytest.fixture(scope="package")
def celery_worker_cluster_config(celery_broker_cluster: CeleryBrokerCluster) -> dict[str, Any]:
    return {"celery_broker_cluster_config": celery_broker_cluster.config(), "celery_backend_cluster_config": None}


@pytest.fixture(scope="package")
def celery_setup_cls() -> type[ShopSetup]:
    return ShopSetup


@pytest.fixture(scope="package")
def celery_setup_app(celery_worker_cluster_config: dict[str, Any], shop_engine: Engine) -> Celery:
    return ShopSetup.create_setup_app(ShopSetup.config(celery_worker_cluster_config), ShopSetup.name())


@pytest.fixture(scope="package")
def durable(celery_setup_app: Celery, shop_kinds: shop.Shop) -> Iterator[Durable]:
    """The web process's durable work: hints go out after its commits."""
    with installed_here(celery_setup_app) as here:
        yield here


class Nodes:
    """Starts workers and beats, and ends every one of them."""

    _numbers = itertools.count(1)

    def __init__(self, folder: Path, config: dict[str, Any], environment: Mapping[str, str], app: Celery) -> None:
        self._folder, self._config, self._environment, self._app = folder, config, environment, app
        self._nodes: list[CeleryTestNode] = []

    def worker(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cls: type[ShopWorker] = ShopWorker,
    ) -> ShopWorker:
        """A worker that is starting; `ready()` waits for it."""
        node = cls(ShopContainer(*self._described(name, arguments, environment)), app=self._app)
        self._nodes.append(node)
        return node

    def beat(self, name: str = "beat") -> Beat:
        node = Beat(BeatContainer(*self._described(name, (), None)), app=self._app)
        self._nodes.append(node)
        return node

    def _described(
        self, name: str, arguments: tuple[str, ...], environment: Mapping[str, str] | None
    ) -> tuple[str, tuple[str, ...], Path, dict[str, Any], dict[str, str]]:
        unique = f"{name}-{next(self._numbers)}"
        return unique, arguments, self._folder, self._config, {**self._environment, **(environment or {})}

    def end(self) -> None:
        # All are told before any is waited for.
        for node in self._nodes:
            node.kill("SIGTERM")
        while self._nodes:
            self._nodes.pop().teardown()


@pytest.fixture(scope="package")
def lasting_nodes(
    tmp_path_factory: pytest.TempPathFactory,
    celery_worker_cluster_config: dict[str, Any],
    shop_environment: dict[str, str],
    celery_setup_app: Celery,
) -> Iterator[Nodes]:
    """Nodes that live as long as the tests of this folder."""
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), celery_worker_cluster_config, shop_environment, celery_setup_app)
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def nodes(
    tmp_path: Path,
    celery_worker_cluster_config: dict[str, Any],
    shop_environment: dict[str, str],
    celery_setup_app: Celery,
) -> Iterator[Nodes]:
    """Nodes of one test, for those that kill or freeze them."""
    its_own = Nodes(tmp_path, celery_worker_cluster_config, shop_environment, celery_setup_app)
    try:
        yield its_own
    finally:
        its_own.end()


@pytest.fixture(scope="package")
def celery_worker(lasting_nodes: Nodes) -> ShopWorker:
    """A prefork worker, started without -Q."""
    return lasting_nodes.worker("work", "-c", "2")


@pytest.fixture(scope="package")
def control_worker(lasting_nodes: Nodes) -> ControlWorker:
    """A worker for the sweeps alone."""
    node = lasting_nodes.worker("control", "-Q", "durable.control", "--pool", "solo", cls=ControlWorker)
    assert isinstance(node, ControlWorker)
    return node


@pytest.fixture(scope="package")
def celery_beat(lasting_nodes: Nodes) -> Beat:
    return lasting_nodes.beat()


@pytest.fixture(scope="package")
def celery_worker_cluster(celery_worker: ShopWorker, control_worker: ControlWorker) -> ShopCluster:
    return ShopCluster(celery_worker, control_worker)


@pytest.fixture(scope="package")
def celery_setup(
    celery_setup_cls: type[ShopSetup],
    celery_worker_cluster: ShopCluster,
    celery_broker_cluster: CeleryBrokerCluster,
    celery_beat: Beat,
    celery_setup_app: Celery,
    durable: Durable,
) -> Iterator[ShopSetup]:
    """The shop, running: broker, worker, control worker, beat, and this process as its web process."""
    setup = celery_setup_cls(
        worker_cluster=celery_worker_cluster,
        broker_cluster=celery_broker_cluster,
        backend_cluster=None,
        app=celery_setup_app,
    )
    assert setup.ready(ping=False, control=True, docker=True)
    assert celery_beat.ready()
    yield setup
    setup.teardown()


@pytest.fixture
def world(
    celery_setup: ShopSetup, durable: Durable, shop_engine: Engine, gates: Path, celery_broker: Broker
) -> Iterator[World]:
    """What a test does with the running shop; its rows are gone afterwards."""
    world = World(shop_engine, gates, celery_setup.app, durable, celery_broker)
    yield world
    world.clean_up()


@pytest.fixture
def another_broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker of this test's own, to freeze."""
    broker = Broker(ValkeyContainer(tmp_path))
    try:
        broker.ready()
        yield broker
    finally:
        broker.teardown()
