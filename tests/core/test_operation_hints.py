"""Calls and polls of operations that wait behind others in their queue: each is hinted in time, whatever else waits."""

import pytest
from sqlalchemy import text

from durable_core import deliveries, sweeps
from durable_core.deliveries import sweep as deliveries_sweep
from durable_core.operations import sweep

CAP = 100
"""Hints of a queue, and rows of it that are looked at."""

CALLS_GO = text(
    "update durable.operations set state = 'canceled', finished_at = durable.durable_now(), canceled_by = 'x',"
    " canceled_reason = 'y' where id in (select id from durable.operations where state = 'queued' order by id limit :n)"
)

RUNNING = text(
    "update durable.operations set state = 'running', issued_at = due_at, fence = 1, settled_fence = 1,"
    " external_ids = '[\"x\"]', patience_until = due_at + interval '3 days'"
)

DAY = 24 * 3600.0


@pytest.fixture
def started(engine):
    """So many of a kind, started; the hints of their commits are not in the queue."""

    def start(kind, count):
        with engine.begin() as tx:
            return [kind.options().start(tx, "preview", by="dana").id for _ in range(count)]

    return start


@pytest.fixture
def swept(database, carrier, clock):
    """Let time pass, and let dispatch and poll come by; the ids that they hint."""

    def sweep_after(seconds):
        clock.advance(seconds)
        carrier.published.clear()
        deliveries_sweep.dispatch(database, cap=CAP, others=sweeps.HINTED)
        sweeps.operations.poll(database, cap=CAP, others=(deliveries_sweep, sweeps.plans))
        return [hint.id for hint in carrier.published]

    return sweep_after


@pytest.fixture
def paused(engine, declare_operation, started):
    """More queued ones than are looked at, of a kind that is paused."""
    kind = declare_operation(one_in_flight=False, start_within=36_000)
    made = started(kind, CAP + 20)
    with engine.begin() as tx:
        deliveries.pause(tx, "kind", kind.name, by="dana", reason="provider down")
    return kind, made


def test_a_poll_is_hinted_beside_a_paused_pile(paused, declare_operation, started, look, swept, carrier):
    kind = declare_operation(one_in_flight=False)
    (one,) = started(kind, 1)
    look(kind, one)
    carrier.lying.clear()
    assert swept(5) == [one]


def test_the_lost_hint_of_a_call_is_repeated_behind_a_paused_pile(
    engine, paused, declare_operation, started, swept, carrier
):
    (one,) = started(declare_operation(one_in_flight=False), 1)
    hinted = []
    for _ in range(5):
        carrier.lying.clear()
        hinted += swept(1)
    assert hinted == [one]
    kind, pile = paused
    with engine.begin() as tx:
        deliveries.resume(tx, "kind", kind.name, by="dana")
    hinted = []
    for _ in range(8):
        carrier.lying.clear()
        hinted += swept(1)
    assert set(hinted) >= set(pile), "and the pile, once it is resumed"


@pytest.mark.parametrize("polls", [1, 30])
def test_polls_are_hinted_while_more_calls_wait_than_are_counted(
    engine, database, declare_operation, started, look, swept, carrier, operation_row, polls
):
    """Three calls a second go, and as many messages; the queue is as deep as the cap all the time."""
    kind = declare_operation(one_in_flight=False)
    running = started(kind, polls)
    for one in running:
        look(kind, one)
    started(kind, 20 * CAP)
    told = set()
    for _ in range(10):
        with engine.begin() as tx:
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(CALLS_GO, {"n": 90})
        carrier.lying["durable"] = CAP
        told.update(swept(30))
        sweep.reap(database)
    assert told >= set(running)
    assert {operation_row(one).state for one in running} == {"running"}


def test_polls_behind_a_deep_queue_of_calls_are_hinted_ever_more_seldom(
    declare_operation, started, look, swept, carrier
):
    kind = declare_operation(one_in_flight=False, lease=24 * 3600)
    running = started(kind, 30)
    for one in running:
        look(kind, one)
    started(kind, 5 * CAP)
    carrier.lying["durable"] = 5 * CAP
    hinted = []
    for _ in range(360):
        hinted += [one for one in swept(10) if one in running]
        carrier.lying["durable"] = 5 * CAP
    assert {hinted.count(one) for one in running} <= {8, 9}, "in an hour"


def test_calls_and_polls_are_counted_each_by_themselves(database, declare_operation, started, look, clock):
    kind = declare_operation(one_in_flight=False)
    running = started(kind, 3)
    for one in running:
        look(kind, one)
    started(kind, 5)
    with database.autocommit() as connection:
        assert (sweep.due(connection, CAP), sweep.POLLS.due(connection, CAP)) == ({"durable": 5}, {}), "not due yet"
        clock.advance(5)
        assert (sweep.due(connection, CAP), sweep.POLLS.due(connection, CAP)) == ({"durable": 5}, {"durable": 3})
        assert (sweep.due(connection, 4), sweep.POLLS.due(connection, 2)) == ({"durable": 4}, {"durable": 2})
        assert sweep.POLLS.due(connection, CAP, ["mail"]) == {}


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("what", ["plans", "calls", "polls"])
def test_rows_that_were_hinted_unsure_for_long_wait_ten_minutes_once_that_is_over(
    engine, shop, declare_operation, started, look, swept, carrier, what, rows
):
    """Hinted last just now, after hours behind what nobody reads; then one other message lies in the queue."""
    if what == "plans":
        made = [shop.approved(shop.step(queue="durable").planned(n), expires=3 * DAY).id for n in range(rows)]
    else:
        made = started(declare_operation(one_in_flight=False, lease=3 * DAY, start_within=3 * DAY), rows)
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        if what == "polls":
            tx.execute(RUNNING)
        table, before = ("plans", 0) if what == "plans" else ("operations", 1)
        tx.execute(text(f"update durable.{table} set hints = 12,"
                        f" hint_at = durable.durable_now() + durable.hint_wait(12 - {before})"))  # fmt: skip
    hinted = {}
    for second in range(0, 1400, 20):
        carrier.lying["durable"] = 1
        for one in swept(20):
            hinted.setdefault(one, []).append(second)
    assert set(hinted) == set(made)
    assert {len(times) for times in hinted.values()} == {2}
    assert all(580 <= times[0] <= 620 and times[1] - times[0] <= 620 for times in hinted.values())
