"""What a second delivery under a taken key becomes: given back, refused, or the newer arguments for the waiting row."""

import pytest
from sqlalchemy.orm import Session

from durable_core import IdempotencyConflict, KeyInFlight, KeyTaken
from durable_core.deliveries.attempt import Outcome, carry_out, perform
from durable_core.deliveries.sweep import reap
from tests.conftest import effects_of


def again(engine, kind, n=2, key="k", **options):
    with Session(engine) as session, session.begin():
        return kind.options(key=key, **options).enqueue(session, n)


@pytest.mark.parametrize("state", ["pending", "processing", "sent", "dead"])
def test_raise_refuses_whatever_the_arguments_and_writes_nothing(engine, kind, make, row, state):
    made = make(arguments={"n": 1}, key="k", state=state)
    before = row(made.id)
    with pytest.raises(KeyTaken) as refused:
        again(engine, kind, 1, key_policy="raise")
    assert (refused.value.row_id, refused.value.reason) == (made.id, "KEY_TAKEN")
    assert row(made.id) == before


def test_raise_takes_a_free_key(engine, kind):
    assert again(engine, kind, key_policy="raise").created


def test_replace_gives_the_waiting_row_the_new_arguments_and_leaves_its_turn(engine, worker, kind, make, row):
    made = make(arguments={"n": 1}, key="k", countdown=60)
    before = row(made.id)
    ref = again(engine, kind, 2, key_policy="replace", priority=1)
    assert (ref.id, ref.created, ref.replaced) == (made.id, False, True)
    after = row(made.id)
    assert (after.arguments, after.priority) == ({"n": 2}, 1)
    assert (after.due_at, after.created_at) == (before.due_at, before.created_at)
    assert (after.fence, after.settled_fence) == (before.fence + 1, before.fence + 1)
    # With the new arguments the key is what it was: the same call again finds itself.
    assert again(engine, kind, 2).id == made.id
    with pytest.raises(IdempotencyConflict):
        again(engine, kind, 1)


def test_debounce_counts_the_due_time_anew(engine, worker, kind, make, row, clock):
    clock.freeze()
    first = again(engine, kind, 1, key_policy="debounce", countdown=10)
    for n in (2, 3):
        clock.advance(8)
        assert again(engine, kind, n, key_policy="debounce", countdown=10).id == first.id
    assert (row(first.id).due_at - clock.now()).total_seconds() == 10
    clock.advance(11)
    assert perform(worker, kind, first.id).outcome is Outcome.SENT
    assert effects_of(engine, first.id) == [(3, "3")]


@pytest.mark.parametrize("policy", ["replace", "debounce"])
@pytest.mark.parametrize("state", ["processing", "sent", "failed", "dead", "canceled", "expired"])
def test_one_that_has_begun_keeps_its_arguments_and_gives_up_its_key(engine, kind, make, row, lines, state, policy):
    made = make(arguments={"n": 1}, key="k", state=state)
    before = row(made.id)
    ref = again(engine, kind, 2, key_policy=policy, countdown=1)
    assert ref.created
    assert ref.id != made.id
    assert row(ref.id).key == "k"
    after = row(made.id)
    assert (after.key, after.arguments, after.state, after.fence) == (None, {"n": 1}, state, before.fence)
    line = lines(made.id)[-1]
    assert (line.move, line.facts) == ("give up key", {"key": "k"})


def test_a_late_report_on_replaced_arguments_is_refused(engine, database, worker, kind, make, row, clock):
    made = make(arguments={"n": 1}, key="k", state="processing")
    clock.advance(31)
    assert reap(database) == 1
    assert again(engine, kind, 2, key_policy="replace").replaced
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id).state == "pending"
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert [note for _, note in effects_of(engine, made.id)] == ["2"]


def test_of_one_call_the_newest_wins(engine, kind, row):
    from durable_core import enqueue_many

    with Session(engine) as session, session.begin():
        refs = enqueue_many(session, [kind.options(key="k", key_policy="replace").new(n) for n in (1, 2, 3)])
    assert len({ref.id for ref in refs}) == 1
    assert row(refs[0].id).arguments == {"n": 3}
    with Session(engine) as session, session.begin(), pytest.raises(KeyTaken):
        enqueue_many(session, [kind.options(key="new", key_policy="raise").new(n) for n in (1, 1)])


@pytest.mark.parametrize("policy", ["replace", "debounce"])
def test_a_row_that_somebody_has_locked_is_waited_for_briefly(engine, other_engine, kind, make, row, policy):
    made = make(arguments={"n": 1}, key="k")
    with other_engine.begin() as tx:
        tx.exec_driver_sql("select 1 from durable.deliveries for update")
        with Session(engine) as session, session.begin():
            with pytest.raises(KeyInFlight):
                kind.options(key="k", key_policy=policy, countdown=1).enqueue(session, 2)
            mine = kind.enqueue(session, 9)
    assert row(made.id).arguments == {"n": 1}
    assert row(mine.id).arguments == {"n": 9}, "the caller's transaction was alive"
