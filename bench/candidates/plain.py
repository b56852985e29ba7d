"""Plain Celery: a task that does nothing. Acknowledged late, as teams do that do not want to lose one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from celery import Celery

from bench.candidates import SETTINGS, broker_url, mark

app = Celery("bench-plain", broker=broker_url())
app.conf.update(SETTINGS, task_acks_late=True, task_default_queue="bench.plain")


@app.task(name="bench.plain")
def work(number: int) -> None:
    mark(number)


@contextmanager
def sender(url: str) -> Iterator[Callable[[int], object]]:
    yield work.delay


def send_all(url: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        work.delay(number)
