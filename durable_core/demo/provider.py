"""
A provider of long operations, as others run them: a small HTTP process that keeps what it did in a file.

It counts each time an operation is issued to it, and may be killed at any moment: what it answered is on the disk.
`python -m durable_core.demo.provider FILE PORT` serves until it is ended.

POST /operations     {"key", "parts", "seconds"}: begins so many, each done after so many seconds; {"ids"}
GET  /operations/ID  {"status"}: working, done, or whatever it was set to
POST /operations/ID  {"status"}: set by whoever plays with it
GET  /keys?key=KEY   {"ids"} of what was begun under the key, or 404
GET  /log            every event, the oldest first
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from durable_core.demo import lifeline


class Book:
    """What was issued, set and asked, one JSON line each; it is read anew at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.events: list[dict[str, Any]] = []
        if path.exists():
            # A line that a kill cut short was never answered.
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.endswith("}"):
                    self.events.append(json.loads(line))

    def write(self, event: dict[str, Any]) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())
            self.events.append(event)

    def issue(self, key: str, parts: int, seconds: float | None) -> list[str]:
        ids = [f"op-{uuid.uuid4().hex[:12]}" for _ in range(parts)]
        done_at = None if seconds is None else time.time() + seconds
        self.write({"event": "issued", "key": key, "ids": ids, "done_at": done_at})
        return ids

    def status(self, one: str) -> str | None:
        found = None
        for event in self.events:
            if event["event"] == "issued" and one in event["ids"]:
                over = event["done_at"] is not None and event["done_at"] <= time.time()
                found = "done" if over else "working"
            elif event["event"] == "set" and event["id"] == one:
                found = event["status"]
        return found

    def by_key(self, key: str) -> list[str] | None:
        return next((e["ids"] for e in self.events if e["event"] == "issued" and e["key"] == key), None)


class Server(ThreadingHTTPServer):
    """Serves one book; `url` is where."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, path: Path, port: int = 0) -> None:
        self.book = Book(path)
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        book = self.server.book
        if asked.path == "/log":
            self._answer(200, {"events": book.events})
        elif asked.path == "/keys":
            ids = book.by_key(parse_qs(asked.query).get("key", [""])[0])
            self._answer(404 if ids is None else 200, {"ids": ids})
        else:
            one = asked.path.rpartition("/")[2]
            status = book.status(one)
            book.write({"event": "polled", "id": one})
            self._answer(404 if status is None else 200, {"status": status})

    def do_POST(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/operations":
            ids = self.server.book.issue(told.get("key", ""), int(told.get("parts", 1)), told.get("seconds"))
            self._answer(202, {"ids": ids})
        else:
            self.server.book.write({"event": "set", "id": self.path.rpartition("/")[2], "status": told["status"]})
            self._answer(200, {})

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Its file says what happened."""


def main(arguments: list[str]) -> None:
    lifeline.hold()
    path, port = arguments
    Server(Path(path), int(port)).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
