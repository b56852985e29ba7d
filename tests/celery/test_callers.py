"""A broker that is down, slow or frozen never breaks or holds up the caller; the rows stand, and are done later."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from celery import Celery

from durable_core import wakes
from durable_core.celery_binding import Durable
from durable_core.local.server import free_port
from tests.celery import shop
from tests.celery.nodes import Broker
from tests.celery.shop import Shop
from tests.celery.world import World, installed_here

AT_MOST = 1.0
"""Seconds for enqueue and commit, whatever the broker does."""


@pytest.fixture
def web_process_of(durable: Durable) -> Iterator[Callable[[str], Durable]]:
    """This process as a web process that knows another broker than the workers do."""
    with ExitStack() as installed:

        def make(broker_url: str) -> Durable:
            app = Celery("shop", broker=broker_url)
            shop.configure(app)
            return installed.enter_context(installed_here(app))

        yield make


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def commit_some(world: World, kinds: Shop, count: int = 3) -> list[str]:
    """Commit a few, each within the bound."""
    row_ids = []
    for _ in range(count):
        began = time.monotonic()
        row_ids.append(world.commit(kinds.order))
        assert time.monotonic() - began < AT_MOST
    return row_ids


def test_with_nobody_listening_at_the_broker_a_commit_returns_and_its_rows_are_done_later(
    world: World, shop_kinds: Shop, web_process_of: Callable[[str], Durable]
) -> None:
    here = web_process_of(f"redis://127.0.0.1:{free_port()}/0")

    row_ids = commit_some(world, shop_kinds)

    world.sent(*row_ids)
    assert here.carrier.flush(20)
    assert here.carrier.failures >= 1
    assert here.carrier.dropped == len(row_ids)
    assert set(world.counts("effects").values()) == {1}


def test_with_a_frozen_broker_a_commit_returns_and_its_rows_are_done_later(
    world: World, shop_kinds: Shop, web_process_of: Callable[[str], Durable], another_broker: Broker
) -> None:
    """Frozen under a connection that had worked, and before a new one."""
    here = web_process_of(another_broker.url)
    first = commit_some(world, shop_kinds, 1)
    assert here.carrier.flush(20)
    assert here.carrier.failures == 0

    with frozen(another_broker.container.process.pid):
        during = commit_some(world, shop_kinds)
        world.sent(*first, *during)
        # The publishing thread gave up within its own bound, not when the broker came back.
        assert here.carrier.flush(20)
        assert here.carrier.failures >= 1
        after_the_breaker = commit_some(world, shop_kinds)
        world.sent(*after_the_breaker)

    assert world.counts("effects") == dict.fromkeys([*first, *during, *after_the_breaker], 1)


def test_with_the_workers_own_broker_frozen_everything_waits_and_is_then_done_once(
    world: World, shop_kinds: Shop
) -> None:
    with frozen(world.broker.container.process.pid):
        row_ids = commit_some(world, shop_kinds)
        time.sleep(1.0)

    world.sent(*row_ids)
    assert world.counts("effects") == world.counts("executions") == dict.fromkeys(row_ids, 1)


class Raising(wakes.Carrier):
    """A carrier in which everything fails."""

    def offer(self, hints: Any) -> None:
        raise RuntimeError("the publisher is broken")

    def publish(self, hints: Any) -> int:
        raise RuntimeError("the publisher is broken")

    def depths(self, queues: Any) -> dict[str, int]:
        raise RuntimeError("the publisher is broken")


def test_a_publisher_that_raises_never_reaches_the_caller(world: World, shop_kinds: Shop) -> None:
    before = wakes.carrier()
    wakes.wake()
    wakes.use_carrier(Raising())
    try:
        row_ids = commit_some(world, shop_kinds)
        with world.engine.begin() as connection:
            row_ids.append(shop_kinds.order.enqueue(connection).id)
        assert wakes.wake() == 1
    finally:
        wakes.use_carrier(before)

    world.sent(*row_ids)
