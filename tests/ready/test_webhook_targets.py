"""Where a webhook may go: judged on the resolved addresses, and connected to a judged one."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

import pytest
from sqlalchemy import Engine

from durable_core import DefinitionError
from durable_core.deliveries.attempt import Attempted, Outcome
from durable_core.deliveries.read import Delivery
from durable_core.ready import bounded, targets
from durable_core.ready.webhook import Webhooks
from tests.ready.conftest import Names
from tests.sinks import Receiver

CarryOut = Callable[..., Attempted]
Declare = Callable[..., Any]
Row = Callable[[str], Delivery]


def port_of(receiver: Receiver) -> int:
    return int(receiver.url.rsplit(":", 1)[1])


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "0x7f000001", "2130706433", "0x7f.1", "localhost", "localhost.", "LOCALHOST",
        "a.localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]", "[::127.0.0.1]", "169.254.169.254", "10.0.0.5", "192.168.0.1", "100.64.0.1", "[fe80::1]",
        "[fc00::1]", "224.0.0.1", "[2002:808:808::]", "[64:ff9b:1::808:808]", "192.0.0.170", "[3fff::1]", "[5f00::1]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("proxy", [None, "http://127.0.0.1:1"])
def test_a_private_address_in_any_spelling_is_refused(
    host: str, proxy: str | None, declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver, row: Row
) -> None:
    """Behind a proxy too: those need no resolver to be known."""
    done = carry_out(declare_webhook(Webhooks(proxy=proxy)), url=f"http://{host}:{port_of(receiver)}/", body={})

    assert (done.outcome, done.error_code) == (Outcome.FAILED, "PRIVATE_TARGET")
    assert "not a public address" in str(row(done.id).error_message)
    assert receiver.calls == []


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_a_public_address_is_none_of_them(address: str) -> None:
    assert targets.permitted(ip_address(address))


@pytest.mark.parametrize(
    "addresses", [["10.0.0.5"], ["127.0.0.1"], ["93.184.216.34", "10.0.0.5"], ["10.0.0.5", "93.184.216.34"], ["::1"]]
)
def test_one_private_address_of_a_name_refuses_it(
    addresses: list[str], names: Names, declare_webhook: Declare, carry_out: CarryOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    names["evil.example"] = addresses
    connected: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda *to, **_: connected.append(to))

    done = carry_out(declare_webhook(Webhooks()), url="http://evil.example/", body={})

    assert (done.outcome, done.error_code) == (Outcome.FAILED, "PRIVATE_TARGET")
    assert connected == []


def test_a_name_that_changes_its_address_after_the_look_changes_nothing(
    names: Names, declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    """Permitted at the look, another from then on. 127.0.0.1 stands for the public address that no test can have."""
    answers = itertools.chain([["127.0.0.1"]], itertools.repeat(["127.0.0.2"]))
    names["rebinding.example"] = lambda: next(answers)

    done = carry_out(
        declare_webhook(Webhooks(allow=("127.0.0.1",))), url=f"http://rebinding.example:{port_of(receiver)}/x", body={}
    )

    assert done.outcome is Outcome.SENT
    assert names.asked == ["rebinding.example"], "looked up once, and connected to what was found"
    (call,) = receiver.calls
    assert (call.path, call.headers["host"]) == ("/x", f"rebinding.example:{port_of(receiver)}")


def test_each_attempt_looks_anew(
    names: Names, declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    kind = declare_webhook(Webhooks(allow=("127.0.0.1/32",)))
    url = f"http://moving.example:{port_of(receiver)}/"
    names["moving.example"] = ["127.0.0.1"]
    assert carry_out(kind, url=url, body={}).outcome is Outcome.SENT
    names["moving.example"] = ["127.0.0.2"]
    assert carry_out(kind, url=url, body={}).error_code == "PRIVATE_TARGET"


def test_the_next_address_is_asked_where_one_does_not_answer(
    names: Names, declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    names["two.example"] = ["::1", "127.0.0.1"]
    done = carry_out(
        declare_webhook(Webhooks(private_targets=True)), url=f"http://two.example:{port_of(receiver)}/", body={}
    )
    assert done.outcome is Outcome.SENT


@pytest.fixture
def eavesdropper() -> Iterator[tuple[int, list[bytes]]]:
    """A port that keeps the first bytes it hears and hangs up."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def listen() -> None:
            try:
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        heard.append(connection.recv(4096))
            except OSError:
                pass  # the test is over

        threading.Thread(target=listen, daemon=True).start()
        yield listening.getsockname()[1], heard


def test_tls_is_spoken_with_the_name_and_not_with_its_address(
    names: Names, declare_webhook: Declare, carry_out: CarryOut, eavesdropper: tuple[int, list[bytes]]
) -> None:
    port, heard = eavesdropper
    names["tls.example"] = ["127.0.0.1"]
    done = carry_out(declare_webhook(Webhooks(private_targets=True)), url=f"https://tls.example:{port}/", body={})
    assert done.error_code == "NETWORK"
    assert b"tls.example" in heard[0]


def test_a_network_may_be_allowed_and_no_other(
    declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    kind = declare_webhook(Webhooks(allow=("127.0.0.0/8",)))
    assert carry_out(kind, url=receiver.url, body={}).outcome is Outcome.SENT
    mapped = f"http://[::ffff:127.0.0.1]:{port_of(receiver)}"
    assert carry_out(kind, url=mapped, body={}).outcome is Outcome.SENT
    assert carry_out(kind, url="http://10.0.0.5/", body={}).error_code == "PRIVATE_TARGET"


@pytest.mark.parametrize("allow", [("10.0.0.1/8",), ("example.com",), "10.0.0.0/8"])
def test_what_is_no_network_is_refused_when_it_is_declared(allow: Any) -> None:
    with pytest.raises(DefinitionError, match="allow"):
        Webhooks(allow=allow)


def test_a_name_without_an_address_is_tried_again(names: Names, declare_webhook: Declare, carry_out: CarryOut) -> None:
    def nowhere() -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    names["gone.example"] = nowhere
    done = carry_out(declare_webhook(Webhooks()), url="http://gone.example/", body={})
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "NETWORK")


def test_a_slow_resolver_ends_at_the_total_timeout(names: Names, declare_webhook: Declare, carry_out: CarryOut) -> None:
    over = threading.Event()
    names["slow.example"] = lambda: [str(over.wait(20))]
    began = time.monotonic()
    done = carry_out(
        declare_webhook(Webhooks(connect_timeout=0.3, total_timeout=0.3)), url="http://slow.example/", body={}
    )
    over.set()
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "HTTP_TIMEOUT")
    assert time.monotonic() - began < 5


def test_calls_that_never_end_do_not_pile_up() -> None:
    over, calls = threading.Event(), bounded.Bounded("test")
    for _ in range(bounded.MOST_ABANDONED + 3):
        with pytest.raises(TimeoutError):
            calls.within(0.01, over.wait)
    assert sum(thread.name == "test" for thread in threading.enumerate()) == bounded.MOST_ABANDONED
    over.set()
    assert calls.within(5, lambda: "again") == "again"


def test_a_call_in_time_gives_its_value_or_its_error() -> None:
    calls = bounded.Bounded("test")
    assert calls.within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        calls.within(5, lambda: 1 // 0)


def test_a_proxy_gets_the_name(names: Names, declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver) -> None:
    """It is the one who resolves it; here nobody looks."""
    done = carry_out(
        declare_webhook(Webhooks(proxy=receiver.url)), url="http://behind.example/orders", body={"order": 7}
    )
    assert done.outcome is Outcome.SENT
    (call,) = receiver.calls
    assert call.path == "http://behind.example/orders"
    assert call.headers["host"] == "behind.example"


def test_without_settings_of_its_own_the_deployable_app_reaches_no_private_address(
    engine: Engine, declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from durable_core.ready.environment import webhooks_from_environment

    kind = declare_webhook(webhooks_from_environment)
    monkeypatch.delenv("DURABLE_WEBHOOK_PRIVATE_TARGETS", raising=False)
    assert carry_out(kind, url=receiver.url, body={}).error_code == "PRIVATE_TARGET"
    monkeypatch.setenv("DURABLE_WEBHOOK_PRIVATE_TARGETS", "yes")
    assert carry_out(kind, url=receiver.url, body={}).outcome is Outcome.SENT
    monkeypatch.setenv("DURABLE_WEBHOOK_PRIVATE_TARGETS", "perhaps")
    with pytest.raises(DefinitionError, match="DURABLE_WEBHOOK_PRIVATE_TARGETS"):
        webhooks_from_environment()
