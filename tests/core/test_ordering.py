"""Deliveries of one ordering key run one at a time, oldest first; who waits, who does not, and who is told."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from durable_core import Retry, deliveries
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, carry_out, claim_one, perform, perform_due
from durable_core.deliveries.worker import Worker
from tests.conftest import effects_of

LIVE = "state in ('pending', 'processing')"


def refuse(step, n=0):
    raise RuntimeError("not now")


def claimed(engine, kind, row_id, worker):
    with engine.begin() as tx:
        return claim_one(tx, kind, row_id, worker.holder)


def test_the_second_of_a_line_waits_for_the_first_whatever_is_hinted(engine, worker, kind, make, row):
    first, second, other = (make(ordering_key=key) for key in ("line", "line", "another"))
    assert perform(worker, kind, second.id).outcome is Outcome.NOTHING_TO_DO
    held = claimed(engine, kind, first.id, worker)
    assert perform(worker, kind, second.id).outcome is Outcome.NOTHING_TO_DO
    assert perform(worker, kind, other.id).outcome is Outcome.SENT
    assert carry_out(worker, kind, held).outcome is Outcome.SENT
    assert perform(worker, kind, second.id).outcome is Outcome.SENT
    assert row(second.id).ordering_key == "line"


def test_a_batch_takes_the_first_of_each_line(worker, make):
    """Of whatever kind: the key alone makes the line."""
    made = [make(ordering_key=key).id for key in ("a", "a", "b", "b", "a", "b")]
    rounds = [[done.id for done in perform_due(worker, 10)] for _ in range(4)]
    assert rounds == [[made[0], made[2]], [made[1], made[3]], [made[4], made[5]], []]


def test_kinds_share_a_line(worker, declare, make):
    one, two = declare(), declare()
    first, second = make(one, ordering_key="order:7"), make(two, ordering_key="order:7")
    assert perform(worker, two, second.id).outcome is Outcome.NOTHING_TO_DO
    assert perform(worker, one, first.id).outcome is Outcome.SENT
    assert perform(worker, two, second.id).outcome is Outcome.SENT


@pytest.mark.parametrize("ordering", ["loose", "strict"])
@pytest.mark.parametrize("state", ["failed", "dead"])
def test_one_that_failed_for_good_holds_up_a_strict_line_until_a_person_acts(
    engine, worker, declare, make, state, ordering
):
    kind = declare(ordering=ordering)
    first, second = make(kind, ordering_key="line", state=state), make(kind, ordering_key="line")
    if ordering == "strict":
        assert perform(worker, kind, second.id).outcome is Outcome.NOTHING_TO_DO
        with engine.begin() as tx:
            deliveries.discard(tx, first.id, by="dana", reason="the order is gone")
    assert perform(worker, kind, second.id).outcome is Outcome.SENT


def test_a_redriven_one_goes_before_those_behind_it(engine, worker, declare, make):
    kind = declare(ordering="strict")
    first, second = make(kind, ordering_key="line", state="dead"), make(kind, ordering_key="line")
    with engine.begin() as tx:
        deliveries.redrive(tx, first.id, by="dana", reason="mended")
    assert perform(worker, kind, second.id).outcome is Outcome.NOTHING_TO_DO
    assert perform(worker, kind, first.id).outcome is Outcome.SENT
    assert perform(worker, kind, second.id).outcome is Outcome.SENT


@pytest.mark.field("R33")
def test_one_that_waits_for_its_retry_holds_the_key(worker, declare, make, clock):
    kind = declare(refuse)
    first, second = make(kind, ordering_key="line"), make(ordering_key="line")
    assert perform(worker, kind, first.id).outcome is Outcome.RETRY
    assert [done.id for done in perform_due(worker, 10)] == []
    clock.advance(60)
    assert [done.id for done in perform_due(worker, 10)] == [first.id]
    assert second.id


@pytest.mark.field("R33")
def test_one_that_is_not_due_and_has_not_begun_stands_aside(worker, kind, make, clock):
    later, now = make(ordering_key="line", countdown=3600), make(ordering_key="line")
    assert perform(worker, kind, now.id).outcome is Outcome.SENT
    clock.advance(3601)
    assert perform(worker, kind, later.id).outcome is Outcome.SENT


def test_whoever_has_begun_goes_before_an_older_one_that_came_to_be_seen_later(
    engine, other_engine, worker, declare, make, clock
):
    kind = declare(refuse)
    with other_engine.connect() as slow, slow.begin() as open_transaction:
        older = kind.options(ordering_key="line").enqueue(slow)
        younger = make(kind, ordering_key="line")
        assert perform(worker, kind, younger.id).outcome is Outcome.RETRY
        open_transaction.commit()
    clock.advance(5)
    assert perform(worker, kind, older.id).outcome is Outcome.NOTHING_TO_DO
    clock.advance(60)
    assert perform(worker, kind, younger.id).outcome is Outcome.RETRY


@pytest.mark.field("R33")
def test_the_key_is_free_when_its_holder_was_lost_on_its_last_go(database, worker, declare, make, clock):
    kind = declare(max_interruptions=0)
    first, second = make(kind, ordering_key="line", state="processing"), make(kind, ordering_key="line")
    clock.advance(31)
    assert sweep.reap(database) == 1
    assert first.id
    assert perform(worker, kind, second.id).outcome is Outcome.SENT


@pytest.mark.parametrize("state", ["sent", "canceled", "expired"])
def test_one_that_ended_otherwise_holds_up_nobody(worker, declare, make, state):
    kind = declare(ordering="strict")
    assert make(kind, ordering_key="line", state=state)
    assert perform(worker, kind, make(kind, ordering_key="line").id).outcome is Outcome.SENT


def test_claims_that_do_not_see_each_other_take_one_of_a_line(engine, other_engine, worker, declare, kind, make):
    """Two of a line, each the first in the eyes of its own claim: the database lets one through."""
    first = make(ordering_key="line", countdown=3600)
    second = make(ordering_key="line")
    with engine.connect() as mine, mine.begin() as transaction:
        assert claim_one(mine, kind, second.id, worker.holder)
        with engine.begin() as tx:
            tx.execute(
                text("update durable.deliveries set due_at = durable.durable_now() where id = :id"), {"id": first.id}
            )
        with ThreadPoolExecutor(1) as pool:
            racing = pool.submit(perform, worker, kind, first.id)
            with pytest.raises(TimeoutError):
                racing.result(timeout=0.5)  # it waits for the index, which knows of the claim that it does not see
            transaction.commit()
            assert racing.result(timeout=10).outcome is Outcome.NOTHING_TO_DO
    with engine.connect() as tx:
        running = tx.scalars(text("select id from durable.deliveries where state = 'processing'")).all()
    assert [str(row_id) for row_id in running] == [second.id]


def test_two_of_a_key_never_overlap_and_all_come_through(engine, database, make_worker, declare, make):
    """Eight workers at sixty deliveries of three keys, with retries among them."""
    running: dict[str, int] = {}
    overlaps, order = [], []
    guard = threading.Lock()

    def handler(step, line, n):
        with guard:
            running[line] = running.get(line, 0) + 1
            if running[line] > 1:
                overlaps.append((line, n))
        try:
            if n % 7 == 3 and step.attempt == 1:
                raise Retry("once more", after=0)
        finally:
            with guard:
                running[line] -= 1
        order.append((line, n))

    kind = declare(handler)
    made = [make(kind, {"line": f"line {n % 3}", "n": n}, ordering_key=f"line {n % 3}") for n in range(60)]
    workers = [make_worker() for _ in range(8)]

    def work(worker: Worker):
        while True:
            perform_due(worker, 3)
            with engine.connect() as tx:
                if not tx.scalar(
                    text("select count(*) from durable.deliveries where state in ('pending', 'processing')")
                ):
                    return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, workers, timeout=60))
    assert overlaps == []
    for line in {"line 0", "line 1", "line 2"}:
        assert [n for name, n in order if name == line] == sorted(n for name, n in order if name == line)
    assert len(order) == len(made)


def test_whoever_ends_hints_the_next_of_its_line_and_dispatch_leaves_the_others(
    database, worker, kind, make, clock, carrier
):
    first, second, third = (make(ordering_key="line") for _ in range(3))
    sweep.dispatch(database)
    assert [hint.id for hint in carrier.published] == [first.id]
    perform(worker, kind, first.id)
    assert [hint.id for hint in carrier.offered] == [second.id]
    carrier.published.clear()
    carrier.lying.clear()
    # Its hint was lost: dispatch finds it when it looks at those it left the next time.
    clock.advance(6)
    sweep.dispatch(database)
    assert [hint.id for hint in carrier.published] == [second.id]
    assert third.id


@pytest.mark.parametrize(("act", "state"), [(deliveries.cancel, "pending"), (deliveries.discard, "dead")])
def test_a_canceled_or_discarded_one_lets_the_next_be_hinted(engine, declare, make, carrier, act, state):
    kind = declare(ordering="strict")
    first, second = make(kind, ordering_key="line", state=state), make(kind, ordering_key="line")
    with Session(engine) as session, session.begin():
        act(session, first.id, by="dana", reason="not needed")
    assert [hint.id for hint in carrier.offered] == [second.id]


def test_an_ordered_effect_happens_once(engine, worker, kind, make):
    made = make(ordering_key="line")
    perform(worker, kind, made.id)
    assert len(effects_of(engine, made.id)) == 1
