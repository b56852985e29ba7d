"""Deliveries with one hint each, as `tasks/` deploys them: one kind touches no database, one inserts its effect."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from bench.candidates import SETTINGS, broker_url, mark
from durable_core import Step, delivery
from durable_core.celery_binding import install
from durable_core.celery_binding.environment import engine_from_environment
from durable_core.celery_binding.transport import guarded
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.enqueue import enqueue_many

INSERT = text("insert into effects (number, pid) values (:number, :pid)")

app = Celery("bench-ours", broker=guarded(broker_url()))
app.conf.update(SETTINGS, durable_engine=engine_from_environment, worker_prefetch_multiplier=1)
durable = install(app)


@delivery("bench.note")
def note(step: Step, number: int) -> None:
    mark(number)


@delivery("bench.note_and_insert")
def note_and_insert(step: Step, number: int) -> None:
    mark(number)
    step.session.execute(INSERT, {"number": number, "pid": os.getpid()})


@contextmanager
def sender(url: str, kind: DeliveryKind[[int], None] = note) -> Iterator[Callable[[int], object]]:
    engine = create_engine(url)

    def send(number: int) -> None:
        with Session(engine) as session, session.begin():
            kind.enqueue(session, number)

    yield send
    engine.dispose()


def send_all(url: str, numbers: Iterable[int], kind: DeliveryKind[[int], None] = note) -> None:
    engine = create_engine(url)
    left = list(numbers)
    while left:
        # A session remembers 1,000 hints; what is beyond would be left to dispatch.
        batch, left = left[:500], left[500:]
        with Session(engine) as session, session.begin():
            enqueue_many(session, [kind.options().new(number) for number in batch])
    engine.dispose()
    assert durable.carrier.flush(60), "the hints did not reach the broker"
