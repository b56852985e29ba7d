"""Taking back what lost workers hold, and the late reports that follow."""

import random
from datetime import timedelta

import pytest
from sqlalchemy import text

from durable_core import Backoff, GiveUp, Retry, deliveries
from durable_core.claims.claim import Holder
from durable_core.database.transactions import run
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, _statements, carry_out, claim_due, claim_one, perform
from durable_core.deliveries.enqueue import enqueue_many
from durable_core.sweeps import Bounds, named, run_sweep
from tests.poison import poisoned

MIDDLE = lambda: 0.5  # noqa: E731


def reap(database):
    return sweep.reap(database, random=MIDDLE)


def take(engine, kind, row_id):
    with engine.begin() as tx:
        claim = claim_one(tx, kind, row_id, Holder())
    assert claim is not None
    return claim


@pytest.mark.spec("deliveries", 15)
def test_a_lost_worker_costs_an_interruption_and_no_attempt(database, engine, kind, make, row, lines, clock):
    """Killed after the claim: due at once the first time, about 30 s ahead the second."""
    clock.freeze()
    made = make(state="processing")
    clock.advance(31)
    assert reap(database) == 1
    reaped = row(made.id)
    assert (reaped.state, reaped.error_code) == ("pending", "CLAIM_EXPIRED")
    assert (reaped.attempts, reaped.interruptions, reaped.failures) == (1, 1, 0)
    assert reaped.due_at == clock.now()
    assert (reaped.fence, reaped.settled_fence, reaped.owner) == (1, 0, None)

    take(engine, kind, made.id)
    clock.advance(31)
    assert reap(database) == 1
    again = row(made.id)
    assert (again.attempts, again.interruptions) == (2, 2)
    assert again.due_at - clock.now() == timedelta(seconds=30)
    moves = [(line.move, line.from_state, line.to_state, line.fence, line.reason) for line in lines(made.id)]
    assert moves == [
        ("reap", "processing", "pending", 1, "CLAIM_EXPIRED"),
        ("reap", "processing", "pending", 2, "CLAIM_EXPIRED"),
    ]


@pytest.mark.spec("deliveries", 16)
def test_after_a_loss_the_handler_runs_once_for_each_reclaim_under_a_higher_fence(
    database, worker, engine, make, row, clock, declare
):
    """Killed after the provider had accepted: sent again, the documented at-least-once, with the same key."""
    calls = []
    kind = declare(lambda step: calls.append((step.key, step.fence)))
    made = make(kind, state="processing")
    calls.append((f"{kind.name}:{made.id}", made.held.fence))  # the call of the attempt that died
    clock.advance(31)
    reap(database)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO
    assert calls == [(f"{kind.name}:{made.id}", 1), (f"{kind.name}:{made.id}", 2)]


@pytest.mark.spec("deliveries", 17)
def test_the_interruption_after_the_last_allowed_one_ends_dead(database, engine, declare, make, row, clock):
    kind = declare(max_interruptions=2)
    made = make(kind)
    for _ in range(3):
        clock.advance(4000)
        take(engine, kind, made.id)
        clock.advance(31)
        assert reap(database) == 1
    dead = row(made.id)
    assert (dead.state, dead.error_code) == ("dead", "WORKER_LOST")
    assert (dead.attempts, dead.interruptions, dead.failures) == (3, 3, 0)
    assert dead.finished_at is not None


@pytest.mark.spec("deliveries", 17)
def test_a_lease_with_a_second_left_is_not_reaped(database, make, row, clock):
    clock.freeze()
    made = make(state="processing")
    before = row(made.id)
    clock.advance(29)
    assert reap(database) == 0
    assert row(made.id) == before


def test_at_most_once_ends_dead_at_the_first_lost_worker(database, declare, make, row, clock):
    made = make(declare(max_attempts=1, max_interruptions=0), state="processing")
    clock.advance(31)
    reap(database)
    assert (row(made.id).state, row(made.id).error_code) == ("dead", "WORKER_LOST")
    assert "outcome is unknown" in row(made.id).error_message


@pytest.mark.parametrize("state", ["pending", "sent", "failed", "dead", "canceled", "expired"])
def test_nothing_but_a_processing_row_is_reaped(database, make, row, clock, state):
    made = make(state=state)
    clock.advance(10_000)
    before = row(made.id)
    assert reap(database) == 0
    assert row(made.id) == before


def test_the_oldest_lease_is_taken_back_first(database, make, row, clock):
    old = make(state="processing")
    clock.advance(5)
    young = make(state="processing")
    clock.advance(60)
    assert sweep.reap(database, limit=1) == 1
    assert (row(old.id).state, row(young.id).state) == ("pending", "processing")


def test_an_owner_that_beat_up_to_its_deadline_failed_by_timeout(database, engine, declare, make, row, clock):
    kind = declare(timeout=100)
    clock.freeze()
    made = make(kind, state="processing")
    clock.advance(93)
    _beat(engine, made)
    assert row(made.id).lease_expires_at == row(made.id).deadline_at, "a beat never reaches past the deadline"
    clock.advance(8)
    assert reap(database) == 1
    late = row(made.id)
    assert (late.state, late.error_code) == ("pending", "TIMEOUT")
    assert (late.attempts, late.interruptions, late.failures) == (1, 0, 1)
    assert late.due_at - clock.now() == timedelta(seconds=30)


@pytest.mark.parametrize("succeeds", [True, False])
def test_the_late_report_of_a_timed_out_attempt_lands_and_its_failure_counts_once(
    database, worker, engine, declare, make, row, clock, succeeds
):
    def handler(step):
        if not succeeds:
            raise RuntimeError("late, and failed")

    kind = declare(handler, timeout=100)
    made = make(kind, state="processing")
    clock.advance(93)
    _beat(engine, made)
    clock.advance(8)
    reap(database)
    outcome = carry_out(worker, kind, made.held).outcome
    end = row(made.id)
    assert (outcome, end.state) == ((Outcome.SENT, "sent") if succeeds else (Outcome.RETRY, "pending"))
    assert (end.attempts, end.interruptions, end.failures) == (1, 0, 0 if succeeds else 1)


def test_an_owner_that_fell_silent_before_its_deadline_was_lost(database, engine, declare, make, row, clock):
    kind = declare(timeout=100)
    made = make(kind, state="processing")
    clock.advance(50)
    _beat(engine, made)
    clock.advance(60)
    assert reap(database) == 1
    assert (row(made.id).error_code, row(made.id).interruptions) == ("CLAIM_EXPIRED", 1)


def test_a_timeout_at_the_last_attempt_ends_dead(database, engine, declare, make, row, clock):
    made = make(declare(timeout=20, max_attempts=1), state="processing")
    clock.advance(15)
    _beat(engine, made)
    clock.advance(6)
    reap(database)
    assert (row(made.id).state, row(made.id).error_code) == ("dead", "TIMEOUT")


def test_a_heartbeat_past_the_deadline_keeps_nothing(engine, declare, make, row, clock):
    made = make(declare(timeout=20), state="processing")
    clock.advance(21)
    before = row(made.id)
    assert _beat(engine, made) is False
    assert row(made.id) == before


def _beat(engine, made):
    with engine.begin() as tx:
        (answer,) = run(tx, _statements.keep, ids=[made.id], fences=[made.held.fence], lease_seconds=30.0)
    return answer["kept"]


# --- late truth ------------------------------------------------------------------------------------


@pytest.mark.spec("deliveries", 11)
def test_a_late_success_on_a_reaped_row_lands_and_nothing_is_sent_twice(
    database, worker, kind, make, row, lines, clock, engine
):
    made = make(state="processing")
    clock.advance(31)
    reap(database)
    assert carry_out(worker, kind, made.held).outcome is Outcome.SENT
    sent = row(made.id)
    assert (sent.state, sent.settled_fence, sent.attempts) == ("sent", 1, 1)
    assert sent.interruptions == 0, "the interruption that the reap booked is taken back"
    assert sent.error_code is None
    assert [line.move for line in lines(made.id)] == ["reap", "settle late"]
    assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO


@pytest.mark.parametrize(
    ("raises", "state", "outcome"),
    [(Retry("busy"), "pending", Outcome.RETRY), (GiveUp("gone"), "failed", Outcome.FAILED)],
)
def test_a_late_failure_on_a_reaped_row_takes_back_the_interruption(
    database, worker, declare, make, row, lines, clock, raises, state, outcome
):
    def handler(step):
        raise raises

    kind = declare(handler)
    made = make(kind, state="processing")
    clock.advance(31)
    reap(database)
    assert carry_out(worker, kind, made.held).outcome is outcome
    late = row(made.id)
    assert (late.state, late.attempts, late.interruptions, late.failures) == (state, 1, 0, 1)
    assert [line.move for line in lines(made.id)] == ["reap", "fail late"]


def test_a_late_last_failure_on_a_reaped_row_ends_dead(database, worker, declare, make, row, clock):
    def handler(step):
        raise RuntimeError("no")

    kind = declare(handler, max_attempts=1)
    made = make(kind, state="processing")
    clock.advance(31)
    reap(database)
    assert carry_out(worker, kind, made.held).outcome is Outcome.DEAD
    assert (row(made.id).interruptions, row(made.id).failures) == (0, 1)


@pytest.mark.spec("deliveries", 23)
def test_a_late_success_on_a_dead_row_changes_nothing_but_is_in_the_journal(
    database, worker, declare, make, row, lines, clock, engine
):
    kind = declare(max_interruptions=0)
    made = make(kind, state="processing")
    clock.advance(31)
    reap(database)
    dead = row(made.id)
    assert dead.state == "dead"
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id) == dead
    last = lines(made.id)[-1]
    assert (last.move, last.reason, last.fence) == ("refused", "LATE_EFFECT", 1)


@pytest.mark.spec("deliveries", 23)
def test_a_late_success_without_a_session_on_a_dead_row_is_journalled_as_a_success(
    database, worker, declare, make, row, lines, clock
):
    kind = declare(lambda step: "accepted", max_interruptions=0)
    made = make(kind, state="processing")
    clock.advance(31)
    reap(database)
    dead = row(made.id)
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id) == dead
    assert [(line.move, line.reason) for line in lines(made.id)] == [
        ("reap", "WORKER_LOST"),
        ("refused", "LATE_SUCCESS"),
    ]


@pytest.mark.parametrize("how", ["success", "effect", "failure"])
def test_a_worker_back_from_the_dead_writes_nothing_once_another_has_the_row(
    database, worker, engine, declare, make, row, lines, clock, how
):
    def handler(step):
        if how == "effect":
            step.session.execute(text("insert into effects (row_id, fence) values ('zombie', 0)"))
        if how == "failure":
            raise RuntimeError("from the dead")

    kind = declare(handler)
    zombie = make(kind, state="processing")
    clock.advance(31)
    reap(database)
    owner = take(engine, kind, zombie.id)
    before = row(zombie.id)
    assert carry_out(worker, kind, zombie.held).outcome is Outcome.CLAIM_LOST
    assert row(zombie.id) == before, "no state, no error text, no lease"
    assert lines(zombie.id)[-1].reason == f"LATE_{how.upper()}"
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from effects")) == 0
    if how == "success":
        assert carry_out(worker, kind, owner).outcome is Outcome.SENT


def test_a_report_is_made_once_and_the_second_is_refused(worker, kind, make, row, engine, database):
    """The same claim, carried out twice by mistake: one receipt, one effect."""
    made = make(state="processing")
    assert carry_out(worker, kind, made.held).outcome is Outcome.SENT
    sent = row(made.id)
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id) == sent
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from effects")) == 1


def test_after_its_own_retry_a_claim_reports_no_second_time(worker, declare, make, row):
    """The row is pending under the same fence again, but that fence is settled."""
    answers = [Retry("first"), None]

    def handler(step):
        if answer := answers.pop(0):
            raise answer

    kind = declare(handler)
    made = make(kind, state="processing")
    assert carry_out(worker, kind, made.held).outcome is Outcome.RETRY
    before = row(made.id)
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id) == before


@pytest.mark.parametrize("raises", [Retry("again"), GiveUp("gone")])
def test_after_its_own_retry_a_claim_fails_no_second_time(worker, declare, make, row, raises):
    answers = [Retry("first"), raises]

    def handler(step):
        raise answers.pop(0)

    kind = declare(handler)
    made = make(kind, state="processing")
    assert carry_out(worker, kind, made.held).outcome is Outcome.RETRY
    before = row(made.id)
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id) == before


# --- sweeping many ---------------------------------------------------------------------------------


def test_one_row_that_cannot_be_reaped_does_not_keep_the_rest(database, engine, make, row, clock):
    """The offender stays where it is, says why, and is skipped from then on."""
    made = [make(state="processing") for _ in range(3)]
    offender = made[1].id
    with engine.begin() as tx:
        tx.execute(
            text("""
            create function refuse_one() returns trigger language plpgsql as $$
            begin
                if old.state = 'processing' and new.state = 'pending' then raise 'host says no'; end if;
                return new;
            end $$""")
        )
        tx.execute(text(
            "create trigger host_guard before update on durable.deliveries for each row"
            f" when (old.id = '{offender}') execute function refuse_one()"
        ))  # fmt: skip
    try:
        clock.advance(31)
        assert reap(database) == 2
        assert [row(m.id).state for m in made] == ["pending", "processing", "pending"]
        assert "host says no" in row(offender).held_reason
        assert reap(database) == 0
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop function refuse_one() cascade"))


def test_one_row_that_cannot_be_given_back_does_not_keep_the_rest_of_its_process(database, engine, make, row, lines):
    made = [make(state="processing", holder=Holder(owner="this-worker", pid=4711)) for _ in range(3)]
    with poisoned(engine, made[1].id, "update", "new.state = 'pending'"):
        assert sweep.give_back(database, "this-worker", {4711}) == 2
    assert [row(m.id).state for m in made] == ["pending", "processing", "pending"]
    assert [line.move for line in lines(made[1].id)] == ["hold"]


def test_a_row_that_fails_at_commit_is_told_from_the_rest(database, engine, make, row, clock):
    """A constraint trigger of the host's, initially deferred."""
    made = [make(state="processing") for _ in range(3)]
    with engine.begin() as tx:
        tx.execute(text(
            "create function refuse_late() returns trigger language plpgsql as $$ begin raise 'host says no'; end $$;"
            "create constraint trigger refuse_late after update on durable.deliveries initially deferred for each row"
            f" when (new.id = '{made[0].id}' and new.state = 'pending') execute function refuse_late()"
        ))  # fmt: skip
    try:
        clock.advance(31)
        assert reap(database) == 2
        assert "host says no" in row(made[0].id).held_reason
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop function refuse_late() cascade"))


@pytest.mark.field("R26")
def test_whoever_is_lost_is_found_by_the_rows_own_lease_whatever_else_is_deleted(database, engine, make, row, clock):
    """No worker is registered anywhere. What tells of workers at all is `durable.loops`, and nothing rests on it."""
    with engine.connect() as tx:
        tables = set(tx.scalars(text("select tablename from pg_tables where schemaname = 'durable'")))
    work = {"deliveries", "operations", "plan_receipts", "plans"}
    work |= {"cases", "case_claims", "case_correlations", "case_events", "case_journal"}
    work |= {"documents", "document_revisions"}
    assert tables - {"schema_version", "test_clock"} == {*work, "journal", "loops", "pauses", "schedules"}
    unheard_of = [make(state="processing", holder=Holder(owner=f"nobody-{n}", pid=n + 1)).id for n in range(3)]
    run_sweep(database, named("reap"), Bounds())
    clock.advance(31)
    with engine.begin() as tx:
        tx.execute(text("delete from durable.loops"))
    assert run_sweep(database, named("reap"), Bounds()) == {"moved": 3}
    assert {row(row_id).state for row_id in unheard_of} == {"pending"}


# --- when all fail at once -------------------------------------------------------------------------


@pytest.mark.field("R73")
@pytest.mark.parametrize(("jitter", "spread"), [(0.15, 0.29), (0.3, 0.5)], ids=["by default", "as wide as is asked"])
def test_five_hundred_failures_of_one_second_come_back_spread_over_their_delay(
    database, engine, declare, clock, seed, jitter, spread
):
    """By default over 30 % of the delay; a kind that needs half of it, or more, says so."""
    kind = declare(timeout=20, backoff=Backoff(base=30, jitter=jitter))
    clock.freeze()
    with engine.begin() as tx:
        enqueue_many(tx, [kind.options().new(n) for n in range(500)])
        claims = claim_due(tx, 500)
    clock.advance(15)
    with engine.begin() as tx:
        run(
            tx, _statements.keep,
            ids=[claim.id for claim in claims], fences=[claim.fence for claim in claims], lease_seconds=30.0,
        )  # fmt: skip
    clock.advance(6)
    assert sweep.reap(database, random=random.Random(seed).random) == 500
    with engine.connect() as tx:
        delays_of = text("select error_code, extract(epoch from due_at - :now) as delay from durable.deliveries")
        found = tx.execute(delays_of, {"now": clock.now()}).all()
    assert {one.error_code for one in found} == {"TIMEOUT"}
    delays = sorted(float(one.delay) for one in found)
    assert delays[-1] - delays[0] >= spread * 30
    assert 30 * (1 - jitter) - 0.01 <= delays[0]
    assert delays[-1] <= 30 * (1 + jitter) + 0.01
    for third in range(3):
        a_third = 2 * jitter * 30 / 3
        within = [d for d in delays if 0 <= d - 30 * (1 - jitter) - third * a_third < a_third]
        assert len(within) > 100, "evenly, and not in two heaps"


@pytest.mark.field("R73")
@pytest.mark.parametrize("attempts", [199, 999_000])
def test_attempt_two_hundred_waits_as_long_as_the_cap_and_no_longer(
    engine, declare, make, row, worker, clock, attempts
):
    def handler(step):
        raise RuntimeError(step.attempt)

    kind = declare(handler, max_attempts=1_000_000)
    made = make(kind)
    with engine.begin() as tx:
        tx.execute(text("update durable.deliveries set attempts = :n where id = :id"), {"n": attempts, "id": made.id})
    clock.freeze()
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert row(made.id).due_at - clock.now() == timedelta(hours=1)


def test_counters_add_up_over_a_life_with_every_kind_of_ending(database, worker, engine, declare, make, row, clock):
    endings = iter([RuntimeError("1"), KeyboardInterrupt(), Retry(after=1), None])

    def handler(step):
        if (ending := next(endings)) is not None:
            raise ending

    kind = declare(handler)
    made = make(kind)
    perform(worker, kind, made.id)
    clock.advance(100)
    with pytest.raises(KeyboardInterrupt):
        perform(worker, kind, made.id)
    clock.advance(100)
    take(engine, kind, made.id)
    clock.advance(31)
    reap(database)
    clock.advance(100)
    assert perform(worker, kind, made.id).attempt == 2
    clock.advance(100)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    end = row(made.id)
    assert (end.attempts, end.interruptions, end.failures) == (5, 2, 2)
    assert end.attempts == end.failures + end.interruptions + end.shutdowns + end.snoozes + 1
    with engine.connect() as tx:
        assert deliveries.get(tx, made.id).fence == 5
