"""
A relay between a client and Postgres that counts round trips: what the client sends until it is answered is one.

Statements that travel together, as in a pipeline, are one round trip; so is a lone message without a statement.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable


class CountingRelay:
    """Passes everything on, and notes the statements of each round trip in `trips`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.trips: list[list[str]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.create_connection(self._target)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = _Conversation(self)
            for pump in ((client, server, said.sent), (server, client, said.answered)):
                threading.Thread(target=_pump, args=pump, daemon=True).start()

    def note(self, statements: list[str], *, new: bool) -> None:
        with self._lock:
            if new:
                self.trips.append([])
            if self.trips:
                self.trips[-1].extend(statements)


def _pump(source: socket.socket, target: socket.socket, look: Callable[[bytes], None]) -> None:
    try:
        while chunk := source.recv(1 << 16):
            look(chunk)
            target.sendall(chunk)
    except OSError:
        pass  # one side has left: so does the other
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class _Conversation:
    """The client's messages on one connection: after the first come a letter, a length, the contents."""

    def __init__(self, relay: CountingRelay) -> None:
        self._relay = relay
        self._rest = b""
        self._begun = False
        self._waits = False
        self._prepared: dict[bytes, str] = {}

    def answered(self, _: bytes) -> None:
        self._waits = False

    def sent(self, chunk: bytes) -> None:
        new, self._waits = not self._waits, True
        self._relay.note(list(self._statements(chunk)), new=new)

    def _statements(self, chunk: bytes) -> list[str]:
        found = []
        self._rest += chunk
        while message := self._next():
            letter, contents = message
            if letter == b"Q":
                found.append(contents.rstrip(b"\0").decode())
            elif letter == b"P":
                name, query, _ = contents.split(b"\0", 2)
                self._prepared[name] = query.decode()
            elif letter == b"B":
                _, name, _ = contents.split(b"\0", 2)
                found.append(self._prepared.get(name, "?"))
        return found

    def _next(self) -> tuple[bytes, bytes] | None:
        head = 1 if self._begun else 0
        if len(self._rest) < head + 4:
            return None
        end = head + int.from_bytes(self._rest[head : head + 4], "big")
        if len(self._rest) < end:
            return None
        letter, contents = self._rest[:head], self._rest[head + 4 : end]
        self._rest = self._rest[end:]
        # The request for encryption is answered by one letter; the start follows, in the same form.
        self._begun = self._begun or contents[:4] not in (b"\x04\xd2\x16/", b"\x04\xd2\x160")
        return letter, contents
