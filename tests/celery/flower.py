"""The real Flower as a process beside the running shop, and what a reader gets from it over HTTP."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import psutil

from durable_core.celery_binding.flower import CONFIGURATION
from durable_core.local.server import free_port
from tests.celery.nodes import BOOT_SECONDS, REPOSITORY, Process, wait_until

PAGE_SECONDS = 30.0
"""More than three times what a page of ours may take."""


@dataclass(frozen=True)
class Answer:
    """A page: its status, its source, and its text as a browser shows it, on one line."""

    status: int
    source: str
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.source)).split())


class Flower:
    """A running Flower; `login` is what its reader gives for a name and a password."""

    def __init__(self, process: Process, port: int, prefix: str = "", login: tuple[str, str] | None = None) -> None:
        self.process, self.port, self.login = process, port, login
        self.url = f"http://127.0.0.1:{port}{prefix}"

    def get(self, path: str, *, stranger: bool = False, **query: object) -> Answer:
        answer = httpx.get(
            f"{self.url}{path}", params={name: str(value) for name, value in query.items()},
            auth=None if stranger or self.login is None else self.login, timeout=PAGE_SECONDS,
        )  # fmt: skip
        return Answer(answer.status_code, answer.text, answer.headers)

    def post(self, path: str) -> int:
        return httpx.post(f"{self.url}{path}", auth=self.login, timeout=PAGE_SECONDS).status_code

    def delivery(self, row_id: str) -> Answer:
        return self.get(f"/delivery/{row_id}")

    def search(self, text: str) -> list[dict[str, Any]]:
        """The lines of its task list that its search box finds, as its own page asks for them."""
        answer = httpx.get(
            f"{self.url}/tasks/datatable", auth=self.login, timeout=PAGE_SECONDS,
            params={
                "draw": "1", "start": "0", "length": "100", "search[value]": text, "order[0][column]": "0",
                "order[0][dir]": "asc", "columns[0][data]": "received",
            },
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert "searchError" not in found, found
        return list(found["data"])

    def ended(self, row_id: str, *states: str) -> list[dict[str, Any]]:
        """The hints that its search finds by this id, once these are their states, the first one's first."""

        def found() -> list[dict[str, Any]] | None:
            hints = self.search(row_id)
            return hints if [hint["state"] for hint in hints] == list(states) else None

        return list(wait_until(found, f"Flower shows {states} for {row_id}"))

    def hears(self) -> None:
        """Return once events reach it: the sweeps' own come twice a second."""
        wait_until(lambda: self.search("durable.dispatch"), "Flower hears of sweeps")

    def addresses(self) -> set[str]:
        """Where it listens."""
        listening = psutil.Process(self.process.pid).net_connections("inet")
        return {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN}

    def log(self) -> str:
        return self.process.logs().decode(errors="replace")


@contextmanager
def started(
    folder: Path,
    environment: Mapping[str, str],
    *arguments: str,
    app: str = "tests.celery.shop_app",
    conf: str | None = str(CONFIGURATION),
    prefix: str = "",
    login: tuple[str, str] | None = None,
) -> Iterator[Flower]:
    """`celery flower` of this app, once it serves; ended with the block."""
    port = free_port()
    given = [f"--port={port}", *arguments]
    given += [] if conf is None else [f"--conf={conf}"]
    given += [f"--url_prefix={prefix.strip('/')}"] if prefix else []
    process = Process(
        "flower", [sys.executable, "-m", "celery", "-A", app, "flower", *given], folder,
        {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **environment},
    )  # fmt: skip
    flower = Flower(process, port, prefix, login)

    def serves() -> bool:
        assert process.status == "running", flower.log()
        try:
            return flower.get("/healthcheck").status == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(serves, "Flower serves", BOOT_SECONDS)
        yield flower
    finally:
        process.remove()
