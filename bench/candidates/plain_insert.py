"""Plain Celery with one INSERT in each task, by psycopg on a connection in autocommit that each child keeps."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import psycopg
from celery import Celery
from sqlalchemy import make_url

from bench.candidates import SETTINGS, broker_url, mark
from durable_core.database.environment import DATABASE_VARIABLE

INSERT = "insert into effects (number, pid) values (%s, %s)"

app = Celery("bench-plain-insert", broker=broker_url())
app.conf.update(SETTINGS, task_acks_late=True, task_default_queue="bench.plain_insert")


@lru_cache(maxsize=1)
def _connection(pid: int) -> psycopg.Connection:
    url = make_url(os.environ[DATABASE_VARIABLE]).set(drivername="postgresql")
    return psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)


@app.task(name="bench.plain_insert")
def work(number: int) -> None:
    mark(number)
    _connection(os.getpid()).execute(INSERT, (number, os.getpid()))


@contextmanager
def sender(url: str) -> Iterator[Callable[[int], object]]:
    yield work.delay


def send_all(url: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        work.delay(number)
