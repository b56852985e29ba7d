"""An operator sends a delivery round again: a new budget, a higher fence, and a line that says who and why."""

import pytest

from durable_core import IllegalMove, InvalidOption, NotFound, deliveries
from durable_core.deliveries.attempt import Outcome, carry_out, perform
from durable_core.deliveries.sweep import expire


def redrive(engine, row_id, by="dana", reason="address fixed"):
    with engine.begin() as tx:
        deliveries.redrive(tx, row_id, by=by, reason=reason)


@pytest.mark.spec("deliveries", 21)
@pytest.mark.parametrize("state", ["dead", "failed"])
def test_a_redriven_delivery_is_pending_and_due_now_with_a_new_budget(engine, make, row, lines, clock, state):
    clock.freeze()
    made = make(state=state, key="k")
    before = row(made.id)
    clock.advance(1000)
    redrive(engine, made.id)
    after = row(made.id)
    assert (after.state, after.due_at) == ("pending", clock.now())
    assert (after.attempts, after.interruptions, after.shutdowns, after.snoozes, after.failures) == (0, 0, 0, 0, 0)
    assert (after.error_code, after.error_message, after.finished_at, after.claimed_at) == (None,) * 4
    assert (after.fence, after.settled_fence) == (before.fence + 1, before.fence + 1)
    assert (after.key, after.arguments, after.created_at) == ("k", before.arguments, before.created_at)
    (line,) = lines(made.id)
    assert (line.move, line.from_state, line.to_state, line.by, line.reason) == (
        "redrive", state, "pending", "dana", "address fixed",
    )  # fmt: skip
    assert line.facts["attempts"] == 1
    assert line.facts["error_code"] == before.error_code


def test_one_that_has_lost_its_use_meanwhile_is_carried_out_all_the_same(engine, database, worker, kind, make, clock):
    """A person wants it: its expiry is lifted."""
    made = make(state="dead", expires=5)
    clock.advance(10)
    redrive(engine, made.id)
    assert expire(database) == 0
    assert perform(worker, kind, made.id).outcome is Outcome.SENT


@pytest.mark.spec("deliveries", 21)
@pytest.mark.parametrize("state", ["pending", "processing", "sent", "canceled", "expired"])
def test_a_redrive_of_anything_else_is_refused_and_writes_nothing(engine, make, row, lines, state):
    made = make(state=state)
    before = row(made.id)
    with pytest.raises(IllegalMove) as refused:
        redrive(engine, made.id)
    assert refused.value.state == state
    assert row(made.id) == before
    assert lines(made.id) == []


@pytest.mark.parametrize(("by", "reason"), [("", "why"), ("who", ""), (" ", "why"), (None, "why")])
def test_a_redrive_without_who_and_why_is_refused(engine, make, row, by, reason):
    made = make(state="dead")
    with pytest.raises(InvalidOption):
        redrive(engine, made.id, by=by, reason=reason)
    assert row(made.id).state == "dead"


@pytest.mark.parametrize("row_id", ["nonsense", "00000000-0000-7000-8000-000000000000"])
def test_a_redrive_of_no_row_is_not_found(engine, row_id):
    with pytest.raises(NotFound):
        redrive(engine, row_id)


def test_a_redrive_commits_or_vanishes_with_its_caller_and_then_hints(engine, make, row, carrier):
    from sqlalchemy.orm import Session

    made = make(state="dead")
    with Session(engine) as session:
        deliveries.redrive(session, made.id, by="dana", reason="x")
        session.rollback()
        assert row(made.id).state == "dead"
        deliveries.redrive(session, made.id, by="dana", reason="x")
        session.commit()
    assert row(made.id).state == "pending"
    assert [(hint.id, hint.first) for hint in carrier.offered] == [(made.id, False)]


def test_the_late_report_of_an_owner_from_before_the_redrive_does_not_land(
    engine, database, worker, declare, make, row, clock
):
    from durable_core.deliveries import sweep

    kind = declare(lambda step: "late", max_interruptions=0)
    made = make(kind, state="processing")
    clock.advance(31)
    sweep.reap(database)
    redrive(engine, made.id)
    before = row(made.id)
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id) == before
    assert perform(worker, kind, made.id).outcome is Outcome.SENT


def test_the_key_of_a_step_is_the_same_before_and_after_a_redrive(engine, worker, declare, make):
    keys = []

    def handler(step):
        keys.append((step.key, step.attempt))
        if len(keys) == 1:
            raise RuntimeError

    kind = declare(handler, max_attempts=1)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.DEAD
    redrive(engine, made.id)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert keys == [(f"{kind.name}:{made.id}", 1)] * 2
