"""
Attachments of an e-mail, by reference: the payload names a file, and the worker fetches it when it sends.

The hole: it is fetched anew at each attempt, so a repeat may carry other bytes under the same `Message-ID`;
and the whole of it is in memory before its size is judged.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Callable, Iterable
from email.message import EmailMessage
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, StringConstraints

# Pydantic refuses typing's own before Python 3.12.
from typing_extensions import TypedDict

from durable_core.errors import GiveUp

MOST_BYTES = 10 * 1024 * 1024
"""Of all attachments of one e-mail; in the message they take a third more."""
LONGEST_NAME = 200

Fetch = Callable[[str], bytes | tuple[bytes, str] | None]
"""`fetch(ref)`: the bytes, or the bytes and their media type. None, KeyError or FileNotFoundError: there is none."""

_MEDIA_TYPE = re.compile(r"([A-Za-z0-9][\w.+-]*)/([A-Za-z0-9][\w.+-]*)\Z", re.ASCII)
_OPAQUE = ("application", "octet-stream")


def checked_name(name: str) -> str:
    """A file's name that can be nothing else in a header or on a disk. Raises ValueError."""
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(f"an attachment's name is one line of 1 to {LONGEST_NAME} letters")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise ValueError("an attachment's name is no path")
    if "=?" in name:
        # An encoded word may hold the line break that the text itself does not.
        raise ValueError("an attachment's name holds no '=?'")
    return name


class Attachment(TypedDict):
    """`name`: what the recipient's file is called. `ref`: what the settings' `fetch` knows it by."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # where pydantic looks for it

    name: Annotated[str, AfterValidator(checked_name)]
    ref: Annotated[str, StringConstraints(min_length=1, max_length=2000)]


def attach(message: EmailMessage, attachments: Iterable[Attachment], fetch: Fetch | None, most: int) -> None:
    """
    Fetch each and add it to the message.

    Gives up with `NO_ATTACHMENT` where there is none or nothing fetches them, `ATTACHMENT_TOO_BIG` and
    `BAD_ATTACHMENT`. Whatever else `fetch` raises is a failed attempt.
    """
    size = 0
    for attachment in attachments:
        try:
            name = checked_name(attachment["name"])
        except ValueError as refused:
            raise GiveUp(str(refused), code="BAD_ATTACHMENT") from None
        content, media_type = _fetched(attachment["ref"], name, fetch)
        size += len(content)
        if size > most:
            raise GiveUp(f"the attachments take more than {most} bytes", code="ATTACHMENT_TOO_BIG")
        maintype, subtype = _parts(media_type, name)
        message.add_attachment(content, maintype=maintype, subtype=subtype, filename=name)


def _fetched(ref: str, name: str, fetch: Fetch | None) -> tuple[bytes, str | None]:
    if fetch is None:
        raise GiveUp(NO_FETCH, code="NO_ATTACHMENT")
    try:
        found = fetch(ref)
    except (KeyError, FileNotFoundError):
        found = None
    if found is None:
        raise GiveUp(f"there is no attachment {name!r} under its reference", code="NO_ATTACHMENT")
    content, media_type = found if isinstance(found, tuple) else (found, None)
    if not isinstance(content, bytes):
        raise GiveUp(
            f"the attachment {name!r} was fetched as {type(content).__name__}, not bytes", code="BAD_ATTACHMENT"
        )
    return content, media_type


NO_FETCH = "this kind was declared without attachments=fetch, so nothing can look a reference up"


def _parts(media_type: str | None, name: str) -> tuple[str, str]:
    """The media type as fetched, or as the name tells; what mail would read as a structure goes as plain bytes."""
    if media_type is None:
        guessed, packed = mimetypes.guess_type(name)
        media_type = guessed if guessed and not packed else "/".join(_OPAQUE)
    told = _MEDIA_TYPE.match(media_type)
    if told is None:
        raise GiveUp(f"the attachment {name!r} has a media type that is none", code="BAD_ATTACHMENT")
    maintype, subtype = told[1].lower(), told[2].lower()
    return _OPAQUE if maintype in ("message", "multipart") else (maintype, subtype)
