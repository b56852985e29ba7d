"""Expiry, pauses, snoozes, what is retried and what is not, and the hook of the dead."""

import logging
from datetime import datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import Backoff, DefinitionError, GiveUp, InvalidOption, Retry, Snooze, deliveries
from durable_core.deliveries.attempt import Outcome, perform, perform_due
from durable_core.deliveries.sweep import dispatch, expire, reap
from durable_core.sweeps import Bounds, named, run_sweep
from tests.conftest import effects_of

# --- expiry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expires", [60, timedelta(minutes=1), "then"])
def test_one_that_waits_beyond_its_time_expires_and_is_never_carried_out(
    engine, database, worker, kind, make, row, lines, clock, expires
):
    clock.freeze()
    at = clock.now() + timedelta(minutes=1)
    made = make(expires=at if expires == "then" else expires)
    assert row(made.id).expires_at == at
    clock.advance(59)
    assert expire(database) == 0
    clock.advance(1)
    # From its instant on, before any sweep has come by.
    assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO
    assert perform_due(worker, 5) == []
    assert run_sweep(database, named("expire"), Bounds()) == {"moved": 1}
    after = row(made.id)
    assert (after.state, after.fence, after.attempts) == ("expired", 0, 0)
    assert [(line.move, line.reason) for line in lines(made.id)] == [("expire", "EXPIRED")]
    assert effects_of(engine, made.id) == []


def test_one_that_runs_goes_on_and_one_to_be_tried_again_expires(database, worker, declare, make, row, clock):
    def refuse(step):
        clock.advance(10)
        assert expire(database) == 0
        raise RuntimeError("not now")

    kind = declare(refuse)
    made = make(kind, expires=5)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert expire(database) == 1
    after = row(made.id)
    assert (after.state, after.error_code, after.failures) == ("expired", "WORKER_ERROR", 1)


def test_one_that_expired_has_no_hint(database, make, clock, carrier):
    make(expires=5)
    make()
    clock.advance(6)
    expire(database)
    assert dispatch(database) == 1


def test_a_row_that_cannot_expire_is_held_and_the_others_expire(database, engine, make, row, clock):
    made = [make(expires=5) for _ in range(3)]
    with engine.begin() as tx:
        tx.execute(
            text(
                "create function refuse_expiry() returns trigger language plpgsql as $$ begin"
                f" if new.state = 'expired' and new.id = '{made[1].id}' then raise exception 'host says no'; end if;"
                " return new; end $$"
            )
        )
        tx.execute(
            text(
                "create trigger refuse_expiry before update on durable.deliveries"
                " for each row execute function refuse_expiry()"
            )
        )
    try:
        clock.advance(6)
        assert expire(database) == 2
        assert [row(one.id).state for one in made] == ["expired", "pending", "expired"]
        assert "host says no" in row(made[1].id).held_reason
        assert expire(database) == 0
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop function refuse_expiry() cascade"))
    assert expire(database) == 0, "it is held, until a person releases it"
    with engine.begin() as tx:
        deliveries.release(tx, made[1].id, by="dana", reason="mended")
    assert expire(database) == 1


def test_a_sweep_takes_those_first_that_are_over_the_longest(database, make, row, clock):
    """And no more than its limit: the others are left to the next."""
    made = [make(expires=seconds) for seconds in (20, 10, 30)]
    clock.advance(31)
    ended = []
    while moved := expire(database, limit=1):
        assert moved == 1
        ended += [one.id for one in made if row(one.id).state == "expired" and one.id not in ended]
    assert ended == [made[1].id, made[0].id, made[2].id]


# --- pauses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["queue", "kind"])
def test_nothing_of_what_is_paused_is_claimed_or_hinted_until_it_is_resumed(
    engine, database, worker, kind, make, clock, carrier, what
):  # fmt: skip
    made = make(queue="mail")
    other = make(queue="other") if what == "queue" else None
    name = "mail" if what == "queue" else kind.name
    with engine.begin() as tx:
        deliveries.pause(tx, what, name, by="dana", reason="the mail server is down")
        (pause,) = deliveries.pauses(tx)
        assert (pause.what, pause.name, pause.by, pause.reason, pause.until) == (
            what, name, "dana", "the mail server is down", None,
        )  # fmt: skip
    assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO
    assert perform_due(worker, 5, queue="mail") == []
    assert dispatch(database) == (0 if other is None else 1)
    with engine.begin() as tx:
        assert deliveries.resume(tx, what, name, by="dana")
        assert not deliveries.resume(tx, what, name, by="dana")
        assert deliveries.pauses(tx) == []
    clock.advance(6)
    dispatch(database)
    assert made.id in {hint.id for hint in carrier.published}
    assert perform(worker, kind, made.id).outcome is Outcome.SENT


def test_a_pause_ends_by_itself_at_its_time_and_a_second_one_replaces_the_first(
    engine, database, worker, kind, make, clock, carrier
):
    """For the claim by a hint, the claim of a batch and dispatch alike."""
    made, other = make(), make()
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "durable", by="dana", reason="for a day", until=clock.now() + timedelta(days=1))
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "durable", by="eve", reason="an hour", until=clock.now() + timedelta(hours=1))
        assert [pause.by for pause in deliveries.pauses(tx)] == ["eve"]
    assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO
    assert (perform_due(worker, 5), dispatch(database)) == ([], 0)
    clock.advance(3601)
    # Before anybody looks, or resumes it.
    assert dispatch(database) == 2
    assert [done.id for done in perform_due(worker, 1)] == [made.id]
    assert perform(worker, kind, other.id).outcome is Outcome.SENT
    with engine.begin() as tx:
        assert deliveries.pauses(tx) == []
        assert not deliveries.resume(tx, "queue", "durable", by="eve")
        history = tx.execute(text("select by_whom, ended_by from durable.pauses order by id")).all()
    assert [tuple(line) for line in history] == [("dana", "eve"), ("eve", "eve")]


def test_a_paused_queue_pauses_no_kind_of_its_name(engine, worker, declare, make):
    kind = declare(name="mail")
    made, more = make(kind, queue="other"), make(kind, queue="other")
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "mail", by="dana", reason="the mail server is down")
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert [done.id for done in perform_due(worker, 5, queue="other")] == [more.id]


@pytest.mark.parametrize(
    "wrong",
    [
        {"what": "worker"}, {"name": "a b"}, {"name": "control"}, {"by": ""}, {"reason": " "},
        {"until": datetime(2030, 1, 1)}, {"until": "tomorrow"},
    ],
)  # fmt: skip
def test_a_pause_that_cannot_be_is_refused(engine, wrong):
    given = {"what": "queue", "name": "mail", "by": "dana", "reason": "x", **wrong}
    with engine.begin() as tx:
        with pytest.raises(InvalidOption):
            deliveries.pause(tx, given.pop("what"), given.pop("name"), **given)
        assert deliveries.pauses(tx) == []


# --- what an attempt may say -------------------------------------------------------------------------


def test_a_snooze_costs_nothing_and_its_history_keeps_the_first(worker, declare, make, row, lines, clock):
    def handler(step):
        raise Snooze(timedelta(minutes=5), "the report is not there yet")

    kind = declare(handler, max_attempts=1, max_interruptions=0)
    made = make(kind)
    for _ in range(3):
        done = perform(worker, kind, made.id)
        assert done.outcome is Outcome.SNOOZED
        assert perform(worker, kind, made.id).outcome is Outcome.NOTHING_TO_DO
        clock.advance(301)
    after = row(made.id)
    assert (after.state, after.attempts, after.snoozes, after.failures) == ("pending", 3, 3, 0)
    assert (after.error_code, after.error_message) == ("SNOOZED", "the report is not there yet")
    assert [(line.move, line.reason) for line in lines(made.id)] == [("snooze", "SNOOZED")]


@pytest.mark.parametrize("after", [-1, float("inf"), float("nan"), "soon", None, True])
def test_a_snooze_needs_a_duration(after):
    with pytest.raises(ValueError, match="Snooze"):
        Snooze(after)


@pytest.mark.parametrize(
    ("terms", "error", "outcome"),
    [
        ({}, KeyError("x"), Outcome.RETRY),
        ({"give_up_on": KeyError}, KeyError("x"), Outcome.FAILED),
        ({"give_up_on": (LookupError,)}, KeyError("x"), Outcome.FAILED),
        ({"give_up_on": KeyError}, ValueError("x"), Outcome.RETRY),
        ({"retry_on": (OSError, TimeoutError)}, ConnectionError("x"), Outcome.RETRY),
        ({"retry_on": OSError}, ValueError("x"), Outcome.FAILED),
        ({"retry_on": OSError, "give_up_on": FileNotFoundError}, FileNotFoundError("x"), Outcome.FAILED),
        ({"give_up_on": Exception}, Retry("x"), Outcome.RETRY),
        ({"give_up_on": Exception}, Snooze(1), Outcome.SNOOZED),
        ({"retry_on": OSError}, Retry("x"), Outcome.RETRY),
        ({}, GiveUp("x"), Outcome.FAILED),
    ],
)
def test_an_exception_is_retried_or_given_up_on_as_the_kind_says(worker, declare, make, row, terms, error, outcome):
    def handler(step):
        raise error

    kind = declare(handler, **terms)
    made = make(kind)
    assert perform(worker, kind, made.id).outcome is outcome
    assert row(made.id).state == ("failed" if outcome is Outcome.FAILED else "pending")


@pytest.mark.parametrize("terms", [{"retry_on": "OSError"}, {"give_up_on": [KeyError]}, {"retry_on": (KeyError, 1)}])
def test_what_is_no_exception_is_refused_at_the_declaration(declare, terms):
    with pytest.raises(DefinitionError):
        declare(**terms)


def test_a_time_limit_is_no_error_of_the_handler(make_worker, declare, make):
    class OutOfTime(Exception):
        pass

    def handler(step):
        raise OutOfTime

    kind = declare(handler, retry_on=OSError, give_up_on=Exception)
    worker = make_worker()
    worker.time_limits = (OutOfTime,)
    assert perform(worker, kind, make(kind).id).outcome is Outcome.RETRY


@pytest.mark.parametrize(("asked", "waits"), [(60, 60), (10 * 86400, 86400), (-5, 0)])
def test_a_retry_waits_as_long_as_it_asks_and_a_day_at_most(worker, declare, make, row, clock, asked, waits):
    def handler(step):
        raise Retry("later", after=asked)

    clock.freeze()
    kind = declare(handler)
    made = make(kind)
    perform(worker, kind, made.id)
    assert row(made.id).due_at - clock.now() == timedelta(seconds=waits)


# --- the hook of the dead ----------------------------------------------------------------------------


def hooked(kind, told, effect="told"):
    @kind.on_dead
    def tell(session, delivery):
        told.append((delivery.id, delivery.state, delivery.error_code, delivery.arguments))
        session.execute(
            text("insert into effects (row_id, fence, note) values (:id, :fence, :note)"),
            {"id": delivery.id, "fence": delivery.fence, "note": effect},
        )

    return tell


def refuse(step, n=0):
    raise RuntimeError("never")


@pytest.mark.field("R72")
def test_the_hook_runs_once_after_the_last_failure(engine, worker, declare, make, row, clock):
    told = []
    kind = declare(refuse, max_attempts=2, backoff=Backoff(base=1, factor=1, cap=1))
    hooked(kind, told)
    made = make(kind, {"n": 5})
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert told == []
    clock.advance(5)
    assert perform(worker, kind, made.id).outcome is Outcome.DEAD
    assert told == [(made.id, "dead", "WORKER_ERROR", {"n": 5})]
    assert effects_of(engine, made.id) == [(2, "told")]


def test_it_runs_where_a_sweep_finds_the_lost_worker(engine, database, declare, make, row, clock):
    told = []
    kind = declare(max_interruptions=0)
    hooked(kind, told)
    made = make(kind, state="processing")
    clock.advance(31)
    assert reap(database) == 1
    assert told == [(made.id, "dead", "WORKER_LOST", {})]
    assert effects_of(engine, made.id) == [(1, "told")]


def test_a_failed_delivery_is_not_dead(worker, declare, make):
    told = []

    def give_up(step):
        raise GiveUp("never")

    kind = declare(give_up)
    hooked(kind, told)
    assert perform(worker, kind, make(kind).id).outcome is Outcome.FAILED
    assert told == []


@pytest.mark.parametrize("by", ["a failure", "a lost worker"])
@pytest.mark.parametrize("how", ["raises", "a refused statement", "ends its session"])
def test_a_hook_that_fails_writes_nothing_and_the_delivery_is_dead_all_the_same(
    engine, database, worker, declare, make, row, lines, clock, caplog, how, by
):
    kind = declare(refuse, max_attempts=1, max_interruptions=0)

    @kind.on_dead
    def tell(session, delivery):
        session.execute(text("insert into effects (row_id, fence, note) values ('x', 1, 'x')"))
        if how == "raises":
            raise ValueError("the pager is broken")
        if how == "a refused statement":
            session.execute(text("select 1/0"))
        if how == "ends its session":
            session.rollback()
            raise ValueError("the pager is broken")

    made = make(kind, state="processing" if by == "a lost worker" else "pending")
    with caplog.at_level(logging.ERROR, "durable.run"):
        if by == "a lost worker":
            clock.advance(31)
            assert reap(database) == 1
        else:
            assert perform(worker, kind, made.id).outcome is Outcome.DEAD
    assert "on_dead_failed" in caplog.messages
    assert row(made.id).state == "dead"
    assert effects_of(engine, "x") == []
    line = lines(made.id)[-1]
    assert (line.move, line.reason) == ("on_dead failed", "HOOK_FAILED")
    assert ("division by zero" if how == "a refused statement" else "the pager is broken") in line.facts["error"]


def test_a_hook_may_commit_its_session_and_what_it_wrote_goes_with_the_move(engine, worker, declare, make):
    kind = declare(refuse, max_attempts=1)

    @kind.on_dead
    def tell(session, delivery):
        session.execute(text("insert into effects (row_id, fence, note) values ('x', 1, 'x')"))
        session.commit()

    assert perform(worker, kind, make(kind).id).outcome is Outcome.DEAD
    assert effects_of(engine, "x") == [(1, "x")]


@pytest.mark.field("R79")
@pytest.mark.parametrize("by", ["a failure", "a lost worker"])
def test_a_session_lost_in_the_hook_takes_the_death_with_it_and_the_next_try_brings_both(
    engine, database, worker, declare, make, row, lines, clock, kind, by
):
    """Neither is there without the other: what the hook enqueues is committed with the death."""
    dying = declare(refuse, max_attempts=1, max_interruptions=0)
    seen, refs = [], []

    @dying.on_dead
    def tell(session, delivery):
        refs.append(kind.enqueue(session, n=7).id)
        with engine.connect() as tx:
            seen.append(tx.scalar(text("select state from durable.deliveries where id = :id"), {"id": delivery.id}))
        if len(seen) == 1:
            session.execute(text("select pg_terminate_backend(pg_backend_pid())"))

    made = make(dying, state="processing" if by == "a lost worker" else "pending")
    if by == "a lost worker":
        clock.advance(31)
        with pytest.raises(DBAPIError):
            reap(database)
        assert (row(made.id).state, lines(made.id)) == ("processing", [])
        assert reap(database) == 1
    else:
        assert perform(worker, dying, made.id).outcome is Outcome.DEAD
    assert seen == ["processing"] * 2, "nobody else saw it dead before the hook had ended"
    assert row(made.id).state == "dead"
    assert [line.to_state for line in lines(made.id)] == ["dead"]
    with engine.connect() as tx:
        told = list(
            tx.scalars(text("select cast(id as text) from durable.deliveries where kind = :k"), {"k": kind.name})
        )
    assert told == refs[1:], "what the lost session had enqueued is gone with it"
    assert perform(worker, kind, refs[1]).outcome is Outcome.SENT


def test_a_hook_may_enqueue(engine, worker, declare, make, kind):
    dying = declare(refuse, max_attempts=1)
    refs = []

    @dying.on_dead
    def tell(session, delivery):
        refs.append(kind.enqueue(session, n=7))

    assert perform(worker, dying, make(dying).id).outcome is Outcome.DEAD
    assert perform(worker, kind, refs[0].id).outcome is Outcome.SENT


def test_a_kind_has_one_hook_and_a_plain_one(declare):
    kind = declare()
    hooked(kind, [])
    with pytest.raises(DefinitionError):
        hooked(kind, [])

    async def tell(session, delivery):
        pass

    with pytest.raises(DefinitionError):
        declare().on_dead(tell)


def test_where_the_kind_is_not_declared_the_log_says_that_nothing_was_run(database, make, declare, row, clock, caplog):
    from durable_core.deliveries.declare import registry

    kind = declare(max_interruptions=0)
    hooked(kind, [])
    made = make(kind, state="processing")
    registry.remove(kind.name)
    clock.advance(31)
    with caplog.at_level(logging.WARNING, "durable.run"):
        assert reap(database) == 1
    assert "on_dead_not_run" in caplog.messages
    assert row(made.id).state == "dead"
