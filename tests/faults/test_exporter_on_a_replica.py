"""An exporter that reads a replica counts what happened on the primary once, however late it gets there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text

from durable_core.database.connections import Database
from durable_core.deliveries.declare import delivery, registry
from durable_core.exporter import tail
from durable_core.exporter.observe import Observer
from durable_core.testing import make_delivery, migrated
from tests.celery.nodes import wait_until
from tests.exporter.conftest import Page
from tests.faults.replica import Replica
from tests.faults.servers import Cluster

LAG = 1.0
"""Instead of half a minute and a minute: on a replica nobody can move the clock while its replay stands still."""


@pytest.fixture(scope="module")
def primary() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.remove()


@pytest.fixture
def replica(primary: Cluster) -> Iterator[Replica]:
    migrated(primary.url).dispose()
    replica = Replica(primary)
    yield replica
    replica.remove()


def test_what_reaches_a_replica_late_is_counted_late(
    primary: Cluster, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "LAG_SECONDS", LAG)
    monkeypatch.setattr(tail, "ENQUEUE_LAG_SECONDS", LAG)
    kind = delivery("test.on_a_replica")(lambda step: None)
    here, there = create_engine(primary.url), create_engine(replica.url)
    observer = Observer(Database(there))

    def commits(state: str) -> None:
        with here.begin() as tx:
            make_delivery(tx, kind, state=state)

    def counted(name: str, **labels: str) -> float | None:
        observer.observe()
        assert observer.failed == {}
        return Page(observer).value(name, queue="durable", kind=kind.name, **labels)

    def knows() -> bool:
        observer.observe()
        return set(observer.tails.places) >= {"finished", "journal", "enqueued"}

    try:
        commits("pending")
        wait_until(knows, "the replica knows how far it is")
        replica.pause()
        with here.connect() as connection:
            since = connection.scalar(text("select durable.durable_now()"))
        for _ in range(3):
            commits("sent")
        # Longer than the counters' lag they stand on the primary, and are not seen here.
        with here.connect() as connection:
            connection.execute(text("select pg_sleep(:seconds)"), {"seconds": 3 * LAG})
        assert counted("durable_attempts_total", outcome="committed") is None
        for name, place in observer.tails.places.items():
            assert place.at < since, name
        replica.go_on()
        commits("pending")  # what tells the replica how far it is
        wait_until(lambda: counted("durable_attempts_total", outcome="committed") == 3, "they are counted")
        wait_until(lambda: (counted("durable_enqueued_total") or 0) >= 3, "and so is their enqueue")
    finally:
        registry.remove(kind.name)
        here.dispose()
        there.dispose()
