"""What the demo's order makes of an answer that does not come: the supplier may have begun."""

import socket
import threading
import urllib.error

import pytest

from durable_core import OperationStep, Retry, kinds
from durable_core.demo import supplier
from durable_core.local.server import free_port


@pytest.fixture
def order():
    """Order parts at a port."""

    def place(port):
        kind = supplier.declare(port, "orders")
        return kind.handler(OperationStep(kind, "0198", '{"parts": 1}'), parts=1)

    yield place
    kinds.operations.remove(supplier.RESTOCK)


@pytest.mark.parametrize(
    "said", [b"", b'HTTP/1.0 200 OK\r\n\r\n{"ids', b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{"]
)
def test_an_answer_that_is_lost_leaves_the_order_to_be_looked_for(order, said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Retry):
            order(server.getsockname()[1])
        thread.join()


@pytest.mark.parametrize("late", [TimeoutError("timed out"), urllib.error.URLError(TimeoutError("timed out"))])
def test_an_answer_that_takes_too_long_leaves_the_order_to_be_looked_for(order, monkeypatch, late):
    def asked(url, told=None):
        raise late

    monkeypatch.setattr(supplier, "_asked", asked)
    with pytest.raises(Retry):
        order(1)


def test_a_supplier_that_is_not_there_has_begun_nothing(order):
    with pytest.raises(urllib.error.URLError):
        order(free_port())
