"""Why a pending delivery does not run now: what is said blocks a claim, and where nothing is said none is refused."""

import random
from datetime import timedelta

import pytest
from sqlalchemy import text

from durable_core import NotFound, deliveries
from durable_core.deliveries import Cause, waits
from durable_core.deliveries.attempt import claim_one, wait_for_handler
from durable_core.states import DeliveryState

BEHIND = text(
    "select durable.is_behind(id, ordering_key, created_at, attempts > 0, durable.durable_now())"
    " from durable.deliveries where id = cast(:id as uuid)"
)


@pytest.fixture
def why(engine):
    def _why(row_id):
        with engine.connect() as tx:
            return waits(tx, row_id)

    return _why


@pytest.fixture
def stopped(engine, database, declare, make, clock):
    """A pending delivery that one thing keeps from running, or none, by the name of its cause."""

    def pause(what, name, **until):
        with engine.begin() as tx:
            deliveries.pause(tx, what, name, by="dana", reason="the printer is away", **until)

    def _stopped(kind, how):
        if how == "behind":
            make(kind, ordering_key="line")
            return make(kind, ordering_key="line")
        made = make(
            kind,
            expires={"expired": 5, "expires_soon": 1800}.get(how),
            countdown=60 if how == "not_due" else 0,
            queue="mail",
        )
        if how == "held":
            with engine.begin() as tx:
                tx.execute(text(f"update durable.deliveries set held_reason = 'stumbled' where id = '{made.id}'"))
        elif how == "paused queue":
            pause("queue", "mail", until=clock.now() + timedelta(hours=1))
        elif how == "paused kind":
            pause("kind", kind.name)
        elif how == "expired":
            clock.advance(6)
        elif how == "handler":
            assert wait_for_handler(database, kind.name, made.id)
        return made

    return _stopped


@pytest.mark.parametrize(
    ("how", "causes"),
    [
        ("held", [Cause.HELD]), ("paused queue", [Cause.PAUSED]), ("paused kind", [Cause.PAUSED]),
        ("behind", [Cause.BEHIND]), ("expired", [Cause.EXPIRED]), ("not_due", [Cause.NOT_DUE]),
        ("handler", [Cause.HANDLER]), ("expires_soon", [Cause.WORKER, Cause.EXPIRES_SOON]), ("worker", [Cause.WORKER]),
    ],
)  # fmt: skip
def test_a_delivery_is_claimed_exactly_when_nothing_that_is_said_blocks_it(
    engine, worker, kind, stopped, why, how, causes
):
    made = stopped(kind, how)
    said = why(made.id)
    assert [wait.cause for wait in said] == causes
    with engine.begin() as tx:
        claimed = claim_one(tx, kind, made.id, worker.holder)
    assert (claimed is None) == any(wait.blocks for wait in said)


def test_everything_that_stands_in_the_way_is_said_with_its_facts(engine, kind, make, why, clock):
    clock.freeze()
    first = make(ordering_key="line")
    made = make(ordering_key="line", queue="mail", countdown=60, expires=30)
    until = clock.now() + timedelta(hours=2)
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "mail", by="dana", reason="the printer is away", until=until)
        deliveries.pause(tx, "queue", kind.name, by="eve", reason="a queue of the kind's name is another thing")
        deliveries.pause(tx, "kind", kind.name, by="eve", reason="it prints twice")

    paused, forever, behind, later, expires = why(made.id)

    assert (paused.pause.what, paused.pause.by, paused.until) == ("queue", "dana", until)
    assert (forever.pause.what, forever.pause.reason, forever.until) == ("kind", "it prints twice", None)
    assert (behind.ahead.id, behind.ahead.kind, behind.ahead.state) == (first.id, kind.name, "pending")
    assert (later.cause, later.until) == (Cause.NOT_DUE, clock.now() + timedelta(seconds=60))
    assert (expires.cause, expires.until) == (Cause.EXPIRES_SOON, clock.now() + timedelta(seconds=30))


def test_a_pause_that_is_over_is_not_said(engine, make, why, clock):
    made = make(queue="mail")
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "mail", by="dana", reason="x", until=clock.now() + timedelta(hours=1))
    assert [wait.cause for wait in why(made.id)] == [Cause.PAUSED]
    clock.advance(3601)
    assert [wait.cause for wait in why(made.id)] == [Cause.WORKER]


@pytest.mark.parametrize(("expires", "countdown", "said"), [(3599, 0, True), (3700, 0, False), (7200, 9000, True)])
def test_an_expiry_is_said_within_its_hour_or_when_it_comes_before_the_due_time(make, why, expires, countdown, said):
    made = make(expires=expires, countdown=countdown)
    assert (Cause.EXPIRES_SOON in [wait.cause for wait in why(made.id)]) == said


@pytest.mark.parametrize("state", [state for state in DeliveryState if state is not DeliveryState.PENDING])
def test_one_that_does_not_wait_has_nothing_to_wait_for(make, why, state):
    assert why(make(state=state).id) == []


def test_one_that_is_not_there_is_not_found(why):
    with pytest.raises(NotFound):
        why("01900000-0000-7000-8000-000000000000")


@pytest.mark.parametrize("state", ["dead", "failed"])
def test_one_that_failed_for_good_is_named_until_it_is_discarded(engine, declare, make, why, state):
    strict = declare(ordering="strict")
    first, second, third = (make(strict, ordering_key="line", state=one) for one in (state, "pending", "pending"))
    (behind,) = why(third.id)
    assert (behind.ahead.id, behind.ahead.state) == (first.id, state)
    with engine.begin() as tx:
        deliveries.discard(tx, first.id, by="dana", reason="that order is gone")
    (behind,) = why(third.id)
    assert (behind.ahead.id, behind.ahead.state) == (second.id, "pending")


def test_one_that_runs_is_named_before_an_older_one_that_came_to_be_seen_later(other_engine, kind, make, why):
    with other_engine.connect() as slow, slow.begin() as open_transaction:
        older = kind.options(ordering_key="line").enqueue(slow)
        running = make(ordering_key="line", state="processing")
        open_transaction.commit()
    youngest = make(ordering_key="line")
    assert [[wait.ahead.id for wait in why(row_id)] for row_id in (older.id, youngest.id)] == [[running.id]] * 2


def test_the_one_named_is_the_first_of_its_line_whatever_stands_in_it(engine, declare, make, why, clock):
    """Rows of every sort in a few lines; the rule of the database, `is_behind`, is the judge."""
    kinds = {True: declare(ordering="strict"), False: declare()}
    for _ in range(60):
        line = random.choice("abcdefghijklmnop")
        how = random.choice(["pending", "pending", "begun", "begun later", "later", "dead", "failed", "discarded"])
        kind = kinds[random.random() < 0.4]
        if how in ("pending", "later"):
            make(kind, ordering_key=line, countdown=3600 if how == "later" else 0)
            continue
        # Past the guards, for no legal move ends one that is behind another.
        made = make(kind, ordering_key=line)
        ended = f"state = '{'failed' if how == 'failed' else 'dead'}', finished_at = now()"
        begun = f"due_at = due_at + interval '{600 if how == 'begun later' else 0} s'"
        discarded = ", discarded_at = now()" if how == "discarded" else ""
        with engine.begin() as tx:
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(
                text(
                    "update durable.deliveries set fence = 1, settled_fence = 1, attempts = 1,"
                    f" {begun if how.startswith('begun') else ended}{discarded} where id = '{made.id}'"
                )
            )
    with engine.connect() as tx:
        live = tx.execute(text("select cast(id as text), state from durable.deliveries where state = 'pending'")).all()
        judged = {row_id: tx.scalar(BEHIND, {"id": row_id}) for row_id, _ in live}
    named = {}
    for row_id, behind in judged.items():
        said = [wait.ahead for wait in why(row_id) if wait.cause is Cause.BEHIND]
        assert bool(said) == behind
        if said:
            named[said[0].id] = said[0].state
    assert set(judged.values()) == {True, False}
    with engine.connect() as tx:
        for row_id, state in named.items():
            assert state != "pending" or not tx.scalar(BEHIND, {"id": row_id}), f"{row_id} is itself behind another"
