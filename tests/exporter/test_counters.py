"""What the counters count: every ended attempt once, from the rows and the journal, whoever else reads them too."""

import pytest
from sqlalchemy import text

from durable_core import GiveUp, Retry, deliveries, sweeps
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import perform
from durable_core.exporter import metrics, tail
from durable_core.exporter.observe import Observer
from tests.exporter.conftest import Page

ATTEMPTS = "durable_attempts_total"


def test_a_delivery_that_was_sent_is_counted_once_with_its_times(make, worker, kind, page, later):
    made = make()
    perform(worker, kind, made.id)
    assert page().value(ATTEMPTS, queue="durable", kind=kind.name, outcome="committed") is None
    shown = later()
    for _ in range(2):
        assert shown.value("durable_enqueued_total", queue="durable", kind=kind.name) == 1
        assert shown.value(ATTEMPTS, queue="durable", kind=kind.name, outcome="committed") == 1
        assert shown.value("durable_queue_wait_seconds_count", queue="durable") == 1
        assert shown.value("durable_attempt_duration_seconds_count", kind=kind.name) == 1
        assert shown.value("durable_delivery_latency_seconds_count", kind=kind.name) == 1
        shown = later()


def test_the_times_of_a_delivery_lie_in_their_buckets(make, worker, declare, clock, later):
    def slow(step):
        clock.advance(seconds=7)

    kind = declare(slow)
    made = make(kind)
    clock.advance(seconds=40)
    perform(worker, kind, made.id)
    shown = later()
    assert shown.value("durable_queue_wait_seconds_bucket", queue="durable", le="30.0") == 0
    assert shown.value("durable_queue_wait_seconds_bucket", queue="durable", le="60.0") == 1
    assert shown.value("durable_attempt_duration_seconds_bucket", kind=kind.name, le="5.0") == 0
    assert shown.value("durable_attempt_duration_seconds_bucket", kind=kind.name, le="10.0") == 1
    assert 47 <= shown.value("durable_delivery_latency_seconds_sum", kind=kind.name) < 57


def test_failures_are_counted_by_what_comes_of_them(make, worker, declare, later):
    def broken(step):
        raise ValueError("a secret of the customer")

    def hopeless(step):
        raise GiveUp("no such address")

    def patient(step):
        raise Retry(after=3600)

    dies, gives_up, waits = declare(broken, max_attempts=1), declare(hopeless), declare(patient)
    for kind in (dies, gives_up, waits):
        perform(worker, kind, make(kind).id)
    shown = later()
    assert {labels[1:]: count for labels, count in shown.all(ATTEMPTS).items()} == {
        (dies.name, "dead"): 1,
        (gives_up.name, "failed"): 1,
        (waits.name, "retry"): 1,
    }
    assert shown.value("durable_dead_letters", kind=dies.name) == 1
    assert "secret" not in shown.text
    assert "address" not in shown.text


def test_a_worker_that_was_lost_is_counted_and_one_that_was_shut_down_apart(make, database, clock, kind, later):
    """The same row is reaped, and then given back at a shutdown; a cancelled attempt is a third thing."""
    make(state="processing")
    clock.advance(seconds=31)
    sweep.reap(database)
    held, cancelled = make(state="processing").held, make(state="processing")
    with database.transaction() as tx:
        owner, pid = tx.execute(
            text("select owner, owner_pid from durable.deliveries where id = :id"), {"id": held.id}
        ).one()
        deliveries.cancel(tx, cancelled.id, by="dana", reason="wrong customer")
    sweep.give_back(database, owner, [pid], shutdown=True)
    shown = later()
    assert {labels[2]: count for labels, count in shown.all(ATTEMPTS).items()} == {
        "lease_lost": 1, "given_back": 1, "cancelled": 1,
    }  # fmt: skip
    assert shown.value("durable_lease_expirations_total", queue="durable") == 1


def test_a_deadline_that_a_reap_found_is_a_retry_and_no_lost_worker(make, database, clock, declare, later):
    short = declare(timeout=10)
    made = make(short, state="processing")
    clock.advance(seconds=9)
    with database.transaction() as tx:
        tx.execute(
            text("update durable.deliveries set beat_at = durable.durable_now() where id = :id"), {"id": made.id}
        )
    clock.advance(seconds=2)
    sweep.reap(database)
    shown = later()
    assert shown.value(ATTEMPTS, queue="durable", kind=short.name, outcome="retry") == 1
    assert shown.all("durable_lease_expirations_total") == {}


def test_what_expired_and_what_was_cancelled_while_it_waited_is_no_attempt(make, database, clock, kind, later):
    make(expires=1)
    waits = make()
    with database.transaction() as tx:
        deliveries.cancel(tx, waits.id, by="dana", reason="wrong customer")
    clock.advance(seconds=2)
    sweep.expire(database)
    shown = later()
    assert shown.value("durable_expired_total", queue="durable", kind=kind.name) == 1
    assert shown.all(ATTEMPTS) == {}


def test_a_batch_that_is_too_small_is_read_on_by_the_next_samples_and_nothing_twice(
    make, worker, declare, observer, later
):
    """Rows and journal lines of one instant too: the place between two batches is between two of them."""
    kind, broken = declare(lambda step: None), declare(lambda step: 1 / 0)
    observer.tails.batch = 2
    for _ in range(5):
        perform(worker, kind, make(kind).id)
        perform(worker, broken, make(broken).id)
    with worker.database.transaction() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text("update durable.deliveries set finished_at = (select min(finished_at) from durable.deliveries)"
                        " where state = 'sent'"))  # fmt: skip
        tx.execute(text("update durable.journal set at = (select min(at) from durable.journal)"))
    seen = []
    for _ in range(7):
        shown = later()
        seen.append(
            (
                shown.value(ATTEMPTS, queue="durable", kind=kind.name, outcome="committed") or 0,
                shown.value(ATTEMPTS, queue="durable", kind=broken.name, outcome="retry") or 0,
                sum(shown.all("durable_enqueued_total").values()),
            )
        )
    assert seen[:2] == [(2, 2, 2), (4, 4, 4)]
    assert seen[-2:] == [(5, 5, 10), (5, 5, 10)]


def test_two_exporters_count_the_same_and_one_that_begins_later_counts_from_there(make, worker, kind, database, later):
    perform(worker, kind, make().id)
    later()
    second = Observer(database)
    second.observe()
    perform(worker, kind, make().id)
    first = later()
    second.observe()
    name = {"queue": "durable", "kind": kind.name, "outcome": "committed"}
    assert (first.value(ATTEMPTS, **name), Page(second).value(ATTEMPTS, **name)) == (2, 1)


def test_a_commit_that_comes_within_the_lag_is_counted_though_an_earlier_one_was_counted_before(
    make, kind, engine, clock, page, later
):
    """The id is made, then the transaction stays open: half a minute is nothing to lose a row for."""
    with engine.begin() as slow:
        kind.enqueue(slow)
        clock.advance(seconds=tail.ENQUEUE_LAG_SECONDS / 2)
        make()
        assert page().all("durable_enqueued_total") == {}
    assert later().value("durable_enqueued_total", queue="durable", kind=kind.name) == 2


def test_a_clock_that_was_set_back_counts_nothing_twice(make, worker, kind, clock, page, later):
    perform(worker, kind, make().id)
    assert later().value(ATTEMPTS, queue="durable", kind=kind.name, outcome="committed") == 1
    clock.advance(seconds=-50)
    page()
    shown = later()
    assert shown.value(ATTEMPTS, queue="durable", kind=kind.name, outcome="committed") == 1
    assert shown.value("durable_enqueued_total", queue="durable", kind=kind.name) == 1


def test_names_without_end_are_counted_as_others(monkeypatch):
    monkeypatch.setattr(metrics, "MOST_SERIES", 2)
    series = metrics.Series(metrics.BY_NAME["durable_enqueued_total"])
    for name in "abca":
        series.add((name, name), 1)
    assert series.values == {("a", "a"): 2, ("b", "b"): 1, ("other", "other"): 1}


def test_every_sweep_of_the_code_has_its_interval_on_the_page(page):
    assert set(page().all("durable_loop_interval_seconds")) == {(one.name,) for one in sweeps.SWEEPS}


@pytest.mark.parametrize("outcome", ["retry", "failed", "dead", "cancelled", "lease_lost", "given_back", "committed"])
def test_each_outcome_is_named_in_the_help_of_its_metric(outcome):
    assert outcome in metrics.BY_NAME[ATTEMPTS].help


def test_a_replica_that_restarts_keeps_its_place_until_it_knows_how_far_it_is(make, engine, clock, page, later):
    """Nothing has reached it since it started; `tests/faults/test_exporter_on_a_replica.py` has a real one."""
    make(state="sent")
    with engine.begin() as tx:
        known = tx.scalar(text("select pg_get_functiondef('durable.known_until()'::regprocedure)"))
        tx.execute(text("create or replace function durable.known_until() returns timestamptz"
                        " language sql volatile return cast(null as timestamptz)"))  # fmt: skip
    try:
        assert later().all("durable_attempts_total") == {}
    finally:
        with engine.begin() as tx:
            tx.execute(text(known))
    counted = page()
    assert sum(counted.all("durable_attempts_total").values()) == 1
    assert sum(counted.all("durable_enqueued_total").values()) == 1
