"""What comes of an attempt: the receipt, the failed attempt, the row given back."""

import asyncio
import logging
import os
import time
import types
from datetime import timedelta
from random import Random

import pytest
from sqlalchemy import text

from durable_core import Backoff, DefinitionError, GiveUp, Retry
from durable_core.deliveries.attempt import (
    Outcome,
    carry_out,
    perform,
    perform_due,
    wait_for_handler,
)
from durable_core.deliveries.declare import registry
from durable_core.deliveries.sweep import dispatch
from tests.conftest import effects_of, record


@pytest.mark.spec("deliveries", 9)
def test_a_claim_that_succeeds_is_sent_with_its_result_and_no_error_of_before(
    worker, declare, make, row, clock, engine
):
    answers = [RuntimeError("busy"), {"provider_id": "m-17"}]

    def handler(step):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert row(made.id).error_code == "WORKER_ERROR"
    clock.advance(60)
    clock.freeze()
    done = perform(worker, kind, made.id)
    assert (done.outcome, done.attempt) == (Outcome.SENT, 2)
    sent = row(made.id)
    assert (sent.state, sent.result) == ("sent", {"provider_id": "m-17"})
    assert (sent.error_code, sent.error_message) == (None, None)
    assert sent.finished_at == clock.now()
    assert sent.settled_fence == sent.fence == 2


def test_the_happy_path_writes_no_journal(worker, kind, make, lines):
    made = make()
    perform(worker, kind, made.id)
    assert lines(made.id) == []


def test_the_handler_gets_its_arguments_and_the_facts_of_its_attempt(worker, declare, make, row):
    seen = {}

    def handler(step, invoice_id: int, *, copy: bool = False):
        seen.update(
            args=(invoice_id, copy), id=step.id, kind=step.kind, key=step.key, fence=step.fence,
            attempt=step.attempt, most=step.max_attempts, deadline=step.deadline, cancelled=step.cancelled,
        )  # fmt: skip

    kind = declare(handler, max_attempts=3, timeout=77)
    made = make(kind, {"invoice_id": 7, "copy": True})
    perform(worker, kind, made.id)
    claimed = row(made.id).claimed_at
    assert seen == {
        "args": (7, True), "id": made.id, "kind": kind.name, "key": f"{kind.name}:{made.id}", "fence": 1,
        "attempt": 1, "most": 3, "deadline": claimed + timedelta(seconds=77), "cancelled": False,
    }  # fmt: skip


def test_the_handler_runs_outside_any_transaction_until_it_opens_its_session(worker, declare, make, engine):
    seen = []

    def handler(step):
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
            question = text(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and state like 'idle in transaction%'"
            )
            seen.append(other.scalar(question))
            assert step.session.scalar(text("select 1")) == 1
            seen.append(other.scalar(question))

    kind = declare(handler)
    perform(worker, kind, make(kind).id)
    assert seen == [0, 1]


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), float("nan"), "a\x00b", "\ud800", "x" * 300_000, [[[0] * 3] * 3, b"raw"]]
)
def test_a_return_value_that_is_no_json_is_stored_as_a_marker_and_fails_nothing(
    worker, declare, make, row, caplog, value
):
    def handler(step):
        record(step.session, step)
        return value

    kind = declare(handler)
    made = make(kind)
    with caplog.at_level(logging.WARNING, logger="durable.run"):
        assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert row(made.id).state == "sent"
    assert row(made.id).result["durable"] == "not stored"
    assert "result_not_stored" in caplog.text


@pytest.mark.spec("deliveries", 12)
@pytest.mark.parametrize("failures_before", [0, 1, 2])
def test_a_retryable_failure_waits_for_the_jittered_back_off_by_the_database_clock(
    make_worker, declare, make, row, clock, seed, failures_before, engine
):
    """Due within 0.85 to 1.15 of backoff(k), and the next tick does not send it."""

    def handler(step):
        raise ConnectionError("no route")

    draw = Random(seed + failures_before).random
    worker = make_worker(draw=draw)
    kind = declare(handler, backoff=Backoff(base=30, factor=4, cap=3600))
    made = make(kind)
    for _ in range(failures_before):
        perform(worker, kind, made.id)
        clock.advance(4200)
    clock.freeze()
    outcome = perform(worker, kind, made.id)
    k = failures_before + 1
    waits = (row(made.id).due_at - clock.now()).total_seconds()
    expected = 30 * 4 ** (k - 1)
    assert 0.85 * expected <= waits <= 1.15 * expected
    assert outcome.due_at == row(made.id).due_at
    assert (row(made.id).state, row(made.id).failures) == ("pending", k)
    assert perform_due(worker, 10) == []


@pytest.mark.spec("deliveries", 13)
def test_a_failure_at_the_last_attempt_ends_dead_after_exactly_as_many_sends(worker, declare, make, row, lines, clock):
    sends = []

    def handler(step):
        sends.append(step.attempt)
        raise RuntimeError("still no")

    kind = declare(handler, max_attempts=3)
    made = make(kind)
    outcomes = []
    for _ in range(6):
        outcomes.append(perform(worker, kind, made.id).outcome)
        clock.advance(4000)
    assert sends == [1, 2, 3]
    assert outcomes[:3] == [Outcome.RETRY, Outcome.RETRY, Outcome.DEAD]
    assert set(outcomes[3:]) == {Outcome.NOTHING_TO_DO}
    dead = row(made.id)
    assert (dead.state, dead.failures, dead.error_code) == ("dead", 3, "WORKER_ERROR")
    assert "still no" in dead.error_message
    assert [(line.move, line.to_state) for line in lines(made.id)] == [
        ("fail", "pending"), ("fail", "pending"), ("fail", "dead"),
    ]  # fmt: skip


@pytest.mark.spec("deliveries", 14)
@pytest.mark.spec("deliveries", 20)
def test_giving_up_fails_at_attempt_1_whatever_budget_remains(worker, declare, make, row):
    """As a handler does that finds no recipient: the attempt is counted."""

    def handler(step):
        raise GiveUp("nobody lives there", code="NO_RECIPIENT")

    kind = declare(handler, max_attempts=8)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.FAILED
    failed = row(made.id)
    assert (failed.state, failed.attempts, failed.failures) == ("failed", 1, 1)
    assert (failed.error_code, failed.error_message) == ("NO_RECIPIENT", "nobody lives there")


@pytest.mark.parametrize("after", [90, timedelta(seconds=90)])
def test_retry_after_waits_as_long_as_asked_without_jitter(worker, declare, make, row, clock, after):
    def handler(step):
        raise Retry("come back", after=after, code="429")

    kind = declare(handler)
    made = make(kind)
    clock.freeze()
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert row(made.id).due_at - clock.now() == timedelta(seconds=90)
    assert (row(made.id).error_code, row(made.id).failures) == ("429", 1)


def test_retry_at_the_last_attempt_ends_dead_all_the_same(worker, declare, make, row):
    def handler(step):
        raise Retry("again", after=1)

    kind = declare(handler, max_attempts=1)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.DEAD


@pytest.mark.parametrize("after", [-5, 10**12])
def test_an_absurd_retry_after_still_gives_a_due_time_people_can_read(worker, declare, make, row, clock, after):
    def handler(step):
        raise Retry("odd", after=after)

    kind = declare(handler)
    made = make(kind)
    perform(worker, kind, made.id)
    assert timedelta(0) <= row(made.id).due_at - row(made.id).created_at <= timedelta(days=367)


def test_the_effects_of_a_failed_attempt_are_gone(worker, declare, make, engine, row):
    def handler(step):
        record(step.session, step)
        raise RuntimeError("after the effect")

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert effects_of(engine, made.id) == []


@pytest.mark.spec("deliveries", 19)
def test_the_first_of_three_rows_raises_and_the_other_two_are_delivered(worker, declare, make, row):
    def handler(step, n: int):
        if n == 1:
            raise RuntimeError("the first")

    kind = declare(handler)
    made = [make(kind, {"n": n}) for n in (1, 2, 3)]
    outcomes = [done.outcome for done in perform_due(worker, 3)]
    assert outcomes == [Outcome.RETRY, Outcome.SENT, Outcome.SENT]
    first = row(made[0].id)
    assert (first.state, first.error_code) == ("pending", "WORKER_ERROR")
    assert [row(m.id).state for m in made[1:]] == ["sent", "sent"]


@pytest.mark.field("R70")
def test_arguments_that_no_longer_fit_the_handler_wait_for_the_right_worker_and_spend_nothing(
    worker, declare, make, row, lines, clock
):
    made = make(declare(lambda step, n: n, name="test.changed"), {"n": 1})
    registry.remove("test.changed")

    def newer(step, m: int):
        raise AssertionError("must not run")

    changed = declare(newer, name="test.changed")
    for _ in range(3):
        assert perform(worker, changed, made.id).outcome is Outcome.WAITING
        clock.advance(seconds=61)
    waiting = row(made.id)
    assert (waiting.state, waiting.waiting_for, waiting.error_code) == ("pending", "arguments", "INVALID_ARGUMENTS")
    assert "'n'" in waiting.error_message or "'m'" in waiting.error_message
    assert (waiting.failures, waiting.interruptions, waiting.snoozes) == (0, 0, 3)
    assert [line.move for line in lines(made.id)] == ["postpone"], "the history keeps the first, not one a minute"

    registry.remove("test.changed")
    right = declare(lambda step, n: n, name="test.changed")
    assert perform(worker, right, made.id).outcome is Outcome.SENT
    assert row(made.id).waiting_for is None


@pytest.mark.field("R70")
def test_a_renamed_kind_carries_out_what_was_enqueued_under_its_old_name(worker, declare, make, row):
    made = make(declare(lambda step, n: n, name="test.old_name"), {"n": 7}, key="k")
    registry.remove("test.old_name")
    keys = []
    renamed = declare(lambda step, n: keys.append(step.key) or n, name="test.new_name", formerly=("test.old_name",))

    assert perform(worker, renamed, made.id).outcome is Outcome.SENT

    assert row(made.id).kind == "test.old_name"
    assert keys == [f"test.old_name:{made.id}"], "the other side may have seen the key under the old name"
    with pytest.raises(DefinitionError):
        declare(name="test.old_name")


def test_a_batch_claim_takes_rows_of_a_kinds_old_names_too(database, worker, declare, make):
    made = make(declare(lambda step, n: n, name="test.old_name"), {"n": 7})
    registry.remove("test.old_name")
    declare(lambda step, n: n, name="test.new_name", formerly=("test.old_name",))

    assert [done.outcome for done in perform_due(worker, 10)] == [Outcome.SENT]
    assert made.id


def test_error_text_that_postgres_would_refuse_is_stored_cleaned(worker, declare, make, row):
    def handler(step):
        raise RuntimeError("a\x00b\ud800c\x1b[31m" + "x" * 50_000)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    stored = row(made.id).error_message
    assert stored.startswith("RuntimeError: a\N{REPLACEMENT CHARACTER}b")
    assert "\x1b" not in stored
    assert len(stored) <= 8192


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exit_of_the_process_gives_the_row_back_at_no_cost(worker, declare, make, row, lines, leaving):
    def handler(step):
        record(step.session, step)
        raise leaving

    kind = declare(handler)
    made = make(kind)
    with pytest.raises(leaving):
        perform(worker, kind, made.id)
    back = row(made.id)
    assert (back.state, back.failures, back.interruptions) == ("pending", 0, 1)
    assert back.settled_fence == back.fence == 1
    assert lines(made.id)[-1].move == "release"
    assert perform_due(worker, 0) == []


def test_an_exit_gives_back_the_rest_of_the_batch_too(worker, declare, make, row):
    def handler(step):
        raise SystemExit

    kind = declare(handler)
    made = [make(kind) for _ in range(3)]
    with pytest.raises(SystemExit):
        perform_due(worker, 3)
    assert [(row(m.id).state, row(m.id).failures) for m in made] == [("pending", 0)] * 3


def test_a_time_limit_is_a_failure_with_the_code_timeout(worker, declare, make, row):
    class OutOfTime(Exception):
        pass

    def handler(step):
        raise OutOfTime

    worker.time_limits = (OutOfTime,)
    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert (row(made.id).error_code, row(made.id).failures) == ("TIMEOUT", 1)


def test_a_time_out_of_the_handlers_own_is_no_time_limit(worker, declare, make, row):
    def handler(step):
        raise TimeoutError("the other side was slow")

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert row(made.id).error_code == "WORKER_ERROR"


@pytest.mark.parametrize("raised", [asyncio.CancelledError, type("Weird", (BaseException,), {})])
def test_a_base_exception_that_ends_no_process_is_a_failed_attempt(worker, declare, make, row, raised):
    def handler(step):
        record(step.session, step)
        raise raised("oops")

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert (row(made.id).error_code, row(made.id).failures) == ("WORKER_ERROR", 1)


def test_a_kind_that_may_not_be_interrupted_is_not_run_twice_when_the_database_refuses_its_work(
    worker, declare, make, row
):
    """Its external call may have happened: at most once means at most once."""
    calls = []

    def handler(step):
        calls.append(1)
        step.session.execute(text("select pg_terminate_backend(pg_backend_pid())"))

    kind = declare(handler, max_attempts=1, max_interruptions=0)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.DEAD
    assert len(calls) == 1
    assert (row(made.id).state, row(made.id).error_code) == ("dead", "WORKER_LOST")


def test_a_statement_time_out_of_the_hosts_own_is_the_handlers_failure(worker, declare, make, row):
    calls = []

    def handler(step):
        calls.append(1)
        step.session.execute(text("set local statement_timeout = '20ms'"))
        step.session.execute(text("select pg_sleep(5)"))

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert (len(calls), row(made.id).failures) == (1, 1)


def test_a_child_that_the_handler_forked_gives_nothing_back(worker, declare, make, row):
    def handler(step):
        child = os.fork()
        if child == 0:
            raise SystemExit(0)
        os.waitpid(child, 0)
        return "the parent's"

    kind = declare(handler)
    made = make(kind)
    try:
        done = perform(worker, kind, made.id)
    except SystemExit:
        os._exit(0)  # the child: nothing of pytest's is its own
    assert done.outcome is Outcome.SENT
    assert (row(made.id).result, row(made.id).interruptions) == ("the parent's", 0)


@pytest.mark.spec("deliveries", 8)
def test_a_doubled_hint_costs_a_claim_that_finds_nothing(worker, kind, make, engine):
    made = make()
    outcomes = [perform(worker, kind, made.id).outcome for _ in range(20)]
    assert outcomes == [Outcome.SENT] + [Outcome.NOTHING_TO_DO] * 19
    assert effects_of(engine, made.id) == [(1, "0")]


def test_follow_up_work_of_a_handler_commits_with_its_receipt(worker, declare, kind, make, row, engine, carrier):
    ids = []

    def handler(step, fail: bool):
        ids.append(kind.enqueue(step.session, 5).id)
        if fail:
            raise RuntimeError

    leading = declare(handler)
    perform(worker, leading, make(leading, {"fail": False}).id)
    perform(worker, leading, make(leading, {"fail": True}).id)
    kept, gone = ids
    assert row(kept).state == "pending"
    assert [hint.id for hint in carrier.offered if hint.id in ids] == [kept]
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.deliveries where id = :id"), {"id": gone}) == 0


def test_a_worker_without_the_handler_leaves_a_remark_that_stops_no_claim_and_slows_the_hints(
    worker, database, kind, make, row, carrier, clock
):
    made = make()
    assert wait_for_handler(database, kind.name, made.id) is True
    assert row(made.id).waiting_for == "handler"
    assert dispatch(database, carrier) == 0, "a misspelt kind must not cost Celery an error a second"
    clock.advance(seconds=11)
    assert dispatch(database, carrier) == 1
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert row(made.id).waiting_for is None


def test_a_handler_may_run_ten_times_its_lease_while_its_process_beats(
    make_worker, declare, make, row, database, engine
):
    from durable_core.deliveries import sweep

    worker = make_worker(lease_seconds=0.9, heartbeat_seconds=0.1)
    reaped = []

    def handler(step):
        end = time.monotonic() + 9.0
        while time.monotonic() < end:
            reaped.append(sweep.reap(database))
            time.sleep(0.05)
        assert not step.cancelled
        record(step.session, step)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert sum(reaped) == 0
    assert (row(made.id).interruptions, effects_of(engine, made.id)) == (0, [(1, "")])


def test_a_handler_that_overruns_uncontested_still_lands(worker, declare, make, row, clock):
    """Expiry decides who may take, the fence who may write."""
    kind = declare(lambda step: clock.advance(1000))
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert row(made.id).state == "sent"


def test_a_handler_sees_that_its_claim_is_lost_after_a_beat(make_worker, declare, make, clock, database):
    from durable_core.deliveries import sweep

    worker = make_worker(lease_seconds=30, heartbeat_seconds=0.05)
    cancelled = []

    def handler(step):
        with database.engine.begin() as tx:  # as an operator's cancel will do it
            tx.execute(text(
                "update durable.deliveries set state = 'canceled', fence = fence + 1, settled_fence = fence + 1,"
                " owner = null, lease_expires_at = null, deadline_at = null, finished_at = durable.durable_now()"
            ))  # fmt: skip
        end = time.monotonic() + 10
        while not step.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        cancelled.append(step.cancelled)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.CLAIM_LOST
    assert cancelled == [True]
    assert sweep.reap(database) == 0


def test_a_claim_carried_out_by_hand_needs_no_hint(worker, kind, make, row):
    made = make(state="processing")
    assert carry_out(worker, kind, made.held).outcome is Outcome.SENT


@pytest.mark.parametrize(
    "odd", [types.MappingProxyType({"a": 1}), {1, 2}, {"a": object()}, type("Odd", (dict,), {"items": None})(a=1)]
)
def test_a_return_value_that_is_no_json_never_fails_an_attempt_whose_effect_has_happened(
    worker, declare, make, row, engine, odd
):
    def handler(step):
        record(step.session, step)
        return odd

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert len(effects_of(engine, made.id)) == 1
    assert row(made.id).result["durable"] == "not stored"


def test_a_coroutine_that_a_handler_hands_back_is_a_failure_and_not_a_success(worker, declare, make, row):
    async def work():
        raise AssertionError("never awaited")

    kind = declare(lambda step: work())
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert "never ran" in row(made.id).error_message


def test_a_handler_that_yields_is_a_definition_error(declare):
    def handler(step):
        yield 1

    async def asynchronous(step):
        yield 1

    for yielding in (handler, asynchronous):
        with pytest.raises(DefinitionError, match="never run"):
            declare(yielding)


def test_an_effect_cannot_add_another(worker, declare, make, row, engine):
    def handler(step):
        step.in_commit(lambda session: step.in_commit(lambda again: record(again, step)))

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert effects_of(engine, made.id) == []
