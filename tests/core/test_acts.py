"""Cancel, reschedule, discard, and any act on all that a filter chooses: who may, what is refused, what is kept."""

from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from durable_core import IllegalMove, InvalidOption, NotFound, RowBusy, deliveries
from durable_core.claims.operate import act_on
from durable_core.deliveries import bulk, operate
from durable_core.deliveries.attempt import Outcome, carry_out, perform
from durable_core.deliveries.bulk import Filter, act_on_all, look
from durable_core.deliveries.sweep import prune, reap
from durable_core.states import DeliveryState
from tests.conftest import effects_of, record

WHO = {"by": "dana", "reason": "no longer needed"}
ACTS = {
    "cancel": (operate.CANCEL, {}),
    "reschedule": (operate.RESCHEDULE, operate.due(60, None)),
    "redrive": (operate.REDRIVE, {}),
    "discard": (operate.DISCARD, {}),
}


def act(engine, name, row_id, **who):
    chosen, more = ACTS[name]
    with Session(engine) as session, session.begin():
        act_on(session, chosen, row_id, **{**WHO, **who}, **more)


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("state", DeliveryState)
def test_an_act_takes_the_states_it_names_and_refuses_the_others_writing_nothing(engine, make, row, lines, name, state):
    made = make(state=state)
    before = row(made.id)
    if state in ACTS[name][0].states:
        act(engine, name, made.id)
        (line,) = lines(made.id)
        assert (line.move, line.from_state, line.by, line.reason) == (name, state, "dana", "no longer needed")
        return
    with pytest.raises(IllegalMove):
        act(engine, name, made.id)
    assert (row(made.id), lines(made.id)) == (before, [])


@pytest.mark.parametrize("name", ACTS)
def test_an_act_without_who_or_why_on_no_row_or_on_a_busy_one_is_refused(engine, other_engine, make, row, name):
    made = make(state=ACTS[name][0].states[0])
    before = row(made.id)
    for who in ({"by": ""}, {"reason": " "}, {"by": None}):
        with pytest.raises(InvalidOption):
            act(engine, name, made.id, **who)
    with pytest.raises(NotFound):
        act(engine, name, "00000000-0000-7000-8000-000000000000")
    with other_engine.begin() as tx:
        tx.exec_driver_sql("select 1 from durable.deliveries for update")
        with pytest.raises(RowBusy):
            act(engine, name, made.id)
    assert row(made.id) == before


def test_an_act_vanishes_with_its_callers_transaction(engine, make, row):
    made = make()
    with Session(engine) as session:
        deliveries.cancel(session, made.id, **WHO)
        session.rollback()
    assert row(made.id).state == "pending"


# --- cancel ------------------------------------------------------------------------------------------


def test_a_canceled_delivery_is_never_carried_out(engine, worker, kind, make, row):
    made = make()
    act(engine, "cancel", made.id)
    assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO
    assert (row(made.id).state, row(made.id).fence, row(made.id).settled_fence) == ("canceled", 1, 1)


@pytest.mark.parametrize("opens", ["its session", "nothing", "an effect at its end", "an error"])
def test_one_that_runs_is_refused_its_commit(engine, worker, declare, row, lines, make, opens):
    """The handler learns it from `step.session`; whoever opens nothing, from its commit."""

    def handler(step):
        act(engine, "cancel", step.id)
        if opens == "its session":
            record(step.session, step, "too late")
        if opens == "an effect at its end":
            step.in_commit(lambda session: record(session, step, "too late"))
        if opens == "an error":
            raise RuntimeError("too late")

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.CLAIM_LOST
    assert row(made.id).state == "canceled"
    assert effects_of(engine, made.id) == []
    assert [line.move for line in lines(made.id)] == ["cancel", "refused"]


def test_a_running_handler_is_told_at_its_next_heartbeat(engine, make_worker, declare, make):
    import time

    told = []

    def handler(step):
        act(engine, "cancel", step.id)
        until = time.monotonic() + 20
        while not step.cancelled and time.monotonic() < until:
            time.sleep(0.02)
        told.append(step.cancelled)

    kind = declare(handler)
    worker = make_worker(lease_seconds=3.0, heartbeat_seconds=0.2)
    assert perform(worker, kind, make(kind).id).outcome is Outcome.CLAIM_LOST
    assert told == [True]


def test_one_in_its_commit_is_not_canceled(engine, worker, declare, make, row):
    refused = []

    def handler(step):
        record(step.session, step)
        with pytest.raises(RowBusy):
            act(engine, "cancel", step.id)
        refused.append(step.id)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert (refused, row(made.id).state) == ([made.id], "sent")


def test_a_late_report_on_a_canceled_one_changes_nothing(database, engine, worker, kind, make, row, clock):
    made = make(state="processing")
    clock.advance(31)
    reap(database)
    act(engine, "cancel", made.id)
    before = row(made.id)
    assert carry_out(worker, kind, made.held).outcome is Outcome.CLAIM_LOST
    assert row(made.id) == before


# --- reschedule and discard --------------------------------------------------------------------------


def test_a_delivery_is_rescheduled_sooner_and_later(engine, worker, kind, make, row, lines, clock):
    clock.freeze()
    made = make(countdown=3600)
    with engine.begin() as tx:
        deliveries.reschedule(tx, made.id, countdown=0, **WHO)
    assert row(made.id).due_at == clock.now()
    with engine.begin() as tx:
        deliveries.reschedule(tx, made.id, eta=clock.now() + timedelta(days=1), **WHO)
    assert row(made.id).due_at == clock.now() + timedelta(days=1)
    assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO
    assert [line.move for line in lines(made.id)] == ["reschedule", "reschedule"]


@pytest.mark.parametrize("when", [{}, {"countdown": 1, "eta": 2}, {"countdown": -1}, {"eta": "tomorrow"}])
def test_a_reschedule_needs_one_time_that_can_be(engine, make, row, when):
    made = make()
    before = row(made.id)
    with engine.begin() as tx, pytest.raises(InvalidOption):
        deliveries.reschedule(tx, made.id, **when, **WHO)
    assert row(made.id) == before


def test_a_discarded_one_stays_dead_counts_no_more_and_goes_after_its_retention(engine, database, make, row, clock):
    from durable_core.deliveries import read

    made, kept = make(state="dead"), make(state="dead")
    clock.advance(20 * 86400)
    act(engine, "discard", made.id)
    assert row(made.id).state == "dead"
    with engine.begin() as tx:
        assert read.ended(tx) == {"dead": 1, "failed": 0}
    with pytest.raises(IllegalMove, match="discarded"):
        act(engine, "discard", made.id)
    assert prune(database) == 0, "its retention counts from the discard"
    clock.advance(15 * 86400)
    assert prune(database) == 1
    with pytest.raises(NotFound):
        row(made.id)
    assert row(kept.id).state == "dead"


def test_a_discarded_one_can_be_redriven(engine, worker, kind, make, row):
    made = make(state="dead")
    act(engine, "discard", made.id)
    act(engine, "redrive", made.id)
    assert row(made.id).discarded_at is None
    assert perform(worker, kind, made.id).outcome is Outcome.SENT


# --- many --------------------------------------------------------------------------------------------


def test_all_that_a_filter_chooses_are_moved_in_bounded_transactions(engine, database, make, row, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH", 10)
    dead = [make(state="dead").id for _ in range(25)]
    others = [make(state=state).id for state in ("sent", "pending", "failed")]
    before = [row(row_id) for row_id in others]
    with engine.begin() as tx:
        chosen = look(tx, operate.REDRIVE, Filter(state=DeliveryState.DEAD))
    assert (chosen.count, chosen.sample) == (25, dead[:5])
    seen = []
    moved = act_on_all(
        database,
        operate.REDRIVE,
        Filter(state=DeliveryState.DEAD),
        **WHO,
        progress=lambda so_far: seen.append(so_far.done),
    )
    assert (moved.done, seen) == (25, [10, 20, 25])
    assert {row(row_id).state for row_id in dead} == {"pending"}
    assert [row(row_id) for row_id in others] == before


@pytest.mark.parametrize(
    ("which", "count"),
    [
        (Filter(kind="test.none"), 0), (Filter(queue="mail"), 2), (Filter(ordering_key="a"), 1),
        (Filter(error_code="WORKER_ERROR"), 3), (Filter(error_code="OTHER"), 0), (Filter(older_seconds=60), 2),
        (Filter(queue="mail", older_seconds=60), 1), (Filter(), 3),
    ],
)  # fmt: skip
def test_each_filter_that_is_given_must_hold(engine, make, clock, which, count):
    make(state="dead", queue="mail")
    make(state="dead", ordering_key="a")
    clock.advance(120)
    make(state="dead", queue="mail")
    with engine.begin() as tx:
        assert look(tx, operate.REDRIVE, which).count == count


def test_a_discarded_one_is_chosen_by_no_filter(engine, database, make, row):
    given_up, other = make(state="dead"), make(state="dead")
    act(engine, "discard", given_up.id)
    with engine.begin() as tx:
        assert look(tx, operate.REDRIVE, Filter()).sample == [other.id]
    assert act_on_all(database, operate.REDRIVE, Filter(), **WHO).done == 1
    assert row(given_up.id).state == "dead"


def test_a_state_that_the_act_does_not_take_is_refused(engine, database):
    with pytest.raises(InvalidOption):
        act_on_all(database, operate.REDRIVE, Filter(state=DeliveryState.SENT), **WHO)
    with pytest.raises(InvalidOption):
        act_on_all(database, operate.REDRIVE, Filter(), rate=0, **WHO)


def test_broken_off_what_is_done_is_done_and_the_next_call_does_the_rest(database, make, row, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH", 10)
    dead = [make(state="dead").id for _ in range(25)]

    def interrupted(so_far):
        if so_far.done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        act_on_all(database, operate.REDRIVE, Filter(), **WHO, progress=interrupted)
    assert [row(row_id).state for row_id in dead] == ["pending"] * 20 + ["dead"] * 5
    assert act_on_all(database, operate.REDRIVE, Filter(), **WHO).done == 5


def test_a_busy_row_is_counted_and_not_waited_for(database, other_engine, make):
    make(state="dead")
    with other_engine.begin() as tx:
        tx.exec_driver_sql("select 1 from durable.deliveries for update")
        make(state="dead")
        moved = act_on_all(database, operate.REDRIVE, Filter(), **WHO)
    assert (moved.done, moved.busy, moved.moved_on) == (1, 1, 0)


def test_each_row_is_come_to_once_also_where_the_act_leaves_its_state(database, make, lines, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH", 10)
    made = [make(countdown=60).id for _ in range(25)]
    seen = []

    def progress(so_far):
        seen.append(so_far.done)
        assert len(seen) <= 3, "or it would never end"

    moved = act_on_all(
        database, operate.RESCHEDULE, Filter(), **WHO, progress=progress, **operate.due(3600, None),
    )  # fmt: skip
    assert (moved.done, seen) == (25, [10, 20, 25])
    assert {len(lines(row_id)) for row_id in made} == {1}


def test_a_rate_spaces_the_batches(database, make):
    for _ in range(25):
        make(state="dead")
    pauses = []
    assert act_on_all(database, operate.REDRIVE, Filter(), **WHO, rate=10, pause=pauses.append).done == 25
    # Ten, ten and five rows, each batch in its share of a second, what it took itself off.
    assert [round(pause + 0.05, 0) for pause in pauses[:2]] == [1, 1]
    assert 0 < pauses[2] <= 0.5
