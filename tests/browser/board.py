"""The example `examples/notes` as its own process, and what a test of its page works with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen
from uuid import UUID

import pytest
from playwright.sync_api import BrowserContext, Error, Locator, Page, expect
from sqlalchemy import Engine, text

from durable_core import Documents
from durable_core.documents import Saved
from durable_core.local.server import free_port
from tests.examples.pages import EXAMPLES, ROOT

NOTES = EXAMPLES / "notes"
CARRY_OUT = ROOT / "tests" / "examples" / "carry_out.py"
SECONDS = 20
expect.set_options(timeout=SECONDS * 1000)
AT_ONCE, NEVER = 20, 60_000
"""How long typing rests before it is saved, in milliseconds."""
SAVES = "**/boards/*/versions"
DRAFTS = """() => new Promise((resolve, reject) => {
  const request = indexedDB.open("durable", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("drafts");
  request.onerror = () => reject(request.error);
  request.onsuccess = () => {
    const store = request.result.transaction("drafts").objectStore("drafts");
    const [keys, slots] = [store.getAllKeys(), store.getAll()];
    store.transaction.oncomplete = () => {
      request.result.close();
      resolve(keys.result.map((key, n) => [key, slots.result[n]]));
    };
  };
})"""


class Server:
    """The page and its router; killed and started again on the same port."""

    def __init__(self, engine: Engine, log: Path) -> None:
        self._engine, self._log = engine, log
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DURABLE_", "PYTEST_"))}
        database = self._engine.url.render_as_string(hide_password=False)
        paths = f"{NOTES}{os.pathsep}{ROOT}"
        return {**kept, "DURABLE_DATABASE_URL": database, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self) -> None:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "uvicorn", "web:app", "--port", str(self._port), "--log-level", "warning"],
                env=self.environment, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.once(self._answers, lambda: self._log.read_text())

    def kill(self) -> None:
        """As a machine that loses its power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes what is sent and answers nothing, until the end of the block."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def carry_out(self) -> str:
        """What a worker says of all the suggestions that were asked for."""
        done = subprocess.run(
            [sys.executable, CARRY_OUT, NOTES / "notes.py"], env=self.environment, check=True, capture_output=True,
            text=True, timeout=SECONDS,
        )  # fmt: skip
        return done.stdout

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urlopen(f"{self.url}/me", timeout=SECONDS) as answer:
                return bool(answer.status == 200)
        except URLError:
            return False

    @staticmethod
    def once(holds: Callable[[], bool], else_say: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < end, else_say()
            time.sleep(0.02)


class Board:
    """One stored board, as the database has it, and its page in a browser."""

    def __init__(self, engine: Engine, server: Server, boards: Documents) -> None:
        self._engine, self.server, self._boards = engine, server, boards
        with engine.begin() as tx:
            content = {"title": "Picnic", "notes": [{"id": "milk", "text": "Milk"}, {"id": "bread", "text": "Bread"}]}
            self.id = boards.create(tx, content, owner="household", by="dana").id

    def texts(self) -> list[str]:
        with self._engine.connect() as tx:
            return [note["text"] for note in self._boards.get(tx, self.id).content["notes"]]

    def version(self) -> int:
        with self._engine.connect() as tx:
            return self._boards.get(tx, self.id).version

    def save(self, changed: dict[str, str], by: str = "sam") -> Saved:
        """Somebody saves elsewhere: the notes with these ids, and new ones for those that are not there."""
        with self._engine.begin() as tx:
            now = self._boards.get(tx, self.id)
            notes = {note["id"]: note["text"] for note in now.content["notes"]} | changed
            content = {**now.content, "notes": [{"id": name, "text": said} for name, said in notes.items()]}
            return self._boards.save(tx, self.id, content, expected_version=now.version, by=by)

    def once_at(self, version: int) -> None:
        self.server.once(lambda: self.version() == version, lambda: (self.version(), self.texts()))

    def is_a_chain(self) -> None:
        """I16: each version but the current one is kept once, and each has a save of its own."""
        with self._engine.connect() as tx:
            kept = tx.execute(
                text("select version from durable.document_revisions where document_id = :id order by version"),
                {"id": UUID(self.id)},
            ).scalars()
            assert list(kept) == list(range(self.version()))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Somebody's open transaction has the row: whoever saves waits."""
        with self._engine.begin() as tx:
            tx.execute(text("select 1 from durable.documents where id = :id for update"), {"id": UUID(self.id)})
            yield

    def once_waited_for(self) -> None:
        waits = text("select exists (select from pg_stat_activity where cardinality(pg_blocking_pids(pid)) > 0)")

        def _waits() -> bool:
            with self._engine.connect() as tx:
                return bool(tx.scalar(waits))

        self.server.once(_waits, lambda: "nobody waits for the row")

    def open(self, context: BrowserContext, debounce: int = AT_ONCE) -> Opened:
        page = context.new_page()
        page.set_default_timeout(SECONDS * 1000)
        page.goto(f"{self.server.url}/?board={self.id}&debounce={debounce}")
        opened = Opened(page)
        expect(opened.notes.first).to_be_visible()
        return opened


class Opened:
    """The page of a board, as a person sees it."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @property
    def notes(self) -> Locator:
        return self.page.get_by_label("Note", exact=True)

    @property
    def status(self) -> Locator:
        return self.page.get_by_role("status")

    def write(self, said: str, note: int = 0) -> None:
        self.notes.nth(note).fill(said)

    def says(self, kind: str, label: str | None = None) -> None:
        expect(self.status).to_have_attribute("data-state", kind)
        if label is not None:
            expect(self.status).to_contain_text(label)

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name).click()

    def shows(self, *texts: str) -> None:
        expect(self.notes).to_have_count(len(texts))
        for n, said in enumerate(texts):
            expect(self.notes.nth(n)).to_have_value(said)

    @property
    def offer(self) -> Locator:
        return self.page.get_by_role("button", name="Restore unsaved text")

    def drafts(self) -> list[tuple[str, Any]]:
        """Every slot in the browser's storage for this site."""
        found: list[tuple[str, Any]] = self.page.evaluate(DRAFTS)
        return found

    def once_drafted(self, said: str) -> None:
        Server.once(lambda: said in json.dumps(self.drafts()), self.drafts)

    def take_all_connections(self) -> None:
        """To a server that is stopped: what this page asks for now does not leave the browser while the page lives."""
        self.page.evaluate("() => { for (let n = 0; n < 6; n++) fetch(`/me?${n}`) }")

    def crash(self) -> None:
        """It dies at once, and sends nothing."""
        with self.page.expect_event("crash"), pytest.raises(Error):
            self.page.goto("chrome://crash")

    def unreachable(self) -> None:
        """From now on no save of this page reaches the server."""
        self.page.route(SAVES, lambda route: route.abort())
