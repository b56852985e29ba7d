from datetime import timedelta
from pathlib import Path

import pytest
from app import Order, confirm, pack, place_order
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from durable_core.testing import (
    MovableClock,
    WorkerProcess,
    assert_enqueued,
    drain,
    frozen_worker,
    killed_worker,
    refute_enqueued,
    run_one,
    wait_for,
)


def new_order(engine: Engine, email: str = "ann@example.org") -> int:
    with Session(engine) as session, session.begin():
        session.add(order := Order(email=email))
        session.flush()
        return order.id


def confirmed(engine: Engine, order_id: int) -> int:
    with Session(engine) as session:
        return session.get_one(Order, order_id).confirmed


def test_an_order_is_confirmed_once(durable_session: Session) -> None:
    order_id = place_order(durable_session, "ann@example.org")

    (row,) = assert_enqueued(durable_session, confirm.options(key=f"order:{order_id}"), order_id=order_id)
    assert row.queue == "mail"
    refute_enqueued(durable_session, confirm, order_id=order_id, copy=True)


def test_a_full_mailbox_is_tried_again_twice(durable_engine: Engine, durable_clock: MovableClock) -> None:
    with Session(durable_engine) as session, session.begin():
        place_order(session, "later@example.org")

    assert [one.outcome for one in drain(durable_engine)] == ["will be tried again"]
    durable_clock.advance(seconds=601)
    assert [one.outcome for one in drain(durable_engine)] == ["will be tried again"]
    assert [one.outcome for one in drain(durable_engine, through=timedelta(hours=1))] == ["dead"]


def test_a_wrong_address_is_told(durable_engine: Engine) -> None:
    with pytest.raises(ValueError, match="'nowhere' is no address"):
        run_one(durable_engine, confirm, new_order(durable_engine, "nowhere"))


def test_a_worker_confirms_it(durable_engine: Engine, durable_worker: WorkerProcess) -> None:
    order_id = new_order(durable_engine)
    with durable_engine.begin() as tx:
        ref = confirm.enqueue(tx, order_id)

    assert wait_for(durable_engine, ref).result == "to ann@example.org"
    assert confirmed(durable_engine, order_id) == 1


def test_a_killed_worker_leaves_the_order_to_the_next(
    durable_engine: Engine, durable_worker: WorkerProcess, tmp_path: Path
) -> None:
    order_id, gate = new_order(durable_engine), tmp_path / "open"
    with durable_engine.begin() as tx:
        ref = pack.enqueue(tx, order_id, str(gate))
    wait_for(durable_engine, ref, state="processing")

    with killed_worker(durable_worker):
        gate.touch()

    row = wait_for(durable_engine, ref, seconds=60)
    assert (row.state, row.interruptions, confirmed(durable_engine, order_id)) == ("sent", 1, 1)


def test_without_a_worker_the_order_waits(durable_engine: Engine, durable_worker: WorkerProcess) -> None:
    with killed_worker(durable_worker, restart=False):
        pass
    with durable_engine.begin() as tx:
        ref = confirm.enqueue(tx, new_order(durable_engine))
    with pytest.raises(TimeoutError):
        wait_for(durable_engine, ref, seconds=2)


def test_a_frozen_worker_does_nothing_until_it_goes_on(durable_engine: Engine, durable_worker: WorkerProcess) -> None:
    with frozen_worker(durable_worker):
        with durable_engine.begin() as tx:
            ref = confirm.enqueue(tx, new_order(durable_engine))
        with pytest.raises(TimeoutError):
            wait_for(durable_engine, ref, seconds=2)

    assert wait_for(durable_engine, ref).state == "sent"
