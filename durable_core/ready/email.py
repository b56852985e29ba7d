"""
`email.send`: one e-mail by SMTP, sent at least once.

The hole: when the connection breaks after the message and before the answer, nobody knows
whether the server has it, and it is sent again. All copies carry one `Message-ID`, made from
`step.key`; mail servers and clients may, and need not, show them as one.
"""

from __future__ import annotations

import re
import smtplib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import policy
from email.errors import HeaderParseError
from email.headerregistry import Address, UniqueAddressHeader
from email.message import EmailMessage
from email.utils import formatdate
from typing import Annotated, Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import AfterValidator, ValidationInfo

from durable_core.deliveries.declare import DeliveryKind, Step, delivery
from durable_core.deliveries.options import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE
from durable_core.errors import DefinitionError, GiveUp, Retry
from durable_core.ready.attachments import MOST_BYTES, NO_FETCH, Attachment, Fetch, attach
from durable_core.retry import Backoff

KIND = "email.send"
LOOPBACK = ("localhost", "127.0.0.1", "::1")

# Every server takes 7-bit text, so whether one speaks 8BITMIME never decides a message's fate.
_POLICY = policy.SMTP.clone(cte_type="7bit")


def _one_line(text: str) -> str:
    """A text that may stand in a header. A line break there would begin a header of the sender's choice."""
    if not text.isprintable():
        raise ValueError("a header is one line without control characters")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]
"""Text for a header, refused at enqueue when it holds a line break or another control character."""


@dataclass(frozen=True)
class Smtp:
    """
    The server that mail is handed to. `ssl`: TLS from the first byte; `starttls`: TLS or nothing is sent.

    `timeout` (seconds) bounds each answer of the server, the kind's own timeout the whole attempt.
    Raises DefinitionError for a password that would cross a network in the clear, and for a
    sender that is not one address. The password is in no repr and in no payload.
    """

    host: str
    sender: str
    port: int = 587
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    starttls: bool = False
    ssl: bool = False
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.ssl and self.starttls:
            raise DefinitionError("SMTP: ssl speaks TLS from the first byte and starttls later; set one of them.")
        if self.password and not (self.ssl or self.starttls) and self.host not in LOOPBACK:
            raise DefinitionError(
                f"SMTP: the password for {self.host} would be sent in the clear; set starttls or ssl."
            )
        if self.timeout <= 0:
            raise DefinitionError("SMTP: a timeout is more than 0 seconds.")
        try:
            _mailbox(self.sender)
        except ValueError as refused:
            raise DefinitionError(f"SMTP: the sender {self.sender!r} is not one address: {refused}.") from None

    @staticmethod
    def from_url(url: str) -> Smtp:
        """
        `smtp://user:password@host:587?from=shop@example.com`, or `smtps://` for TLS from the first byte.

        `smtp` uses STARTTLS for a port 587 and wherever there is a password, unless
        `starttls=no`. User and password are percent-encoded; `timeout=10` is in seconds.
        Raises DefinitionError, which never quotes the URL.
        """
        try:
            parts = urlsplit(url)
            options = {name: values[-1] for name, values in parse_qs(parts.query, strict_parsing=True).items()}
            port = parts.port
            timeout = float(options.pop("timeout", 30.0))
        except ValueError:
            raise DefinitionError("the SMTP URL is not one; write smtp://user:password@host:587?from=...") from None
        sender, asked = options.pop("from", ""), options.pop("starttls", None)
        if (
            parts.scheme not in ("smtp", "smtps")
            or not parts.hostname
            or not sender
            or options
            or asked not in (None, "yes", "no")
            or parts.path not in ("", "/")
        ):
            raise DefinitionError(
                "an SMTP URL has the scheme smtp or smtps, a host and from=<address>, "
                "and besides at most starttls=yes|no and timeout=<seconds>."
            )
        tls = parts.scheme == "smtps"
        port = port or (465 if tls else 587)
        wanted = asked == "yes" if asked else port == 587 or parts.password is not None
        return Smtp(
            host=parts.hostname, port=port, sender=sender,
            username=None if parts.username is None else unquote(parts.username),
            password=None if parts.password is None else unquote(parts.password),
            ssl=tls, starttls=wanted and not tls, timeout=timeout,
        )  # fmt: skip


def declare(
    settings: Smtp | Callable[[], Smtp],
    *,
    attachments: Fetch | None = None,
    attachment_bytes: int = MOST_BYTES,
    name: str = KIND,
    queue: str = DEFAULT_QUEUE,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    backoff: Backoff | None = None,
    timeout: float = 120.0,
) -> DeliveryKind[..., dict[str, Any]]:
    """
    Declare the kind `email.send`: `to` (one address or a list), `subject`, `text`, `html`, `reply_to`, `attachments`.

    `settings` may be a function, called at each attempt: a process that only enqueues needs
    no mail server. An attachment is `{"name": "invoice.pdf", "ref": "invoices/7"}`, and the function
    `attachments` fetches what `ref` names when the mail is sent, `attachment_bytes` in all; without it
    they are refused at enqueue. See `send` for what becomes of each answer of the server.
    """
    fetch, most = attachments, attachment_bytes
    if most < 0:
        raise DefinitionError("email: attachment_bytes is at least 0.")

    def fetchable(given: list[Attachment] | None, info: ValidationInfo) -> list[Attachment] | None:
        # At enqueue only: a row that has some gives up when it is sent, and does not wait for another handler.
        if given and fetch is None and info.mode == "python":
            raise ValueError(NO_FETCH)
        return given

    def send_email(
        step: Step,
        to: OneLine | list[OneLine],
        subject: OneLine,
        text: str,
        html: str | None = None,
        reply_to: OneLine | None = None,
        attachments: list[Attachment] | None = None,
    ) -> dict[str, Any]:
        smtp = settings if isinstance(settings, Smtp) else settings()
        return send(
            smtp, step, to=to, subject=subject, text=text, html=html, reply_to=reply_to,
            attachments=attachments or (), fetch=fetch, attachment_bytes=most,
        )  # fmt: skip

    # A type of this very declaration, which no annotation in the source could name.
    send_email.__annotations__["attachments"] = Annotated[list[Attachment] | None, AfterValidator(fetchable)]
    return delivery(name, queue=queue, max_attempts=max_attempts, backoff=backoff, timeout=timeout)(send_email)


def send(
    smtp: Smtp,
    step: Step,
    *,
    to: str | list[str],
    subject: str,
    text: str,
    html: str | None = None,
    reply_to: str | None = None,
    attachments: Sequence[Attachment] = (),
    fetch: Fetch | None = None,
    attachment_bytes: int = MOST_BYTES,
) -> dict[str, Any]:
    """
    Send one e-mail from inside a handler; `{"message_id": ...}`, and `refused` where only some recipients were.

    Replies 4xx and network errors raise Retry, 5xx GiveUp, each with the code `SMTP_<reply>`;
    no recipient is `NO_RECIPIENT`. A recipient refused for now holds the message back from all,
    so that nobody gets it twice; only the last attempt of the budget goes without that one.
    See `attachments.attach` for what becomes of attachments.
    """
    recipients = [address for address in ([to] if isinstance(to, str) else to) if address.strip()]
    if not recipients:
        raise GiveUp("there is nobody to send it to", code="NO_RECIPIENT")
    message, envelope = _message(smtp, step, recipients, subject, text, html, reply_to)
    attach(message, attachments, fetch, attachment_bytes)
    with _answers_explained(smtp), _connected(smtp) as server:
        refused = _envelope(server, step, _mailbox(smtp.sender).addr_spec, envelope)
        if step.cancelled:
            # Up to here the server has promised nothing; whoever has the row now sends it.
            raise Retry("the attempt was over before the message was handed on", code="TIMEOUT")
        code, reply = server.data(message.as_bytes())
        if code >= 400:
            raise smtplib.SMTPDataError(code, reply)
    result: dict[str, Any] = {"message_id": str(message["Message-ID"])}
    return {**result, "refused": refused} if refused else result


def message_id(step: Step, sender: str) -> str:
    """The `Message-ID` of every copy of this delivery."""
    # ':' may not stand in it, nor two dots side by side; the row's id keeps it unique.
    left = re.sub(r"\.+", ".", step.key.replace(":", ".")).strip(".")
    return f"<{left}@{_mailbox(sender).domain}>"


def _message(
    smtp: Smtp, step: Step, to: list[str], subject: str, text: str, html: str | None, reply_to: str | None
) -> tuple[EmailMessage, list[str]]:
    """The message and its envelope. A text that would forge a header, or an address that is none, gives up."""
    message = EmailMessage(policy=_POLICY)
    try:
        mailboxes = [_mailbox(address) for address in to]
    except ValueError as refused:
        raise GiveUp(f"a recipient is no address: {refused}", code="BAD_RECIPIENT") from None
    try:
        message["From"] = _mailbox(smtp.sender)
        message["To"] = mailboxes
        message["Subject"] = _one_line(subject)
        # An encoded word may hold the line break that the text itself does not.
        _one_line(str(message["Subject"]))
        if reply_to is not None:
            message["Reply-To"] = _mailbox(reply_to)
    except ValueError as refused:
        raise GiveUp(f"a header was refused: {refused}", code="BAD_HEADER") from None
    message["Date"] = formatdate()
    message["Message-ID"] = message_id(step, smtp.sender)
    message.set_content(text)
    if html is not None:
        message.add_alternative(html, subtype="html")
    return message, list(dict.fromkeys(mailbox.addr_spec for mailbox in mailboxes))


def _mailbox(text: str) -> Address:
    """
    One address, with or without a name. Raises ValueError.

    The hole: the part before the @ must be ASCII, for few servers take another.
    """
    _one_line(text)
    parsed: dict[str, Any] = {"defects": []}
    try:
        UniqueAddressHeader.parse(text, parsed)
        groups = parsed["groups"]
        (found,) = (address for group in groups for address in group.addresses)
        if parsed["defects"] or len(groups) != 1 or groups[0].display_name or not found.domain or not found.username:
            raise ValueError
        domain = found.domain.encode("idna").decode()
        address = Address(found.display_name, found.username, domain)
        address.addr_spec.encode("ascii")
    except (ValueError, IndexError, AttributeError, HeaderParseError):
        raise ValueError(f"{text[:100]!r} is not one address like name@example.com") from None
    return address


def _envelope(server: smtplib.SMTP, step: Step, sender: str, recipients: list[str]) -> dict[str, int]:
    """Name the sender and the recipients; those refused. Raises SMTPRecipientsRefused before anything is sent."""
    code, reply = server.mail(sender)
    if code >= 400:
        raise smtplib.SMTPSenderRefused(code, reply, sender)
    refused: dict[str, tuple[int, bytes]] = {}
    for recipient in recipients:
        code, reply = server.rcpt(recipient)
        if code == 421:
            raise smtplib.SMTPResponseException(code, reply)
        if code >= 400:
            refused[recipient] = (code, reply)
    for_now = any(code < 500 for code, _ in refused.values())
    if len(refused) == len(recipients) or (for_now and step.attempt < step.max_attempts):
        raise smtplib.SMTPRecipientsRefused(refused)
    return {recipient: code for recipient, (code, _) in refused.items()}


@contextmanager
def _connected(smtp: Smtp) -> Iterator[smtplib.SMTP]:
    if smtp.ssl:
        server: smtplib.SMTP = smtplib.SMTP_SSL(
            smtp.host, smtp.port, timeout=smtp.timeout, context=ssl.create_default_context()
        )
    else:
        server = smtplib.SMTP(smtp.host, smtp.port, timeout=smtp.timeout)
    try:
        server.ehlo_or_helo_if_needed()
        if smtp.starttls:
            server.starttls(context=ssl.create_default_context())
            server.ehlo_or_helo_if_needed()
        if smtp.username is not None:
            server.login(smtp.username, smtp.password or "")
        yield server
        try:
            server.quit()
        except (smtplib.SMTPException, OSError):
            pass  # the message is accepted by now, and a poor farewell must not send it again
    finally:
        server.close()


@contextmanager
def _answers_explained(smtp: Smtp) -> Iterator[None]:
    """Turn what smtplib raises into the two words of the contract."""
    try:
        yield
    except smtplib.SMTPRecipientsRefused as refused:
        replies: Mapping[str, tuple[int, bytes]] = refused.recipients
        first, (code, reply) = min(replies.items(), key=lambda item: item[1][0])
        raise _verdict(code, reply, f"recipient {first}") from None
    except smtplib.SMTPResponseException as answered:
        raise _verdict(answered.smtp_code, answered.smtp_error, smtp.host) from None
    except smtplib.SMTPNotSupportedError as missing:
        raise GiveUp(f"{smtp.host} lacks what is needed: {missing}", code="SMTP_NOT_SUPPORTED") from None
    except (smtplib.SMTPException, OSError) as broken:
        raise Retry(f"{smtp.host}: {type(broken).__name__}: {broken}", code="NETWORK") from None


def _verdict(code: int, reply: bytes | str, about: str) -> Retry | GiveUp:
    said = reply.decode(errors="replace") if isinstance(reply, bytes) else reply
    sentence = f"{about}: {code} {said}"
    if 500 <= code < 600:
        return GiveUp(sentence, code=f"SMTP_{code}")
    # smtplib reports an answer that is no SMTP as -1: a machine in trouble, not a refusal.
    return Retry(sentence, code=f"SMTP_{code}" if code > 0 else "NETWORK")
