"""Answers of the database that are lost around an operation's call: it is made once at most."""

import pytest

from durable_core.deliveries.worker import Outcome
from durable_core.operations import sweep
from durable_core.operations.attempt import perform


@pytest.mark.parametrize("arrives", [True, False])
def test_the_ids_are_recorded_although_an_answer_is_lost_and_the_call_is_not_repeated(
    make_worker, far, relay, declare_operation, remote, start, operation_row, arrives
):
    kind, cuts = declare_operation(), []
    issue = kind.handler

    def handler(step, branch="preview", *, parts=1):
        issued = issue(step, branch, parts=parts)
        cuts.append(relay.cut_after(b"settled as (") if arrives else relay.cut_before(b"settled as ("))
        return issued

    kind.handler = handler
    ref = start(kind)
    attempted = perform(make_worker(on=far), kind, ref.id)
    assert cuts[0].done
    assert attempted.outcome is Outcome.ISSUED
    row = operation_row(ref.id)
    assert (row.external_ids, row.settled_fence, remote.issued) == (remote.ids(), 1, 1)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_claim_whose_answer_is_lost_makes_no_call(
    make_worker, far, relay, declare_operation, remote, start, operation_row, database, clock, worker, arrives
):
    kind = declare_operation()
    ref = start(kind)
    cut = relay.cut_after(b"taken as (") if arrives else relay.cut_before(b"taken as (")
    assert perform(make_worker(on=far), kind, ref.id).outcome is Outcome.UNAVAILABLE
    assert cut.done
    assert remote.issued == 0
    if not arrives:
        assert perform(worker, kind, ref.id).outcome is Outcome.ISSUED
        assert remote.issued == 1
        return
    assert perform(worker, kind, ref.id).outcome is Outcome.NOTHING_TO_DO
    clock.advance(seconds=31)
    assert sweep.reap(database) == 1
    row = operation_row(ref.id)
    assert (row.state, row.error_code, remote.issued) == ("failed", "OUTCOME_UNKNOWN", 0)


@pytest.mark.parametrize("arrives", [True, False])
def test_the_end_that_a_poll_saw_is_recorded_although_an_answer_is_lost(
    make_worker, far, relay, reset, remote, start, operation_row, look, clock, arrives
):
    ref = start(reset)
    look(reset, ref.id)
    remote.set("done")
    clock.advance(seconds=3)
    cut = relay.cut_after(b"settled as (") if arrives else relay.cut_before(b"settled as (")
    assert perform(make_worker(on=far), reset, ref.id).outcome is Outcome.SUCCEEDED
    assert cut.done
    assert operation_row(ref.id).state == "succeeded"


def test_a_time_limit_between_two_tries_of_the_record_loses_no_ids(
    far, relay, make_worker, reset, start, remote, operation_row
):
    class OutOfTime(Exception):
        """As the pool raises it."""

    struck = []

    def strike(again):
        if not struck:
            struck.append(again)
            raise OutOfTime
        return 0.0

    ref, worker = start(reset), make_worker(on=far)
    worker.time_limits, worker.pause = (OutOfTime,), strike
    cut = relay.cut_before(b"settled as (")
    assert perform(worker, reset, ref.id).outcome is Outcome.ISSUED
    assert (cut.done, struck, remote.issued) == (True, [1], 1)
    assert operation_row(ref.id).external_ids


def test_a_time_limit_in_the_call_is_an_unknown_outcome(make_worker, declare_operation, start, remote, operation_row):
    class OutOfTime(Exception):
        """As the pool raises it."""

    for finds, ends in ((False, "failed"), (True, "running")):
        kind = declare_operation(finds=finds)

        def slow(step, branch="preview", *, parts=1):
            remote.issue(step.key)
            raise OutOfTime

        kind.handler = slow
        ref = start(kind)
        worker = make_worker()
        worker.time_limits = (OutOfTime,)
        perform(worker, kind, ref.id)
        row = operation_row(ref.id)
        assert (row.state, row.error_code, row.external_ids) == (ends, "OUTCOME_UNKNOWN", None)


def test_the_lease_may_outlast_the_call_by_the_time_that_its_record_gets(declare_operation, start, look, operation_row):
    kind, seen = declare_operation(timeout=7), []
    issue = kind.handler

    def handler(step, branch="preview", *, parts=1):
        row = operation_row(step.id)
        spans = (row.deadline_at, row.lease_expires_at, step.deadline)
        seen.extend((at - row.claimed_at).total_seconds() for at in spans)
        return issue(step, branch, parts=parts)

    kind.handler = handler
    look(kind, start(kind).id)
    assert seen == [67, 30, 7], "the row's deadline, its lease, and what the handler is told"
