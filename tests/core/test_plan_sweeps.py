"""What time, lost workers and lost messages do to plans, and what the sweeps and reads make of it."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from durable_core import IllegalMove, deliveries, kinds, plans, sweeps
from durable_core.claims import claim as protocol
from durable_core.claims.claim import Holder
from durable_core.claims.heartbeat import Heartbeat
from durable_core.claims.shares import Share
from durable_core.deliveries import sweep as deliveries_sweep
from durable_core.deliveries.stuck import cut_off
from durable_core.deliveries.worker import Outcome
from durable_core.plans import attempt, sweep
from tests.core import plan_process
from tests.core.plan_shop import note
from tests.faults.clocks import faketime, wrong_by
from tests.relay import COMMIT

MINUTE = 60.0
HOLD = text("select from durable.plans where id = :id for no key update")


def step_of(plan, index=0):
    return kinds.plan_steps.get(plan.steps[index].kind)


# --- interrupted -----------------------------------------------------------------------------------


@pytest.mark.spec("plans", 12)
def test_a_plan_left_between_two_steps_goes_on_by_dispatch_and_its_step_runs_once(
    shop, worker, database, carrier, clock
):
    kind = shop.step()
    plan = shop.approved(kind.planned(1), kind.planned(2))
    shop.run(worker, plan)
    carrier.offered.clear()  # the worker died, and its hint with it
    clock.advance(11)
    deliveries_sweep.dispatch(database, others=(sweep,))
    assert [(hint.kind, hint.id, hint.attempt) for hint in carrier.published] == [(kind.name, plan.id, 2)]
    assert [done.outcome for done in shop.run(worker, plan, 2)] == [Outcome.DONE, Outcome.NOTHING_TO_DO]
    assert shop.effects(plan.id) == ["0:1", "1:2"]


@pytest.mark.spec("plans", 12)
def test_a_plan_left_between_two_steps_for_too_long_is_interrupted_and_keeps_what_is_done(
    shop, worker, database, carrier, clock
):
    kind = shop.step()
    plan = shop.approved(kind.planned(1), kind.planned(2), expires=10 * MINUTE)
    shop.run(worker, plan)
    clock.advance(10 * MINUTE + 1)
    assert shop.run(worker, plan)[0].outcome is Outcome.NOTHING_TO_DO
    with database.transaction() as connection:
        assert sweep.pick(connection, {"durable": Share(9, empty=True)}) == [], "nobody may start it any more"
    assert sweep.reap(database) == 1
    got = shop.get(plan.id)
    assert (got.state, got.reason, len(got.receipts)) == ("failed", "interrupted", 1)
    assert "nobody went on with step 2 of 2" in got.error_message
    assert shop.effects(plan.id) == ["0:1"]


@pytest.mark.spec("plans", 12)
@pytest.mark.parametrize("by", ["read", "sweep"])
def test_a_step_whose_worker_fell_silent_is_in_flight_for_its_lease_and_then_interrupted(
    shop, worker, database, clock, by
):
    kind = shop.step()
    plan = shop.approved(kind.planned(1), kind.planned(2))
    shop.run(worker, plan)
    claim = shop.claim(plan)
    clock.advance(119)
    assert sweep.reap(database) == 0
    assert (shop.get(plan.id).state, shop.get(plan.id).in_flight) == ("executing", True)
    clock.advance(2)
    if by == "sweep":
        assert sweep.reap(database) == 1
        assert sweep.reap(database) == 0
    got = shop.get(plan.id)
    assert (got.state, got.reason) == ("failed", "interrupted")
    assert "inside step 2 of 2" in got.error_message
    assert shop.receipts(plan.id) == [(0, "ok")]
    assert shop.lines(plan.id)[-1] == ("heal", "executing", "failed")
    assert attempt.carry_out(worker, kind, claim).outcome is Outcome.CLAIM_LOST, "its worker comes back from the dead"
    assert shop.effects(plan.id) == ["0:1"]
    assert shop.lines(plan.id)[-1][0] == "refused"
    assert shop.run(worker, plan)[0].outcome is Outcome.NOTHING_TO_DO


@pytest.mark.spec("plans", 14)
def test_complete_receipts_of_a_plan_that_nobody_finished_make_it_executed(shop, worker, engine, database, clock):
    """Nothing of ours leaves it so: the last receipt and the end are one statement. By hand, as the guards allow."""
    plan = shop.approved(shop.step().planned(1))
    claim = shop.claim(plan)
    with engine.begin() as tx:
        tx.execute(
            text(
                "insert into durable.plan_receipts (plan_id, step, kind, outcome, fence) values (:id, 0, 'k', 'ok', 1)"
            ),
            {"id": plan.id},
        )
        tx.execute(
            text(
                "update durable.plans set receipts = 1, settled_fence = fence, owner = null, lease_expires_at = null,"
                " deadline_at = null where id = :id"
            ),
            {"id": plan.id},
        )
    assert claim is not None
    assert shop.run(worker, plan)[0].outcome is Outcome.NOTHING_TO_DO
    clock.advance(16 * MINUTE)
    assert sweep.reap(database) == 1
    assert (shop.raw(plan.id).state, shop.raw(plan.id).error_code) == ("executed", None)
    assert shop.effects(plan.id) == []


@pytest.mark.spec("plans", 24)
def test_ten_slow_steps_that_go_on_are_never_taken_for_interrupted(shop, worker, database, engine, clock):
    """Ten steps of a minute in a window of two: each receipt stamps it anew, and a locked row is alive."""
    swept = []

    def slow(step, n):
        step.session.execute(text("select 1"))
        clock.advance(60)
        swept.append(sweep.reap(database))
        swept.append(shop.get(step.id).state == "executing")
        note(step, n)

    kind = shop.step(slow, timeout=900)
    plan = shop.approved(*[kind.planned(n) for n in range(10)], expires=2 * MINUTE)
    for _ in range(10):
        assert shop.run(worker, plan)[0].outcome is Outcome.DONE
        clock.advance(60)
        assert sweep.reap(database) == 0
    assert swept == [0, True] * 10
    assert shop.get(plan.id).state == "executed"


def test_a_step_longer_than_its_lease_is_alive_as_long_as_its_row_is_locked(shop, worker, database, clock):
    seen = []

    def slow(step):
        clock.advance(200)
        seen.append((sweep.reap(database), shop.get(step.id).state, shop.get(step.id).in_flight))
        with shop.engine.begin() as tx:
            seen.append("in flight" in plans.report(tx, step.id).text)

    plan = shop.approved(shop.step(slow).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert seen == [(0, "executing", True), True]
    assert shop.get(plan.id).state == "executed"


def test_a_heartbeat_keeps_a_claim_that_has_not_locked_its_row_yet(shop, database, clock):
    plan = shop.approved(shop.step(timeout=400).planned(1))
    claim = shop.claim(plan)
    heartbeat = Heartbeat(database, Holder())
    held = heartbeat.hold(claim, attempt._statements)
    for _ in range(3):
        clock.advance(100)
        heartbeat.beat()
        assert sweep.reap(database) == 0
    assert not held.lost.is_set()
    clock.advance(101)
    heartbeat.beat()
    assert sweep.reap(database) == 1, "no beat goes past the deadline"
    heartbeat.beat()
    assert held.lost.is_set()
    heartbeat.stop()


def test_the_lease_of_a_step_is_two_minutes_and_never_past_its_deadline(shop):
    long, short = shop.approved(shop.step().planned(1)), shop.approved(shop.step(timeout=20).planned(1))
    seconds = {}
    for plan in (long, short):
        shop.claim(plan)
        row = shop.raw(plan.id)
        seconds[plan.id] = (
            (row.lease_expires_at - row.claimed_at).total_seconds(),
            (row.deadline_at - row.claimed_at).total_seconds(),
            (row.continue_until - row.claimed_at).total_seconds(),
        )
    assert seconds == {long.id: (120, 300, 900), short.id: (20, 20, 900)}


def test_after_an_outage_a_read_leaves_owners_the_time_to_beat(shop, engine, clock):
    plan = shop.approved(shop.step().planned(1))
    shop.claim(plan)
    clock.advance(121)
    with engine.begin() as tx:
        tx.execute(
            text(
                "insert into durable.loops (name, began_at, host, hold_until)"
                " values ('reap', durable.durable_now(), 'h', durable.durable_now() + interval '8 s')"
            )
        )
    assert shop.get(plan.id).state == "executing"
    clock.advance(9)
    assert shop.get(plan.id).state == "failed"


def test_who_keeps_a_plan_locked_past_its_deadline_and_a_grace_is_ended_and_the_plan_is_interrupted(
    shop, database, clock
):
    plan, short = shop.approved(shop.step().planned(1)), shop.approved(shop.step(timeout=300).planned(1))
    claims = shop.claim(plan), shop.claim(short)
    with database.connect() as held, database.connect() as other:
        assert protocol.lock(held, attempt._statements, claims[0]) is not None
        clock.advance(329)
        assert cut_off(database, grace_seconds=30.0) == 0
        clock.advance(2)
        assert protocol.lock(other, attempt._statements, claims[1]) is not None
        other.rollback()
        assert sweep.reap(database) == 1, "one is still locked"
        assert shop.raw(plan.id).state == "executing"
        assert cut_off(database, grace_seconds=30.0) == 1
        held.invalidate()
    assert sweep.reap(database) == 1
    assert (shop.raw(plan.id).state, shop.raw(plan.id).error_code) == ("failed", "INTERRUPTED")
    assert ("cut off", "executing", "executing") in shop.lines(plan.id)


# --- dead children and shutdowns -------------------------------------------------------------------


def test_what_a_killed_child_held_has_failed_at_once(shop, worker, database):
    kind = shop.step()
    plan = shop.approved(kind.planned(1), kind.planned(2))
    shop.run(worker, plan)
    claim = shop.claim(plan, Holder(owner="nonce", pid=77))
    assert sweeps.holding_pids(database, "nonce") == {77}
    assert sweeps.give_back(database, "nonce", [78]) == 0
    assert sweeps.give_back(database, "other", [77]) == 0
    assert sweeps.give_back(database, "nonce", [77]) == 1
    assert sweeps.give_back(database, "nonce", [77]) == 0
    got = shop.get(plan.id)
    assert (got.state, got.reason, got.owner) == ("failed", "interrupted", None)
    assert attempt.carry_out(worker, kind, claim).outcome is Outcome.CLAIM_LOST
    assert shop.lines(plan.id)[-2] == ("release", "executing", "failed")


def test_what_a_shutdown_cut_short_runs_again_and_its_old_owner_is_refused(shop, worker, database, carrier, clock):
    began = []

    def handler(step, n):
        began.append(step.fence)
        return note(step, n)

    kind = shop.step(handler)
    plan = shop.approved(kind.planned(1))
    claim = shop.claim(plan, Holder(owner="nonce", pid=77))
    clock.advance(16 * 60)  # the window of its consent is over, and its step was begun in time
    assert sweeps.give_back(database, "nonce", [77], shutdown=True) == 1
    sweep.reap(database, heartbeat_seconds=8.0)
    row = shop.raw(plan.id)
    assert (row.state, row.owner, row.fence, row.settled_fence) == ("executing", None, 1, 0)
    assert attempt.carry_out(worker, kind, claim).outcome is Outcome.CLAIM_LOST, "nobody's, so not its either"
    assert began == [], "it is refused before its handler begins"
    deliveries_sweep.dispatch(database, others=(sweep,))
    assert [hint.id for hint in carrier.published] == [plan.id]
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert shop.effects(plan.id) == ["0:1"]


@pytest.mark.parametrize("shutdown", [True, False])
def test_a_row_that_is_still_locked_by_its_backend_is_not_given_back(shop, database, other_engine, shutdown):
    plan = shop.approved(shop.step().planned(1))
    shop.claim(plan, Holder(owner="nonce", pid=77))
    with other_engine.begin() as backend:
        backend.execute(HOLD, {"id": plan.id})
        assert sweeps.give_back(database, "nonce", [77], shutdown=shutdown) == 0
    assert sweeps.give_back(database, "nonce", [77], shutdown=shutdown) == 1


# --- dispatch --------------------------------------------------------------------------------------


def test_a_pause_stops_a_plan_between_two_steps_and_its_end_is_that_of_its_window(
    shop, worker, database, engine, clock
):
    """As the how-to says it: what is done stays done, and after the pause nothing of it runs."""
    first, second = shop.step(), shop.step()
    plan = shop.approved(first.planned(1), second.planned(2), expires=60)
    begun = shop.approved(second.planned(3), expires=60)
    shop.run(worker, plan)
    with engine.begin() as tx:
        deliveries.pause(tx, "kind", second.name, by="dana", reason="the wrong customer")
    assert [shop.run(worker, one)[0].outcome for one in (plan, begun)] == [Outcome.NOTHING_TO_DO] * 2
    clock.advance(61)
    assert (sweep.reap(database), sweep.expire(database)) == (1, 1)
    with engine.begin() as tx:
        deliveries.resume(tx, "kind", second.name, by="dana")
    assert [shop.run(worker, one)[0].outcome for one in (plan, begun)] == [Outcome.NOTHING_TO_DO] * 2
    assert [(row.state, row.error_code) for row in (shop.raw(plan.id), shop.raw(begun.id))] == [
        ("failed", "INTERRUPTED"), ("expired", "EXPIRED"),
    ]  # fmt: skip
    assert (shop.effects(plan.id), shop.effects(begun.id)) == (["0:1"], [])


@pytest.mark.spec("plans", 22)
def test_a_hint_that_was_lost_is_repeated_and_two_hints_run_it_once(shop, worker, database, carrier, clock):
    plan = shop.approved(shop.step().planned(1))
    carrier.offered.clear()
    carrier.lying["durable"] = 1  # of some other row: the queue is not empty
    for _ in range(2):
        deliveries_sweep.dispatch(database, others=(sweep,))
    assert carrier.published == [], "its first hint is on its way"
    clock.advance(11)
    for _ in range(2):
        deliveries_sweep.dispatch(database, others=(sweep,))
    assert [hint.id for hint in carrier.published] == [plan.id]
    assert [done.outcome for done in shop.run(worker, plan, 2)] == [Outcome.DONE, Outcome.NOTHING_TO_DO]
    assert shop.effects(plan.id) == ["0:1"]


def test_hints_that_nobody_takes_come_ever_more_seldom_and_a_claim_begins_anew(shop, database, engine, clock):
    plan = shop.approved(shop.step().planned(1), expires=30 * 24 * 3600)

    def hinted(queue="durable", **told):
        with database.transaction() as connection:
            return len(sweep.pick(connection, {queue: Share(9, **told)}))

    for wait in (10, 20, 40, 80, 160, 320, 600, 600):
        clock.advance(wait - 2)
        assert hinted() == 0, wait
        clock.advance(3)
        assert hinted() == 1, wait
        assert hinted() == 0, wait
    assert hinted("other", empty=True) == 0
    assert hinted(empty=True) == 0, "hinted within the second"
    clock.advance(2)
    assert hinted(empty=True) == 1, "its queue is empty"
    assert attempt.wait_for_handler(database, plan.steps[0].kind, plan.id)
    clock.advance(2)
    assert hinted(empty=True) == 0, "of a kind that nobody knows an empty queue says nothing"
    shop.claim(plan)
    assert (shop.raw(plan.id).hints, shop.raw(plan.id).waiting_for) == (0, None)
    assert hinted(empty=True) == 0, "it is claimed"


def test_an_empty_queue_is_refilled_at_once(shop, database, carrier, clock):
    plans_made = {shop.approved(shop.step(queue="careful").planned(n)).id for n in range(3)}
    clock.advance(2)
    deliveries_sweep.dispatch(database, others=(sweep,))
    assert {(hint.id, hint.queue) for hint in carrier.published} == {(made, "careful") for made in plans_made}


def test_what_waits_is_counted_by_queue(shop, database):
    careful, other = shop.step(queue="careful"), shop.step()
    for n in range(2):
        shop.approved(careful.planned(n))
    shop.approved(other.planned(1))
    shop.propose(other.planned(1))
    claimed = shop.approved(other.planned(1))
    shop.claim(claimed)
    with database.autocommit() as connection:
        assert sweep.due(connection, 1000) == {"careful": 2, "durable": 1}


def test_the_sweeps_as_beat_drives_them_see_plans(shop, database, carrier, clock, worker):
    kind = shop.step()
    waiting, silent, overdue = shop.approved(kind.planned(1)), shop.approved(kind.planned(1)), None
    shop.claim(silent)
    overdue = shop.propose(kind.planned(1), expires=60)
    bounds = sweeps.Bounds()
    sweeps.run_sweep(database, sweeps.named("reap"), bounds)  # the first after a gap takes nothing
    clock.advance(12)
    assert sweeps.run_sweep(database, sweeps.named("dispatch"), bounds)["moved"] == 1
    clock.advance(20)
    sweeps.run_sweep(database, sweeps.named("reap"), bounds)
    for _ in range(5):
        clock.advance(20)
        sweeps.run_sweep(database, sweeps.named("reap"), bounds)
    assert shop.raw(silent.id).state == "failed"
    assert sweeps.run_sweep(database, sweeps.named("expire"), bounds)["moved"] == 1
    assert shop.raw(overdue.id).state == "expired"
    assert shop.raw(waiting.id).state == "approved"


def test_what_ended_long_ago_goes_with_its_receipts_and_its_history(shop, worker, database, engine, clock):
    kind = shop.step()
    done, open_ = shop.approved(kind.planned(1)), shop.propose(kind.planned(1), expires=300 * 24 * 3600)
    shop.run(worker, done)
    clock.advance(15 * 24 * 3600)
    late = shop.approved(kind.planned(1))
    shop.run(worker, late)
    assert sweep.prune_all(database, retention_seconds=14 * 24 * 3600.0) == 1
    with engine.connect() as tx:
        assert set(tx.scalars(text("select id::text from durable.plans"))) == {open_.id, late.id}
        assert set(tx.scalars(text("select plan_id::text from durable.plan_receipts"))) == {late.id}
        assert set(tx.scalars(text("select row_id::text from durable.journal"))) == {open_.id, late.id}


# --- held ------------------------------------------------------------------------------------------


def test_a_plan_on_which_a_sweep_fails_is_held_and_the_others_are_swept(shop, database, engine, clock):
    kind = shop.step()
    bad, good = shop.approved(kind.planned(1)), shop.approved(kind.planned(2))
    for plan in (bad, good):
        shop.claim(plan)
    with engine.begin() as tx:
        tx.execute(
            text(
                f"create function public.refuse() returns trigger language plpgsql as $$ begin"
                f" if new.id = '{bad.id}' and new.state = 'failed' then raise exception 'not this one'; end if;"
                f" return new; end $$"
            )
        )
        tx.execute(
            text("create trigger refuse before update on durable.plans for each row execute function public.refuse()")
        )
    try:
        clock.advance(121)
        assert sweep.reap(database) == 1
        assert shop.raw(good.id).state == "failed"
        assert "not this one" in shop.raw(bad.id).held_reason
        assert sweep.reap(database) == 0, "it is passed over"
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop trigger refuse on durable.plans"))
            tx.execute(text("drop function public.refuse()"))
    with engine.begin() as tx:
        plans.release(tx, bad.id, by="dana", reason="mended")
    with pytest.raises(IllegalMove), engine.begin() as tx:
        plans.release(tx, bad.id, by="dana", reason="mended")
    assert sweep.reap(database) == 1
    assert shop.raw(bad.id).state == "failed"
    assert ("release", "executing", "executing") in shop.lines(bad.id)


@pytest.mark.parametrize("digest", [None, "another"])
def test_a_held_plan_is_not_approved_before_it_is_released_and_nothing_is_written(shop, worker, engine, digest):
    plan = shop.propose(shop.step().planned(1))
    by = {"by": "dana", "digest": digest or plan.digest}
    with engine.begin() as tx:
        tx.execute(text("update durable.plans set held_reason = 'CheckViolation: a row'"))
    before, lines = shop.raw(plan.id), shop.lines(plan.id)
    with engine.begin() as tx:
        with pytest.raises(IllegalMove, match=r"held back, not released first\. Nothing was written") as refused:
            plans.approve(tx, plan.id, **by)
        assert refused.value.reason == "ILLEGAL_MOVE"
        assert tx.scalar(text("select 1")) == 1
    assert (shop.raw(plan.id), shop.lines(plan.id)) == (before, lines)
    with engine.begin() as tx:
        plans.release(tx, plan.id, by="dana", reason="mended")
    with engine.begin() as tx:
        plans.approve(tx, plan.id, by="dana", digest=plan.digest)
    assert shop.run(worker, plan)[0].outcome.name == "DONE"


def test_a_held_plan_may_be_rejected(shop, engine):
    plan = shop.propose(shop.step().planned(1))
    with engine.begin() as tx:
        tx.execute(text("update durable.plans set held_reason = 'odd'"))
        plans.reject(tx, plan.id, by="dana")
    assert shop.raw(plan.id).state == "rejected"


# --- unknown commits -------------------------------------------------------------------------------


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_whose_answer_was_lost_is_asked_of_the_row(shop, make_worker, far, relay, arrives):
    runs = []

    def handler(step):
        note(step, len(runs))
        runs.append(1)
        if len(runs) == 1:
            (relay.cut_after if arrives else relay.cut_before)(COMMIT)

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(make_worker(on=far), plan)[0].outcome is Outcome.DONE
    assert len(runs) == (1 if arrives else 2)
    assert shop.effects(plan.id) == (["0:0"] if arrives else ["0:1"])
    assert shop.receipts(plan.id) == [(0, "ok")]
    assert shop.get(plan.id).state == "executed"


def test_a_connection_lost_inside_the_step_runs_it_again_whole(shop, worker, engine):
    runs = []

    def handler(step):
        note(step, len(runs))
        runs.append(1)
        if len(runs) == 1:
            step.session.execute(text("select pg_terminate_backend(pg_backend_pid())"))

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert shop.effects(plan.id) == ["0:1"]


# --- clocks ----------------------------------------------------------------------------------------


@contextmanager
def elsewhere(engine, environment):
    """A process of this environment: what it says came of an act, and how wrong its clock is."""
    url = engine.url.render_as_string(hide_password=False)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.core.plan_process", url], env={**os.environ, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip

        def ask(*words):
            process.stdin.write(" ".join(words) + "\n")
            process.stdin.flush()
            clock, _, came = process.stdout.readline().strip().partition(" ")
            return came, int(clock) - time.time()

        yield ask


@pytest.mark.spec("plans", 23)
@pytest.mark.skipif(faketime() is None, reason="no libfaketime on this platform")
@pytest.mark.parametrize("wrong", [-600, 600])
def test_a_process_whose_clock_is_ten_minutes_wrong_changes_no_expiry_and_no_interruption(shop, engine, clock, wrong):
    kind = shop.step(name=plan_process.KIND)
    run, silent = shop.approved(kind.planned(1), expires=300), shop.approved(kind.planned(2), expires=300)
    pending = shop.propose(kind.planned(3), expires=300)
    shop.claim(silent)
    clock.advance(90)
    with elsewhere(engine, wrong_by(wrong)) as ask:
        came, error = ask("sweep")
        assert came == "0 0", "nothing is over yet"
        assert abs(error - wrong) < 60
        assert ask("read", silent.id)[0] == "executing"
        assert ask("perform", run.id)[0] == "done"
        row = shop.raw(run.id)
        assert abs((row.continue_until - row.claimed_at).total_seconds() - 300) < 5
        clock.advance(40)
        assert ask("sweep")[0] == "1 0"
        assert shop.raw(silent.id).error_code == "INTERRUPTED"
        clock.advance(180)
        assert ask("sweep")[0] == "0 1"
    assert shop.raw(pending.id).state == "expired"
