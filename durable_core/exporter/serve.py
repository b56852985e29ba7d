"""The exporter's HTTP: the page, and what a container's probes ask. Reading it costs the database nothing."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from durable_core.exporter.observe import Observer
from durable_core.exporter.page import rendered

log = logging.getLogger("durable.exporter")

READ_SECONDS = 10.0
"""A reader that sends nothing for so long is hung up on."""


class Server(ThreadingHTTPServer):
    """Answers about one observer."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], observer: Observer) -> None:
        self.observer = observer
        super().__init__(address, _Request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("page_not_read", exc_info=True)  # a reader that hangs up


class _Request(BaseHTTPRequestHandler):
    server: Server
    timeout = READ_SECONDS
    server_version = "durable-exporter"
    sys_version = ""

    def do_GET(self) -> None:
        observer = self.server.observer
        match self.path.partition("?")[0]:
            case "/metrics":
                page, content_type = rendered(observer.series(), self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, page, content_type)
            case "/livez":
                self._answer(HTTPStatus.OK, b"alive\n")
            case "/readyz":
                if observer.is_ready:
                    self._answer(HTTPStatus.OK, b"ready\n")
                else:
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready: see /healthz\n")
            case "/healthz":
                checks = observer.checks()
                worst = max((("pass", "warn", "fail").index(check["status"]) for check in checks), default=0)
                told = {"status": ("pass", "warn", "fail")[worst], "checks": checks}
                status = HTTPStatus.SERVICE_UNAVAILABLE if worst == 2 else HTTPStatus.OK
                self._answer(status, json.dumps(told).encode(), "application/json")
            case "/":
                self._answer(HTTPStatus.OK, b"/metrics /livez /readyz /healthz\n")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /livez, /readyz and /healthz\n")

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each scrape says nothing to anybody."""
