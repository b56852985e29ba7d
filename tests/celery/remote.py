"""Operations whose workers can be held around their call: one kind can look up what became of it, the other cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from durable_core import Issued, OperationKind, OperationStep, kinds, operation
from durable_core.local.server import free_port
from tests.celery.conftest import Nodes
from tests.celery.nodes import Process, ShopContainer, ShopWorker, wait_until
from tests.celery.shop import hold
from tests.operations import WORDS, Provider

DONE_AFTER = 1.0
"""Seconds after which the other side has done what was issued to it."""

BRIEF_SECONDS = 2.0
"""The time that one of the kinds has for its call."""


def other_side() -> Provider:
    return Provider(os.environ["REMOTE_URL"])


def hold_once(step: OperationStep, here: str, wanted: object) -> None:
    """Held where the operation says, the first time."""
    if wanted == here and not (Path(os.environ["SHOP_GATES"]) / f"{step.id}.reached").exists():
        hold(step.id)


def call(step: OperationStep, held: str = "") -> Issued:
    hold_once(step, "before", held)
    issued = other_side().issue(step.key, seconds=DONE_AFTER)
    hold_once(step, "after", held)
    return issued


def precheck(step: OperationStep, held: str = "") -> None:
    hold_once(step, "precheck", held)


def poll(step: OperationStep, ids: list[str]) -> dict[str, str]:
    hold_once(step, "poll", step.arguments["held"])
    return other_side().statuses(ids)


def find(step: OperationStep) -> Issued | None:
    return other_side().found(step.key)


class Remote:
    """The kinds, declared in this process."""

    def __init__(self) -> None:
        terms: dict[str, Any] = {"queue": "remote", "statuses": WORDS, "every": 0.5, "one_in_flight": False}
        self.plain, self.found = (operation(f"remote.{name}", **terms)(call) for name in ("plain", "found"))
        self.brief = operation("remote.brief", **terms, timeout=BRIEF_SECONDS)(call)
        for kind in self.all:
            kind.poll(poll)
            kind.precheck(precheck)
        self.found.find(find)

    @property
    def all(self) -> tuple[OperationKind, ...]:
        return self.plain, self.found, self.brief

    def forget(self) -> None:
        for kind in self.all:
            kinds.operations.remove(kind.name)


class RemoteContainer(ShopContainer):
    """A `celery worker` of these kinds."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return ["celery", "-A", "tests.celery.remote_app", "worker", f"--loglevel={cls.log_level()}", *args]


def remote_worker(nodes: Nodes, name: str, url: str, *arguments: str) -> ShopWorker:
    """A worker that is starting; `ready()` waits for it. It ends with the other nodes."""
    described = nodes._described(name, arguments, {"REMOTE_URL": url})
    node = ShopWorker(RemoteContainer(*described), app=nodes._app)
    nodes._nodes.append(node)
    return node


@contextmanager
def provider_process(folder: Path) -> Iterator[tuple[Provider, Process]]:
    """The other side as a process of its own, to be killed and restarted; its file is in the folder."""
    port = free_port()
    command = [sys.executable, "-m", "durable_core.demo.provider", str(folder / "provider.jsonl"), str(port)]
    process = Process("provider", command, folder, dict(os.environ))
    provider = Provider(f"http://127.0.0.1:{port}")
    try:
        await_answer(provider)
        yield provider, process
    finally:
        process.stop()


def await_answer(provider: Provider) -> None:
    def answers() -> bool:
        try:
            provider.ask("/log")
        except OSError:
            return False
        return True

    wait_until(answers, "the provider answers")
