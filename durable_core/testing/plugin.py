"""
The pytest plugin: fixtures that begin with `durable_`, and an ini option for the name of the Celery app.

Every pytest run of an environment that has this package loads this module, and with it the package: a second. Celery,
Alembic and the servers wait until a fixture is used; `-p no:durable` leaves out all of it. Nothing else of the package
asks for pytest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from durable_core.database.connections import Database
    from durable_core.testing.databases import MovableClock
    from durable_core.testing.worker import WorkerProcess

APP_OPTION = "durable_app"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(APP_OPTION, "the Celery app of durable_worker, as `celery --app` takes it: shop.celery:app")


# --- what a project may say itself, by a fixture of the same name ---------------------------------------


@pytest.fixture(scope="session")
def durable_prepare() -> Callable[[Engine], None]:
    """Called once with the engine of the migrated database, to make the project's own tables; makes none."""
    return lambda engine: None


@pytest.fixture(scope="session")
def durable_worker_arguments() -> Sequence[str]:
    """More arguments for `celery worker`."""
    return ("--concurrency", "2")


@pytest.fixture(scope="session")
def durable_worker_environment() -> Mapping[str, str]:
    """More environment variables for the worker, where the app reads its addresses from others than ours."""
    return {}


@pytest.fixture(scope="session")
def durable_app(pytestconfig: pytest.Config) -> str:
    """The name of the Celery app, from the ini option of this name."""
    name: str = pytestconfig.getini(APP_OPTION)
    if not name:
        pytest.fail(f'durable_worker needs the Celery app: set {APP_OPTION} = "shop.celery:app" in pytest\'s settings')
    return name


# --- the database ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def durable_database_server() -> Iterator[str]:
    """The URL of a Postgres on which databases may be made: DURABLE_DATABASE_URL, or one started for this process."""
    from durable_core.testing.servers import database_server

    with database_server() as url:
        yield url


@pytest.fixture(scope="session")
def durable_redis_url() -> Iterator[str]:
    """The URL of a Redis or Valkey: DURABLE_REDIS_URL, or one started for this process."""
    from durable_core.testing.servers import redis_server

    with redis_server() as url, pytest.MonkeyPatch.context() as environment:
        environment.setenv(REDIS_VARIABLE, url)
        yield url


@pytest.fixture(scope="session")
def durable_database(durable_database_server: str, durable_prepare: Callable[[Engine], None]) -> Iterator[Database]:
    """The migrated database of this pytest process; DURABLE_DATABASE_URL names it while it is there."""
    from durable_core.testing.databases import fresh_database

    with fresh_database(durable_database_server, durable_prepare) as database, pytest.MonkeyPatch.context() as changed:
        changed.setenv(DATABASE_VARIABLE, database.engine.url.render_as_string(hide_password=False))
        yield database


@pytest.fixture
def durable_engine(durable_database: Database) -> Iterator[Engine]:
    """For tests that commit: an engine on the database, which is emptied and gets real time again after the test."""
    from durable_core.testing.databases import MovableClock, empty

    yield durable_database.engine
    try:
        empty(durable_database.engine)
    finally:
        MovableClock(durable_database.engine).reset()


@pytest.fixture
def durable_session(durable_database: Database, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session in a transaction that is rolled back at the end; a commit of it is a savepoint, so it goes too."""
    from sqlalchemy.orm import Session

    if "durable_engine" in request.fixturenames:
        # Whatever their order in the test's signature, the locks of this transaction go before the tables are emptied.
        request.getfixturevalue("durable_engine")
    with durable_database.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        if outer.is_active:
            outer.rollback()


@pytest.fixture
def durable_clock(durable_database: Database) -> Iterator[MovableClock]:
    """The database's clock, for everybody who uses it; real time again after the test."""
    from durable_core.testing.databases import MovableClock

    clock = MovableClock(durable_database.engine)
    yield clock
    clock.reset()


# --- the worker -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _durable_worker(
    durable_app: str,
    durable_database: Database,
    durable_redis_url: str,
    durable_worker_arguments: Sequence[str],
    durable_worker_environment: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[WorkerProcess]:
    from durable_core.testing.worker import WorkerProcess

    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        # The app is found as the tests find it.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        DATABASE_VARIABLE: durable_database.engine.url.render_as_string(hide_password=False),
        REDIS_VARIABLE: durable_redis_url,
        **durable_worker_environment,
    }
    worker = WorkerProcess(
        durable_app, durable_worker_arguments, tmp_path_factory.mktemp("durable_worker"), environment
    )
    try:
        try:
            # Here, so that pytest remembers what it came to: an app that does not start is waited for once in a run.
            worker.start()
        except RuntimeError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def durable_worker(_durable_worker: WorkerProcess, durable_engine: Engine) -> Iterator[WorkerProcess]:
    """
    A real Celery worker of the app on a real Redis, with its beat: one for the whole run, ready, and awake.

    At the end of the test it has nothing to do any more: what is pending is taken away, and a handler that still
    runs after 5 s is killed with its worker, which the next test starts anew.
    """
    from durable_core.testing.deliveries import settle_down

    _durable_worker.start()
    _durable_worker.said()
    yield _durable_worker
    _durable_worker.thaw()
    if not settle_down(durable_engine, seconds=5.0 if _durable_worker.alive else 0.0):
        _durable_worker.kill()
    # pytest shows it beside a test that failed, and else keeps it to itself.
    print(_durable_worker.said())
