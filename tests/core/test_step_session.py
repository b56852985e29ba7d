"""What a handler may do with its session, and what it may not."""

import pytest
from psycopg import errors
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Outcome, Worker, perform
from durable_core.errors import StepTransactionOwned
from tests.conftest import effects_of, record


@pytest.mark.parametrize("call", ["commit", "rollback", "close", "reset", "invalidate", "prepare"])
def test_a_handler_that_ends_its_session_is_refused_and_its_effects_are_gone(worker, declare, make, row, engine, call):
    def handler(step):
        record(step.session, step)
        getattr(step.session, call)()

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert f"step.session.{call}() is not yours to call" in row(made.id).error_message
    assert effects_of(engine, made.id) == []


def test_a_handler_that_swallows_the_refusal_keeps_its_effects_with_the_receipt(worker, declare, make, engine):
    def handler(step):
        record(step.session, step)
        try:
            step.session.commit()
        except StepTransactionOwned:
            pass

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert effects_of(engine, made.id) == [(1, "")]


@pytest.mark.parametrize("statement", ["commit", "rollback"])
def test_a_handler_that_ends_the_transaction_behind_our_back_is_found_by_its_transaction_id(
    worker, declare, make, row, engine, statement
):
    def handler(step):
        record(step.session, step)
        step.session.execute(text(statement))

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert (row(made.id).state, row(made.id).error_code) == ("pending", "EFFECT_ESCAPED")
    assert row(made.id).settled_fence == row(made.id).fence, "the failure was reported, the receipt was not"


def test_a_handler_may_use_savepoints_of_its_own(worker, declare, make, engine):
    def handler(step):
        with step.session.begin_nested():
            record(step.session, step, "kept")
        try:
            with step.session.begin_nested():
                record(step.session, step, "undone")
                raise ValueError
        except ValueError:
            pass

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert effects_of(engine, made.id) == [(1, "kept")]


def test_the_session_is_of_the_class_and_settings_the_host_configured(make_worker, engine, declare, make):
    class HostSession(Session):
        pass

    seen = []
    maker = sessionmaker(engine, class_=HostSession, expire_on_commit=False, info={"tenant": "acme"})

    def handler(step):
        seen.append((isinstance(step.session, HostSession), step.session.expire_on_commit, step.session.info))

    kind = declare(handler)
    perform(make_worker(on=Database(sessions=maker)), kind, make(kind).id)
    assert seen == [(True, False, {"tenant": "acme"})]


def test_user_code_waits_for_locks_as_its_host_decided_and_we_for_5_seconds(engine, declare, make, make_worker):
    """Our own bound holds for our own statements; between them the session's value is back."""
    host = create_engine(engine.url, connect_args={"options": "-c lock_timeout=1234ms"})
    seen = []
    try:
        worker = make_worker(on=Database(host))

        def handler(step):
            seen.append(step.session.scalar(text("show lock_timeout")))
            seen.append(step.session.scalar(text("show transaction_isolation")))

        kind = declare(handler)
        assert perform(worker, kind, make(kind).id).outcome is Outcome.SENT
        with host.connect() as after:
            seen.append(after.scalar(text("show lock_timeout")))
    finally:
        host.dispose()
    assert seen == ["1234ms", "read committed", "1234ms"]


def test_our_own_lock_runs_under_a_bound_of_5_seconds(database, make):
    from durable_core.claims import claim as protocol
    from durable_core.deliveries.attempt import _statements

    made = make(state="processing")
    with database.connect() as connection:
        locked = protocol.lock(connection, _statements, made.held)
        assert locked is not None
        assert locked.lock_timeout_was == "0"
        assert connection.scalar(text("show lock_timeout")) == "5s"
        connection.rollback()


def test_effects_registered_for_the_commit_run_in_it_in_order(worker, declare, make, engine):
    def handler(step):
        step.in_commit(lambda session: record(session, step, "first"))
        step.in_commit(lambda session: record(session, step, "second"))
        assert effects_of(engine, step.id) == []

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert effects_of(engine, made.id) == [(1, "first"), (1, "second")]


def test_an_effect_that_raises_takes_the_whole_commit_with_it(worker, declare, make, row, engine):
    def effect(session):
        session.execute(text("insert into effects (row_id, note) values ('x', 'half')"))
        raise ValueError("second half")

    def handler(step):
        record(step.session, step)
        step.in_commit(effect)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert (row(made.id).state, row(made.id).error_code) == ("pending", "WORKER_ERROR")
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from effects")) == 0


def test_effects_are_forgotten_when_the_handler_raises(worker, declare, make, engine):
    def handler(step):
        step.in_commit(lambda session: record(session, step))
        raise RuntimeError

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert effects_of(engine, made.id) == []


@pytest.mark.parametrize("error", [errors.SerializationFailure, errors.DeadlockDetected])
def test_a_transaction_the_machine_room_refused_repeats_the_whole_attempt_and_spends_none(
    worker, declare, make, row, engine, error
):
    runs = []

    def handler(step):
        runs.append(step.attempt)
        record(step.session, step)
        if len(runs) == 1:
            state = "40001" if error is errors.SerializationFailure else "40P01"
            step.session.execute(text(f"do $$ begin raise exception 'unlucky' using errcode = '{state}'; end $$"))

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert runs == [1, 1]
    assert (row(made.id).attempts, row(made.id).failures, row(made.id).interruptions) == (1, 0, 0)
    assert effects_of(engine, made.id) == [(1, "")]


def test_a_commit_the_machine_room_refused_runs_its_effects_again_but_not_the_handler(
    worker, declare, make, row, engine
):
    calls, runs = [], []

    def effect(session):
        runs.append(1)
        if len(runs) == 1:
            session.execute(text("do $$ begin raise exception 'x' using errcode = '40001'; end $$"))
        session.execute(text("insert into effects (row_id) values ('once')"))

    def handler(step):
        calls.append(1)
        step.in_commit(effect)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert (len(calls), len(runs)) == (1, 2)
    assert len(effects_of(engine, "once")) == 1


def test_a_machine_room_that_refuses_for_good_costs_an_interruption_and_no_attempt(
    worker, declare, make, row, engine, lines
):
    runs = []

    def handler(step):
        runs.append(1)
        step.session.execute(text("do $$ begin raise exception 'x' using errcode = '40001'; end $$"))

    kind = declare(handler)
    made = make(kind)
    done = perform(worker, kind, made.id)
    assert (done.outcome, done.error_code) == (Outcome.INTERRUPTED, "INFRASTRUCTURE")
    assert len(runs) == 3
    assert (row(made.id).state, row(made.id).failures, row(made.id).interruptions) == ("pending", 0, 1)
    assert lines(made.id)[-1].reason == "INFRASTRUCTURE"


def test_a_database_error_of_the_handlers_own_is_a_failed_attempt(worker, declare, make, row):
    def handler(step):
        step.session.execute(text("select 1 / 0"))

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert (row(made.id).error_code, row(made.id).failures) == ("WORKER_ERROR", 1)


def test_connections_are_given_back_clean_whatever_happened(engine, declare, make):
    """One connection in the pool serves attempt after attempt, and keeps none of our settings."""
    small = create_engine(engine.url, pool_size=1, max_overflow=1, pool_timeout=5)
    try:
        worker = Worker(Database(small))

        def handler(step, how: str):
            step.session.execute(text("select 1"))
            if how == "raise":
                raise RuntimeError
            if how == "break":
                step.session.execute(text("select nothing"))

        kind = declare(handler)
        for how in ("return", "raise", "break", "return") * 2:
            perform(worker, kind, make(kind, {"how": how}).id)
        worker.heartbeat.stop()
        with small.connect() as one:
            assert one.scalar(text("show lock_timeout")) == "0"
            assert one.get_isolation_level() == "READ COMMITTED"
    finally:
        small.dispose()


@pytest.mark.parametrize("opens", [lambda step: step.session, lambda step: step.in_commit(lambda session: None)])
def test_a_session_that_was_opened_and_never_used_leaves_the_receipt_committed(opens, worker, declare, make, row):
    def handler(step):
        opens(step)

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert row(made.id).state == "sent"
