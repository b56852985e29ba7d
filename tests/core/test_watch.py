"""An answer to COMMIT that does not come: the wait for it ends, and the row is asked."""

import os
import threading

import psycopg
import pytest
from sqlalchemy import event, text

from durable_core.database.connections import raw
from durable_core.database.watch import Watch
from durable_core.deliveries.attempt import Outcome, perform
from tests.conftest import effects_of, record
from tests.relay import COMMIT


@pytest.fixture
def impatient(make_worker, far, monkeypatch):
    """A worker that waits a second for an answer: the third of its lease."""
    monkeypatch.setattr("durable_core.claims.claim.LEAST_ANSWER_SECONDS", 0.1)
    return make_worker(on=far, lease_seconds=3, heartbeat_seconds=1)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_that_is_never_answered_is_given_up_and_the_row_is_asked(
    impatient, relay, declare, make, row, engine, arrives
):
    runs, silences = [], []

    def handler(step):
        runs.append(1)
        record(step.session, step)
        if len(runs) == 1:
            silences.append(relay.silence_after(COMMIT) if arrives else relay.silence_before(COMMIT))

    kind = declare(handler)
    made = make(kind)
    assert perform(impatient, kind, made.id).outcome is Outcome.SENT
    assert silences[0].done
    assert len(runs) == (1 if arrives else 2)
    assert (row(made.id).state, row(made.id).attempts, effects_of(engine, made.id)) == ("sent", 1, [(1, "")])


def test_a_claim_that_is_never_answered_leaves_the_worker_free_for_others(impatient, relay, kind, make, row):
    made, other = make(), make()
    silence = relay.silence_before(b"attempts = d.attempts + 1")
    assert perform(impatient, kind, made.id).outcome is Outcome.UNAVAILABLE
    assert silence.done
    assert row(made.id).state == "pending"
    assert perform(impatient, kind, other.id).outcome is Outcome.SENT


def test_a_host_that_takes_its_time_after_its_commit_keeps_its_connection(engine):
    """Only an answer that the server owes is overdue."""
    watch = Watch()
    with engine.connect() as connection:
        with watch.over(raw(connection), 0.0):
            connection.execute(text("select 1"))
            connection.commit()
            threading.Event().wait(2.5)
        assert connection.scalar(text("select 2")) == 2


def test_an_overdue_answer_ends_as_a_lost_connection_and_other_connections_go_on(engine):
    watch = Watch()
    with engine.connect() as slow, engine.connect() as other:
        with watch.over(raw(other), 60.0):
            with pytest.raises(psycopg.OperationalError) as lost, watch.over(raw(slow), 0.5):
                raw(slow).execute("select pg_sleep(30)")
            assert lost.value.sqlstate is None
            assert other.scalar(text("select 1")) == 1
        slow.invalidate()


def test_a_forked_child_watches_for_itself(engine):
    watch = Watch()
    with engine.connect() as connection, watch.over(raw(connection), 60.0):
        child = os.fork()
        if child == 0:
            try:
                with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False)) as mine:
                    try:
                        with watch.over(mine, 0.2):
                            mine.execute("select pg_sleep(30)")
                    except psycopg.OperationalError:
                        os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert connection.scalar(text("select 1")) == 1


def test_the_hosts_own_events_before_its_commit_are_no_answer_of_the_database(
    make_worker, declare, make, row, monkeypatch
):
    """A `before_commit` that takes long is the host's business; the bound is for COMMIT itself."""
    worker = make_worker(lease_seconds=0.6, heartbeat_seconds=0.15)
    monkeypatch.setattr("durable_core.claims.claim.LEAST_ANSWER_SECONDS", 0.3)

    def handler(step):
        event.listen(step.session, "before_commit", lambda session: session.execute(text("select pg_sleep(2.5)")))

    kind = declare(handler)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert row(made.id).attempts == 1
