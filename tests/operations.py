"""What tests of operations share: a provider that they play with, and kinds that talk to it."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from durable_core import Issued, OperationKind, OperationRef, kinds, operation, operations
from durable_core.deliveries.worker import Attempted, Worker
from durable_core.demo.provider import Server
from durable_core.operations.attempt import perform
from durable_core.operations.read import Operation
from durable_core.testing import MovableClock

WORDS = {"done": "ok", "working": "running", "broken": "failed", "stopped": "canceled"}


class Provider:
    """The other side, from the tests' side."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, told: dict[str, Any] | None = None) -> dict[str, Any]:
        body = None if told is None else json.dumps(told).encode()
        request = urllib.request.Request(self.url + path, data=body, method="GET" if told is None else "POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def events(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.ask("/log")["events"] if one["event"] == event]

    def issued_under(self, key: str) -> int:
        return len([one for one in self.events("issued") if one["key"] == key])

    @property
    def issued(self) -> int:
        return len(self.events("issued"))

    @property
    def polled(self) -> int:
        return len(self.events("polled"))

    def ids(self) -> list[str]:
        """Those of what was issued last."""
        found: list[str] = self.events("issued")[-1]["ids"]
        return found

    def set(self, status: str, *ids: str) -> None:
        for one in ids or self.ids():
            self.ask(f"/operations/{one}", {"status": status})

    # what a kind does

    def issue(self, key: str, parts: int = 1, seconds: float | None = None) -> Issued:
        return Issued(self.ask("/operations", {"key": key, "parts": parts, "seconds": seconds})["ids"])

    def statuses(self, ids: list[str]) -> dict[str, str]:
        return {one: self.ask(f"/operations/{one}")["status"] for one in ids}

    def found(self, key: str) -> Issued | None:
        try:
            return Issued(self.ask(f"/keys?key={key}")["ids"])
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


@contextmanager
def provider_here(folder: Path) -> Iterator[Provider]:
    """A provider in a thread of this process."""
    server = Server(folder / "provider.jsonl")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Provider(server.url)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def resetting(provider: Provider, name: str, *, finds: bool = False, **terms: Any) -> Any:
    """A kind that issues one operation of the provider and polls it."""

    def reset(step: Any, branch: str = "preview", *, parts: int = 1) -> Issued:
        return provider.issue(step.key, parts)

    kind = operation(name, **{"statuses": WORDS, **terms})(reset)
    kind.poll(lambda step, ids: provider.statuses(ids))
    if finds:
        kind.find(lambda step: provider.found(step.key))
    return kind


# --- fixtures, for the folders whose conftest imports them -------------------------------------------

_numbers = itertools.count(1)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Provider]:
    """The other side of operations: a real HTTP server, with its file."""
    with provider_here(tmp_path) as provider:
        yield provider


@pytest.fixture
def declare_operation(remote: Provider) -> Iterator[Callable[..., OperationKind]]:
    """Declare an operation for this test alone; its handler talks to the remote."""
    declared: list[str] = []

    def declare(**terms: Any) -> OperationKind:
        kind = resetting(remote, f"test.operation_{next(_numbers)}", **terms)
        declared.append(kind.name)
        return kind

    yield declare
    for name in declared:
        kinds.operations.remove(name)


@pytest.fixture
def reset(declare_operation: Callable[..., OperationKind]) -> OperationKind:
    """An operation of the remote, one in flight at a time."""
    return declare_operation()


@pytest.fixture
def start(engine: Engine) -> Callable[..., OperationRef]:
    """Start one and commit: `start(kind, "preview", key="k")`; the ref."""

    def _start(kind: OperationKind, *arguments: Any, key: str | None = None, by: str = "dana", **more: Any) -> Any:
        with engine.begin() as tx:
            return kind.options(key=key).start(tx, *arguments, by=by, **more)

    return _start


@pytest.fixture
def operation_row(engine: Engine) -> Callable[[str], Operation]:
    """The committed row of an operation."""

    def _row(row_id: str) -> Operation:
        with engine.connect() as tx:
            return operations.get(tx, row_id)

    return _row


@pytest.fixture
def look(worker: Worker, clock: MovableClock) -> Callable[..., Attempted]:
    """Have a worker look at an operation, as a hint makes it do, so many seconds later."""

    def _look(kind: OperationKind, row_id: str, *, after: float = 0.0, by: Worker | None = None) -> Attempted:
        if after:
            clock.advance(seconds=after)
        return perform(by or worker, kind, row_id)

    return _look
