"""Heartbeats: cheap, bounded by the deadline, and never the handler's business."""

import logging
import time
from dataclasses import replace

from sqlalchemy import create_engine, text

from durable_core.claims.claim import Holder
from durable_core.claims.heartbeat import Heartbeat
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import _statements, claim_due
from durable_core.deliveries.enqueue import enqueue_many


def test_the_heartbeats_of_a_hundred_neighbours_touch_no_index(engine, database, kind):
    """HOT updates: half of each page is free, and no index covers what a heartbeat writes."""
    with engine.begin() as tx:
        enqueue_many(tx, (kind.options().new(n) for n in range(100)))
    with engine.begin() as tx:
        claims = claim_due(tx, 100)
        tx.execute(text("select pg_stat_force_next_flush()"))  # count the claims before the beats
    assert len(claims) == 100
    heartbeat = Heartbeat(database, Holder(lease_seconds=3000, heartbeat_seconds=900))
    for claim in claims:
        heartbeat.hold(claim, _statements)
    question = text(
        "select pg_stat_get_tuples_updated(oid) as updated, pg_stat_get_tuples_hot_updated(oid) as hot"
        " from pg_class where oid = 'durable.deliveries'::regclass"
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
        before = _stats(watching, heartbeat, question)
        for _ in range(10):
            heartbeat.beat()
        after = _stats(watching, heartbeat, question)
    heartbeat.stop()
    updated, hot = after.updated - before.updated, after.hot - before.hot
    assert updated == 1000
    assert hot / updated >= 0.95


def _stats(watching, heartbeat, question):
    """The counters, once the backends that count have reported."""
    for connection in (watching, heartbeat._connection):
        if connection is not None:
            connection.execute(text("select pg_stat_force_next_flush()"))
            if connection is not watching:
                connection.rollback()
    watching.execute(text("select pg_stat_clear_snapshot()"))
    return watching.execute(question).one()


def test_a_heartbeat_renews_every_lease_in_one_statement_and_to_full_length(engine, database, make, row, clock):
    from sqlalchemy import Engine, event

    made = [make(state="processing") for _ in range(3)]
    heartbeat = Heartbeat(database, Holder())
    for m in made:
        heartbeat.hold(m.held, _statements)
    clock.advance(20)
    clock.freeze()
    statements = []

    def count(*told):
        if "kept" in told[2]:
            statements.append(told[2])

    # On every engine: the heartbeat's connection comes from none of the host's pools.
    event.listen(Engine, "before_cursor_execute", count)
    heartbeat.beat()
    event.remove(Engine, "before_cursor_execute", count)
    heartbeat.stop()
    assert len(statements) == 1
    for m in made:
        assert (row(m.id).lease_expires_at - clock.now()).total_seconds() == 30
        assert row(m.id).beat_at == clock.now()


def test_a_claim_let_go_is_beaten_for_no_more(database, make, row, clock):
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder())
    heartbeat.let_go(heartbeat.hold(made.held, _statements))
    before = row(made.id)
    clock.advance(10)
    heartbeat.beat()
    heartbeat.stop()
    assert row(made.id) == before


def test_a_beat_of_an_old_fence_renews_nothing_and_says_that_the_claim_is_lost(database, engine, make, row, caplog):
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder())
    held = heartbeat.hold(made.held, _statements)
    with engine.begin() as tx:
        tx.execute(text("update durable.deliveries set fence = fence + 1"))
    before = row(made.id)
    with caplog.at_level(logging.WARNING, logger="durable.heartbeat"):
        heartbeat.beat()
        heartbeat.beat()
    heartbeat.stop()
    assert held.lost.is_set()
    assert row(made.id) == before
    assert [record.message for record in caplog.records] == ["claim_lost"]


def test_the_thread_beats_by_itself_and_survives_a_lost_connection(database, engine, make, row):
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder(lease_seconds=30, heartbeat_seconds=0.05))
    heartbeat.hold(made.held, _statements)
    first = row(made.id).beat_at
    second = _later_beat(row, made, first)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        ))  # fmt: skip
    engine.dispose()
    assert _later_beat(row, made, second) > second
    heartbeat.stop()


def _later_beat(row, made, than):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if (beat := row(made.id).beat_at) > than:
            return beat
        time.sleep(0.02)
    raise AssertionError("no beat came")


def test_a_stopped_heartbeat_gives_its_connection_back(database, engine, make):
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder(lease_seconds=30, heartbeat_seconds=0.05))
    heartbeat.hold(made.held, _statements)
    heartbeat.beat()
    heartbeat.stop()
    assert heartbeat._connection is None


def test_a_claim_none_of_whose_beats_gets_through_is_given_up_when_its_lease_is_over(engine, make):
    made = make(state="processing")
    nowhere = Database(create_engine(engine.url.set(port=1)))
    heartbeat = Heartbeat(nowhere, Holder(lease_seconds=0.6, heartbeat_seconds=0.1))
    held = heartbeat.hold(replace(made.held, taken_at=time.monotonic()), _statements)
    assert not held.given_up
    end = time.monotonic() + 10
    while not held.given_up and time.monotonic() < end:
        time.sleep(0.02)
    heartbeat.stop()
    assert held.given_up
    assert not held.lost.is_set()


def test_a_claim_whose_row_its_own_step_has_locked_is_not_given_up(database, engine, make):
    """The beat skips the row, and so does whoever would take it."""
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder(lease_seconds=0.6, heartbeat_seconds=0.1))
    held = heartbeat.hold(replace(made.held, taken_at=time.monotonic() - 1.0), _statements)
    assert held.given_up
    with engine.begin() as step:
        step.execute(text("select from durable.deliveries for no key update"))
        heartbeat.beat()
        assert not held.given_up
    heartbeat.stop()
