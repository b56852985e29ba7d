"""Why a plan or an operation does not move: what a person has to act on comes first, and no payload is said."""

import pytest
from sqlalchemy import text

from durable_core import GiveUp, Retry, deliveries, operations, plans
from durable_core.errors import NotFound
from durable_core.operations import attempt as operation_attempt
from durable_core.operations import why as why_operations
from durable_core.plans import attempt as plan_attempt
from durable_core.plans import why as why_plans
from tests.core.spans import SECRET

P, X = why_plans.Cause, why_operations.Cause
SAID = {"by": "dana", "reason": "a test"}


@pytest.fixture(autouse=True)
def frozen(clock):
    clock.freeze()
    return clock


@pytest.fixture
def of_plan(engine):
    """As a reader sees it that heals nothing, which the commands are."""

    def _of_plan(plan):
        with engine.connect() as tx:
            tx.execute(text("set transaction read only"))
            return plans.reasons(tx, plan.id)

    return _of_plan


@pytest.fixture
def of_operation(engine):
    def _of_operation(ref):
        with engine.connect() as tx:
            return operations.reasons(tx, ref.id)

    return _of_operation


@pytest.fixture
def pause(engine):
    def _pause(what, name):
        with engine.begin() as tx:
            deliveries.pause(tx, what, name, by="dana", reason="away")

    return _pause


@pytest.fixture
def hold(engine):
    def _hold(table):
        with engine.begin() as tx:
            tx.execute(text(f"update durable.{table} set held_reason = 'CheckViolation: {SECRET}'"))

    return _hold


def causes(found):
    return [one.cause for one in found]


# --- plans --------------------------------------------------------------------------------------------


def test_a_pending_plan_waits_for_a_person_until_its_time_is_over(shop, of_plan, clock):
    kind = shop.step()
    plan = shop.propose(kind.planned(), expires=900, self_approval=True)
    (why,) = of_plan(plan)
    assert (why.cause, why.until, why.blocks) == (P.APPROVAL, plan.expires_at, True)
    assert "it waits for a person to approve or reject it" in why.says
    assert "in 15m" in why.says
    assert f"durable plans show {plan.id}" in why.says
    strict = shop.propose(kind.planned(), self_approval=False)
    assert "(another one than assistant)" in of_plan(strict)[0].says
    clock.advance(seconds=910)
    (why,) = of_plan(plan)
    assert why.cause is P.OVERDUE
    assert why.says == "its time to be approved passed 10s ago: the next expire sweep ends it"


def test_an_approved_plan_waits_for_a_worker_and_says_when_it_is_hinted_again(shop, of_plan, clock):
    kind = shop.step(queue="letters")
    plan = shop.approved(kind.planned(), kind.planned(), expires=900)
    (why,) = of_plan(plan)
    assert (why.cause, why.until, why.blocks) == (P.WORKER, plan.expires_at, False)
    assert why.says.startswith(f"step 1 of 2, {kind.name}, waits for a free worker that reads queue letters, until ")
    assert why.says.endswith("it is hinted again in 10s")
    clock.advance(seconds=10)
    assert of_plan(plan)[0].says.endswith("it is hinted by the next dispatch")
    clock.advance(seconds=900)
    assert "its time to start passed 10s ago" in of_plan(plan)[0].says


def test_between_two_steps_the_next_one_is_named_and_the_time_to_go_on(shop, worker, of_plan, clock):
    first, second = shop.step(), shop.step(queue="letters")
    plan = shop.approved(first.planned(), second.planned(), expires=900)
    shop.run(worker, plan)
    (why,) = of_plan(plan)
    assert why.says.startswith(f"step 2 of 2, {second.name}, waits for a free worker that reads queue letters")
    clock.advance(seconds=930)
    (why,) = of_plan(plan)
    assert (why.cause, why.blocks) == (P.OVERDUE, True)
    assert why.says.endswith("30s ago: the next reap ends it as interrupted, after 1 of its steps")


def test_a_step_in_flight_says_where_and_how_long_yet(shop, of_plan, clock):
    kind = shop.step(timeout=300)
    plan = shop.approved(kind.planned())
    shop.claim(plan)
    clock.advance(seconds=20)
    (why,) = of_plan(plan)
    assert (why.cause, why.blocks) == (P.IN_FLIGHT, True)
    assert why.says.startswith(f"step 1 of 1, {kind.name}, runs for 20s in process ")
    assert why.says.endswith("under a lease of another 1m 40s; its time is over in 4m 40s")
    clock.advance(seconds=110)
    (why,) = of_plan(plan)
    assert why.cause is P.LAPSED
    assert "whose lease lapsed 10s ago" in why.says


def test_a_pause_the_lack_of_code_and_a_hold_come_before_the_worker(shop, database, of_plan, pause, hold):
    kind = shop.step(queue="letters")
    plan = shop.approved(kind.planned())
    paused = shop.approved(shop.step(name="plan.paused").planned())
    pause("kind", "plan.paused")
    assert causes(of_plan(paused)) == [P.PAUSED]
    assert plan_attempt.wait_for_handler(database, kind.name, plan.id)
    (why,) = of_plan(plan)
    assert why.cause is P.HANDLER
    assert f"does not know kind {kind.name}" in why.says
    pause("queue", "letters")
    pause("kind", kind.name)
    pause("queue", "elsewhere")
    found = of_plan(plan)
    assert causes(found) == [P.PAUSED, P.PAUSED, P.HANDLER]
    assert found[0].says.startswith("queue letters is paused by dana (away), until somebody resumes it")
    hold("plans")
    found = of_plan(plan)
    assert causes(found) == [P.HELD, P.PAUSED, P.PAUSED, P.HANDLER]
    assert found[0].says.startswith("a sweep failed on it (CheckViolation) and held it back")
    assert f"durable plans release {plan.id}" in found[0].says
    assert not [one for one in found if SECRET in one.says]


def test_how_a_plan_ended_is_said(shop, engine, worker, of_plan, clock):
    def broken(step):
        raise GiveUp(SECRET)

    good, bad = shop.step(), shop.step(broken)
    done, fails = shop.approved(good.planned()), shop.approved(good.planned(), bad.planned(), good.planned())
    shop.run(worker, done)
    shop.run(worker, fails, times=2)
    rejected, expired = shop.propose(good.planned()), shop.propose(good.planned(), expires=1)
    late = shop.approved(good.planned(), expires=1)
    with engine.begin() as tx:
        plans.reject(tx, rejected.id, by="dana", reason="too dear")
    clock.advance(seconds=5)
    for plan in (expired, late):
        shop.get(plan.id)
    told = {name: of_plan(plan) for name, plan in (
        ("done", done), ("failed", fails), ("rejected", rejected), ("expired", expired), ("late", late))}  # fmt: skip
    assert {one.cause for (one,) in told.values()} == {P.ENDED}
    says = {name: found[0].says for name, found in told.items()}
    assert says["done"].endswith("5s ago: all of its 1 steps have their receipt")
    assert f"(GAVE_UP) after 1 of its 3 steps, which stay: `durable plans report {fails.id}`" in says["failed"]
    assert says["rejected"].endswith("by dana (too dear): no step of it has run")
    assert "nobody approved it in time" in says["expired"]
    assert "it was approved, and did not start, in time" in says["late"]
    assert not [one for one in says.values() if SECRET in one]


def test_a_plan_of_another_origin_and_one_that_is_not_there_are_not_found(shop, engine):
    plan = shop.propose(shop.step().planned(), origin="a")
    with engine.begin() as tx:
        assert plans.reasons(tx, plan.id, origin="a")
        for asked in ({"plan_id": plan.id, "origin": "b"}, {"plan_id": "none"}):
            with pytest.raises(NotFound):
                plans.reasons(tx, **asked)
        with pytest.raises(NotFound):
            operations.reasons(tx, plan.id)


# --- operations ---------------------------------------------------------------------------------------


def test_a_queued_operation_waits_for_a_worker_until_its_time_is_over(
    declare_operation, start, of_operation, operation_row, clock
):
    ref = start(declare_operation(queue="calls"))
    (why,) = of_operation(ref)
    row = operation_row(ref.id)
    assert (why.cause, why.until, why.blocks) == (X.WORKER, row.start_before, False)
    assert "it waits for a worker to issue it, one that reads queue calls, until " in why.says
    assert why.says.endswith("; it is hinted by the next dispatch")
    clock.advance(seconds=(row.start_before - row.created_at).total_seconds() + 7)
    (why,) = of_operation(ref)
    assert (why.cause, why.blocks) == (X.OVERDUE, True)
    assert "passed 7s ago: the next expire sweep ends it, never issued" in why.says


def test_a_pause_keeps_a_call_but_no_poll(engine, reset, start, look, of_operation, pause):
    ref = start(reset)
    pause("kind", reset.name)
    pause("queue", "elsewhere")
    (why,) = of_operation(ref)
    assert (why.cause, why.blocks) == (X.PAUSED, True)
    assert why.says.startswith(f"kind {reset.name} is paused by dana (away)")
    assert look(reset, ref.id).outcome.name == "NOTHING_TO_DO"
    with engine.begin() as tx:
        deliveries.resume(tx, "kind", reset.name, by="dana")
    look(reset, ref.id)
    pause("kind", reset.name)
    assert causes(of_operation(ref)) == [X.POLL_LATER]


def test_what_a_worker_could_not_look_at_says_why_and_when_it_is_looked_at_again(
    reset, start, look, of_operation, database, clock
):
    ref = start(reset)
    assert operation_attempt.wait_for_handler(database, reset.name, ref.id)
    (why,) = of_operation(ref)
    assert why.cause is X.HANDLER
    assert reset.name in why.says

    def unready(*_, **__):
        raise RuntimeError(SECRET)

    reset.precheck_hook = unready
    look(reset, ref.id)
    (why,) = of_operation(ref)
    assert (why.cause, why.blocks) == (X.NOT_DUE, True)
    assert "nothing was issued (PRECHECK_FAILED); it is looked at again in 10s" in why.says
    assert SECRET not in why.says


def test_a_poll_that_is_due_later_and_then_late_says_what_patience_is_left(reset, start, look, of_operation, clock):
    ref = start(reset)
    look(reset, ref.id)
    (why,) = of_operation(ref)
    assert (why.cause, why.blocks) == (X.POLL_LATER, False)
    assert why.says.startswith("its next poll is due in 2s")
    assert "its patience ends in 5m" in why.says
    clock.advance(seconds=42)
    (why,) = of_operation(ref)
    assert why.cause is X.POLL_DUE
    assert "late by 39s: it waits for a worker that reads queue durable" in why.says
    assert "its patience ends in 4m 18s" in why.says
    clock.advance(seconds=300)
    assert "its patience was over 42s ago" in of_operation(ref)[0].says


def test_a_poll_that_failed_says_its_code_and_never_its_text(reset, start, look, of_operation):
    ref = start(reset)
    look(reset, ref.id)

    def broken(*_):
        raise RuntimeError(SECRET)

    reset.poll_hook = broken
    look(reset, ref.id, after=5)
    (why,) = of_operation(ref)
    assert "the last one met POLL_FAILED" in why.says
    assert SECRET not in why.says


@pytest.mark.parametrize(("makes", "does"), [("issue", "is making its call"), ("poll", "is asking the other side")])
def test_one_in_flight_says_who_has_it_and_under_which_lease(reset, start, look, of_operation, makes, does):
    seen = []

    def asked(*args, **kwargs):
        seen.append(of_operation(ref)[0])
        return before(*args, **kwargs)

    ref = start(reset)
    if makes == "issue":
        before, reset.handler = reset.handler, asked
        look(reset, ref.id)
    else:
        look(reset, ref.id)
        before, reset.poll_hook = reset.poll_hook, asked
        look(reset, ref.id, after=5)
    (why,) = seen
    assert (why.cause, why.blocks) == (X.IN_FLIGHT, True)
    assert f"{does}, under a lease of another 30s" in why.says


def test_a_lapsed_lease_is_said(reset, start, look, of_operation, clock):
    seen = []

    def slow(step, ids):
        clock.advance(seconds=33)
        seen.append(of_operation(ref)[0])
        raise RuntimeError("no")

    ref = start(reset)
    look(reset, ref.id)
    reset.poll_hook = slow
    look(reset, ref.id, after=5)
    (why,) = seen
    assert why.cause is X.LAPSED
    assert "its lease lapsed 3s ago: the next reap decides" in why.says


def test_a_call_that_was_not_heard_of_is_looked_for(declare_operation, start, look, of_operation):
    def unsure(*_, **__):
        raise Retry(SECRET)

    kind = declare_operation(finds=True)
    kind.handler = unsure
    ref = start(kind)
    look(kind, ref.id)
    (why,) = of_operation(ref)
    assert why.cause is X.UNHEARD
    assert "it is being looked for on the other side" in why.says
    assert SECRET not in why.says


def test_a_held_operation_is_held_first(reset, start, look, of_operation, hold):
    ref = start(reset)
    look(reset, ref.id)
    hold("operations")
    found = of_operation(ref)
    assert causes(found) == [X.HELD, X.POLL_LATER]
    assert f"`durable operations release {ref.id}`" in found[0].says
    assert SECRET not in found[0].says


def test_how_an_operation_ended_is_said(reset, declare_operation, start, look, remote, engine, of_operation, clock):
    done = start(reset)
    look(reset, done.id)
    remote.set("done")
    look(reset, done.id, after=5)
    canceled = start(reset)
    with engine.begin() as tx:
        operations.cancel(tx, canceled.id, by="dana", reason="no need")

    def broken(*_, **__):
        raise RuntimeError(SECRET)

    def unsure(*_, **__):
        raise Retry(SECRET)

    fails, unknown = declare_operation(), declare_operation()
    fails.handler, unknown.handler = broken, unsure
    refs = start(fails), start(unknown)
    for kind, ref in zip((fails, unknown), refs, strict=True):
        look(kind, ref.id)
    clock.advance(seconds=3)
    told = [of_operation(ref) for ref in (done, canceled, *refs)]
    assert {one.cause for (one,) in told} == {X.ENDED}
    done, canceled, failed, unheard = (one.says for (one,) in told)
    assert done.endswith("3s ago: the other side says that all of it is done")
    assert "given up" in canceled
    assert "3s ago by dana (no need)" in canceled
    assert failed.endswith("3s ago: CALL_FAILED")
    assert "may have got through" in unheard
    assert SECRET not in failed + unheard
