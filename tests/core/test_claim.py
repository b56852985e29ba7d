"""Claiming: who is taken, in which order, for how long."""

import time
from datetime import timedelta

import pytest
from sqlalchemy import event, text

from durable_core.claims.claim import Holder
from durable_core.database.connections import Database
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import claim_due, claim_one
from durable_core.errors import DefinitionError


@pytest.mark.spec("deliveries", 2)
def test_a_new_row_is_claimed_at_once_with_attempt_1_and_a_claim_stamp(engine, kind, make, row, clock):
    made = make()
    clock.freeze()
    with engine.begin() as tx:
        claim = claim_one(tx, kind, made.id, Holder())
    taken = row(made.id)
    assert claim is not None
    assert (claim.attempt, claim.fence, claim.id) == (1, 1, made.id)
    assert (taken.state, taken.attempts, taken.fence, taken.settled_fence) == ("processing", 1, 1, 0)
    assert taken.claimed_at == taken.beat_at == clock.now()


@pytest.mark.spec("deliveries", 3)
def test_a_row_due_in_60_seconds_is_not_claimed_and_stays_as_it_is(engine, kind, make, row, clock):
    made = make(countdown=60)
    before = row(made.id)
    with engine.begin() as tx:
        assert claim_one(tx, kind, made.id, Holder()) is None
        assert claim_due(tx, 10) == []
    assert row(made.id) == before
    clock.advance(61)
    with engine.begin() as tx:
        assert claim_one(tx, kind, made.id, Holder()) is not None


@pytest.mark.spec("deliveries", 4)
def test_the_most_overdue_come_first_then_the_oldest(engine, kind, make, clock):
    late, later, latest = make(countdown=30), make(countdown=20), make(countdown=10)
    twin_of_latest = make(countdown=10)
    clock.advance(60)
    with engine.begin() as tx:
        first = [claim.id for claim in claim_due(tx, 2)]
        rest = [claim.id for claim in claim_due(tx, 10)]
    assert first == [latest.id, twin_of_latest.id]
    assert rest == [later.id, late.id]


@pytest.mark.spec("deliveries", 4)
@pytest.mark.parametrize("state", ["processing", "sent", "failed", "dead", "canceled", "expired"])
def test_only_pending_rows_are_taken(engine, kind, make, row, clock, state):
    made = make(state=state)
    clock.advance(3600)
    before = row(made.id)
    with engine.begin() as tx:
        assert claim_due(tx, 10) == []
        assert claim_one(tx, kind, made.id, Holder()) is None
    assert row(made.id) == before


@pytest.mark.spec("deliveries", 5)
@pytest.mark.parametrize("limit", [0, -1])
def test_a_batch_below_1_claims_nothing_and_runs_no_statement(engine, make, row, limit):
    made = make()
    statements = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    with engine.connect() as tx:
        assert claim_due(tx, limit) == []
    assert statements == []
    assert row(made.id).state == "pending"


def test_a_claim_never_takes_more_than_asked_even_where_the_plan_rescans(engine, make, conn):
    """A LIMIT inside `IN (…)` took every row under a nested loop; ours is materialised first."""
    for _ in range(6):
        make()
    for off in ("hashjoin", "mergejoin", "hashagg", "material"):
        conn.execute(text(f"set local enable_{off} = off"))
    assert len(claim_due(conn, 2)) == 2
    assert conn.scalar(text("select count(*) from durable.deliveries where state = 'processing'")) == 2


def test_claims_keep_to_their_queue_and_to_the_kinds_declared_here(engine, declare, make, row):
    elsewhere = make(queue="mail")
    unknown = declare()
    of_unknown = make(unknown)
    from durable_core.deliveries.declare import registry

    registry.remove(unknown.name)
    mine = make()
    with engine.begin() as tx:
        assert [claim.id for claim in claim_due(tx, 10)] == [mine.id]
        assert [claim.id for claim in claim_due(tx, 10, queue="mail")] == [elsewhere.id]
    assert row(of_unknown.id).state == "pending"


def test_a_row_of_another_kind_is_not_claimed_by_its_id(engine, declare, make):
    other = declare()
    made = make()
    with engine.begin() as tx:
        assert claim_one(tx, other, made.id, Holder()) is None


def test_a_held_row_is_skipped_by_claims_until_it_is_released(engine, kind, make, database):
    made = make()
    with engine.begin() as tx:
        tx.execute(text("update durable.deliveries set held_reason = 'a sweep failed on it'"))
    with engine.begin() as tx:
        assert claim_due(tx, 10) == []
        assert claim_one(tx, kind, made.id, Holder()) is None
        tx.execute(text("update durable.deliveries set held_reason = null"))
        assert len(claim_due(tx, 10)) == 1


@pytest.mark.parametrize("lease", [3.0, 30.0, 0.75])
def test_the_lease_read_back_from_the_row_is_as_long_as_asked(engine, declare, make, row, clock, lease):
    kind = declare(timeout=120)
    by_id, by_queue = make(kind), make(kind, queue="mail")
    holder = Holder(lease_seconds=lease, heartbeat_seconds=lease / 4)
    clock.freeze()
    with engine.begin() as tx:
        claim_one(tx, kind, by_id.id, holder)
        claim_due(tx, 1, queue="mail", holder=holder)
    for taken in (row(by_id.id), row(by_queue.id)):
        assert taken.lease_expires_at - taken.claimed_at == timedelta(seconds=lease)
        assert taken.deadline_at - taken.claimed_at == timedelta(seconds=120)


def test_a_lease_never_reaches_past_the_deadline(engine, declare, make, row):
    kind = declare(timeout=5)
    made = make(kind, state="processing")
    assert row(made.id).lease_expires_at == row(made.id).deadline_at


def test_a_claim_writes_the_budget_of_the_code_that_runs_it(engine, declare, make, row):
    made = make(declare(name="test.budget", max_attempts=2, max_interruptions=1))
    from durable_core.deliveries.declare import registry

    registry.remove("test.budget")
    newer = declare(name="test.budget", max_attempts=7, max_interruptions=3)
    with engine.begin() as tx:
        claim_one(tx, newer, made.id, Holder())
    assert (row(made.id).max_attempts, row(made.id).max_interruptions) == (7, 3)


@pytest.mark.spec("deliveries", 24)
@pytest.mark.parametrize("wrong_by", [3600, -3600])
def test_the_clock_of_the_worker_decides_nothing(engine, database, kind, make, row, clock, monkeypatch, wrong_by):
    """Every instant comes from the database; the process's own wall clock may be an hour off either way."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + wrong_by)
    clock.freeze()
    due, later = make(), make(countdown=60)
    assert row(later.id).due_at - row(later.id).created_at == timedelta(seconds=60)
    with engine.begin() as tx:
        assert [claim.id for claim in claim_due(tx, 10)] == [due.id]
    assert row(due.id).claimed_at == clock.now()
    assert sweep.reap(database) == 0
    clock.advance(29)
    assert sweep.reap(database) == 0
    clock.advance(2)
    assert sweep.reap(database) == 1
    assert row(due.id).due_at == clock.now()
    assert row(later.id).state == "pending"


@pytest.mark.spec("deliveries", 24)
def test_no_statement_is_handed_an_instant_by_python(engine, database, declare, make, make_worker):
    """But for an `eta`, which the caller names; everything else is a duration."""
    from datetime import date, datetime

    from durable_core.deliveries.attempt import perform

    handed = []

    def keep(conn, cursor, statement, parameters, context, many):
        if "durable" in statement:
            handed.extend(parameters.values() if isinstance(parameters, dict) else parameters or ())

    event.listen(engine, "before_cursor_execute", keep)
    try:
        made = make(countdown=0)
        perform(make_worker(), _kind_of(engine, made.id), made.id)
        sweep.reap(database)
        sweep.prune(database)
    finally:
        event.remove(engine, "before_cursor_execute", keep)
    assert handed
    assert not [value for value in handed if isinstance(value, date | datetime)]


def _kind_of(engine, row_id):
    from durable_core import deliveries
    from durable_core.deliveries.declare import registry

    with engine.connect() as tx:
        return registry.get(deliveries.get(tx, row_id).kind)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_claims_run_at_read_committed_whatever_the_host_set(services, engine, kind, make, level):
    from sqlalchemy import create_engine

    option = level.replace(" ", r"\ ")
    strict = create_engine(engine.url, connect_args={"options": f"-c default_transaction_isolation={option}"})
    try:
        made = make()
        with Database(strict).autocommit() as connection:
            assert connection.scalar(text("show transaction_isolation")) == "read committed"
            assert claim_one(connection, kind, made.id, Holder()) is not None
        with Database(strict).connect() as connection:
            assert connection.scalar(text("show transaction_isolation")) == "read committed"
    finally:
        strict.dispose()


@pytest.mark.parametrize(("lease", "beat"), [(10, 5), (10, 6), (0, 0), (5, 0)])
def test_a_lease_without_room_for_three_heartbeats_is_refused(lease, beat):
    with pytest.raises(DefinitionError, match="three heartbeats"):
        Holder(lease_seconds=lease, heartbeat_seconds=beat)
