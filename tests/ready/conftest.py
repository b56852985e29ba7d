"""What the tests of the ready kinds share: a real receiver, and kinds under names of their own."""

import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from durable_core.deliveries.attempt import Attempted, Worker, perform
from durable_core.deliveries.declare import DeliveryKind, registry
from durable_core.ready import email, notify, webhook
from tests.sinks import Receiver, http_server

_numbers = itertools.count(1)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_server() as receiver:
        yield receiver


def _under_names_of_their_own(declare: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`tasks` may be loaded in this process, and has the usual names."""
    declared: list[str] = []

    def _declare(*settings: Any, **terms: Any) -> DeliveryKind[..., Any]:
        name = f"test.ready_{next(_numbers)}"
        kind: DeliveryKind[..., Any] = declare(*settings, name=name, **terms)
        declared.append(name)
        return kind

    yield _declare
    for name in declared:
        registry.remove(name)


@pytest.fixture
def declare_webhook() -> Iterator[Callable[..., Any]]:
    yield from _under_names_of_their_own(webhook.declare)


@pytest.fixture
def declare_email() -> Iterator[Callable[..., Any]]:
    yield from _under_names_of_their_own(email.declare)


@pytest.fixture
def declare_notify() -> Iterator[Callable[..., Any]]:
    yield from _under_names_of_their_own(notify.declare)


@pytest.fixture
def carry_out(engine: Engine, worker: Worker) -> Callable[..., Attempted]:
    """Enqueue one delivery and attempt it once."""

    def _carry_out(kind: DeliveryKind[..., Any], **arguments: Any) -> Attempted:
        with engine.begin() as connection:
            ref = kind.enqueue(connection, **arguments)
        return perform(worker, kind, ref.id)

    return _carry_out


class Names:
    """A resolver of the test's: `names["shop.example"] = ["127.0.0.1"]`; how often each was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self._real = socket.getaddrinfo

    def __setitem__(self, name: str, addresses: Any) -> None:
        self.answers[name] = addresses

    def __call__(self, host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host not in self.answers or options.get("flags") == socket.AI_NUMERICHOST:
            return self._real(host, port, *arguments, **options)
        self.asked.append(host)
        answer = self.answers[host]
        addresses = answer() if callable(answer) else answer
        return [found for one in addresses for found in self._real(one, port, type=socket.SOCK_STREAM)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    return names
