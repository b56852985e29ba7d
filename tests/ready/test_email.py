"""`email.send` against a real SMTP server and a real Postgres: what becomes of each answer."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from durable_core import DefinitionError, DeliveryState, GiveUp, InvalidArguments
from durable_core.deliveries.attempt import Attempted, Outcome, Worker, perform
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.read import Delivery
from durable_core.ready import email
from durable_core.ready.email import Smtp
from durable_core.testing import MovableClock
from tests.sinks import Mailbox, mail_server, refuse_everyone

Row = Callable[[str], Delivery]
HELLO = {"to": "ann@example.com", "subject": "Hello", "text": "Good morning."}


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with mail_server() as mailbox:
        yield mailbox


def smtp_at(port: int, **more: Any) -> Smtp:
    return Smtp("127.0.0.1", "Shop <shop@example.com>", port=port, timeout=5.0, **more)


@pytest.fixture
def kind(declare_email: Callable[..., Any], mailbox: Mailbox) -> DeliveryKind[..., Any]:
    kind: DeliveryKind[..., Any] = declare_email(smtp_at(mailbox.port), max_attempts=3)
    return kind


@pytest.fixture
def attempt(engine: Engine, worker: Worker) -> Callable[..., Attempted]:
    """Enqueue and attempt once."""

    def _attempt(kind: DeliveryKind[..., Any], **arguments: Any) -> Attempted:
        with engine.begin() as connection:
            ref = kind.enqueue(connection, **{**HELLO, **arguments})
        return perform(worker, kind, ref.id)

    return _attempt


def test_importing_declares_nothing() -> None:
    """In a process of its own, for others here may have declared it."""
    code = (
        "from durable_core.ready import email as r; from durable_core.kinds import deliveries as d; print(r.KIND in d)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_message_arrives_with_text_and_html(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox, row: Row
) -> None:
    done = attempt(kind, to=["ann@example.com", "Béa <bea@example.com>"], subject="Grüße", text="Schön.",
                   html="<p>Schön.</p>", reply_to="help@example.com")  # fmt: skip

    assert done.outcome is Outcome.SENT
    (message,) = mailbox.messages
    assert mailbox.envelopes == [["ann@example.com", "bea@example.com"]]
    assert (message["Subject"], message["Reply-To"]) == ("Grüße", "help@example.com")
    assert message["From"] == "Shop <shop@example.com>"
    assert message["To"] == "ann@example.com, Béa <bea@example.com>"
    plain, html = message.get_body(("plain",)), message.get_body(("html",))
    assert plain is not None
    assert html is not None
    assert (plain.get_content().strip(), html.get_content().strip()) == ("Schön.", "<p>Schön.</p>")
    assert row(done.id).result == {"message_id": message["Message-ID"]}
    assert message["Message-ID"] == f"<{kind.name}.{done.id}@example.com>"


def test_all_attempts_carry_one_message_id(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox, worker: Worker,
    clock: MovableClock,
) -> None:  # fmt: skip
    """The connection breaks after the server took the message: nobody knows, so it goes out again, recognisably."""
    mailbox.hang_up_after_data = True
    first = attempt(kind)
    clock.advance(60)
    second = perform(worker, kind, first.id)

    assert (first.outcome, first.error_code) == (Outcome.RETRY, "NETWORK")
    assert second.outcome is Outcome.SENT
    assert len(mailbox.messages) == 2
    assert len({message["Message-ID"] for message in mailbox.messages}) == 1


@pytest.mark.parametrize("command", ["MAIL", "RCPT", "DATA"])
def test_a_4xx_is_tried_again_and_a_5xx_given_up(
    command: str, kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox, row: Row
) -> None:
    mailbox.replies[command] = ["451 4.3.0 later", "550 5.1.1 never"]

    later, never = attempt(kind), attempt(kind)

    assert (later.outcome, later.error_code) == (Outcome.RETRY, "SMTP_451")
    assert (never.outcome, never.error_code) == (Outcome.FAILED, "SMTP_550")
    assert "5.1.1 never" in str(row(never.id).error_message)
    assert mailbox.messages == []


def test_a_recipient_refused_for_good_does_not_keep_it_from_the_others(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox, row: Row
) -> None:
    mailbox.replies["RCPT gone@example.com"] = ["550 no such user"]

    done = attempt(kind, to=["gone@example.com", "ann@example.com"])

    assert mailbox.envelopes == [["ann@example.com"]]
    assert row(done.id).result["refused"] == {"gone@example.com": 550}


def test_a_recipient_refused_for_now_holds_it_back_from_all_until_the_last_attempt(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox, worker: Worker,
    clock: MovableClock, row: Row,
) -> None:  # fmt: skip
    mailbox.replies["RCPT grey@example.com"] = ["450 greylisted"] * 3

    done = attempt(kind, to=["ann@example.com", "grey@example.com"])
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "SMTP_450")
    assert mailbox.messages == []
    for _ in range(2):
        clock.advance(3600)
        done = perform(worker, kind, done.id)

    assert done.outcome is Outcome.SENT
    assert mailbox.envelopes == [["ann@example.com"]]
    assert row(done.id).result["refused"] == {"grey@example.com": 450}


def test_all_recipients_refused_is_given_up_only_when_none_was_refused_for_now(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox
) -> None:
    both = ["a@example.com", "b@example.com"]
    mailbox.replies["RCPT"] = ["550 no", "551 no", "550 no", "450 later"]

    assert attempt(kind, to=both).error_code == "SMTP_550"
    assert attempt(kind, to=both).outcome is Outcome.RETRY


@pytest.mark.spec("deliveries", 20)
@pytest.mark.parametrize("to", ["", [], [" "]])
def test_no_recipient_is_given_up_and_counted(
    to: Any, kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox, row: Row
) -> None:
    done = attempt(kind, to=to)

    assert (done.outcome, done.error_code) == (Outcome.FAILED, "NO_RECIPIENT")
    assert (row(done.id).attempts, row(done.id).state) == (1, DeliveryState.FAILED)
    assert mailbox.conversations == 0


@pytest.mark.parametrize("to", ["ann", "ann@", "a@example.com, b@example.com", "jürgen@example.com"])
def test_what_is_no_address_is_given_up(
    to: str, kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox
) -> None:
    done = attempt(kind, to=to)
    assert (done.outcome, done.error_code) == (Outcome.FAILED, "BAD_RECIPIENT")
    assert mailbox.conversations == 0


@pytest.mark.parametrize("argument", ["to", "subject", "reply_to"])
def test_a_line_break_in_a_header_is_refused_at_enqueue(
    argument: str, kind: DeliveryKind[..., Any], engine: Engine
) -> None:
    with engine.begin() as connection, pytest.raises(InvalidArguments, match=argument):
        kind.enqueue(connection, **{**HELLO, argument: "ann@example.com\r\nBcc: eve@example.com"})


@pytest.mark.parametrize("name", ["to", "subject", "reply_to"])
@pytest.mark.parametrize("forged", ["ann@example.com\nBcc: eve@example.com",
                                    "=?utf-8?q?x=0D=0ABcc:_eve=40example.com?= <ann@example.com>"])  # fmt: skip
def test_a_forged_header_is_given_up_at_the_latest_when_it_is_sent(name: str, forged: str, mailbox: Mailbox) -> None:
    step: Any = type("Step", (), {"key": "email.send:1", "attempt": 1, "max_attempts": 1, "cancelled": False})
    with pytest.raises(GiveUp):
        email.send(smtp_at(mailbox.port), step, **{**HELLO, name: forged})  # type: ignore[arg-type]
    assert mailbox.messages == []


def test_an_international_domain_is_spelled_as_servers_read_it(
    kind: DeliveryKind[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox
) -> None:
    attempt(kind, to="ann@bücher.example")
    assert mailbox.envelopes == [["ann@xn--bcher-kva.example"]]


def test_a_server_that_is_away_is_tried_again(
    declare_email: Callable[..., Any], attempt: Callable[..., Attempted]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        done = attempt(declare_email(smtp_at(nobody.getsockname()[1])))
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "NETWORK")


def test_a_server_that_says_nothing_is_tried_again(
    declare_email: Callable[..., Any], attempt: Callable[..., Attempted]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        smtp = Smtp("127.0.0.1", "shop@example.com", port=silent.getsockname()[1], timeout=0.2)
        done = attempt(declare_email(smtp))
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "NETWORK")


def test_nothing_is_sent_where_tls_is_wanted_and_not_offered(
    declare_email: Callable[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox
) -> None:
    done = attempt(declare_email(smtp_at(mailbox.port, starttls=True)))
    assert (done.outcome, done.error_code) == (Outcome.FAILED, "SMTP_NOT_SUPPORTED")
    assert mailbox.messages == []


def test_a_wrong_password_is_given_up_and_appears_nowhere(
    declare_email: Callable[..., Any], attempt: Callable[..., Attempted], row: Row
) -> None:
    with mail_server(authenticator=refuse_everyone, auth_require_tls=False) as mailbox:
        done = attempt(declare_email(smtp_at(mailbox.port, username="shop", password="hunter2")))
    assert (done.outcome, done.error_code) == (Outcome.FAILED, "SMTP_535")
    assert "hunter2" not in str(row(done.id).as_json())


def test_settings_may_come_at_the_last_moment(
    declare_email: Callable[..., Any], attempt: Callable[..., Attempted], mailbox: Mailbox
) -> None:
    assert attempt(declare_email(lambda: smtp_at(mailbox.port))).outcome is Outcome.SENT


def test_a_url_names_a_server() -> None:
    smtp = Smtp.from_url("smtp://us%40er:p%2Fw@mail.example.com:587?from=shop@example.com")
    assert (smtp.host, smtp.port, smtp.username, smtp.password) == ("mail.example.com", 587, "us@er", "p/w")
    assert (smtp.starttls, smtp.ssl, smtp.sender) == (True, False, "shop@example.com")
    assert "p/w" not in repr(smtp)
    tls = Smtp.from_url("smtps://mail.example.com?from=shop@example.com&timeout=3")
    assert (tls.port, tls.ssl, tls.starttls, tls.timeout) == (465, True, False, 3.0)
    local = Smtp.from_url("smtp://127.0.0.1:25?from=shop@example.com")
    assert (local.starttls, local.ssl) == (False, False)


@pytest.mark.parametrize(
    "url",
    [
        "http://secret@mail.example.com?from=a@example.com",
        "smtp://u:secret@mail.example.com:587",
        "smtp://u:secret@mail.example.com:99999?from=a@example.com",
        "smtp://u:secret@mail.example.com:587?from=a@example.com&tls=off",
        "smtp://u:secret@mail.example.com:587?from=nobody",
        "smtp://u:secret@mail.example.com:25?from=a@example.com&starttls=no",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(DefinitionError) as refused:
        Smtp.from_url(url)
    assert "secret" not in str(refused.value)
