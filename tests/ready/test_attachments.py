"""Attachments of `email.send`: fetched by reference when it is sent, and no way into a header."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from durable_core import DefinitionError, GiveUp, InvalidArguments, enqueue_by_name
from durable_core.deliveries.attempt import Attempted, Outcome, Worker, perform
from durable_core.deliveries.read import Delivery
from durable_core.ready import email
from durable_core.ready.email import Smtp
from tests.sinks import Mailbox, mail_server

CarryOut = Callable[..., Attempted]
Declare = Callable[..., Any]
HELLO = {"to": "ann@example.com", "subject": "Hello", "text": "Good morning."}
STORE: dict[str, Any] = {
    "invoices/7": b"%PDF-7",
    "with a type": (b"\x00\xff", "image/x-thing"),
    "a message": (b"From: eve@example.com\r\n\r\nhi", "message/rfc822"),
    "a structure": (b"--x", "multipart/mixed; boundary=x"),
    "text": "no bytes",
    "none": None,
}


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with mail_server() as mailbox:
        yield mailbox


def smtp_at(mailbox: Mailbox) -> Smtp:
    return Smtp("127.0.0.1", "Shop <shop@example.com>", port=mailbox.port, timeout=5.0)


@pytest.fixture
def kind(declare_email: Declare, mailbox: Mailbox) -> Any:
    return declare_email(smtp_at(mailbox), attachments=STORE.__getitem__, attachment_bytes=100)


def attached(ref: str, name: str = "file.bin") -> dict[str, Any]:
    return {**HELLO, "attachments": [{"name": name, "ref": ref}]}


def test_attachments_arrive_as_they_were_fetched(kind: Any, carry_out: CarryOut, mailbox: Mailbox) -> None:
    files = [{"name": "Rechnung für Ann.pdf", "ref": "invoices/7"}, {"name": 'a "b".xyz', "ref": "with a type"}]
    done = carry_out(kind, **HELLO, html="<p>Good morning.</p>", attachments=files)

    assert done.outcome is Outcome.SENT
    (message,) = mailbox.messages
    parts = list(message.iter_attachments())
    assert [(part.get_filename(), part.get_content_type(), part.get_content()) for part in parts] == [
        ("Rechnung für Ann.pdf", "application/pdf", b"%PDF-7"),
        ('a "b".xyz', "image/x-thing", b"\x00\xff"),
    ]
    body = message.get_body(("plain",))
    assert body is not None
    assert body.get_content().strip() == "Good morning."


def test_the_row_holds_the_reference_alone(kind: Any, carry_out: CarryOut, row: Callable[[str], Delivery]) -> None:
    done = carry_out(kind, **attached("invoices/7"))
    assert row(done.id).arguments["attachments"] == [{"name": "file.bin", "ref": "invoices/7"}]
    assert "%PDF" not in str(row(done.id).as_json())


def test_a_message_as_attachment_goes_as_plain_bytes(kind: Any, carry_out: CarryOut, mailbox: Mailbox) -> None:
    """In mail `message/rfc822` may not be encoded, and its headers would be read."""
    assert carry_out(kind, **attached("a message", "old.eml")).outcome is Outcome.SENT
    (part,) = mailbox.messages[0].iter_attachments()
    assert (part.get_content_type(), part.get_content()) == ("application/octet-stream", STORE["a message"][0])


@pytest.mark.parametrize(
    ("ref", "code"),
    [
        ("lost", "NO_ATTACHMENT"),
        ("none", "NO_ATTACHMENT"),
        ("text", "BAD_ATTACHMENT"),
        ("a structure", "BAD_ATTACHMENT"),
    ],
)
def test_what_cannot_be_attached_gives_up_before_the_server_is_asked(
    ref: str, code: str, kind: Any, carry_out: CarryOut, mailbox: Mailbox
) -> None:
    done = carry_out(kind, **attached(ref))
    assert (done.outcome, done.error_code) == (Outcome.FAILED, code)
    assert mailbox.conversations == 0


def test_a_file_that_is_gone_is_missing_and_a_store_that_is_away_is_tried_again(
    declare_email: Declare, carry_out: CarryOut, mailbox: Mailbox
) -> None:
    def fetch(ref: str) -> bytes:
        raise FileNotFoundError(ref) if ref == "gone" else ConnectionError(ref)

    kind = declare_email(smtp_at(mailbox), attachments=fetch)
    assert carry_out(kind, **attached("gone")).error_code == "NO_ATTACHMENT"
    assert carry_out(kind, **attached("away")).outcome is Outcome.RETRY


def test_the_size_of_all_together_is_capped(declare_email: Declare, carry_out: CarryOut, mailbox: Mailbox) -> None:
    kind = declare_email(smtp_at(mailbox), attachments=lambda ref: b"x" * int(ref), attachment_bytes=100)
    files = [{"name": "a", "ref": "60"}, {"name": "b", "ref": "40"}]
    assert carry_out(kind, **HELLO, attachments=files).outcome is Outcome.SENT
    files.append({"name": "c", "ref": "1"})
    done = carry_out(kind, **HELLO, attachments=files)
    assert (done.outcome, done.error_code) == (Outcome.FAILED, "ATTACHMENT_TOO_BIG")
    with pytest.raises(DefinitionError):
        email.declare(smtp_at(mailbox), name="test.negative", attachment_bytes=-1)


def test_without_a_function_that_fetches_they_are_refused_at_enqueue(
    declare_email: Declare, engine: Engine, worker: Worker, mailbox: Mailbox
) -> None:
    """And give up where another process let them pass."""
    kind = declare_email(smtp_at(mailbox))
    with engine.begin() as connection, pytest.raises(InvalidArguments, match="without attachments=fetch"):
        kind.enqueue(connection, **attached("invoices/7"))
    other = declare_email(smtp_at(mailbox), attachments=STORE.get)
    with engine.begin() as connection:
        ref = other.enqueue(connection, **attached("invoices/7"))
    step: Any = type("Step", (), {"key": "email.send:1", "attempt": 1, "max_attempts": 1, "cancelled": False})
    with pytest.raises(GiveUp, match="without attachments=fetch"):
        email.send(smtp_at(mailbox), step, **attached("invoices/7"))
    assert perform(worker, other, ref.id).outcome is Outcome.SENT


FORGED = [
    "a.pdf\r\nBcc: eve@example.com", "a.pdf\nX", "a\tb", "a\x00", "", " ", "../a.pdf", "/etc/passwd", "c:\\a.pdf", "..",
    "=?utf-8?q?x=0D=0ABcc:_eve=40example.com?=.pdf", "x" * 201, "a\u2028b", "a\u202efdp.exe",
]  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_name_that_is_more_than_a_name_is_refused_at_enqueue(name: str, kind: Any, engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(InvalidArguments, match="attachments"):
        kind.enqueue(connection, **attached("invoices/7", name))


@pytest.mark.parametrize("name", FORGED)
def test_and_given_up_at_the_latest_when_it_is_sent(name: str, mailbox: Mailbox) -> None:
    step: Any = type("Step", (), {"key": "email.send:1", "attempt": 1, "max_attempts": 1, "cancelled": False})
    with pytest.raises(GiveUp) as refused:
        email.send(smtp_at(mailbox), step, **attached("invoices/7", name), fetch=STORE.get)
    assert refused.value.code == "BAD_ATTACHMENT"
    assert mailbox.conversations == 0


@pytest.mark.parametrize("media_type", ["image/png\r\nBcc: eve@example.com", "image", "image/png; name=x", "a/b\n", ""])
def test_a_media_type_is_no_way_into_a_header(
    media_type: str, declare_email: Declare, carry_out: CarryOut, mailbox: Mailbox
) -> None:
    kind = declare_email(smtp_at(mailbox), attachments=lambda ref: (b"x", media_type))
    assert carry_out(kind, **attached("x")).error_code == "BAD_ATTACHMENT"
    assert mailbox.messages == []


@pytest.mark.parametrize(
    "wrong", [[{"name": "a"}], [{"name": "a", "ref": "b", "path": "/etc"}], [{"name": "a", "ref": ""}]]
)
def test_an_attachment_has_a_name_and_a_reference_and_nothing_else(wrong: Any, kind: Any, engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(InvalidArguments, match="attachments"):
        kind.enqueue(connection, **HELLO, attachments=wrong)


def test_a_row_enqueued_without_the_code_is_checked_when_it_is_carried_out(
    kind: Any, engine: Engine, worker: Worker, mailbox: Mailbox
) -> None:
    with engine.begin() as connection:
        ref = enqueue_by_name(connection, kind.name, attached("invoices/7"))
    assert perform(worker, kind, ref.id).outcome is Outcome.SENT
    assert len(mailbox.messages) == 1
