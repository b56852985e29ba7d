"""What needs a server of its own to be broken: a replica, a lost standby, a prepared transaction, no vacuum."""

import threading

import pytest
from sqlalchemy import text

from durable_core.deliveries.declare import delivery, registry
from durable_core.doctor.findings import Reason, Status
from durable_core.testing import MovableClock, make_delivery, migrated
from tests.celery.nodes import wait_until
from tests.doctor.conftest import is_mendable, look, only
from tests.faults.servers import Cluster
from tests.faults.standby import Standby

pytestmark = pytest.mark.serial


@pytest.fixture
def cluster():
    cluster = Cluster({"max_prepared_transactions": "5"})
    yield cluster
    cluster.remove()


@pytest.fixture
def engine(cluster):
    engine = migrated(cluster.url)
    yield engine
    engine.dispose()


def test_a_server_that_keeps_what_it_acknowledges_is_well_until_it_cleans_no_more(cluster, engine):
    assert only(engine, "server").status is Status.PASS
    cluster.set(autovacuum="off")
    assert is_mendable(only(engine, "server"), Reason.AUTOVACUUM_OFF, Status.WARN)


def test_a_replica_fails(cluster, engine):
    engine.dispose()
    cluster.end()
    (cluster.data / "standby.signal").touch()
    cluster.start_again()
    findings = look(engine, "server").findings
    assert is_mendable(findings[0], Reason.ON_A_REPLICA, Status.FAIL)
    # Everything else can be looked at there.
    assert not [one for one in look(engine).findings if one.reason is Reason.COULD_NOT_LOOK]


def test_a_transaction_that_nobody_decided_warns(engine):
    clock = MovableClock(engine)
    clock.install()
    with engine.connect() as connection:
        connection.execute(text("create table host (a int)"))
        connection.execute(text("prepare transaction 'orphan'"))
    try:
        clock.advance(120)
        finding = only(engine, "transactions")
        assert is_mendable(finding, Reason.PREPARED_TRANSACTION, Status.WARN)
        assert "rollback prepared 'orphan'" in finding.fix
    finally:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("rollback prepared 'orphan'"))


def test_a_commit_that_waits_for_its_standby_fails_and_nobody_is_told_to_end_it(cluster, engine):
    clock = MovableClock(engine)
    clock.install()
    kind = delivery("test.doctor_standby")(lambda step: None)
    standby = Standby(cluster, engine)
    committer = threading.Thread(target=lambda: connection.commit())
    try:
        with engine.begin() as tx:
            made = make_delivery(tx, kind, state="processing")
        clock.advance(300 + 31)
        standby.require()
        with engine.connect() as connection:
            named = f"durable {made.id} {made.held.fence}"
            connection.execute(text("select set_config('application_name', :name, true)"), {"name": named})
            connection.execute(text("update durable.deliveries set error_code = 'X' where id = :id"), {"id": made.id})
            standby.freeze()
            committer.start()
            wait_until(standby.waiting, "the commit waits")
            finding = only(engine, "stuck")
            standby.thaw()
            committer.join(30)
        assert is_mendable(finding, Reason.COMMIT_WAITS_FOR_STANDBY, Status.FAIL)
        assert "pg_terminate_backend" not in finding.fix
    finally:
        standby.thaw()
        standby.remove()
        registry.remove("test.doctor_standby")
