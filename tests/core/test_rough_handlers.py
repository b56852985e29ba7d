"""Handlers that fork, start threads, or are ended by their parent: what comes back to us, and what does not."""

import os
import threading

import pytest
from sqlalchemy import create_engine, event

from durable_core import GiveUp
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.deliveries.attempt import Outcome, Worker, _statements, perform
from durable_core.deliveries.sweep import reap
from durable_core.errors import ClaimLost
from tests.conftest import effects_of, record


def exit_of(child):
    """The exit code of a forked copy."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("leaves", "code"),
    [(SystemExit(3), 3), (SystemExit(None), 0), (SystemExit("a text"), 70), (RuntimeError("no"), 70), (None, 70)],
)
def test_a_forked_copy_ends_where_it_comes_back_to_us_with_the_code_it_asked_for(
    worker, declare, make, row, engine, leaves, code
):
    def handler(step):
        record(step.session, step, "the parent's")
        child = os.fork()
        if child:
            return exit_of(child)
        if leaves is not None:
            raise leaves
        return "the copy's"

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert (row(made.id).result, row(made.id).attempts, row(made.id).interruptions) == (code, 1, 0)
    assert effects_of(engine, made.id) == [(1, "the parent's")]


def test_a_copy_forked_by_an_effect_ends_there_and_commits_nothing(worker, declare, make, engine):
    def effect(session, step):
        child = os.fork()
        if child:
            record(session, step, f"{exit_of(child)}")

    def handler(step):
        step.in_commit(lambda session: effect(session, step))

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert effects_of(engine, made.id) == [(1, "70")]


def test_a_thread_that_outlives_its_handler_can_write_nothing(worker, declare, make, row, engine):
    settled, refusals, threads = threading.Event(), [], []

    def late(step, session):
        settled.wait(60)
        for write in (lambda: record(session, step, "too late"), lambda: record(step.session, step, "anew")):
            try:
                write()
            except Exception as error:
                refusals.append(error)

    def handler(step):
        record(step.session, step, "in time")
        threads.append(threading.Thread(target=late, args=(step, step.session)))
        threads[0].start()

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    settled.set()
    threads[0].join(60)
    assert len(refusals) == 2
    assert isinstance(refusals[1], ClaimLost)
    assert effects_of(engine, made.id) == [(1, "in time")]
    assert engine.pool.checkedout() == 0


def test_threads_that_ask_for_the_session_all_at_once_get_the_same_one(worker, declare, make, engine):
    """Two would wait for each other's lock on the row."""
    together, sessions = threading.Barrier(8), []

    def ask(step):
        together.wait(60)
        sessions.append(step.session)

    def handler(step):
        threads = [threading.Thread(target=ask, args=(step,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        record(step.session, step)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert len(sessions) == 8
    assert len({id(session) for session in sessions}) == 1
    assert effects_of(engine, made.id) == [(1, "")]
    assert engine.pool.checkedout() == 0


@pytest.mark.parametrize("raised", [SystemExit(-241), RuntimeError("in the clean-up of the exit")])
def test_an_attempt_that_breaks_off_because_its_parent_ends_the_process_is_reported_by_the_parent_alone(
    database, declare, make, row, lines, raised
):
    """A TERM in a pool child is an exit in the midst of the handler, which says nothing about its work."""
    told = []
    worker = Worker(database, told_to_end=lambda: bool(told))

    def handler(step):
        told.append("TERM")
        raise raised

    kind = declare(handler)
    made = make(kind)
    with pytest.raises(SystemExit):
        perform(worker, kind, made.id)
    worker.heartbeat.stop()
    left = row(made.id)
    assert (left.state, left.attempts, left.failures, left.interruptions) == ("processing", 1, 0, 0)
    assert lines(made.id) == []


class OutOfTime(Exception):
    """As Celery's soft limit: an exception in the midst of whatever the handler does."""


def test_a_time_limit_that_strikes_in_the_claim_leaves_the_pool_to_those_who_hold_of_it(engine, declare, make):
    """It may have struck while a connection went in or out of the pool, which then never gets it back."""
    own = create_engine(engine.url)
    worker = Worker(Database(own), time_limits=(OutOfTime,))
    kind = declare(lambda step: None)
    made = make(kind)
    pool, strikes = own.pool, [True]

    @event.listens_for(own, "checkout")
    def _strike(*_):
        if strikes:
            strikes.pop()
            raise OutOfTime

    try:
        with pytest.raises(OutOfTime):
            perform(worker, kind, made.id)
        assert own.pool is not pool
        assert perform(worker, kind, made.id).outcome is Outcome.SENT
    finally:
        worker.heartbeat.stop()
        own.dispose()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("as it is", "TIMEOUT"),
        ("made another of", "TIMEOUT"),
        ("cleaned up after", "TIMEOUT"),
        ("given up", "TOO_SLOW"),
    ],
)
def test_a_time_limit_is_known_by_whatever_was_made_of_it_unless_the_handler_has_its_own_word(
    database, declare, make, row, how, code
):
    """A driver that is interrupted raises an error of its own; of the pool we then ask for nothing back."""
    worker = Worker(database, time_limits=(OutOfTime,))

    def handler(step):
        try:
            raise OutOfTime
        except OutOfTime as limit:
            match how:
                case "as it is":
                    raise
                case "made another of":
                    raise RuntimeError("connection is in a strange state") from limit
                case "cleaned up after":
                    {}["nothing to clean up"]
                case "given up":
                    raise GiveUp("it never ends", code="TOO_SLOW") from limit

    kind = declare(handler)
    made = make(kind)
    pool = database.engine.pool
    perform(worker, kind, made.id)
    worker.heartbeat.stop()
    assert (row(made.id).error_code, row(made.id).failures) == (code, 1)
    assert database.engine.pool is not pool


def test_a_note_on_an_exception_does_not_hide_the_exception(worker, declare, make, row):
    def handler(step):
        error = ValueError("what went wrong")
        error.add_note("what one may do about it")
        raise error

    kind = declare(handler)
    made = make(kind)
    perform(worker, kind, made.id)
    message = row(made.id).error_message
    assert message.split("\n")[0] == "ValueError: what went wrong"
    assert "what one may do about it" in message


@pytest.mark.parametrize(("last_beat", "booked"), [(91, "TIMEOUT"), (85, "TIMEOUT"), (83, "CLAIM_EXPIRED")])
def test_an_owner_whose_last_beat_fell_just_before_the_deadlines_last_heartbeat_ran_out_of_time(
    database, declare, make, row, clock, engine, last_beat, booked
):
    """Beats come a little further apart than the heartbeat of 8 s: one at 91.9 s is followed by one at 100.1 s."""
    made = make(declare(timeout=100), state="processing")
    clock.advance(last_beat)
    with engine.begin() as tx:
        run(tx, _statements.keep, ids=[made.id], fences=[made.held.fence], lease_seconds=30.0)
    clock.advance(101 - last_beat)
    assert reap(database) == 1
    assert row(made.id).error_code == booked
