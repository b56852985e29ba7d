"""The shop orders parts from a supplier: an operation, whose other side is killed and restarted while it is polled."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from durable_core import kinds
from durable_core.demo.processes import Process, Processes
from durable_core.errors import Retry
from durable_core.local.server import free_port
from durable_core.operations import read
from durable_core.operations.declare import OperationKind, OperationStep, operation
from durable_core.operations.read import Operation
from durable_core.operations.statuses import Issued

RESTOCK = "shop.restock"
PARTS = 2
WITHIN = 90.0
"""Seconds in which it has to have ended, its supplier's death and its workers' included."""


def declare(port: int, queue: str) -> OperationKind:
    """The operation. Who carries it out asks the supplier at this port."""
    url = f"http://127.0.0.1:{port}"

    @operation(
        RESTOCK, queue=queue, every=0.5, lease=60, timeout=20,
        statuses={"done": "ok", "working": "running"},
    )  # fmt: skip
    def restock(step: OperationStep, parts: int) -> Issued:
        try:
            return Issued(_asked(f"{url}/operations", {"key": step.key, "parts": parts})["ids"])
        except urllib.error.HTTPError:
            raise  # it has answered
        except (OSError, http.client.HTTPException, ValueError) as lost:
            if isinstance(getattr(lost, "reason", None), ConnectionRefusedError):
                raise  # nobody was there to begin anything
            # It may have begun: it is looked for by the key, and not ordered again.
            raise Retry("the supplier's answer was lost") from lost

    @restock.poll
    def poll(step: OperationStep, ids: list[str]) -> dict[str, str]:
        return {one: _asked(f"{url}/operations/{one}")["status"] for one in ids}

    @restock.find
    def find(step: OperationStep) -> Issued | None:
        try:
            return Issued(_asked(f"{url}/keys?{urllib.parse.urlencode({'key': step.key})}")["ids"])
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    return restock


def declared(port: int, queue: str) -> OperationKind:
    """The same for a process that only starts it: that of an earlier demo in it serves again."""
    return kinds.operations.find(RESTOCK) or declare(port, queue)


def _asked(url: str, told: dict[str, Any] | None = None) -> dict[str, Any]:
    body = None if told is None else json.dumps(told).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=5.0) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@dataclass(frozen=True)
class Restocked:
    """How the operation ended, and how often the supplier was told to begin it, by its own book."""

    state: str
    error_code: str | None
    issued: int
    polled: int
    supplier_killed: bool

    @property
    def kept(self) -> bool:
        """Issued once at most; and done, or honestly said to be unknown, where a worker died around the call."""
        done = self.state == "succeeded" and self.issued == 1
        return done or (self.error_code == "OUTCOME_UNKNOWN" and self.issued <= 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "state": self.state, "error_code": self.error_code, "issued": self.issued, "polled": self.polled,
            "supplier_killed": self.supplier_killed, "kept": self.kept,
        }  # fmt: skip


class Supplier:
    """The supplier's process. Its book is a file, so a kill takes nothing that it answered."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes, self._book = processes, folder / "supplier.book"
        self.port = free_port()
        self._process: Process | None = None

    def start(self) -> None:
        self._process = self._processes.start(
            "supplier", "durable_core.demo.provider", str(self._book), str(self.port), environment={}
        )

    def kill(self) -> None:
        if self._process is not None:
            self._processes.kill(self._process)
            self._process = None

    def finish(self, ids: list[str], stop: threading.Event) -> None:
        """Have it be done with these, as soon as it answers."""
        for one in ids:
            while not stop.wait(0.1):
                try:
                    _asked(f"http://127.0.0.1:{self.port}/operations/{one}", {"status": "done"})
                    break
                except OSError:
                    continue  # it is starting

    def events(self, event: str) -> int:
        """How often this happened, by its book."""
        lines = self._book.read_text(encoding="utf-8").splitlines() if self._book.exists() else []
        return sum(json.loads(line)["event"] == event for line in lines if line.endswith("}"))


def restocked(
    engine: Engine, kind: OperationKind, supplier: Supplier, tell: Callable[[str], None], stop: threading.Event
) -> Restocked | None:
    """Order once, kill and restart the supplier once it is polled, and wait for the end; None if stopped before."""
    with engine.begin() as tx:
        row_id = kind.start(tx, PARTS, by="the shop").id
    until, killed = time.monotonic() + WITHIN, False
    while not stop.wait(0.2):
        with engine.connect() as tx:
            row = read.get(tx, row_id)
        if row.ended or time.monotonic() > until:
            return _result(row, supplier, killed)
        if not killed and row.polls:
            supplier.kill()
            killed = True
            tell("the supplier was killed while its order was polled")
            stop.wait(2.0)
            supplier.start()
            tell("the supplier is back")
            supplier.finish(row.external_ids or [], stop)
    return None


def _result(row: Operation, supplier: Supplier, killed: bool) -> Restocked:
    return Restocked(row.state.value, row.error_code, supplier.events("issued"), supplier.events("polled"), killed)
