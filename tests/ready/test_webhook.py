"""`webhook.post` against a real HTTP server and a real Postgres: what becomes of each answer."""

import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from durable_core import DefinitionError, GiveUp, InvalidArguments
from durable_core.deliveries.attempt import Attempted, Outcome, Worker, perform
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.read import Delivery
from durable_core.ready import webhook
from durable_core.ready.webhook import Webhooks, retry_after
from durable_core.testing import MovableClock
from tests.sinks import Receiver, broken, dripping, endless, status

Row = Callable[[str], Delivery]


@pytest.fixture
def kind(declare_webhook: Callable[..., Any]) -> DeliveryKind[..., Any]:
    kind: DeliveryKind[..., Any] = declare_webhook(Webhooks(private_targets=True))
    return kind


@pytest.fixture
def attempt(engine: Engine, worker: Worker, receiver: Receiver) -> Callable[..., Attempted]:
    """Enqueue and attempt once, at the receiver unless told otherwise."""

    def _attempt(kind: DeliveryKind[..., Any], **arguments: Any) -> Attempted:
        with engine.begin() as connection:
            ref = kind.enqueue(connection, **{"url": f"{receiver.url}/hook", "body": {"order": 7}, **arguments})
        return perform(worker, kind, ref.id)

    return _attempt


def test_importing_declares_nothing() -> None:
    """In a process of its own, for others here may have declared it."""
    code = (
        "from durable_core import kinds; from durable_core.ready import webhook as r; print(r.KIND in kinds.deliveries)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_call_carries_its_key_and_its_body(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver, row: Row
) -> None:
    receiver.answers = [status(202)]
    done = attempt(kind, body={"ä": [1, None]}, headers={"X-Shop": "yes", "content-type": "application/x+json"})

    assert (done.outcome, row(done.id).result) == (Outcome.SENT, {"status": 202})
    (call,) = receiver.calls
    assert (call.path, json.loads(call.body)) == ("/hook", {"ä": [1, None]})
    assert call.headers["idempotency-key"] == f"{kind.name}:{done.id}"
    assert (call.headers["x-shop"], call.headers["content-type"]) == ("yes", "application/x+json")
    assert call.headers["accept-encoding"] == "identity"


def test_all_attempts_carry_one_key_and_the_same_bytes(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver, worker: Worker,
    clock: MovableClock,
) -> None:  # fmt: skip
    receiver.answers = [status(503), status(200)]
    first = attempt(kind, body={"b": 1, "a": 2})
    clock.advance(3600)
    assert perform(worker, kind, first.id).outcome is Outcome.SENT
    assert len({(call.headers["idempotency-key"], call.body) for call in receiver.calls}) == 1
    assert len(receiver.calls) == 2


@pytest.mark.parametrize("code", [500, 502, 503, 429])
def test_a_receiver_in_trouble_is_tried_again(
    code: int, kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver, row: Row
) -> None:
    receiver.answers = [status(code, b"busy")]
    done = attempt(kind)
    assert (done.outcome, done.error_code) == (Outcome.RETRY, f"HTTP_{code}")
    assert "busy" in str(row(done.id).error_message)


@pytest.mark.parametrize("code", [301, 302, 307, 400, 401, 404, 410, 422])
def test_anything_else_is_given_up(
    code: int, kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver
) -> None:
    receiver.answers = [status(code, Location=f"{receiver.url}/elsewhere")]
    done = attempt(kind)
    assert (done.outcome, done.error_code) == (Outcome.FAILED, f"HTTP_{code}")
    assert len(receiver.calls) == 1, "a redirect is not followed"


@pytest.mark.parametrize(
    ("asked", "wait"),
    [
        ("120", 120), ("0", 1), ("1000000000", 3600), ("99999999999999999999", 3600),
        ("Wed, 21 Oct 2015 07:30:00 GMT", 120), ("Wed, 21 Oct 2015 07:00:00 GMT", 1),
    ],
)  # fmt: skip
def test_retry_after_is_obeyed_within_reason(
    asked: str, wait: float, kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver,
    clock: MovableClock,
) -> None:  # fmt: skip
    """A date is read against the receiver's own clock, here in 2015."""
    clock.freeze()

    def answer(to: Any) -> None:
        to.date_time_string = lambda timestamp=None: "Wed, 21 Oct 2015 07:28:00 GMT"
        status(429, Retry_After=asked)(to)

    receiver.answers = [answer]
    done = attempt(kind)
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "HTTP_429")
    assert done.due_at is not None
    assert (done.due_at - clock.now()).total_seconds() == pytest.approx(wait)


def test_retry_after_that_nobody_can_read_leaves_it_to_the_back_off() -> None:
    assert [retry_after({"retry-after": text}) for text in ("", "soon", "-5", "²", "1e9")] == [None] * 5


def test_a_date_without_the_date_of_the_answer_is_not_read_by_a_clock_of_ours() -> None:
    assert retry_after({"retry-after": "Wed, 21 Oct 2099 07:30:00 GMT"}) is None
    told = {"retry-after": "Wed, 21 Oct 2099 07:30:00 GMT", "date": "Wed, 21 Oct 2099 07:28:00 GMT"}
    assert retry_after(told) == 120.0


def test_a_receiver_that_is_away_or_breaks_off_is_tried_again(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver
) -> None:
    receiver.answers = [broken]
    assert attempt(kind).error_code == "NETWORK"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        done = attempt(kind, url=f"http://127.0.0.1:{nobody.getsockname()[1]}/")
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "NETWORK")


def test_an_answer_that_drips_for_ever_ends_at_the_total_timeout(
    declare_webhook: Callable[..., Any], attempt: Callable[..., Attempted], receiver: Receiver
) -> None:
    receiver.answers = [dripping]
    began = time.monotonic()
    done = attempt(declare_webhook(Webhooks(connect_timeout=0.5, total_timeout=0.5, private_targets=True)))
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "HTTP_TIMEOUT")
    assert time.monotonic() - began < 5


def test_silence_ends_at_the_total_timeout(
    declare_webhook: Callable[..., Any], attempt: Callable[..., Attempted], receiver: Receiver
) -> None:
    receiver.answers = [lambda to: time.sleep(1.5)]
    done = attempt(declare_webhook(Webhooks(connect_timeout=0.3, total_timeout=0.3, private_targets=True)))
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "HTTP_TIMEOUT")


def test_an_answer_that_would_unpack_to_more_is_not_unpacked(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver, row: Row
) -> None:
    receiver.answers = [status(400, gzip.compress(b"A" * 20_000_000), Content_Encoding="gzip")]
    done = attempt(kind)
    assert done.error_code == "HTTP_400"
    assert "AAAA" not in str(row(done.id).error_message)


def test_an_endless_answer_is_read_up_to_the_cap(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], receiver: Receiver
) -> None:
    receiver.answers = [endless(receiver)]
    assert attempt(kind).outcome is Outcome.SENT
    assert receiver.written < 64 * 1024 * 200, "what the sockets hold, and no more"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "gopher://example.com/", "//example.com", "http://", "example.com", "http://u:p@example.com/",
        "http://example.com/\r\nX: y", "http://exa mple.com", "http://example.com:99999/", "https://" + "x" * 2000,
    ],
)  # fmt: skip
def test_a_url_that_must_not_be_called_is_refused_at_enqueue(
    url: str, kind: DeliveryKind[..., Any], engine: Engine
) -> None:
    with engine.begin() as connection, pytest.raises(InvalidArguments, match="url"):
        kind.enqueue(connection, url=url, body={})


@pytest.mark.parametrize(
    "headers",
    [
        {"X": "a\r\nY: b"}, {"X\n": "a"}, {"": "x"},
        {"Idempotency-Key": "mine"}, {"idempotency-KEY": "mine"}, {"Host": "x"}, {"webhook-id": "mine"},
    ],
)  # fmt: skip
def test_a_header_that_is_not_the_callers_to_set_is_refused_at_enqueue(
    headers: dict[str, str], kind: DeliveryKind[..., Any], engine: Engine
) -> None:
    with engine.begin() as connection, pytest.raises(InvalidArguments, match="headers"):
        kind.enqueue(connection, url="http://example.com/", body={}, headers=headers)


def test_both_are_refused_again_when_it_is_sent() -> None:
    step: Any = type("Step", (), {"key": "webhook.post:1"})
    with pytest.raises(GiveUp):
        webhook.post(Webhooks(), step, url="file:///etc/passwd", body={})
    with pytest.raises(GiveUp):
        webhook.post(Webhooks(), step, url="http://example.com/", body={}, headers={"X": "a\nb"})


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(DefinitionError):
        Webhooks(connect_timeout=5, total_timeout=1)
    assert "secret" not in repr(Webhooks(proxy="http://u:secret@proxy.example.com"))
