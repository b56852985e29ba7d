"""What can befall the Valkey of a stage, each with its end: `with frozen(stage.broker): ...`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from tests.celery.nodes import Broker, wait_until


def end(broker: Broker, how: str = "killed") -> None:
    """End it, `killed` or `shut down`; nobody listens on its port when this returns."""
    if how == "killed":
        broker.container.process.kill("SIGKILL")
    else:
        broker.client.shutdown(nosave=True)
        broker.container.process.wait(20)


def start_again(broker: Broker) -> None:
    """On its port; with what its file says, if it appends to one, and else empty."""
    broker.container.process.start()
    broker.container.ready()


@contextmanager
def away(broker: Broker, how: str = "killed") -> Iterator[None]:
    """Its port is closed while this lasts."""
    end(broker, how)
    try:
        yield
    finally:
        start_again(broker)


@contextmanager
def frozen(broker: Broker) -> Iterator[None]:
    """It takes connections, as the kernel does for it, and answers nobody."""
    os.kill(broker.container.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.container.process.pid, signal.SIGCONT)


@contextmanager
def writes_paused(broker: Broker) -> Iterator[None]:
    """It answers reads, and keeps every writer waiting."""
    client = broker.client
    client.client_pause(600_000, all=False)
    try:
        yield
    finally:
        client.client_unpause()


@contextmanager
def read_only(broker: Broker) -> Iterator[None]:
    """A replica of a primary that is nowhere: every write, a worker's BRPOP included, is answered with READONLY."""
    client = broker.client
    client.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        client.replicaof("NO", "ONE")


@contextmanager
def full(broker: Broker) -> Iterator[None]:
    """Over its memory limit under noeviction: writes are refused."""
    client = broker.client
    client.config_set("maxmemory", "1mb")
    # Client buffers count too, so a little more is put in until nothing goes in any more.
    wait_until(lambda: _refused(client), "writes are refused")
    try:
        yield
    finally:
        client.config_set("maxmemory", "0")
        client.delete("filler")


def _refused(client: redis.Redis) -> bool:
    try:
        client.append("filler", "x" * 100_000)
    except redis.exceptions.OutOfMemoryError:
        return True
    return False


@contextmanager
def evicting(broker: Broker) -> Iterator[None]:
    """Over its memory limit under allkeys-lru: any key may be taken away, and a queue is one."""
    client = broker.client
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", "1mb")
    try:
        yield
    finally:
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", "noeviction")
