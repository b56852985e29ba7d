"""Workers that hear of work before it is committed, again and again: they find nothing until it is."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from sqlalchemy import text

from durable_core.deliveries.attempt import perform, perform_due

CALLERS = 12


@pytest.mark.full_size
@pytest.mark.field("R42")
def test_a_worker_hinted_before_the_commit_runs_after_it_always_and_after_a_rollback_never(
    engine, other_engine, declare, make_worker, row, lines, sized, seed
):
    """The caller inserts an order, starts work about it, sleeps and ends; two workers ask for it all the while."""
    tries, longest = sized(60, 500), sized(0.04, 3.0)
    tx_of_caller: dict[str, bool] = {}
    found: dict[str, str | None] = {}

    def handler(step, order):
        there = step.session.scalar(text("select note from effects where row_id = :order"), {"order": order})
        found[step.id] = there

    kind = declare(handler)
    hinted: list[str] = []
    ended = threading.Event()

    def call(number):
        random = Random(f"{seed} {number}")
        order = f"order {number}"
        with other_engine.connect() as tx:
            tx.execute(text("insert into effects (row_id, note) values (:order, 'placed')"), {"order": order})
            ref = kind.options(key=order if number % 2 else None).enqueue(tx, order)
            hinted.append(ref.id)
            time.sleep(random.uniform(0, longest))
            tx_of_caller[ref.id] = random.random() < 0.7
            if tx_of_caller[ref.id]:
                tx.commit()
            else:
                tx.rollback()

    def work():
        worker = make_worker()
        while not ended.is_set():
            for row_id in hinted[-2 * CALLERS :]:
                perform(worker, kind, row_id)
            perform_due(worker, 5)
        perform_due(worker, tries)

    with ThreadPoolExecutor(CALLERS) as callers, ThreadPoolExecutor(2) as workers:
        working = [workers.submit(work) for _ in range(2)]
        try:
            for call_ in [callers.submit(call, number) for number in range(tries)]:
                call_.result()
        finally:
            ended.set()
        for worked in working:
            worked.result()

    committed = {row_id for row_id, stands in tx_of_caller.items() if stands}
    assert len(tx_of_caller) == tries > len(committed) > 0
    assert found == dict.fromkeys(committed, "placed")
    with engine.connect() as tx:
        assert set(tx.scalars(text("select id::text from durable.deliveries"))) == committed, "of a rollback nothing"
        assert tx.scalar(text("select count(*) from effects")) == len(committed)
    for row_id in committed:
        assert (row(row_id).state, row(row_id).attempts) == ("sent", 1)
        assert lines(row_id) == []
