"""Operations: issued at most once, polled until they end. The cases of the contract by their numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from durable_core import (
    ExternalStatus,
    GiveUp,
    IdempotencyConflict,
    Issued,
    NotConfigured,
    OperationInFlight,
    Poll,
    Retry,
    TargetsUnresolved,
    operations,
)
from durable_core.arguments import Signature
from durable_core.claims.shares import Share
from durable_core.database.connections import Database
from durable_core.deliveries.worker import Outcome
from durable_core.errors import DefinitionError, IllegalMove, InvalidArguments, InvalidOption
from durable_core.operations import sweep
from durable_core.operations.attempt import perform, wait_for_handler
from durable_core.operations.why import why
from durable_core.testing import drain

PATIENCE = 300.0
EMPTY = {"durable": Share(9, empty=True)}


def count(engine, kind):
    with engine.connect() as tx:
        return tx.scalar(text("select count(*) from durable.operations where kind = :kind"), {"kind": kind.name})


def put_back(engine, row_id, **columns):
    """Set columns of a row to so many seconds ago."""
    with engine.begin() as tx:
        for column, seconds in columns.items():
            tx.execute(
                text(f"update durable.operations set {column} = durable.durable_now() - make_interval(secs => :s)"
                     " where id = :id"),
                {"s": seconds, "id": row_id},
            )  # fmt: skip


def moves(lines, row_id):
    return [(line.move, line.from_state, line.to_state) for line in lines(row_id)]


# --- from start to end ---------------------------------------------------------------------------


@pytest.mark.spec("operations", 1)
def test_a_started_operation_is_issued_once_and_shows_a_count_alone(remote, reset, start, look, operation_row, lines):
    ref = start(reset, "preview", parts=2)
    assert (ref.created, ref.replayed) == (True, False)
    assert remote.issued == 0, "a start calls nobody"
    assert look(reset, ref.id).outcome is Outcome.ISSUED
    row = operation_row(ref.id)
    assert (row.state, row.owner, row.external_ids) == ("running", None, remote.ids())
    assert remote.issued == 1
    assert row.patience_until > row.issued_at
    assert row.public()["external_operations"] == 2
    for shown in (str(row.public()), str(row.as_json(arguments=True)), repr(row)):
        assert not any(one in shown for one in remote.ids())
    look(reset, ref.id, after=3)
    assert set(operation_row(ref.id).external_statuses) == set(remote.ids())
    assert moves(lines, ref.id) == [
        ("start", None, "queued"), ("take", "queued", "running"), ("issued", "running", "running"),
    ]  # fmt: skip
    assert lines(ref.id)[0].by == "dana"
    assert lines(ref.id)[2].facts == {"external_operations": 2}


@pytest.mark.spec("operations", 2)
def test_a_second_start_while_one_is_in_flight_is_refused(engine, remote, reset, start, look):
    ref = start(reset)
    with Session(engine) as session, session.begin():
        with pytest.raises(OperationInFlight) as refused:
            reset.start(session, by="eve")
        assert refused.value.row_id == ref.id
        assert session.scalar(text("select 1")) == 1, "the caller's transaction is alive"
    look(reset, ref.id)
    with pytest.raises(OperationInFlight):
        start(reset)
    assert (count(engine, reset), remote.issued) == (1, 1)


@pytest.mark.spec("operations", 3)
def test_of_ten_starts_at_once_one_comes_to_be(engine, other_engine, remote, reset, look):
    barrier = threading.Barrier(10)

    def go(number):
        barrier.wait()
        try:
            with other_engine.begin() as tx:
                return reset.options(key=f"k{number}").start(tx, by="dana").id
        except OperationInFlight as refused:
            return refused

    with ThreadPoolExecutor(10) as threads:
        came = list(threads.map(go, range(10)))
    (won,) = [one for one in came if isinstance(one, str)]
    assert count(engine, reset) == 1
    for _ in range(3):
        look(reset, won)
    assert remote.issued == 1


@pytest.mark.spec("operations", 5)
def test_the_same_key_after_success_gives_the_first_back(engine, remote, reset, start, look, operation_row):
    ref = start(reset, "preview", key="reset-42")
    look(reset, ref.id)
    remote.set("done")
    assert look(reset, ref.id, after=3).outcome is Outcome.SUCCEEDED
    again = start(reset, "preview", key="reset-42")
    assert (again.id, again.created, again.replayed, again.state) == (ref.id, False, True, "succeeded")
    look(reset, again.id)
    assert (remote.issued, count(engine, reset)) == (1, 1)
    with pytest.raises(IdempotencyConflict) as refused:
        start(reset, "main", key="reset-42")
    assert "operation" in str(refused.value)


@pytest.mark.spec("operations", 6)
def test_an_operation_that_ended_is_not_polled_again(remote, reset, start, look, operation_row):
    ref = start(reset)
    look(reset, ref.id)
    remote.set("done")
    look(reset, ref.id, after=3)
    first, polled = operation_row(ref.id), remote.polled
    assert first.state == "succeeded"
    assert look(reset, ref.id, after=30).outcome is Outcome.NOTHING_TO_DO
    assert operation_row(ref.id) == first
    assert remote.polled == polled


@pytest.mark.spec("operations", 7)
@pytest.mark.parametrize(("word", "code"), [("broken", "REMOTE_FAILED"), ("stopped", "REMOTE_CANCELED")])
def test_one_failed_part_fails_the_whole_and_both_statuses_are_kept(
    remote, reset, start, look, operation_row, word, code
):
    ref = start(reset, parts=2)
    look(reset, ref.id)
    good, bad = remote.ids()
    remote.set("done", good)
    remote.set(word, bad)
    assert look(reset, ref.id, after=3).outcome is Outcome.FAILED
    row = operation_row(ref.id)
    assert (row.state, row.error_code) == ("failed", code)
    assert row.external_statuses[good] == {"status": "ok", "word": "done"}
    assert row.external_statuses[bad]["word"] == word


@pytest.mark.spec("operations", 8)
def test_a_poll_that_finds_it_running_moves_its_patience_on(remote, reset, start, look, operation_row):
    ref = start(reset)
    look(reset, ref.id)
    before = operation_row(ref.id)
    assert look(reset, ref.id, after=60).outcome is Outcome.POLLED
    after = operation_row(ref.id)
    assert (after.patience_until - before.patience_until).total_seconds() == pytest.approx(60, abs=5)
    assert list(after.external_statuses.values()) == [{"status": "running", "word": "working"}]
    assert (after.fence, after.polls) == (before.fence + 1, 1)


@pytest.mark.spec("operations", 9)
def test_a_poll_that_fails_changes_nothing_and_an_outage_past_the_patience_fails_it(
    engine, remote, declare_operation, start, look, operation_row
):
    broken = []

    kind = declare_operation()
    asked = kind.poll_hook
    kind.poll_hook = lambda step, ids: (_ for _ in ()).throw(ConnectionError("away")) if broken else asked(step, ids)
    ref = start(kind)
    look(kind, ref.id)
    before = operation_row(ref.id)
    broken.append(True)
    assert look(kind, ref.id, after=3).outcome is Outcome.PUT_OFF
    row = operation_row(ref.id)
    assert (row.patience_until, row.external_statuses, row.polls) == (before.patience_until, {}, 0)
    assert (row.state, row.fence, row.owner) == ("running", before.fence + 1, None)
    broken.clear()
    assert look(kind, ref.id, after=31).outcome is Outcome.POLLED, "the next poll works"
    assert operation_row(ref.id).error_code is None
    broken.append(True)
    for _ in range(40):
        if look(kind, ref.id, after=15).outcome is Outcome.FAILED:
            break
    row = operation_row(ref.id)
    assert (row.state, row.error_code, row.outage_at) == ("failed", "PATIENCE_OVER", None)
    assert remote.issued == 1


@pytest.mark.spec("operations", 10)
def test_a_poll_after_the_patience_is_over_fails_it_without_asking(
    engine, remote, reset, start, look, operation_row, lines
):
    ref = start(reset)
    look(reset, ref.id)
    put_back(engine, ref.id, patience_until=1, due_at=1)
    polled = remote.polled
    assert look(reset, ref.id).outcome is Outcome.FAILED
    row = operation_row(ref.id)
    assert (row.state, row.error_code) == ("failed", "PATIENCE_OVER")
    assert remote.polled == polled
    assert lines(ref.id)[-1].reason == "PATIENCE_OVER"
    assert start(reset).created, "the slot is free"


@pytest.mark.spec("operations", 11)
def test_the_reaper_fails_what_nobody_polls_and_the_slot_is_free(
    database, engine, remote, reset, start, look, operation_row, clock, lines
):
    ref = start(reset)
    look(reset, ref.id)
    clock.advance(seconds=PATIENCE + 5)
    assert sweep.reap(database) == 1
    row = operation_row(ref.id)
    assert (row.state, row.outage_at is None) == ("running", False), "nobody asked the other side: patience, once"
    assert lines(ref.id)[-1].move == "outage"
    assert sweep.reap(database) == 0
    clock.advance(seconds=PATIENCE + 5)
    assert sweep.reap(database) == 1
    assert operation_row(ref.id).error_code == "PATIENCE_OVER"
    assert start(reset).created
    assert remote.issued == 1


def test_the_reaper_fails_at_once_what_was_polled_and_did_not_answer(
    database, engine, reset, start, look, operation_row
):
    ref = start(reset)
    look(reset, ref.id)
    put_back(engine, ref.id, patience_until=1, due_at=1)
    assert sweep.reap(database) == 1
    assert operation_row(ref.id).state == "failed"


def test_a_good_poll_after_an_outage_lets_the_next_outage_count_anew(engine, reset, start, look, operation_row):
    ref = start(reset)
    look(reset, ref.id)
    for _ in range(2):
        assert look(reset, ref.id, after=PATIENCE + 60).outcome is Outcome.POLLED, "our own gap"
        assert operation_row(ref.id).outage_at is None
    put_back(engine, ref.id, patience_until=1, due_at=100, outage_at=50)
    assert look(reset, ref.id).outcome is Outcome.FAILED, "renewed once, until a good poll"


@pytest.mark.spec("operations", 14)
@pytest.mark.parametrize("finds", [False, True])
def test_a_worker_lost_around_the_call_leaves_an_unknown_outcome_and_nobody_calls_again(
    database, remote, declare_operation, start, look, operation_row, make_worker, clock, finds
):
    kind = declare_operation(finds=finds)
    ref = start(kind)
    lost = make_worker()

    def die(step, branch="preview", *, parts=1):
        raise SystemExit

    handler, kind.handler = kind.handler, die
    lost.told_to_end = lambda: True  # its parent ends it, so it says nothing itself
    with pytest.raises(SystemExit):
        look(kind, ref.id, by=lost)
    kind.handler = handler
    assert look(kind, ref.id).outcome is Outcome.NOTHING_TO_DO, "its lease is not over"
    clock.advance(seconds=31)
    assert sweep.reap(database) == 1
    assert operation_row(ref.id).state == ("running" if finds else "failed")
    look(kind, ref.id)
    row = operation_row(ref.id)
    assert (row.state, row.error_code) == ("failed", "OUTCOME_UNKNOWN")
    for _ in range(3):
        look(kind, ref.id, after=60)
        sweep.reap(database)
    assert remote.issued == 0
    assert start(kind).created, "the slot is free"


@pytest.mark.spec("operations", 16)
def test_a_message_that_comes_again_may_poll_and_does_not_issue(remote, reset, start, look):
    ref = start(reset)
    outcomes = [look(reset, ref.id, after=after).outcome for after in (0, 0, 0, 3, 0)]
    assert outcomes == [
        Outcome.ISSUED, Outcome.NOTHING_TO_DO, Outcome.NOTHING_TO_DO, Outcome.POLLED, Outcome.NOTHING_TO_DO,
    ]  # fmt: skip
    assert remote.issued == 1


@pytest.mark.spec("operations", 17)
def test_a_lost_message_is_sent_again_and_what_nobody_issues_fails_in_the_end(
    database, engine, carrier, reset, start, clock, operation_row
):
    ref = start(reset)
    carrier.offered.clear()

    def picked(**told):
        with engine.begin() as tx:
            return [hint.id for hint in sweep.pick(tx, {"durable": Share(9, **told)})]

    assert picked() == [ref.id]
    assert picked() == [], "hinted just now"
    clock.advance(seconds=1.5)
    assert picked(empty=True) == [ref.id], "its queue is empty: the hint is lost"
    clock.advance(seconds=1200)
    assert picked() == [ref.id]
    clock.advance(seconds=3600)
    assert sweep.expire(database) == 1
    row = operation_row(ref.id)
    assert (row.state, row.error_code, row.issued_at) == ("failed", "NOT_STARTED", None)
    assert start(reset).created


def test_one_that_is_too_late_to_be_issued_is_not(database, remote, reset, start, look, clock):
    ref = start(reset)
    assert look(reset, ref.id, after=3700).outcome is Outcome.NOTHING_TO_DO
    assert remote.issued == 0


@pytest.mark.spec("operations", 18)
def test_zero_operations_end_it_with_a_reason(remote, reset, start, look, operation_row):
    ref = start(reset, parts=0)
    assert look(reset, ref.id).outcome is Outcome.FAILED
    row = operation_row(ref.id)
    assert (row.state, row.error_code, row.external_ids) == ("failed", "NO_OPERATIONS", [])
    assert start(reset).created


@pytest.mark.spec("operations", 19)
def test_a_word_without_a_meaning_is_shown_and_renews_nothing(remote, reset, start, look, operation_row):
    ref = start(reset, parts=2)
    look(reset, ref.id)
    before = operation_row(ref.id)
    remote.set("skipped", remote.ids()[0])
    remote.set("done", remote.ids()[1])
    for _ in range(40):
        last = look(reset, ref.id, after=10)
        if last.outcome is Outcome.FAILED:
            break
        row = operation_row(ref.id)
        assert row.external_statuses[remote.ids()[0]] == {"status": "unknown", "word": "skipped"}
        assert row.patience_until == before.patience_until
    assert operation_row(ref.id).error_code == "PATIENCE_OVER"


@pytest.mark.spec("operations", 20)
def test_a_canceled_one_frees_the_slot_and_the_precheck_sees_what_still_runs(
    engine, remote, declare_operation, start, look, operation_row
):
    kind = declare_operation()
    asked = []
    kind.cancel(lambda step, ids: asked.append(ids))

    @kind.precheck
    def precheck(step, branch="preview", *, parts=1):
        if any(status == "working" for status in remote.statuses(running).values()):
            raise GiveUp("the branch is being reset", code="BRANCH_BUSY")

    running = []
    ref = start(kind)
    look(kind, ref.id)
    running += remote.ids()
    with engine.begin() as tx:
        assert operations.cancel(tx, ref.id, by="dana", reason="wrong branch").state == "canceled"
    assert look(kind, ref.id).outcome is Outcome.CANCELED
    assert look(kind, ref.id).outcome is Outcome.NOTHING_TO_DO
    assert asked == [running], "asked to stop, once"
    again = start(kind)
    assert look(kind, again.id).outcome is Outcome.FAILED
    row = operation_row(again.id)
    assert (row.state, row.error_code, row.issued_at) == ("failed", "BRANCH_BUSY", None)
    remote.set("done")
    third = start(kind)
    assert look(kind, third.id).outcome is Outcome.ISSUED
    with engine.begin() as tx:
        before = operations.get(tx, ref.id)
        assert operations.cancel(tx, ref.id, by="eve", reason="again") == before, "it had ended: unchanged"


@pytest.mark.spec("operations", 21)
def test_what_the_call_raises_is_stored_without_token_and_id(remote, declare_operation, start, look, operation_row):
    kind = declare_operation()

    def fail(step, branch="preview", *, parts=1):
        raise RuntimeError(
            "POST https://dana:hunter2@api.example.com/v1/ops/op-77?token=s3cr3t said 503 for op-77, "
            'Authorization: Bearer eyJhbGciOi: {"id": "op-77"}'
        )

    kind.handler = fail
    ref = start(kind)
    assert look(kind, ref.id).outcome is Outcome.FAILED
    row = operation_row(ref.id)
    assert (row.state, row.error_code) == ("failed", "CALL_FAILED")
    assert "RuntimeError" in row.error_message
    assert "503" in row.error_message
    for secret in ("hunter2", "s3cr3t", "op-77", "eyJ", "dana:"):
        assert secret not in row.error_message
    look(kind, ref.id)
    assert start(kind).created


@pytest.mark.spec("operations", 21)
@pytest.mark.parametrize(
    ("code", "kept"), [("QUOTA_EXCEEDED", "QUOTA_EXCEEDED"), ("op-77", None), ("it is op-77", None), ("GAVE_UP", None)]
)
def test_a_code_that_the_handler_names_is_stored_as_far_as_it_can_be_no_id(
    declare_operation, start, look, operation_row, code, kept
):
    def fail(step, branch="preview", *, parts=1):
        raise GiveUp("no", code=code)

    kind, refusing = declare_operation(), declare_operation()
    kind.handler = fail
    refusing.precheck(fail)
    for one, otherwise in ((kind, "CALL_FAILED"), (refusing, "OPERATION_REFUSED")):
        ref = start(one)
        assert look(one, ref.id).error_code == (kept or otherwise)
        assert operation_row(ref.id).error_code == (kept or otherwise)


@pytest.mark.spec("operations", 22)
@pytest.mark.parametrize("flag", [None, "", "false", "TRUE", "True", "1", False, 1])
def test_a_scheduled_start_whose_flag_is_off_looks_at_nothing(engine, declare_operation, start, flag):
    kind = declare_operation()
    asked = []
    kind.configured(lambda: asked.append(True))
    ref = start(kind, "no", "such", "arguments", trigger="scheduled", auto=flag)
    assert (ref.id, ref.created, ref.skipped) == ("", False, True)
    assert (asked, count(engine, kind)) == ([], 0)


@pytest.mark.parametrize("flag", [True, "true"])
def test_a_scheduled_start_is_skipped_while_one_is_in_flight(engine, reset, start, flag, operation_row):
    ref = start(reset, trigger="scheduled", auto=flag)
    assert operation_row(ref.id).trigger == "scheduled"
    again = start(reset, trigger="scheduled", auto=flag)
    assert (again.id, again.created, again.skipped) == (ref.id, False, True)


# --- refusals at the door ------------------------------------------------------------------------


def test_a_start_is_refused_in_the_order_of_the_contract_and_writes_nothing(engine, declare_operation, start):
    kind = declare_operation()
    ready, known = [False], [False]
    kind.configured(lambda: ready[0])
    kind.targets(lambda branch="preview", *, parts=1: known[0])
    with Session(engine) as session, session.begin():
        for error, how in (
            (NotConfigured, {"trigger": "nonsense"}), (InvalidOption, {"trigger": "nonsense"}),
            (InvalidOption, {"by": " "}), (InvalidArguments, {"branch": 5}), (TargetsUnresolved, {}),
        ):  # fmt: skip
            with pytest.raises(error):
                kind.start(session, **{"by": "dana", **how})
            ready[0] = True
        assert session.scalar(text("select count(*) from durable.operations")) == 0
    known[0] = True
    ref = start(kind, key="k")
    known[0] = False
    assert start(kind, key="k").id == ref.id, "a replay resolves nothing"


def test_an_operation_that_nobody_could_poll_is_refused(engine, declare_operation):
    kind = declare_operation()
    kind.poll_hook = None
    with engine.begin() as tx, pytest.raises(DefinitionError, match="poll"):
        kind.start(tx, by="dana")


def test_a_start_that_is_rolled_back_was_none(engine, reset, start):
    with engine.connect() as tx, tx.begin() as transaction:
        reset.start(tx, by="dana")
        transaction.rollback()
    assert start(reset).created


def test_several_of_a_kind_may_be_in_flight_where_it_says_so(declare_operation, start):
    kind = declare_operation(one_in_flight=False)
    assert start(kind).id != start(kind).id


# --- the call ------------------------------------------------------------------------------------


def test_a_precheck_that_cannot_be_made_puts_the_start_off(remote, declare_operation, start, look, operation_row):
    kind = declare_operation()
    answers = [ConnectionError("away"), Retry("wait", after=100), None]

    @kind.precheck
    def precheck(step, branch="preview", *, parts=1):
        assert step.fence == 0
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    ref = start(kind)
    assert look(kind, ref.id).outcome is Outcome.PUT_OFF
    assert operation_row(ref.id).error_code == "PRECHECK_FAILED"
    assert look(kind, ref.id).outcome is Outcome.NOTHING_TO_DO
    assert look(kind, ref.id, after=11).outcome is Outcome.PUT_OFF
    assert look(kind, ref.id, after=90).outcome is Outcome.NOTHING_TO_DO
    assert look(kind, ref.id, after=11).outcome is Outcome.ISSUED
    assert operation_row(ref.id).error_code is None
    assert remote.issued == 1


def test_a_paused_kind_is_not_issued_and_its_polls_go_on(engine, carrier, declare_operation, start, look):
    from durable_core import deliveries

    kind = declare_operation(one_in_flight=False)
    running, waiting = start(kind), start(kind)
    look(kind, running.id)
    with engine.begin() as tx:
        deliveries.pause(tx, "kind", kind.name, by="dana", reason="audit")
    assert look(kind, waiting.id).outcome is Outcome.NOTHING_TO_DO
    with engine.begin() as tx:
        assert sweep.pick(tx, EMPTY) == []
    assert look(kind, running.id, after=3).outcome is Outcome.POLLED


@pytest.mark.parametrize("raised", [Retry("read timed out"), None])
def test_a_call_that_does_not_know_what_became_of_it_is_looked_for(
    remote, declare_operation, start, look, operation_row, raised
):
    kind = declare_operation(finds=True)

    def unsure(step, branch="preview", *, parts=1):
        remote.issue(step.key)
        if raised is not None:
            raise raised
        return "an answer without ids"

    kind.handler = unsure
    ref = start(kind)
    assert look(kind, ref.id).outcome is Outcome.PUT_OFF
    assert operation_row(ref.id).external_ids is None
    assert look(kind, ref.id, after=3).outcome is Outcome.ISSUED
    assert operation_row(ref.id).external_ids == remote.ids()
    remote.set("done")
    assert look(kind, ref.id, after=3).outcome is Outcome.SUCCEEDED
    assert remote.issued == 1


def test_a_call_that_the_other_side_is_still_taking_is_asked_for_again(
    remote, declare_operation, start, look, operation_row
):
    kind = declare_operation(finds=True)
    kind.handler = lambda step, **_: (_ for _ in ()).throw(Retry("read timed out"))
    ref = start(kind)
    look(kind, ref.id)
    patience = operation_row(ref.id).patience_until
    assert look(kind, ref.id, after=3).outcome is Outcome.PUT_OFF
    row = operation_row(ref.id)
    assert (row.state, row.error_code, row.patience_until) == ("running", "NOT_FOUND_YET", patience)
    assert "was not heard" in why(row, row.due_at)
    remote.issue(f"{kind.name}:{ref.id}")
    assert look(kind, ref.id, after=5).outcome is Outcome.ISSUED
    assert operation_row(ref.id).external_ids == remote.ids()


def test_a_call_that_the_other_side_never_knew_ends_after_a_while(
    remote, declare_operation, start, look, operation_row
):
    kind = declare_operation(finds=True, lease=40, one_in_flight=False)
    kind.handler = lambda step, **_: (_ for _ in ()).throw(Retry("read timed out"))
    ref = start(kind)
    look(kind, ref.id)
    assert look(kind, ref.id, after=15).outcome is Outcome.PUT_OFF
    assert look(kind, ref.id, after=10).outcome is Outcome.FAILED
    row = operation_row(ref.id)
    assert row.error_code == "OUTCOME_UNKNOWN"
    assert row.error_message == "what became of the call was not heard, and the other side knows nothing of it"
    assert remote.issued == 0


def test_a_find_that_cannot_be_asked_is_asked_again_until_the_patience_is_over(
    remote, declare_operation, start, look, operation_row
):
    kind = declare_operation(finds=True)
    kind.handler = lambda step, **_: (_ for _ in ()).throw(Retry("who knows"))
    kind.find_hook = lambda step: (_ for _ in ()).throw(ConnectionError("away"))
    ref = start(kind)
    look(kind, ref.id)
    outcomes = []
    while len(outcomes) < 40 and Outcome.FAILED not in outcomes:
        outcomes.append(look(kind, ref.id, after=15).outcome)
    assert outcomes.count(Outcome.PUT_OFF) > 5
    assert operation_row(ref.id).error_code == "OUTCOME_UNKNOWN"
    assert remote.issued == 0


def test_an_answer_that_is_late_by_a_lapsed_lease_still_lands(
    database, remote, declare_operation, start, look, operation_row, clock
):
    """Reaped to be looked for, and nobody looked yet: the issuer's own answer is better."""
    kind = declare_operation(finds=True)
    issue = kind.handler

    def slow(step, branch="preview", *, parts=1):
        issued = issue(step, branch, parts=parts)
        clock.advance(seconds=31)
        assert sweep.reap(database) == 1
        return issued

    kind.handler = slow
    ref = start(kind)
    assert look(kind, ref.id).outcome is Outcome.ISSUED
    row = operation_row(ref.id)
    assert (row.external_ids, row.fence, row.settled_fence) == (remote.ids(), 1, 1)


def test_an_answer_after_a_cancel_is_dropped_and_the_other_side_is_asked_to_stop(
    engine, remote, declare_operation, start, look, operation_row, lines
):
    kind = declare_operation()
    asked = []
    kind.cancel(lambda step, ids: asked.append(ids))
    issue = kind.handler

    def slow(step, branch="preview", *, parts=1):
        issued = issue(step, branch, parts=parts)
        with engine.begin() as tx:
            operations.cancel(tx, step.id, by="dana", reason="no")
        return issued

    kind.handler = slow
    ref = start(kind)
    assert look(kind, ref.id).outcome is Outcome.CLAIM_LOST
    row = operation_row(ref.id)
    assert (row.state, row.external_ids, row.canceled_by) == ("canceled", None, "dana")
    assert asked == [remote.ids()]
    assert [line.move for line in lines(ref.id)][-2:] == ["refused", "ask to cancel"]


def test_a_poll_result_after_a_cancel_is_dropped(engine, remote, declare_operation, start, look, operation_row, lines):
    kind = declare_operation()
    poll = kind.poll_hook

    def slow(step, ids):
        with engine.begin() as tx:
            operations.cancel(tx, step.id, by="dana", reason="no")
        return poll(step, ids)

    ref = start(kind)
    look(kind, ref.id)
    kind.poll_hook = slow
    remote.set("done")
    assert look(kind, ref.id, after=3).outcome is Outcome.CLAIM_LOST
    assert operation_row(ref.id).state == "canceled"
    assert lines(ref.id)[-1].reason == "LATE_POLL"


def test_async_hooks_run(remote, declare_operation, start, look, operation_row):
    kind = declare_operation()
    issue, poll = kind.handler, kind.poll_hook

    async def handler(step, branch="preview", *, parts=1):
        return issue(step, branch, parts=parts)

    async def asked(step, ids):
        return poll(step, ids)

    kind.handler, kind.poll_hook = handler, asked
    ref = start(kind)
    assert look(kind, ref.id).outcome is Outcome.ISSUED
    assert look(kind, ref.id, after=3).outcome is Outcome.POLLED


# --- the poll ------------------------------------------------------------------------------------


def test_the_wait_that_the_provider_asks_for_wins(remote, declare_operation, start, look, operation_row):
    kind = declare_operation()
    poll = kind.poll_hook
    kind.poll_hook = lambda step, ids: Poll(poll(step, ids), retry_after=400)
    ref = start(kind)
    look(kind, ref.id)
    assert look(kind, ref.id, after=3).outcome is Outcome.POLLED
    row = operation_row(ref.id)
    assert (row.due_at - row.polled_at).total_seconds() >= 400
    assert row.patience_until > row.due_at, "it asked for the wait, so it may be silent as long"
    kind.poll_hook = lambda step, ids: (_ for _ in ()).throw(Retry("slow down", after=77))
    assert look(kind, ref.id, after=500).outcome is Outcome.PUT_OFF
    late = operation_row(ref.id)
    assert (late.due_at - late.claimed_at).total_seconds() >= 77


@pytest.mark.spec("operations", 7)
def test_an_answer_about_another_operation_is_dropped_and_an_end_stays(
    remote, declare_operation, start, look, operation_row
):
    kind = declare_operation()
    ref = start(kind, parts=2)
    look(kind, ref.id)
    one, two = remote.ids()
    kind.poll_hook = lambda step, ids: {one: ExternalStatus.OK, "op-of-another": "broken"}
    assert look(kind, ref.id, after=3).outcome is Outcome.POLLED
    row = operation_row(ref.id)
    assert set(row.external_statuses) == {one, two}
    assert row.external_statuses[two]["status"] == "unknown"
    kind.poll_hook = lambda step, ids: {one: "working", two: "done"}
    assert look(kind, ref.id, after=3).outcome is Outcome.SUCCEEDED, "what ended does not go back to running"


def test_what_is_no_answer_is_a_failed_poll(declare_operation, start, look, operation_row):
    kind = declare_operation()
    ref = start(kind)
    look(kind, ref.id)
    for answer in (None, ["ok"], "done"):
        kind.poll_hook = lambda step, ids, answer=answer: answer
        assert look(kind, ref.id, after=40).outcome is Outcome.PUT_OFF
    assert operation_row(ref.id).state == "running"


def test_a_poll_of_a_dead_worker_is_made_again(database, remote, reset, start, look, make_worker, clock, operation_row):
    ref = start(reset)
    look(reset, ref.id)
    lost = make_worker()
    lost.told_to_end = lambda: True
    poll, reset.poll_hook = reset.poll_hook, lambda step, ids: (_ for _ in ()).throw(SystemExit())
    with pytest.raises(SystemExit):
        look(reset, ref.id, after=3, by=lost)
    reset.poll_hook = poll
    assert sweep.holding_pids(database, lost.holder.owner) == {lost.holder.pid}
    assert sweep.give_back(database, lost.holder.owner, [lost.holder.pid]) == 1
    assert look(reset, ref.id).outcome is Outcome.POLLED
    assert (operation_row(ref.id).state, remote.issued) == ("running", 1)


# --- sweeps --------------------------------------------------------------------------------------


def test_the_poll_sweep_hints_each_due_poll_once(database, carrier, reset, start, look, clock, engine):
    ref = start(reset)
    look(reset, ref.id)
    assert sweep.poll(database) == 0, "not due yet"
    clock.advance(seconds=3)
    assert sweep.poll(database) == 1
    assert [(hint.kind, hint.id, hint.first) for hint in carrier.published] == [(reset.name, ref.id, False)]
    assert sweep.poll(database) == 0, "its hint lies in the queue"
    carrier.lying.clear()
    assert sweep.poll(database) == 0, "a worker has just taken it"
    clock.advance(seconds=1.5)
    assert sweep.poll(database) == 1, "the queue was flushed"


def test_an_empty_queue_is_no_reason_to_hint_a_kind_that_its_worker_did_not_know(
    database, carrier, reset, start, look, clock
):
    ref = start(reset)
    with database.transaction() as connection:
        assert len(sweep.pick(connection, EMPTY)) == 1, "the queue was flushed"
    assert wait_for_handler(database, reset.name, ref.id)
    clock.advance(seconds=5)
    with database.transaction() as connection:
        assert sweep.pick(connection, EMPTY) == []
    clock.advance(seconds=6)
    with database.transaction() as connection:
        assert len(sweep.pick(connection, EMPTY)) == 1
    look(reset, ref.id)
    clock.advance(seconds=3)
    assert wait_for_handler(database, reset.name, ref.id)
    assert sweep.poll(database) == 0, "its poll is due, and no worker knows it"
    clock.advance(seconds=11)
    assert sweep.poll(database) == 1


def test_a_read_drives_a_due_poll_and_no_more_than_one(carrier, engine, reset, start, look, clock):
    ref = start(reset)
    look(reset, ref.id)
    carrier.offered.clear()
    with engine.connect() as tx:
        operations.get(tx, ref.id)
        assert carrier.offered == [], "not due"
        clock.advance(seconds=3)
        for _ in range(5):
            operations.get(tx, ref.id)
    assert [hint.id for hint in carrier.offered] == [ref.id]


def test_a_read_adds_no_hint_to_one_that_no_worker_takes(carrier, database, engine, reset, start, look, clock):
    ref = start(reset)
    look(reset, ref.id)
    carrier.offered.clear()
    clock.advance(seconds=3)
    assert sweep.poll(database) == 1
    with engine.connect() as tx:
        operations.get(tx, ref.id)
        assert carrier.offered == [], "its hint lies in the queue"
        clock.advance(seconds=11)
        operations.get(tx, ref.id)
    assert [hint.id for hint in carrier.offered] == [ref.id]


def test_ended_rows_go_with_their_history(database, engine, reset, start, look, remote, clock, lines):
    ref = start(reset)
    look(reset, ref.id)
    remote.set("done")
    look(reset, ref.id, after=3)
    assert sweep.prune_all(database, retention_seconds=100) == 0
    clock.advance(seconds=101)
    assert sweep.prune_all(database, retention_seconds=100) == 1
    assert lines(ref.id) == []


def test_a_row_that_a_sweep_fails_on_is_held_and_released(database, engine, reset, start, clock, operation_row):
    ref = start(reset)
    with engine.begin() as tx:
        tx.execute(text("create function public.no() returns trigger language plpgsql as"
                        " $$ begin if new.state = 'failed' then raise 'no'; end if; return new; end $$"))  # fmt: skip
        tx.execute(text("create trigger no before update on durable.operations for each row execute function no()"))
    try:
        clock.advance(seconds=4000)
        assert sweep.expire(database) == 0
        assert "no" in operation_row(ref.id).held_reason
        assert sweep.expire(database) == 0
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop trigger no on durable.operations"))
            tx.execute(text("drop function public.no()"))
    with engine.begin() as tx:
        operations.release(tx, ref.id, by="dana", reason="mended")
    assert sweep.expire(database) == 1


def test_a_poll_of_one_that_is_held_back_is_refused_until_it_is_released(engine, reset, start, look, operation_row):
    ref = start(reset)
    look(reset, ref.id)
    with engine.begin() as tx:
        tx.execute(text("update durable.operations set held_reason = 'no' where id = :id"), {"id": ref.id})
    before = operation_row(ref.id)
    with engine.begin() as tx, pytest.raises(IllegalMove, match="held back, not released first"):
        operations.poll(tx, ref.id, by="dana", reason="now")
    assert operation_row(ref.id) == before
    with engine.begin() as tx:
        operations.release(tx, ref.id, by="dana", reason="mended")
        operations.poll(tx, ref.id, by="dana", reason="now")
    assert operation_row(ref.id).due_at < before.due_at


def test_issued_by_hand_is_checked():
    for wrong in ("text", [1], [""], ["a", "a"], ["x" * 501]):
        with pytest.raises(ValueError, match="Issued"):
            Issued(wrong)


# --- in the tests of others ----------------------------------------------------------------------


def test_drain_issues_and_polls_and_comes_to_later_polls_with_the_clock(engine, remote, reset, start, operation_row):
    ref = start(reset)
    assert [one.outcome for one in drain(engine)] == [Outcome.ISSUED]
    assert drain(engine) == [], "its poll is not due"
    remote.set("done")
    assert [one.outcome for one in drain(engine, through=timedelta(seconds=10))] == [Outcome.SUCCEEDED]
    assert operation_row(ref.id).state == "succeeded"
    start(reset)
    assert drain(engine, queue="another") == []


def test_a_hint_of_a_kind_that_a_worker_does_not_know_is_remarked_and_the_claim_clears_it(
    database, reset, start, look, operation_row
):
    ref = start(reset)
    assert not wait_for_handler(database, "another.kind", ref.id)
    assert wait_for_handler(database, reset.name, ref.id)
    assert operation_row(ref.id).waiting_for == "handler"
    look(reset, ref.id)
    assert operation_row(ref.id).waiting_for is None
    look(reset, ref.id, after=3)


def test_arguments_that_do_not_fit_the_code_wait_for_other_code(engine, remote, reset, start, look, operation_row):
    ref = start(reset, "preview", parts=2)

    def without(step, branch="preview"):
        raise AssertionError("it is not called")

    signature, handler = reset.signature, reset.handler
    reset.handler, reset.signature = without, Signature(reset.name, without)
    assert look(reset, ref.id).outcome is Outcome.PUT_OFF
    row = operation_row(ref.id)
    assert (row.state, row.waiting_for, row.error_code) == ("queued", "arguments", "INVALID_ARGUMENTS")
    reset.handler, reset.signature = handler, signature
    assert look(reset, ref.id, after=61).outcome is Outcome.ISSUED
    assert operation_row(ref.id).waiting_for is None


def test_a_poll_that_hangs_leaves_its_row_to_another(
    database, remote, declare_operation, start, look, clock, lines, operation_row
):
    kind = declare_operation(timeout=600)
    poll, seen = kind.poll_hook, []

    def hangs(step, ids):
        kind.poll_hook = poll
        row = operation_row(step.id)
        assert (row.deadline_at - row.claimed_at).total_seconds() == 30, "heartbeats carry its lease no further"
        clock.advance(seconds=31)
        assert sweep.reap(database) == 1
        seen.append(look(kind, step.id).outcome)
        return poll(step, ids)

    ref = start(kind)
    look(kind, ref.id)
    kind.poll_hook = hangs
    assert look(kind, ref.id, after=3).outcome is Outcome.CLAIM_LOST
    assert seen == [Outcome.POLLED]
    assert lines(ref.id)[-1].reason == "LATE_POLL"


def test_a_host_whose_driver_reads_json_as_text_polls_all_the_same(engine, make_worker, remote, reset, start, clock):
    own = create_engine(engine.url, json_deserializer=lambda text: text)
    worker = make_worker(on=Database(own))
    try:
        ref = start(reset)
        assert perform(worker, reset, ref.id).outcome is Outcome.ISSUED
        clock.advance(seconds=3)
        assert perform(worker, reset, ref.id).outcome is Outcome.POLLED
        clock.advance(seconds=3)
        remote.set("done")
        assert perform(worker, reset, ref.id).outcome is Outcome.SUCCEEDED
        with own.connect() as tx:
            assert operations.get(tx, ref.id).external_ids == remote.ids()
    finally:
        own.dispose()


def test_a_cancel_that_no_hint_followed_reaches_the_other_side_by_the_sweep(
    database, engine, carrier, declare_operation, start, look, clock
):
    """As of one from the command line, which has no broker."""
    kind, asked = declare_operation(one_in_flight=False), []
    kind.cancel(lambda step, ids: asked.append(ids))
    quiet = declare_operation()
    refs = [(kind, start(kind)), (quiet, start(quiet))]
    for one, ref in refs:
        look(one, ref.id)
        with engine.begin() as tx:
            operations.cancel(tx, ref.id, by="dana", reason="no")
    carrier.offered.clear()
    carrier.published.clear()
    assert sweep.poll(database) == 1, "the other kind asks nobody"
    assert [hint.id for hint in carrier.published] == [refs[0][1].id]
    assert sweep.poll(database) == 0, "its hint lies in the queue"
    carrier.lying.clear()
    assert look(kind, refs[0][1].id).outcome is Outcome.CANCELED
    assert sweep.poll(database) == 0, "it was asked"
    assert len(asked) == 1


def test_a_claim_that_was_frozen_past_the_patience_is_our_own_gap_and_not_the_other_sides(
    database, remote, declare_operation, start, look, clock, operation_row, lines
):
    kind = declare_operation()
    poll = kind.poll_hook

    def frozen(step, ids):
        clock.advance(seconds=PATIENCE + 60)
        assert sweep.reap(database) == 1
        assert sweep.reap(database) == 1
        assert [line.move for line in lines(step.id)][-2:] == ["reap", "outage"]
        kind.poll_hook = poll
        assert look(kind, step.id).outcome is Outcome.POLLED
        return poll(step, ids)

    ref = start(kind)
    look(kind, ref.id)
    kind.poll_hook = frozen
    assert look(kind, ref.id, after=3).outcome is Outcome.CLAIM_LOST
    row = operation_row(ref.id)
    assert (row.state, row.outage_at) == ("running", None)


@pytest.mark.parametrize(
    "change",
    [
        "kind = 'another'", "key = 'another'", "arguments = jsonb_build_object('other', 1)",
        "digest = repeat('a', 64)", "started_by = 'eve'",
        "one_in_flight = not one_in_flight", "trigger = 'scheduled'", "patience_seconds = 1", "every_seconds = 1",
        "issued_at = durable.durable_now()", "external_ids = '[]'", "owner_pid = 1",
    ],
)  # fmt: skip
def test_what_was_started_and_issued_never_changes_whoever_asks(engine, reset, start, look, operation_row, change):
    """In plain SQL, as psql would send it. Somebody polls the row, so its process cannot be another under one fence."""
    ref = start(reset)
    look(reset, ref.id)
    with engine.begin() as tx:
        tx.execute(
            text(
                "update durable.operations set fence = fence + 1, owner = 'one', owner_pid = 7,"
                " lease_expires_at = durable.durable_now(), deadline_at = durable.durable_now() where id = :id"
            ),
            {"id": ref.id},
        )
    before = operation_row(ref.id)
    with pytest.raises(DBAPIError) as refused, engine.begin() as tx:
        tx.execute(text(f"update durable.operations set {change} where id = :id"), {"id": ref.id})
    assert refused.value.orig.sqlstate == "55000"
    assert operation_row(ref.id) == before


def test_a_list_of_operations_is_a_page_newest_first_as_of_plans(engine, declare_operation, start):
    kind = declare_operation(one_in_flight=False)
    made = [start(kind).id for _ in range(3)]
    with engine.begin() as tx:
        assert [row.id for row in operations.list(tx, kind=kind.name)] == made[::-1]
        assert [row.id for row in operations.list(tx, kind=kind.name, limit=1, after=made[2])] == [made[1]]
    assert "list" in operations.__all__
