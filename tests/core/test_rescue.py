"""Rescue goes on without beat: a worker process runs the sweeps that nobody drives."""

import logging
import types
from dataclasses import replace

import pytest
from celery import Celery

from durable_core.celery_binding.durable import Durable
from durable_core.celery_binding.rescue import Rescue
from durable_core.sweeps import BY_A_WORKER, Bounds, late, loops, named, run_sweep


@pytest.fixture
def rescue(database, carrier):
    """The thread's work, without the thread."""
    app = Celery("nobody")
    app.conf.update(durable_engine=database.engine, durable_lease_seconds=30, durable_heartbeat_seconds=8)
    durable = types.SimpleNamespace(settings=Durable(app).settings, database=database)
    made = Rescue(durable)
    yield made
    if made._database is not None:
        made._database.engine.dispose()


def test_where_no_beat_runs_a_worker_hints_due_rows_and_reaps_lapsed_ones(rescue, database, make, row, carrier, clock):
    due, lapsed = make(), make(state="processing")
    clock.advance(seconds=31)

    rescue._look()

    assert due.id in [hint.id for hint in carrier.published]
    assert (row(lapsed.id).state, row(lapsed.id).error_code) == ("pending", "CLAIM_EXPIRED")
    with database.engine.connect() as tx:
        assert all(loop["host"].endswith(BY_A_WORKER) for loop in loops(tx)), "who ran them is noted"


def test_a_broker_that_is_away_keeps_no_worker_from_reaping(rescue, make, row, carrier, clock):
    due, lapsed = make(), make(state="processing")
    carrier.refuses = ConnectionError("the broker is away")
    clock.advance(seconds=31)

    rescue._look()

    assert (row(due.id).state, row(lapsed.id).error_code) == ("pending", "CLAIM_EXPIRED")


def test_while_a_beat_runs_no_worker_meddles(rescue, database, make, carrier):
    for name in ("dispatch", "reap", "cron"):
        run_sweep(database, named(name), Bounds())
    make()

    rescue._look()

    assert carrier.published == []


def test_a_sweep_is_late_after_three_of_its_intervals(database, engine, clock, carrier):
    for name in ("reap", "dispatch", "cron", "poll"):
        run_sweep(database, named(name), Bounds())
    with engine.connect() as tx:
        assert late(tx) == []
        clock.advance(seconds=3.5)
        assert [sweep.name for sweep in late(tx)] == ["dispatch", "cron", "poll"]
        clock.advance(seconds=12)
        assert sorted(sweep.name for sweep in late(tx)) == ["cron", "dispatch", "poll", "reap"], (
            "prune rescues nobody and may wait"
        )


def test_a_database_clock_set_back_by_an_hour_stops_neither_sweep_for_an_hour(rescue, database, make, carrier, clock):
    """Their last beginnings lie an hour ahead then, and so may the instant until which reap holds back."""
    clock.advance(seconds=3600)
    for name in ("dispatch", "reap", "cron"):
        run_sweep(database, named(name), Bounds())
        clock.advance(seconds=40)
        run_sweep(database, named(name), Bounds())  # a gap longer than a lease: reap is held back for a heartbeat
    clock.advance(seconds=-3600)
    due = make()

    rescue._look()
    assert due.id in [hint.id for hint in carrier.published]

    clock.advance(seconds=6)
    assert run_sweep(database, named("reap"), Bounds()) == {"moved": 0}, "reap is held back no longer"


def test_a_reap_that_comes_less_often_than_once_a_lease_still_takes_what_lost_workers_hold(
    database, make, row, clock, carrier
):
    """After a gap it is held back once for the owners, not each time."""
    seldom = replace(named("reap"), interval=60.0)
    run_sweep(database, seldom, Bounds())
    lost = make(state="processing")
    for moved in (0, 1):
        clock.advance(seconds=60)
        assert run_sweep(database, seldom, Bounds())["moved"] == moved
    assert row(lost.id).state == "pending"


def test_it_is_said_and_not_repeated_at_every_look(rescue, clock, caplog):
    with caplog.at_level(logging.WARNING, "durable.worker"):
        for _ in range(3):
            rescue._look()
            clock.advance(seconds=60)

    assert [record.message for record in caplog.records] == ["sweeps_late_and_run_by_a_worker"]


def test_rescue_needs_no_connection_of_a_busy_pool(database, rescue, make, carrier, clock):
    make()
    held = [database.engine.connect() for _ in range(database.engine.pool.size())]
    try:
        rescue._look()
    finally:
        for connection in held:
            connection.close()

    assert len(carrier.published) == 1
