"""Queues that plans and operations share with deliveries, on a real broker and read by nobody: their hints stay few."""

import itertools
import json

import pytest
from celery import Celery
from redis import Redis
from sqlalchemy import text

from durable_core import Issued, deliveries, kinds, operation, operations, plans, sweeps, wakes
from durable_core.celery_binding.publish import CeleryCarrier
from durable_core.deliveries import sweep
from durable_core.deliveries.enqueue import enqueue_many

_numbers = itertools.count(1)
MONTH = 30 * 24 * 3600.0


@pytest.fixture
def queue():
    """A queue of the broker that no worker reads."""
    return f"unread-{next(_numbers)}"


@pytest.fixture
def broker(services, queue):
    with Redis.from_url(services.redis_url) as redis:
        yield redis
        lists = list(redis.scan_iter(f"durable.{queue}*"))
        if lists:
            redis.delete(*lists)


@pytest.fixture
def publishing(services, broker):
    """A carrier to the real broker."""
    before = wakes.carrier()
    wakes.wake()
    made = CeleryCarrier(Celery("here", broker=services.redis_url, set_as_current=False))
    wakes.use_carrier(made)
    yield made
    wakes.wake()
    wakes.use_carrier(before)


@pytest.fixture
def rendering(queue):
    """An operation that nobody issues here."""
    terms = {"statuses": {"done": "ok"}, "queue": queue, "one_in_flight": False}
    kind = operation(f"test.shared_{queue}", **terms)(lambda step: Issued(["x"]))
    kind.poll(lambda step, ids: dict.fromkeys(ids, "done"))
    kind.cancel(lambda step, ids: None)
    yield kind
    kinds.operations.remove(kind.name)


@pytest.fixture
def lying(broker, queue):
    """The ids in the messages that lie in the queue."""

    def read():
        found = []
        for name in broker.scan_iter(f"durable.{queue}*"):
            found += [json.loads(one)["headers"]["kwargsrepr"] for one in broker.lrange(name, 0, -1)]
        return [one.split("'id': '")[1].split("'")[0] for one in found]

    return read


@pytest.fixture
def swept(database, clock):
    """Let time pass, and let dispatch and poll come by, with a cap of so many hints in a queue."""

    def sweep_after(seconds, cap=1000):
        clock.advance(seconds)
        sweep.dispatch(database, cap=cap, others=sweeps.HINTED)
        sweeps.operations.poll(database, cap=cap, others=(sweep, sweeps.plans))

    return sweep_after


def approve(engine, step, count, **how):
    """So many plans, approved; their hints are told on `wake`."""
    made = []
    with engine.begin() as tx:
        for n in range(count):
            plan = plans.propose(tx, [step.planned(n)], by="a", expires=MONTH, **how)
            plans.approve(tx, plan.id, by="dana", digest=plan.digest)
            made.append(plan.id)
    return made


def start(engine, kind, count):
    with engine.begin() as tx:
        return [kind.options().start(tx, by="dana").id for _ in range(count)]


def all_run(engine, after=0):
    """Let the operations have been issued and their polls be due so many seconds later; nobody has hinted those."""
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(
            text(
                "update durable.operations set state = 'running', issued_at = due_at, fence = 1, settled_fence = 1,"
                " external_ids = '[\"x\"]', cancels = true, patience_until = due_at + interval '30 days',"
                " due_at = due_at + make_interval(secs => :after), hint_at = due_at + make_interval(secs => :after)"
            ),
            {"after": after},
        )


@pytest.mark.parametrize("what", ["plans", "operations", "polls"])
def test_a_thousand_that_nobody_takes_leave_no_more_than_a_thousand_messages(
    engine, shop, queue, rendering, publishing, lying, broker, swept, what
):
    rows = 1000
    if what == "plans":
        made = approve(engine, shop.step(queue=queue), rows)
    else:
        made = start(engine, rendering, rows)
    if what == "polls":
        all_run(engine)
    else:
        wakes.wake()
        assert publishing.flush(30)
    swept(0)
    swept(1)
    assert sorted(lying()) == sorted(made)
    for seconds in (11, 21, 41, 81, 161, *([601] * 5)):
        swept(seconds)
    assert sorted(lying()) == sorted(made), "nearly an hour later"
    broker.delete(*broker.scan_iter(f"durable.{queue}*"))
    swept(2)
    swept(2)
    assert sorted(lying()) == sorted(made), "and after the broker lost them"


@pytest.mark.parametrize("what", ["a plan", "an operation", "a poll"])
@pytest.mark.parametrize("ahead", ["more deliveries than are counted", "messages of nothing"])
def test_the_lost_hint_of_one_behind_a_queue_that_is_never_empty_is_repeated_and_ever_more_seldom(
    engine, kind, shop, queue, rendering, publishing, lying, swept, what, ahead
):
    cap, before = 50, 60
    with engine.begin() as tx:
        enqueue_many(tx, [kind.options(queue=queue).new(n) for n in range(before)])
        if ahead == "messages of nothing":
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(text("delete from durable.deliveries where queue = :queue"), {"queue": queue})
    wakes.wake()
    assert publishing.flush(30)
    if what == "a plan":
        (one,) = approve(engine, shop.step(queue=queue), 1)
    else:
        (one,) = start(engine, rendering, 1)
    if what == "a poll":
        all_run(engine)
    wakes._unsent.get().clear()  # its caller died with its hint
    assert one not in lying()
    swept(11, cap)
    assert lying().count(one) == 1
    swept(1, cap)
    assert lying().count(one) == 1
    for seconds in [5] * 240 + [60] * 60 + [3600] * 24:
        swept(seconds, cap)
    found = lying()
    assert 8 <= found.count(one) <= 15, "in a day: ten seconds, doubled each time"
    assert len(found) - found.count(one) == before, "and nothing else was added"


def test_of_many_that_wait_behind_many_each_lost_hint_is_repeated(engine, kind, shop, queue, publishing, lying, swept):
    """Twenty plans that died with their caller's hints, and more deliveries ahead of them than are counted."""
    with engine.begin() as tx:
        enqueue_many(tx, [kind.options(queue=queue).new(n) for n in range(60)])
    wakes.wake()
    assert publishing.flush(30)
    made = approve(engine, shop.step(queue=queue), 20)
    wakes._unsent.get().clear()
    swept(11, 50)
    swept(1, 50)
    assert sorted(one for one in lying() if one in made) == sorted(made)


@pytest.mark.parametrize("why", ["paused", "held", "over"])
def test_plans_and_operations_that_nobody_may_take_leave_deliveries_their_place(
    engine, kind, shop, queue, rendering, publishing, lying, swept, why
):
    step = shop.step(queue=queue)
    approve(engine, step, 20)
    start(engine, rendering, 20)
    wakes._unsent.get().clear()
    with engine.begin() as tx:
        if why == "paused":
            for name in (step.name, rendering.name):
                deliveries.pause(tx, "kind", name, by="dana", reason="inventory")
        elif why == "held":
            for table in ("plans", "operations"):
                tx.execute(text(f"update durable.{table} set held_reason = 'a trigger'"))
        else:
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(text("update durable.plans set expires_at = durable.durable_now()"))
            tx.execute(text("update durable.operations set start_before = durable.durable_now()"))
        refs = enqueue_many(tx, [kind.options(queue=queue).new(n) for n in range(5)])
    wakes._unsent.get().clear()
    for _ in range(5):
        swept(2)
    assert sorted(lying()) == sorted(ref.id for ref in refs)


def test_a_cancel_is_told_the_worker_at_once_and_every_ten_seconds_whatever_lies_in_the_queue(
    engine, kind, queue, rendering, publishing, lying, swept
):
    with engine.begin() as tx:
        enqueue_many(tx, [kind.options(queue=queue).new(n) for n in range(60)])
    wakes.wake()
    assert publishing.flush(30)
    told, asked = start(engine, rendering, 2)
    wakes._unsent.get().clear()
    all_run(engine, after=7200)
    with engine.begin() as tx:
        for one in (told, asked):
            operations.cancel(tx, one, by="dana", reason="no")
    wakes._unsent.get().clear()  # a command carries no hints
    swept(0.5, 50)
    assert (lying().count(told), lying().count(asked)) == (1, 1)
    with engine.begin() as tx:
        tx.execute(
            text(
                "insert into durable.journal (row_id, contract, move, fence)"
                " values (:id, 'operation', 'ask to cancel', 2)"
            ),
            {"id": asked},
        )
    for _ in range(9):
        swept(1, 50)
    assert (lying().count(told), lying().count(asked)) == (1, 1), "it was hinted just now"
    for _ in range(120):
        swept(1, 50)
    assert (lying().count(told), lying().count(asked)) == (6, 1), "for a minute"
    assert len(lying()) == 60 + 7
