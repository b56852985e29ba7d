"""What the gauges show: what waits, runs and is dead, what is paused, and when each sweep last ended well."""

from datetime import timedelta

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from durable_core import deliveries, periodic, sweeps
from durable_core.database import migrate
from durable_core.database.connections import Database
from durable_core.exporter import metrics, sample
from durable_core.exporter.observe import Observer
from tests.exporter.conftest import Page


def test_deliveries_are_counted_by_queue_kind_and_state(make, declare, database, page):
    one, other = declare(), declare(queue="mail")
    for _ in range(2):
        make(one)
    make(one, state="processing")
    make(other, countdown=60)
    make(other, state="failed")
    gone = make(other, state="dead")
    make(other, state="sent")
    with database.transaction() as tx:
        deliveries.discard(tx, gone.id, by="dana", reason="that customer is gone")
    shown = page()
    assert shown.all("durable_deliveries") == {
        ("durable", one.name, "pending"): 2,
        ("durable", one.name, "processing"): 1,
        ("mail", other.name, "pending"): 1,
        ("mail", other.name, "failed"): 1,
    }
    assert shown.all("durable_dead_letters") == {(other.name,): 1}
    assert shown.all("durable_deliveries_estimated") == {}


def test_the_oldest_ready_row_has_a_time_and_a_queue_without_one_has_no_series(make, declare, row, clock, page):
    mail = declare(queue="mail")
    make(mail, countdown=60)
    oldest = make()
    clock.advance(seconds=10)
    make()
    shown = page()
    due_at = row(oldest.id).due_at.timestamp()
    assert shown.all("durable_queue_oldest_ready_timestamp_seconds") == {("durable",): pytest.approx(due_at, abs=1e-3)}


READY = "durable_queue_oldest_ready_timestamp_seconds"


def test_what_waits_on_purpose_is_not_late(make, declare, database, engine, row, clock, page):
    """A paused queue, a paused kind, a held row and one behind its line: whoever is on call sleeps on."""
    mail, letters, lined = declare(queue="mail"), declare(), declare(queue="lines")
    make(mail)
    make(letters)
    held = make()
    make(lined, state="processing", ordering_key="a")
    make(lined, ordering_key="a")
    with database.transaction() as tx:
        deliveries.pause(tx, "queue", "mail", by="dana", reason="the mail server moves")
        deliveries.pause(tx, "kind", letters.name, by="dana", reason="a wrong price")
    with engine.begin() as tx:
        tx.execute(text("update durable.deliveries set held_reason = 'stumbled' where id = :id"), {"id": held.id})
    clock.advance(seconds=600)
    shown = page()
    assert shown.all(READY) == {}
    assert shown.all("durable_held") == {("durable", row(held.id).kind, "pending"): 1}
    assert sum(shown.all("durable_deliveries").values()) == 5
    free = make()
    assert page().all(READY) == {("durable",): pytest.approx(row(free.id).due_at.timestamp(), abs=1e-3)}
    with database.transaction() as tx:
        deliveries.resume(tx, "queue", "mail", by="dana")
        deliveries.release(tx, held.id, by="dana", reason="the trigger is gone")
    shown = page()
    assert shown.value(READY, queue="durable") == pytest.approx(row(held.id).due_at.timestamp(), abs=1e-3)
    assert shown.value(READY, queue="mail") is not None
    assert shown.all("durable_held") == {}


def test_a_pile_of_a_paused_kind_does_not_hide_a_row_that_is_late(
    make, declare, database, row, clock, monkeypatch, page
):
    """One row is read at each instant, and five paused ones lie before the one that is free."""
    monkeypatch.setattr(sample, "MOST_DUE", len(sample.SINCE_SECONDS))
    letters = declare()
    for _ in range(5):
        make(letters)
    with database.transaction() as tx:
        deliveries.pause(tx, "kind", letters.name, by="dana", reason="a wrong price")
    clock.advance(seconds=200)
    free = make()
    clock.advance(seconds=200)
    make(letters)
    assert page().all(READY) == {("durable",): pytest.approx(row(free.id).due_at.timestamp(), abs=1e-3)}


def test_a_count_at_its_limit_is_the_planners_estimate_and_says_so(make, declare, engine, monkeypatch, page):
    """Twelve rows of one queue and two of another, of which eight are read at most: the planner knows of fourteen."""
    monkeypatch.setattr(sample, "COUNT_LIMIT", 10)
    one, other = declare(), declare(queue="mail")
    for _ in range(12):
        make(one)
    for _ in range(2):
        make(other)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze durable.deliveries"))
    shown = page()
    assert shown.all("durable_deliveries") == {
        ("durable", one.name, "pending"): 12,
        ("mail", other.name, "pending"): 2,
    }
    assert shown.all("durable_deliveries_estimated") == {("durable", "pending"): 1}


def test_of_several_long_queues_each_has_at_least_what_was_read(make, declare, engine, monkeypatch, page):
    monkeypatch.setattr(sample, "COUNT_LIMIT", 12)
    kinds = [declare(queue=f"q{number}") for number in range(3)]
    for kind, rows in zip(kinds, (1, 9, 20), strict=True):
        for _ in range(rows):
            make(kind)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze durable.deliveries"))
    shown = page()
    # Two for each, and the seven that are left go to the two that have more.
    assert {queue: count for (queue, _, _), count in shown.all("durable_deliveries").items()} == {
        "q0": 1,
        "q1": 3,
        "q2": 3,
    }
    assert set(shown.all("durable_deliveries_estimated")) == {("q1", "pending"), ("q2", "pending")}


def test_dead_letters_are_counted_though_masses_were_discarded_after_them(make, declare, database, monkeypatch, page):
    monkeypatch.setattr(sample, "COUNT_LIMIT", 3)
    kind, other = declare(), declare()
    make(kind, state="dead")
    for _ in range(2):
        make(kind, state="failed")
    for _ in range(6):
        gone = make(other, state="dead")
        with database.transaction() as tx:
            deliveries.discard(tx, gone.id, by="dana", reason="that customer is gone")
    assert page().all("durable_dead_letters") == {(kind.name,): 3}


def test_what_is_paused_is_shown_until_it_is_resumed(database, page, clock):
    with database.transaction() as tx:
        deliveries.pause(tx, "queue", "mail", by="dana", reason="the mail server moves")
        until = tx.scalar(text("select durable.durable_now()")) + timedelta(seconds=60)
        deliveries.pause(tx, "kind", "invoice.send", by="dana", reason="a wrong price", until=until)
    assert page().all("durable_paused") == {("queue", "mail"): 1, ("kind", "invoice.send"): 1}
    clock.advance(seconds=61)
    assert page().all("durable_paused") == {("queue", "mail"): 1}


def test_plans_are_counted_and_the_one_that_waits_longest_for_a_person_has_a_time(shop, page, clock):
    assert page().all("durable_plans") == {}
    kind = shop.step()
    first = shop.propose(kind.planned(1))
    clock.advance(seconds=60)
    for plan in (
        shop.propose(kind.planned(1), expires=60),
        shop.approved(kind.planned(1)),
        shop.approved(kind.planned(1)),
    ):
        if plan.expires_at > first.expires_at:
            last = plan
    shop.claim(last)
    shown = page()
    assert shown.all("durable_plans") == {("pending",): 2, ("approved",): 1, ("executing",): 1}
    proposed = pytest.approx(first.created_at.timestamp(), abs=1e-3)
    assert shown.all("durable_plan_oldest_pending_timestamp_seconds") == {(): proposed}


def test_a_schedule_shows_its_next_slot_or_that_it_is_paused(declare, database, page):
    kind = declare(lambda step: None, cron="0 8 * * *")
    sweeps.run_sweep(database, sweeps.named("cron"), sweeps.Bounds())
    assert set(page().all("durable_schedule_next_slot_timestamp_seconds")) == {(kind.name,)}
    with database.transaction() as tx:
        periodic.pause(tx, kind.name, by="dana", reason="not this week")
    shown = page()
    assert shown.all("durable_schedule_next_slot_timestamp_seconds") == {}
    assert shown.all("durable_paused") == {("schedule", kind.name): 1}


def test_a_sweep_that_fails_keeps_the_time_at_which_it_last_went_well(database, engine, clock, page):
    sweeps.run_sweep(database, sweeps.named("reap"), sweeps.Bounds())
    before = page()
    clock.advance(seconds=100)
    with engine.begin() as tx:
        tx.execute(text("update durable.loops set began_at = durable.durable_now(), ended_at = durable.durable_now(),"
                        " error = 'no such table: a secret'"))  # fmt: skip
    after = page()
    name = "durable_loop_last_success_timestamp_seconds"
    assert before.value(name, loop="reap") is not None
    assert after.value(name, loop="reap") == before.value(name, loop="reap")
    assert (before.value("durable_loop_failed", loop="reap"), after.value("durable_loop_failed", loop="reap")) == (0, 1)
    assert "secret" not in after.text


def test_health_says_that_a_sweep_is_late_when_status_does_by_the_databases_clock(database, engine, clock, observer):
    def reap():
        observer.observe()
        (found,) = [check for check in observer.checks() if check["name"] == "sweep reap"]
        return found

    assert reap()["status"] == "warn"
    sweeps.run_sweep(database, sweeps.named("reap"), sweeps.Bounds())
    assert reap()["status"] == "pass"
    clock.advance(seconds=sweeps.LATE_AFTER * sweeps.named("reap").interval + 1)
    late = reap()
    assert (late["status"], "beat" in late["fix"]) == ("warn", True)
    with engine.begin() as tx:
        tx.execute(text("update durable.loops set began_at = durable.durable_now(), ended_at = durable.durable_now(),"
                        " error = 'no such table: a secret'"))  # fmt: skip
    failed = reap()
    assert (failed["status"], "failed" in failed["observed"], "secret" in str(failed)) == ("warn", True, False)


def test_the_page_says_what_it_is_made_by_and_of_what(page):
    shown = page()
    assert shown.value("durable_up") == 1
    assert shown.value("durable_schema_info", version=migrate.newest()) == 1
    assert shown.value("durable_schema_supported") == 1
    assert shown.families["durable_build"].samples[0].value == 1
    asked = {name for (name,) in shown.all("durable_exporter_scrape_duration_seconds")}
    named = {query for metric in metrics.METRICS for query in (metric.query or "").split(", ") if query}
    assert asked == named


def test_one_look_that_fails_is_counted_and_the_others_stand(make, observer, engine):
    make()
    with engine.begin() as tx:
        tx.execute(text("alter table durable.loops rename to loops_away"))
    try:
        observer.observe()
        observer.observe()
    finally:
        with engine.begin() as tx:
            tx.execute(text("alter table durable.loops_away rename to loops"))
    shown = Page(observer)
    assert shown.all("durable_exporter_errors_total") == {("loops",): 2}
    assert shown.all("durable_loop_failed") == {}
    assert len(shown.all("durable_deliveries")) == 1
    assert observer.is_ready
    assert [check["name"] for check in observer.checks() if check["status"] != "pass"][-1] == "looks"


def test_a_schema_that_this_code_does_not_know_is_told_and_not_read(observer, monkeypatch):
    monkeypatch.setattr(migrate, "SUPPORTED", ("9000",))
    observer.observe()
    shown = Page(observer)
    assert shown.value("durable_up") == 1
    assert shown.value("durable_schema_supported") == 0
    assert shown.all("durable_deliveries") == {}
    assert not observer.is_ready
    (wrong,) = [check for check in observer.checks() if check["status"] == "fail"]
    assert wrong["name"] == "schema"
    assert "durable migrate" in wrong["fix"]


def test_a_look_can_write_nothing(database):
    with pytest.raises(DBAPIError, match="read-only"), sample.looking(database) as connection:
        connection.execute(text("delete from durable.loops"))


def test_a_database_that_is_away_is_asked_once_a_sample(engine):
    observer = Observer(Database(create_engine(engine.url.set(database="no_such_database"))))
    observer.observe()
    assert set(observer.failed) == {"schema"}
    assert Page(observer).value("durable_up") == 0


def test_a_role_that_may_only_read_is_enough(engine, make):
    make()
    with engine.begin() as tx:
        tx.execute(text("create role watcher login password 'watches'"))
        tx.execute(text("grant usage on schema durable to watcher"))
        tx.execute(text("grant select on all tables in schema durable to watcher"))
    watching = create_engine(engine.url.set(username="watcher", password="watches"))
    try:
        observer = Observer(Database(watching))
        observer.observe()
        observer.observe()
    finally:
        watching.dispose()
        with engine.begin() as tx:
            tx.execute(text("drop owned by watcher"))
            tx.execute(text("drop role watcher"))
    assert observer.failed == {}
    assert Page(observer).value("durable_up") == 1
