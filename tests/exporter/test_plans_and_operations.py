"""What the exporter shows of plans and operations: what is alive, what came of the steps, the calls and the polls."""

import pytest
from sqlalchemy import text

from durable_core import Retry, operations, plans
from durable_core.deliveries.worker import Outcome
from durable_core.exporter import tail
from durable_core.exporter.observe import Observer
from durable_core.plans import sweep
from tests.core.plan_shop import note
from tests.exporter.conftest import Page

POLLS = "durable_operation_polls_total"
SAID = {"by": "dana", "reason": "a test"}


@pytest.fixture
def held(engine):
    def _held(table):
        with engine.begin() as tx:
            tx.execute(text(f"update durable.{table} set held_reason = 'CheckViolation: the row of Mr Smith'"))

    return _held


def test_operations_are_counted_by_kind_and_state_while_they_live(reset, declare_operation, start, look, engine, page):
    other = declare_operation(one_in_flight=False)
    begun = start(reset)
    look(reset, begun.id)
    for _ in range(2):
        start(other)
    shown = page()
    assert shown.all("durable_operations") == {(reset.name, "running"): 1, (other.name, "queued"): 2}
    assert shown.all("durable_operations_overdue") == {}
    with engine.begin() as tx:
        operations.cancel(tx, begun.id, **SAID)
    assert page().all("durable_operations") == {(other.name, "queued"): 2}


def test_what_is_past_its_patience_or_its_start_is_overdue(reset, declare_operation, start, look, clock, page):
    other = declare_operation()
    look(reset, start(reset).id)
    start(other)
    clock.advance(seconds=299)
    assert page().all("durable_operations_overdue") == {}
    clock.advance(seconds=2)
    assert page().all("durable_operations_overdue")[(reset.name,)] == 1
    clock.advance(seconds=2 * 24 * 3600)
    assert page().all("durable_operations_overdue") == {(reset.name,): 1, (other.name,): 1}


def test_what_a_sweep_holds_is_among_the_held_without_why(shop, reset, start, held, page):
    plan = shop.propose(shop.step(queue="mail").planned())
    start(reset)
    assert page().all("durable_held") == {}
    held("plans")
    held("operations")
    shown = page()
    assert shown.all("durable_held") == {("mail", plan.kind, "pending"): 1, ("durable", reset.name, "queued"): 1}
    assert "Smith" not in shown.text


def test_steps_are_counted_by_their_receipts_once_their_plan_has_ended(shop, worker, later, page):
    def broken(step):
        raise ValueError("a secret of the customer")

    good, bad = shop.step(), shop.step(broken)
    done = shop.approved(good.planned(1), good.planned(2))
    fails = shop.approved(good.planned(1), bad.planned(), good.planned(3))
    shop.run(worker, done)
    later()
    assert later().all("durable_plan_steps_total") == {}, "its plan goes on"
    shop.run(worker, done)
    shop.run(worker, fails, times=2)
    assert page().all("durable_plan_steps_total") == {}, "counted half a minute later"
    for _ in range(2):
        assert later().all("durable_plan_steps_total") == {(good.name, "ok"): 3, (bad.name, "failed"): 1}
    moved = shop.product()
    shop.move()
    conflicting = shop.step(lambda step, n: None, target="product")
    shop.run(worker, shop.approved(conflicting.planned(7, target=moved)))
    assert later().value("durable_plan_steps_total", kind=conflicting.name, outcome="conflict") == 1


def test_a_plan_that_fails_without_a_receipt_says_of_which_step(shop, database, clock, later):
    first, second = shop.step(), shop.step(note)
    plan = shop.approved(first.planned(), second.planned())
    shop.claim(plan)
    clock.advance(seconds=121)
    assert sweep.reap(database) == 1
    rejected = shop.propose(second.planned())
    with database.transaction() as tx:
        plans.reject(tx, rejected.id, by="dana")
    assert later().all("durable_plan_steps_total") == {(first.name, "no_receipt"): 1}


def test_a_poll_is_counted_once_whether_it_was_answered_or_not(reset, remote, start, look, page):
    begun = start(reset)
    look(reset, begun.id)
    assert page().all(POLLS) == {}, "a call is no poll"
    remote.set("working")
    for _ in range(2):
        assert look(reset, begun.id, after=5).outcome is Outcome.POLLED
    for _ in range(2):
        assert page().all(POLLS) == {(reset.name, "answered"): 2}
    reset.poll_hook = lambda step, ids: 1 / 0
    assert look(reset, begun.id, after=5).outcome is Outcome.PUT_OFF
    assert page().all(POLLS) == {(reset.name, "answered"): 2, (reset.name, "unanswered"): 1}


def test_what_ends_is_counted_with_the_polls_that_nobody_saw(reset, remote, start, look, engine, page, later):
    begun = start(reset)
    look(reset, begun.id)
    remote.set("working")
    look(reset, begun.id, after=5)
    page()
    remote.set("done")
    assert look(reset, begun.id, after=5).outcome is Outcome.SUCCEEDED
    quick = start(reset)
    look(reset, quick.id)
    remote.set("broken")
    look(reset, quick.id, after=5)
    canceled = start(reset)
    look(reset, canceled.id)
    with engine.begin() as tx:
        operations.cancel(tx, canceled.id, **SAID)
    assert page().all("durable_operations_ended_total") == {}
    for _ in range(2):
        shown = later()
        ended = {outcome: count for (_, outcome), count in shown.all("durable_operations_ended_total").items()}
        assert ended == {"succeeded": 1, "failed": 1, "canceled": 1}
        assert shown.all(POLLS) == {(reset.name, "answered"): 3}


def test_a_call_that_may_have_got_through_has_an_outcome_of_its_own(declare_operation, start, look, later):
    def unsure(step, branch, parts):
        raise Retry("it may have got through")

    kind = declare_operation()
    kind.handler = unsure
    look(kind, start(kind).id)
    assert later().all("durable_operations_ended_total") == {(kind.name, "outcome_unknown"): 1}


def test_polls_that_were_made_before_the_exporter_began_are_not_counted(
    reset, remote, start, look, database, page, later
):
    begun = start(reset)
    look(reset, begun.id)
    remote.set("working")
    look(reset, begun.id, after=5)
    second = Observer(database)
    second.observe()
    assert Page(second).all(POLLS) == {}
    look(reset, begun.id, after=5)
    second.observe()
    assert Page(second).all(POLLS) == {(reset.name, "answered"): 1}
    assert page().all(POLLS) == {(reset.name, "answered"): 2}


def test_nor_are_those_of_an_operation_that_ended_just_before_it_began(reset, remote, start, look, database, clock):
    begun = start(reset)
    look(reset, begun.id)
    remote.set("working")
    for _ in range(2):
        look(reset, begun.id, after=5)
    remote.set("done")
    assert look(reset, begun.id, after=5).outcome is Outcome.SUCCEEDED
    clock.advance(seconds=5)
    second = Observer(database)
    second.observe()
    clock.advance(seconds=tail.LAG_SECONDS)
    second.observe()
    shown = Page(second)
    assert shown.all("durable_operations_ended_total") == {(reset.name, "succeeded"): 1}
    assert shown.all(POLLS) == {}
    assert second.tails.polled == {}


def test_a_poll_that_is_under_way_is_not_counted_yet(reset, remote, start, look, page):
    begun = start(reset)
    look(reset, begun.id)
    seen = []

    def poll(step, ids):
        seen.append(page().all(POLLS))
        return remote.statuses(ids)

    remote.set("working")
    reset.poll_hook = poll
    look(reset, begun.id, after=5)
    assert seen == [{}]
    assert page().all(POLLS) == {(reset.name, "answered"): 1}


def test_what_is_remembered_of_polls_is_bounded(monkeypatch, declare_operation, start, look, observer, engine, page):
    monkeypatch.setattr(tail, "MOST_RUNNING", 1)
    kind = declare_operation(one_in_flight=False)
    for _ in range(4):
        look(kind, start(kind).id)
        page()
        with engine.begin() as tx:
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(text("delete from durable.operations"))
    assert len(observer.tails.polled) == 2
