"""What a killed pool child held is given back by its parent at once, in one transaction naming owner and process."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, text

from durable_core.claims.claim import Claim, Holder
from durable_core.database.connections import Database
from durable_core.deliveries import attempt, sweep
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.read import Delivery
from durable_core.states import DeliveryState
from durable_core.testing import Made, MovableClock

CHILD = Holder(owner="this-worker", pid=4711)


def claimed(database: Database, kind: DeliveryKind[..., Any], row_id: str, holder: Holder = CHILD) -> Claim:
    with database.autocommit() as connection:
        claim = attempt.claim_one(connection, kind, row_id, holder)
    assert claim is not None
    return claim


def test_a_dead_childs_row_is_due_again_at_once_and_counted_as_one_interruption(
    database: Database, kind: DeliveryKind[..., Any], make: Callable[..., Made], row: Any, lines: Any
) -> None:
    made = make(state="pending")
    claimed(database, kind, made.id)

    assert sweep.give_back(database, "this-worker", {4711}) == 1

    given: Delivery = row(made.id)
    assert (given.state, given.attempts, given.interruptions, given.failures) == (DeliveryState.PENDING, 1, 1, 0)
    assert given.error_code == "CHILD_LOST"
    assert [(line.move, line.reason) for line in lines(made.id)] == [("release", "CHILD_LOST")]
    with database.autocommit() as connection:
        assert attempt.claim_one(connection, kind, made.id, CHILD) is not None


def test_rows_of_other_children_and_other_workers_stay_where_they_are(
    database: Database, kind: DeliveryKind[..., Any], make: Callable[..., Made], row: Any
) -> None:
    sibling, stranger = make(state="pending"), make(state="pending")
    claimed(database, kind, sibling.id, Holder(owner="this-worker", pid=4712))
    claimed(database, kind, stranger.id, Holder(owner="other-worker", pid=4711))

    assert sweep.give_back(database, "this-worker", {4711}) == 0

    assert {row(sibling.id).state, row(stranger.id).state} == {DeliveryState.PROCESSING}


def test_parent_and_reaper_who_see_one_death_count_it_once(
    database: Database, kind: DeliveryKind[..., Any], make: Callable[..., Made], row: Any, clock: MovableClock
) -> None:
    made = make(state="pending")
    claimed(database, kind, made.id)
    clock.advance(seconds=31)

    assert sweep.reap(database) == 1
    assert sweep.give_back(database, "this-worker", {4711}) == 0

    assert row(made.id).interruptions == 1


def test_a_child_killed_at_its_deadline_spends_an_attempt(
    database: Database, declare: Callable[..., Any], make: Callable[..., Made], row: Any, clock: MovableClock
) -> None:
    kind = declare(timeout=10, max_attempts=2)
    made = make(kind, state="pending")
    claimed(database, kind, made.id)
    clock.advance(seconds=10.5)

    assert sweep.give_back(database, "this-worker", {4711}) == 1

    given: Delivery = row(made.id)
    assert (given.error_code, given.failures, given.interruptions) == ("TIMEOUT", 1, 0)


def test_a_row_that_the_dead_childs_backend_still_locks_is_left_for_later(
    database: Database, kind: DeliveryKind[..., Any], make: Callable[..., Made], other_engine: Engine
) -> None:
    made = make(state="pending")
    claimed(database, kind, made.id)
    with other_engine.begin() as backend:
        backend.execute(text("select from durable.deliveries where id = :id for no key update"), {"id": made.id})

        assert sweep.give_back(database, "this-worker", {4711}) == 0

    assert sweep.give_back(database, "this-worker", {4711}) == 1


def test_what_a_shutdown_kills_is_due_at_once_and_costs_the_row_nothing(
    database: Database, kind: DeliveryKind[..., Any], make: Callable[..., Made], row: Any
) -> None:
    made = make(state="pending")
    for deploys in range(1, 30):
        claimed(database, kind, made.id)

        assert sweep.give_back(database, "this-worker", {4711}, shutdown=True) == 1

        given: Delivery = row(made.id)
        assert (given.state, given.shutdowns, given.interruptions, given.failures) == ("pending", deploys, 0, 0)
