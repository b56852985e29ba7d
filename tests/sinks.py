"""A real SMTP server and a real HTTP server on loopback, whose answers a test decides."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult


@dataclass
class Mailbox:
    """What a mail server was told, and what it is to answer: `replies["DATA"] = ["451 later", None]`, None for yes."""

    port: int = 0
    replies: dict[str, list[str | None]] = field(default_factory=dict)
    messages: list[EmailMessage] = field(default_factory=list)
    envelopes: list[list[str]] = field(default_factory=list)
    conversations: int = 0
    hang_up_after_data: bool = False

    def _answer(self, command: str, otherwise: str) -> str:
        waiting = self.replies.get(command)
        reply = waiting.pop(0) if waiting else None
        return reply or otherwise

    async def handle_EHLO(
        self, server: Any, session: Any, envelope: Any, hostname: str, responses: list[str]
    ) -> list[str]:
        self.conversations += 1
        session.host_name = hostname
        return responses

    async def handle_MAIL(self, server: Any, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        reply = self._answer("MAIL", "250 OK")
        if reply.startswith("250"):
            envelope.mail_from = address
            envelope.mail_options.extend(options)
        return reply

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        reply = self._answer(f"RCPT {address}", self._answer("RCPT", "250 OK"))
        if reply.startswith("250"):
            envelope.rcpt_tos.append(address)
        return reply

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        reply = self._answer("DATA", "250 accepted")
        if reply.startswith("250"):
            self.messages.append(message_from_bytes(envelope.content, policy=policy.default))  # type: ignore[arg-type]
            self.envelopes.append(list(envelope.rcpt_tos))
        if self.hang_up_after_data:
            self.hang_up_after_data = False
            server.transport.abort()
            await asyncio.sleep(0)
        return reply


@contextmanager
def mail_server(**options: Any) -> Iterator[Mailbox]:
    mailbox = Mailbox()
    loop = asyncio.new_event_loop()
    serving = loop.run_until_complete(
        loop.create_server(lambda: SMTP(mailbox, loop=loop, hostname="sink", **options), "127.0.0.1", 0)
    )
    mailbox.port = serving.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield mailbox
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        serving.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


def refuse_everyone(*_: Any) -> AuthResult:
    return AuthResult(success=False, handled=False)


@dataclass
class Call:
    path: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[BaseHTTPRequestHandler], None]


def status(code: int, body: bytes = b"", **headers: str) -> Answer:
    """An answer with this status; `Retry_After="2"` for a header."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(code)
        for name, value in headers.items():
            to.send_header(name.replace("_", "-"), value)
        to.send_header("Content-Length", str(len(body)))
        to.end_headers()
        to.wfile.write(body)

    return answer


@dataclass
class Receiver:
    """What an HTTP server was called with, and its next answers; 204 when none is planned."""

    url: str = ""
    calls: list[Call] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    written: int = 0


@contextmanager
def http_server() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            receiver.calls.append(Call(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            answer = receiver.answers.pop(0) if receiver.answers else status(204)
            try:
                answer(self)
            except OSError:
                pass  # the client hung up, which some tests are about
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


def endless(receiver: Receiver) -> Answer:
    """A body that never ends."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        while True:
            to.wfile.write(b"x" * 8192)
            receiver.written += 8192

    return answer


def dripping(to: BaseHTTPRequestHandler) -> None:
    """Headers that come a byte at a time, and never to an end."""
    to.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        to.wfile.write(b"x")
        time.sleep(0.05)


def broken(to: BaseHTTPRequestHandler) -> None:
    """No answer at all."""
    to.connection.close()
