"""Behind PgBouncer in transaction mode: every transaction may run in another session, and nothing of ours minds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, create_engine, text

from durable_core.cli.main import main
from durable_core.database.connections import Database
from durable_core.database.poolers import refuse_unsafe_pooler
from durable_core.errors import UnsafePooler
from tests.celery.nodes import ControlWorker
from tests.elsewhere import ALL, PART, quick_servers, run_there
from tests.faults.conftest import Stage
from tests.faults.pooler import Pooler, find_pgbouncer

pytestmark = pytest.mark.skipif(find_pgbouncer() is None, reason="no pgbouncer here")

SESSIONS = 60
"""As many server connections as those tests hold transactions at once, and some more."""


@pytest.mark.field("R60")
@pytest.mark.full_size
def test_the_core_and_the_races_pass_through_a_pooler_and_leave_nothing_in_its_sessions(
    sized: Callable[[list[str], list[str]], list[str]],
) -> None:
    """What needs sessions of its own to be tested at all is listed with its reason: `DIRECT` in pooler.py."""
    with quick_servers() as addresses:
        pooler = Pooler(addresses.database_url, pool_size=SESSIONS)
        try:
            through_it = replace(addresses, database_url=pooler.url.render_as_string(hide_password=False))
            run_there(sized(PART, ALL), through_it, "-p", "tests.faults.pooler")
            sessions, kept = pooler.kept("durable_test_master")
        finally:
            pooler.stop()
    assert (sessions, kept) == (SESSIONS, [])


@pytest.fixture(scope="module")
def two(stage: Stage) -> Iterator[Pooler]:
    """A pooler with two server connections before the stage's Postgres."""
    pooler = Pooler(stage.cluster.url, pool_size=2)
    yield pooler
    pooler.stop()


def through(pooler: Pooler, **settings: str) -> dict[str, str]:
    """The environment of a worker whose engine goes through the pooler."""
    return {"SHOP_DATABASE_URL": pooler.url.render_as_string(hide_password=False), **settings}


@pytest.mark.field("R60")
@pytest.mark.full_size
def test_workers_beat_and_rescue_get_along_with_two_server_connections(
    stage: Stage, two: Pooler, sized: Callable[[int, int], int]
) -> None:
    """Four handlers, their heartbeats and the sweeps share them, and a killed worker's row is rescued through them."""
    pooled = through(two, SHOP_CONNECT_ARGS='{"prepare_threshold": null}')
    stage.beat()
    control = ("-Q", "durable.control", "--pool", "solo")
    assert stage.nodes.worker("control", *control, environment=pooled, cls=ControlWorker).ready()
    doomed = stage.worker("-c", "1", environment=pooled)
    kept = stage.commit(stage.kinds.held, "calling", "in_commit")
    stage.held_at(kept)
    doomed.kill()
    stage.worker("-c", "4", environment=pooled)

    rows = stage.commit_many(stage.kinds.quick, sized(40, 500))
    rows += stage.commit_many(stage.kinds.order, sized(40, 500))
    (rescued, *_) = stage.accounted(kept, *rows, seconds=300)

    assert rescued.interruptions == 1
    assert {pool["pool_mode"] for pool in two.show("pools") if pool["database"] == "durable"} == {"transaction"}
    sessions, found = two.kept("durable")
    assert (sessions, found) == (2, [])


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(pooler: Pooler, **connect_args: object) -> Engine:
        made.append(create_engine(pooler.url, connect_args=connect_args))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


@pytest.fixture
def quiet(stage: Stage) -> Iterator[Pooler]:
    """A pooler that nobody else uses."""
    pooler = Pooler(stage.cluster.url, pool_size=2)
    yield pooler
    pooler.stop()


def test_prepared_statements_through_it_are_refused_at_the_start_with_the_setting_that_helps(
    stage: Stage, quiet: Pooler, engines: Callable[..., Engine]
) -> None:
    for _ in range(2):
        with pytest.raises(UnsafePooler, match=re.escape('connect_args={"prepare_threshold": None}')):
            refuse_unsafe_pooler(Database(engines(quiet)))
    refuse_unsafe_pooler(Database(engines(quiet, prepare_threshold=None)))
    refuse_unsafe_pooler(Database(stage.engine))  # no pooler: prepared statements are as good as ever
    assert quiet.kept("durable")[1] == [], "asking leaves nothing behind"


def test_a_worker_that_would_prepare_statements_behind_it_does_not_start(stage: Stage, quiet: Pooler) -> None:
    worker = stage.nodes.worker("refused", "-c", "1", environment=through(quiet))
    assert worker.process.wait(90) != 0
    assert "prepare_threshold" in worker.logs()


def test_the_commands_need_no_connection_of_their_own(stage: Stage, quiet: Pooler) -> None:
    """`durable migrate` included: its advisory lock and its lock timeout are the transaction's."""
    address = quiet.url.render_as_string(hide_password=False)
    for line in (("migrate",), ("status",), ("deliveries", "list")):
        done = CliRunner().invoke(main, ["--database-url", address, *line, "--json"], prog_name="durable")
        assert done.exit_code == 0, done.stderr
    with stage.engine.connect() as connection:
        assert connection.scalar(text("select count(*) from pg_locks where locktype = 'advisory'")) == 0
    assert quiet.kept("durable")[1] == []
