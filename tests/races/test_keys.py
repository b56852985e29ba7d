"""Two callers with the same idempotency key, both still open."""

import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import IdempotencyConflict, KeyInFlight, enqueue_many
from durable_core.database.transactions import sqlstate
from durable_core.testing import wait_until_blocked


def test_a_twin_still_open_is_answered_key_in_flight_soon_and_poisons_nothing(engine, other_engine, kind, row):
    with other_engine.connect() as first, engine.connect() as second:
        one = kind.options(key="k").enqueue(first, 1)
        second.execute(text("insert into effects (row_id) values ('of the second')"))
        began = time.monotonic()
        with pytest.raises(KeyInFlight) as refused:
            kind.options(key="k").enqueue(second, 1)
        assert time.monotonic() - began < 3 * 0.05 + 0.5
        assert (refused.value.kind, refused.value.key) == (kind.name, "k")
        assert second.scalar(text("show lock_timeout")) == "0"
        first.commit()
        again = kind.options(key="k").enqueue(second, 1)
        assert (again.id, again.created) == (one.id, False)
        with pytest.raises(IdempotencyConflict):
            kind.options(key="k").enqueue(second, 2)
        second.commit()
    assert row(one.id).arguments == {"n": 1}
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from effects")) == 1


def test_a_twin_that_rolled_back_frees_the_key(engine, other_engine, kind):
    with other_engine.connect() as first, engine.connect() as second:
        kind.options(key="k").enqueue(first, 1)
        with pytest.raises(KeyInFlight):
            kind.options(key="k").enqueue(second, 2)
        first.rollback()
        assert kind.options(key="k").enqueue(second, 2).created
        second.commit()


def _enqueue(connection, kind, key, n):
    ref = kind.options(key=key).enqueue(connection, n)
    connection.commit()
    return ref


@pytest.mark.parametrize("commits", [True, False])
def test_a_twin_that_ends_while_we_wait_decides_the_answer(engine, other_engine, kind, monkeypatch, commits):
    from durable_core.deliveries import keys

    monkeypatch.setattr(keys, "KEY_WAIT", "20s")
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as first, engine.connect() as second:
        one = kind.options(key="k").enqueue(first, 1)
        pid = second.scalar(text("select pg_backend_pid()"))
        waiting = pool.submit(_enqueue, second, kind, "k", 1)
        wait_until_blocked(other_engine, pid, by=first.scalar(text("select pg_backend_pid()")))
        if commits:
            first.commit()
        else:
            first.rollback()
        ref = waiting.result(30)
    assert ref.created is not commits
    assert (ref.id == one.id) is commits


def test_two_callers_with_the_same_keys_in_opposite_orders_never_deadlock(engine, other_engine, kind, monkeypatch):
    """Keys are met in sorted order, so the second waits for the first and then finds all its rows."""
    from durable_core.deliveries import keys

    monkeypatch.setattr(keys, "KEY_WAIT", "20s")
    keys = [f"k{n}" for n in range(40)]

    def both(order):
        with other_engine.begin() as tx:
            return enqueue_many(tx, [kind.options(key=key).new(1) for key in order])

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            forward, backward = pool.submit(both, keys), pool.submit(both, keys[::-1])
            ids = {ref.id for ref in forward.result(30)} | {ref.id for ref in backward.result(30)}
            assert len(ids) == 40
            with engine.begin() as tx:
                tx.execute(text("set local session_replication_role = replica"))
                tx.execute(text("delete from durable.deliveries"))


def test_opposite_keys_one_by_one_end_in_key_in_flight_and_not_in_a_deadlock(engine, other_engine, kind):
    with other_engine.connect() as first, engine.connect() as second:
        kind.options(key="a").enqueue(first, 1)
        kind.options(key="b").enqueue(second, 1)
        with pytest.raises(KeyInFlight):
            kind.options(key="a").enqueue(second, 1)
        with pytest.raises(KeyInFlight):
            kind.options(key="b").enqueue(first, 1)
        second.commit()
        assert not kind.options(key="b").enqueue(first, 1).created
        first.commit()


def test_a_key_in_flight_among_others_is_not_said_to_be_one_that_it_is_not(engine, other_engine, kind):
    with other_engine.connect() as first, engine.connect() as second:
        kind.options(key="k").enqueue(first, 1)
        with pytest.raises(KeyInFlight, match=r"^one of these 3 keys, for example") as refused:
            enqueue_many(second, [kind.options(key=key).new(1) for key in ("z", "k", "a")])
        assert (refused.value.key, refused.value.among) == ("a", 3)
        with pytest.raises(KeyInFlight, match=rf"^{kind.name}: key 'k' is being written"):
            enqueue_many(second, [kind.options(key="k").new(1)])


@pytest.mark.parametrize("door", ["Connection", "psycopg"])
def test_a_connection_that_dies_in_a_keyed_enqueue_is_what_the_caller_hears_of(
    engine, other_engine, kind, monkeypatch, door
):
    """And not that the savepoint could not be rolled back."""
    from durable_core.deliveries import keys

    monkeypatch.setattr(keys, "KEY_WAIT", "20s")
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as first:
        kind.options(key="k").enqueue(first, 1)
        second = psycopg.connect(url) if door == "psycopg" else other_engine.connect()
        ask = "select pg_backend_pid()"
        pid = second.execute(ask if door == "psycopg" else text(ask)).fetchone()[0]
        waiting = pool.submit(kind.options(key="k").enqueue, second, 1)
        wait_until_blocked(engine, pid, by=first.scalar(text(ask)))
        with engine.connect() as killer:
            killer.execute(text("select pg_terminate_backend(:pid)"), {"pid": pid})
        with pytest.raises((psycopg.Error, DBAPIError)) as died:
            waiting.result(30)
        second.close()
    assert sqlstate(died.value) == "57P01"
