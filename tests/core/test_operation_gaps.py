"""Where our own polling stands still around a poll that then fails, its report does not wipe the gap out."""

import time
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from durable_core.deliveries.worker import Outcome
from durable_core.operations import attempt, sweep

PATIENCE = 300.0


@pytest.fixture
def failing(declare_operation):
    """A kind whose polls fail, each after so many seconds of the database's clock: `failing.takes(…)`; or go well."""
    kind = declare_operation()
    good = kind.poll_hook
    acts = []

    def poll(step, ids):
        if not acts:
            return good(step, ids)
        acts.pop(0)(step)
        raise ConnectionError("away")

    kind.poll_hook = poll
    kind.fails_after = acts.append
    return kind


def patience_left(engine, row_id):
    with engine.connect() as tx:
        left = text("select extract(epoch from patience_until - durable.durable_now()) from durable.operations"
                    " where id = :id")  # fmt: skip
        return float(tx.scalar(left, {"id": row_id}))


def test_a_gap_inside_a_poll_that_fails_renews_the_patience_before_anything_is_judged(
    database, engine, remote, failing, start, look, operation_row, lines, clock
):
    """The poll is claimed, the database is away for longer than the patience, and then the failure is reported."""
    ref = start(failing)
    look(failing, ref.id)
    failing.fails_after(lambda step: clock.advance(PATIENCE + 60))
    assert look(failing, ref.id, after=3).outcome is Outcome.PUT_OFF
    row = operation_row(ref.id)
    assert (row.state, row.owner, row.settled_fence, row.outage_at is None) == ("running", None, row.fence, False)
    assert patience_left(engine, ref.id) == pytest.approx(PATIENCE, abs=10)
    assert [(line.move, line.reason) for line in lines(ref.id)][-1] == ("outage", "OUTAGE")
    assert sweep.reap(database) == 0
    assert look(failing, ref.id, after=35).outcome is Outcome.POLLED, "it is asked, and not judged"
    assert operation_row(ref.id).outage_at is None
    assert remote.issued == 1


def test_it_is_renewed_once_until_the_next_good_poll(engine, failing, start, look, operation_row, lines, clock):
    ref = start(failing)
    look(failing, ref.id)
    for _ in range(2):
        failing.fails_after(lambda step: clock.advance(PATIENCE - 20))
    assert look(failing, ref.id, after=3).outcome is Outcome.PUT_OFF
    renewed = operation_row(ref.id).patience_until
    assert look(failing, ref.id, after=35).outcome is Outcome.PUT_OFF
    assert operation_row(ref.id).patience_until == renewed
    assert [line.move for line in lines(ref.id)].count("outage") == 1
    assert look(failing, ref.id, after=35).outcome is Outcome.FAILED
    assert operation_row(ref.id).error_code == "PATIENCE_OVER"


def test_a_gap_before_the_claim_of_a_poll_that_fails_is_not_wiped_out_either(
    engine, failing, start, look, operation_row, lines
):
    """Patience was not over at the claim, so nothing was renewed there."""
    ref = start(failing)
    look(failing, ref.id)
    failing.fails_after(lambda step: None)
    assert look(failing, ref.id, after=PATIENCE - 10).outcome is Outcome.PUT_OFF
    assert patience_left(engine, ref.id) == pytest.approx(PATIENCE, abs=10)
    assert [line.move for line in lines(ref.id)][-1] == "outage"
    assert look(failing, ref.id, after=35).outcome is Outcome.POLLED


def test_a_gap_shows_where_the_claim_was_taken_back_and_its_owner_reports_late(
    database, engine, failing, start, look, operation_row, clock
):
    """Nobody took the row since, so the report lands; the lease's end is the row's due time by then."""

    def frozen(step):
        clock.advance(PATIENCE + 60)
        assert sweep.reap(database) == 1
        assert operation_row(step.id).owner is None

    ref = start(failing)
    look(failing, ref.id)
    failing.fails_after(frozen)
    assert look(failing, ref.id, after=3).outcome is Outcome.PUT_OFF
    assert operation_row(ref.id).outage_at is not None
    assert patience_left(engine, ref.id) == pytest.approx(PATIENCE, abs=10)


@pytest.mark.parametrize("seconds", [0, 25])
def test_a_poll_that_fails_in_its_time_renews_nothing(engine, failing, start, look, operation_row, clock, seconds):
    ref = start(failing)
    look(failing, ref.id)
    until = operation_row(ref.id).patience_until
    failing.fails_after(lambda step: clock.advance(seconds))
    assert look(failing, ref.id, after=25).outcome is Outcome.PUT_OFF
    row = operation_row(ref.id)
    assert (row.patience_until, row.outage_at) == (until, None)


@pytest.mark.parametrize(("seconds", "ours"), [(90, False), (145, False), (155, True)])
def test_while_the_other_side_keeps_a_hook_waiting_it_is_no_gap_of_ours(
    database, declare_operation, start, look, operation_row, lines, clock, monkeypatch, seconds, ours
):
    """The claim is taken back meanwhile. No hook hangs beyond the time-out of its kind: that is a frozen process."""
    kind = declare_operation(timeout=120)

    def hangs(step, ids):
        clock.advance(seconds)
        monkeypatch.setattr(attempt, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
        sweep.reap(database)
        raise TimeoutError("no answer")

    ref = start(kind)
    look(kind, ref.id)
    until = operation_row(ref.id).patience_until
    kind.poll_hook = hangs
    assert look(kind, ref.id, after=3).outcome is Outcome.PUT_OFF
    row = operation_row(ref.id)
    assert (row.patience_until != until, row.outage_at is not None) == (ours, ours)
    assert ("outage" in [line.move for line in lines(ref.id)]) is ours
