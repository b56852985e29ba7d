"""Connections of ours from the host's pool: what each use finds, and what it leaves there."""

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import create_engine, event, text
from sqlalchemy.pool import NullPool

from durable_core.database.connections import Database, raw
from durable_core.database.transactions import DATABASE_ERRORS, is_infrastructure

BACKEND = "select pg_backend_pid()"


@pytest.fixture
def pooled(engine):
    """The host's engine with two connections, that raises at once where there is no third."""
    made = create_engine(engine.url, pool_size=2, max_overflow=0, pool_timeout=0.01)
    yield made
    made.dispose()


def pid_of(driver):
    return driver.execute(BACKEND).fetchone()[0]


def two_pids(pooled):
    """Both connections of the pool, used once, so that they know their session's isolation."""
    database = Database(pooled)
    with database.driver() as one, database.driver() as another:
        return [pid_of(one), pid_of(another)]


def test_each_statement_is_committed_by_itself_and_the_pool_gets_its_connection_back_as_it_was(pooled):
    two_pids(pooled)
    for _ in range(3):
        with Database(pooled).driver() as driver:
            assert driver.autocommit
            pid_of(driver)
            assert driver.info.transaction_status == TransactionStatus.IDLE
    with pooled.connect() as connection, pooled.connect() as another:
        assert not raw(connection).autocommit
        assert not raw(another).autocommit


def test_an_engine_in_autocommit_stays_so(engine):
    made = create_engine(engine.url, isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0)
    try:
        for _ in range(2):
            with Database(made).driver() as driver:
                pid_of(driver)
        with made.connect() as connection:
            assert raw(connection).autocommit
    finally:
        made.dispose()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_where_sessions_have_another_isolation_it_is_one_transaction_at_read_committed(engine, level):
    option = level.replace(" ", r"\ ")
    strict = create_engine(engine.url, connect_args={"options": f"-c default_transaction_isolation={option}"})
    try:
        for _ in range(2):
            with Database(strict).driver() as driver:
                assert driver.execute("show transaction_isolation").fetchone() == ("read committed",)
                driver.execute("insert into effects (row_id, fence) values (%s, 7)", (level,))
        with engine.connect() as connection:
            assert connection.scalar(text("select count(*) from effects where row_id = :id"), {"id": level}) == 2
    finally:
        strict.dispose()


def test_a_connection_that_nobody_gave_back_comes_to_the_pool_without_autocommit(pooled):
    """As where a time limit strikes on its way there: a later transaction of the host's would commit each statement."""
    two_pids(pooled)
    using = Database(pooled).driver()
    using.__enter__()
    used = using.gen.gi_frame.f_locals["pooled"]
    used._checkin()
    with pooled.connect() as connection, pooled.connect() as another:
        assert [raw(each).autocommit for each in (connection, another)] == [False, False]
        del using


def test_where_the_pool_keeps_nothing_each_use_is_one_connection(engine):
    made = create_engine(engine.url, poolclass=NullPool)
    connects = []
    event.listen(made, "connect", lambda *_: connects.append(1))
    for _ in range(3):
        with Database(made).driver() as driver:
            pid_of(driver)
    assert len(connects) == 3


def test_what_the_hosts_events_raise_does_not_hide_a_lost_connection(engine, pooled):
    """An error of theirs would be taken for one of the attempt's, and not for a commit that may have landed."""

    def refuses(*_):
        raise RuntimeError("the host's own")

    before = two_pids(pooled)
    event.listen(pooled, "invalidate", refuses)
    with engine.begin() as killer:
        killer.execute(text("select pg_terminate_backend(pid, 5000) from unnest(:pids) as pid"), {"pids": before})
    with pytest.raises(psycopg.OperationalError), Database(pooled).driver() as driver:
        pid_of(driver)
    event.remove(pooled, "invalidate", refuses)


def test_after_an_error_of_a_statement_the_connection_is_used_again(pooled):
    before = two_pids(pooled)
    with pytest.raises(psycopg.errors.DivisionByZero), Database(pooled).driver() as driver:
        driver.execute("select 1/0")
    assert sorted(two_pids(pooled)) == sorted(before)


def test_a_connection_whose_answer_is_on_its_way_does_not_go_back(pooled):
    """So a time limit leaves it that strikes in the middle of a statement: the next user would get that answer."""
    before = two_pids(pooled)
    with Database(pooled).driver() as driver:
        left = pid_of(driver)
        driver.pgconn.send_query(b"select 42")
    after = two_pids(pooled)
    assert left not in after
    assert len(set(after) & set(before)) == 1


def test_with_a_connection_that_was_lost_the_others_of_its_pool_are_not_used_again(engine, pooled):
    before = two_pids(pooled)
    with engine.begin() as killer:
        killer.execute(text("select pg_terminate_backend(pid, 5000) from unnest(:pids) as pid"), {"pids": before})
    with pytest.raises(psycopg.OperationalError), Database(pooled).driver() as driver:
        pid_of(driver)
    assert not set(two_pids(pooled)) & set(before)


def test_no_connection_is_told_as_sqlalchemy_tells_it(pooled):
    two_pids(pooled)
    database = Database(pooled)
    with database.driver(), database.driver(), pytest.raises(DATABASE_ERRORS) as refused, database.driver():
        pass
    assert is_infrastructure(refused.value)
