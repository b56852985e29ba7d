"""
The other side: a mail server and a web server, each in a process of its own.

Each writes one line per call that it accepted, before it answers, and now and then refuses
the first goes at a key, so that there is something to retry.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from durable_core.demo import lifeline

REFUSED_ONCE, REFUSED_TWICE = 0.07, 0.02
"""Shares of the keys whose first one or two goes are refused for now."""
QUICKEST, SLOWEST = 0.02, 0.15
"""Seconds a call takes. Half of it passes before the call is accepted, half after."""


class Ledger:
    """The calls accepted, one JSON line each, in the file before the caller hears of it."""

    def __init__(self, path: str, seed: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._seed = seed
        self._goes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def go(self, key: str) -> tuple[bool, float]:
        """Whether this go at a key is to be refused, and how long half of it takes."""
        with self._lock:
            self._goes[key] += 1
            go = self._goes[key]
        chance = random.Random(f"{self._seed}:{key}").random()
        refused = go <= (2 if chance < REFUSED_TWICE else 1 if chance < REFUSED_ONCE else 0)
        return refused, random.Random(f"{self._seed}:{key}:{go}").uniform(QUICKEST, SLOWEST) / 2

    def accept(self, channel: str, order: int, key: str) -> None:
        line = json.dumps({"channel": channel, "order": order, "key": key, "at": time.time()})
        os.write(self._file, f"{line}\n".encode())


class Mail:
    """What aiosmtpd asks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        message = message_from_bytes(envelope.original_content, policy=policy.default)
        key, order = str(message["Message-ID"]), int(str(message["Subject"]).rpartition(" ")[2])
        refused, half = self._ledger.go(key)
        await asyncio.sleep(half)
        if refused:
            return "451 4.3.2 busy, come back later"
        self._ledger.accept("email", order, key)
        await asyncio.sleep(half)
        return "250 2.0.0 accepted"


def serve_mail(listening: socket.socket, ledger: Ledger) -> None:
    from aiosmtpd.smtp import SMTP

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: SMTP(Mail(ledger), hostname="sink", loop=loop), sock=listening)
        await server.serve_forever()

    asyncio.run(serve())


def serve_web(listening: socket.socket, ledger: Ledger) -> None:
    class Orders(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order"]
            key = self.headers["Idempotency-Key"]
            refused, half = ledger.go(key)
            time.sleep(half)
            if refused:
                # Both ways in which a receiver says "later".
                self._answer(*((429, {"Retry-After": "1"}) if order % 2 else (503, {})))
                return
            ledger.accept("webhook", order, key)
            time.sleep(half)
            self._answer(200, {})

        def _answer(self, status: int, headers: dict[str, str]) -> None:
            try:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": "0"}.items():
                    self.send_header(name, value)
                self.end_headers()
            except OSError:
                pass  # whoever called was killed

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(listening.getsockname(), Orders, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.daemon_threads = True
    server.serve_forever()


def main(which: str, descriptor: str, path: str, seed: str) -> None:
    lifeline.hold()
    serve = {"mail": serve_mail, "web": serve_web}[which]
    serve(socket.socket(fileno=int(descriptor)), Ledger(path, seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
