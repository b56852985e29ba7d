"""A TCP relay that loses a connection at a chosen message: before it arrives, or before its answer does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

COMMIT = b"COMMIT\x00"
"""The statement alone: comments of other statements, which travel with them, use the word too."""


@dataclass
class Cut:
    """One cut, made once: at the first message that holds `words`. A silent one leaves the client's side open."""

    words: bytes
    arrives: bool
    silent: bool = False
    done: bool = False
    then: Cut | None = None
    """What is cut next, once this is done."""


class Relay:
    """Listens on a port of its own and passes everything on to `host:port`, until a cut comes due."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut: Cut | None = None
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_before(self, words: bytes) -> Cut:
        """Lose the connection in the place of the next message with these words: it never arrives."""
        self._cut = Cut(words, arrives=False)
        return self._cut

    def cut_after(self, words: bytes) -> Cut:
        """Lose the connection once the server has answered the next message with these words."""
        self._cut = Cut(words, arrives=True)
        return self._cut

    def silence_before(self, words: bytes) -> Cut:
        """Swallow the next message with these words and all after it: the client waits for an answer."""
        self._cut = Cut(words, arrives=False, silent=True)
        return self._cut

    def silence_after(self, words: bytes) -> Cut:
        """Let the next message with these words arrive, and swallow its answer: the client waits for it."""
        self._cut = Cut(words, arrives=True, silent=True)
        return self._cut

    def lose_all(self) -> None:
        """Lose every connection that goes through it now; the server may be at work on what one has sent."""
        for end in self._ends:
            _shut(end)

    def close(self) -> None:
        """End what still goes through it too: a client that nobody waits for any more would keep its session open."""
        self._listener.close()
        self.lose_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._ends += client, server
            answered = threading.Event()
            for pump in (self._up, self._down):
                threading.Thread(target=pump, args=(client, server, answered), daemon=True).start()

    def _due(self, message: bytes) -> Cut | None:
        with self._lock:
            cut = self._cut
            if cut is None or cut.done or cut.words not in message:
                return None
            cut.done = True
            self._cut = cut.then or cut
            return cut

    def _up(self, client: socket.socket, server: socket.socket, lose_answer: threading.Event) -> None:
        with ending(client, server):
            while message := client.recv(1 << 20):
                cut = self._due(message)
                if cut is not None and not cut.arrives:
                    if cut.silent:
                        _drain(client)
                    return
                if cut is not None:
                    lose_answer.set()
                server.sendall(message)
                if cut is not None and cut.silent:
                    _drain(client)
                    return

    def _down(self, client: socket.socket, server: socket.socket, lose_answer: threading.Event) -> None:
        with ending(client, server):
            while message := server.recv(1 << 20):
                if lose_answer.is_set():
                    if self._cut is not None and self._cut.silent:
                        continue
                    return
                client.sendall(message)


def _drain(client: socket.socket) -> None:
    """Hear the client out until it gives up."""
    while client.recv(1 << 20):
        pass


@contextmanager
def ending(*ends: socket.socket) -> Iterator[None]:
    """When one direction ends, both do."""
    try:
        yield
    except OSError:
        pass
    finally:
        for end in ends:
            _shut(end)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
