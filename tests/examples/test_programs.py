"""Every program in `examples/` runs, and its work is done by a real Celery worker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sqlalchemy import text

from durable_core import deliveries
from durable_core.deliveries.read import Delivery
from durable_core.local import Addresses
from tests.examples.conftest import Programs
from tests.examples.pages import EXAMPLES, page, pages

SECONDS = 60
OF_CASES = "house_sale.py"
CLIENTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ("myshop.py", OF_CASES))


@pytest.fixture
def programs(programs: Programs, services: Addresses) -> Programs:
    """With a Redis database of its own: other tests of this process use the first."""
    return replace(programs, redis_url=services.redis_url.rsplit("/", 1)[0] + "/7")


@contextmanager
def celery(programs: Programs, *arguments: str) -> Iterator[None]:
    """A Celery process of the example's app; ended at the end of the block."""
    log = programs.directory / f"{arguments[0]}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "celery_app", *arguments], cwd=programs.directory,
            env=programs.environment, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield
        except BaseException:
            print(log.read_text())
            raise
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def once_all_are_sent(programs: Programs, wanted: int) -> list[Delivery]:
    """The deliveries, once so many are there and sent."""
    end = time.monotonic() + SECONDS
    while True:
        with programs.engine.connect() as tx:
            rows = deliveries.page(tx)
        if len(rows) == wanted and {row.state for row in rows} == {"sent"}:
            return rows
        assert time.monotonic() < end, [(row.kind, row.state, row.error_message) for row in rows]
        time.sleep(0.1)


def test_the_examples_say_what_they_promise(programs: Programs) -> None:
    assert programs.run(str(EXAMPLES / "in_a_session.py")).split() == ["IDEMPOTENCY_CONFLICT", "NOT_FOUND", "pending"]
    assert "hints: 1" in programs.run(str(EXAMPLES / "plain_psycopg.py"))


def test_the_house_is_sold_once_both_have_signed(programs: Programs) -> None:
    """Each buyer signs by the signature service's webhook; one that comes twice, or is of nobody, does no harm."""
    assert programs.run(str(EXAMPLES / OF_CASES)).splitlines() == [
        "dana can: agree_price",
        "dana can: agree_price, send_contract ada, send_contract ben",
        "dana can: do nothing now",
        "webhook: executed",
        "webhook: duplicate",
        "webhook: executed",
        "webhook: duplicate",
        "webhook: dead-lettered unrouted",
        "dana can: hand_over_keys",
        "journal: agree_price, send_contract, send_contract, record_signature, record_signature, hand_over_keys",
        "still true: True",
    ]


@pytest.mark.serial
def test_a_worker_of_the_example_app_does_the_work(programs: Programs) -> None:
    """With one worker, started without -Q, and a beat: nothing of the app is configured but the engine."""
    for name in CLIENTS:
        programs.run(str(EXAMPLES / name))
    with (
        celery(programs, "worker", "--pool", "threads", "--concurrency", "2"),
        celery(programs, "beat", "--schedule", str(programs.directory / "beat")),
    ):
        rows = once_all_are_sent(programs, len(CLIENTS))
    with programs.engine.connect() as tx:
        noted = tx.scalars(text("select sent_as from invoices")).all()
    assert sorted(noted) == sorted(row.result for row in rows)


def test_every_example_is_named_in_the_documentation() -> None:
    readme = page("README.md").text
    assert "(examples/)" in readme
    assert any("from myshop import" in shown.text for shown in pages())
