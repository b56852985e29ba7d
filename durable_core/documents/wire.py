"""Reading a request about a document: its size, its JSON, the version it was made from, and the site it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit
from uuid import UUID

from starlette.datastructures import Headers
from starlette.requests import Request

from durable_core.arguments import INT64, Unfit, check, clean_text
from durable_core.documents.problems import Problem
from durable_core.errors import DefinitionError

JSON = "application/json"

_TAG = re.compile(r'\s*(?:W/)?"([\x21\x23-\x7e\x80-\xff]*)"\s*(?:,|$)')
_VERSION = re.compile(r"(0|[1-9][0-9]{0,18})(?:(?:--?|;)(?:gzip|br|zstd|deflate))?")
"""The proxy that compresses an answer marks the tag so, or makes it weak. It is the same version."""


@dataclass(frozen=True)
class Change:
    """
    What a request asks to be written, and the version that it was made from.

    `by_header`: the version came as a precondition of HTTP, so its failure has a status of its own.
    """

    expected_version: int
    save_id: str | None
    wanted: Any
    by_header: bool


# --- where it comes from --------------------------------------------------------------------------


def origins(collection: str, given: Iterable[str]) -> frozenset[str]:
    """
    Origins as browsers spell them. Raises DefinitionError for what is none.

    A text is refused, for its letters are texts too, and so is `null`, which every sandboxed frame says of itself.
    """
    told = f"documents {collection!r}: trusted_origins is a list of origins, such as https://app.example.com; got"
    if isinstance(given, str):
        raise DefinitionError(f"{told} the text {given!r}.")
    spelled = frozenset(origin.lower().rstrip("/") for origin in given)
    if alien := [origin for origin in spelled if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin)]:
        raise DefinitionError(f"{told} {min(alien)!r}.")
    return spelled


def refuse_cross_site(headers: Headers, trusted: Collection[str]) -> None:
    """
    Refuse a write that a page of another site sent with this user's cookies.

    A browser says where a request comes from. What says nothing is no browser, or an old one: there the content type
    is what another site cannot send without asking first. Raises Problem.
    """
    origin, fetched = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower().rstrip("/") in trusted:
        return
    if fetched is not None:
        alien = fetched not in ("same-origin", "none")
    else:
        # The scheme is not compared: behind a proxy that ends TLS ours is not the browser's.
        alien = origin is not None and _host(origin) != headers.get("host", "").lower()
    if alien:
        raise Problem("cross-site", "A page of another site may not write here. Nothing was written.")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def require_json(headers: Headers) -> None:
    """Refuse what is not declared as plain JSON. No form can send that. Raises Problem."""
    media, _, rest = headers.get("content-type", "").partition(";")
    charset = re.search(r'charset\s*=\s*"?([^";\s]+)', rest, re.IGNORECASE)
    if media.strip().lower() != JSON or (charset and charset[1].lower() not in ("utf-8", "utf8")):
        raise Problem("unsupported-media-type", f"Send the body as {JSON}, in UTF-8.", headers={"Accept": JSON})
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Problem("unsupported-media-type", "Send the body uncompressed.", headers={"Accept-Encoding": "identity"})


# --- the body -------------------------------------------------------------------------------------


async def read_body(request: Request, limit: int) -> bytes:
    """
    The body, of which no more than `limit` bytes are ever held. What the header says of its length saves reading it;
    what arrives is counted all the same. Raises Problem.
    """
    declared = request.headers.get("content-length")
    if declared is not None and not re.fullmatch(r"[0-9]{1,19}", declared):
        raise Problem("malformed", "Content-Length is no length.")
    if declared is not None and int(declared) > limit:
        raise too_large(limit)
    held = bytearray()
    async for chunk in request.stream():
        if len(held) + len(chunk) > limit:
            raise too_large(limit)
        held += chunk
    return bytes(held)


def too_large(limit: int) -> Problem:
    """The refusal of a body or content that is larger than the limit."""
    return Problem("content-too-large", f"{limit:,} bytes are the most. Nothing was written.", limit=limit)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body: strict, so that what is stored is what was sent. Raises Problem."""
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
        )
        check(value, depth=-1)  # the content lies one level down, and may be as deep as any
    except json.JSONDecodeError as unread:
        raise Problem("malformed", f"The body is no JSON: {unread.msg}, at character {unread.pos}.") from None
    except UnicodeDecodeError:
        raise Problem("malformed", "The body is not UTF-8.") from None
    except RecursionError:
        raise Problem("malformed", "The body is nested too deeply.") from None
    except Unfit as unfit:
        raise Problem("malformed", f"The body cannot be stored: {unfit}.") from None
    except ValueError:  # Python's own bound on the digits of an integer
        raise Problem("malformed", "The body has a number with too many digits.") from None
    if not isinstance(value, dict):
        raise Problem("malformed", "The body is a JSON object.")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Unfit(f"the key {clean_text(twice, 60)!r} stands twice in one object")
    return made


def _no_number(_: str) -> NoReturn:
    raise Unfit("a number is NaN or infinite")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise Unfit("a number is too large")
    return value


# --- the version ----------------------------------------------------------------------------------


def tags(values: list[str]) -> list[str] | None:
    """The entity tags of a header, weak or not; `["*"]` for the star; None where it is no list of tags."""
    text = ", ".join(values).strip()
    if text == "*":
        return ["*"]
    found, at = [], 0
    while at < len(text):
        tag = _TAG.match(text, at)
        if tag is None:
            return None
        found.append(tag[1])
        at = tag.end()
    return found or None


def version_of(tag: str) -> int | None:
    """The version that an entity tag of ours stands for; None for a tag that is not of ours."""
    found = _VERSION.fullmatch(tag)
    return int(found[1]) if found and int(found[1]) in INT64 else None


def number(text: str) -> int | None:
    """The number in an address, spelled in the one way; None for what is none. No proxy puts its mark there."""
    return version_of(text) if text.isdecimal() else None


def unchanged(headers: Headers, version: int) -> bool:
    """Whether the reader has this version already, by its If-None-Match."""
    known = tags(headers.getlist("if-none-match"))
    return known is not None and (known == ["*"] or version in map(version_of, known))


def if_match(headers: Headers) -> int | None:
    """
    The version that If-Match names; None without one, and for `*`, which names none.

    A list that names more than one is refused: a change was made from one version. Raises Problem.
    """
    values = headers.getlist("if-match")
    if not values:
        return None
    found = tags(values)
    if found == ["*"]:
        return None
    versions = {version_of(tag) for tag in found or [""]}
    version = versions.pop()
    if versions or version is None:
        raise Problem("version-malformed", 'If-Match names the one version that this was made from: If-Match: "41".')
    return version


def version_in(body: dict[str, Any], field: str) -> int | None:
    """A version in a body; None where the body has none. Raises Problem."""
    if field not in body:
        return None
    version = body[field]
    if isinstance(version, bool) or not isinstance(version, int) or version < 0 or version not in INT64:
        raise Problem("version-malformed", f"{field} is a whole number from 0 to 2^63 - 1.")
    return version


# --- what is asked --------------------------------------------------------------------------------

NAMING = {"expected_version", "save_id"}


def asked_to_save(headers: Headers, body: dict[str, Any]) -> Change:
    """A new version in the form of the body: `{expected_version, save_id, content}`. Raises Problem."""
    _only(body, {*NAMING, "content"})
    version, by_header = _version(headers, body)
    if "content" not in body:
        raise Problem("malformed", "content is missing.")
    return Change(version, _save_id(headers, body), body["content"], by_header)


def asked_to_replace(headers: Headers, body: dict[str, Any]) -> Change:
    """
    A new version by PUT: the body is the content, and If-Match names the version.

    A body with `expected_version`, or with `content` and `save_id` and no Idempotency-Key beside it, is read as
    `asked_to_save` does, so content with fields of those names needs that form. Raises Problem.
    """
    formed = {"content", "save_id"} <= set(body) and "idempotency-key" not in headers
    if "expected_version" in body or formed:
        return asked_to_save(headers, body)
    version, by_header = _version(headers, body)
    return Change(version, _save_id(headers, {}), body, by_header)


def asked_to_restore(headers: Headers, body: dict[str, Any]) -> Change:
    """An older version to be saved anew: `{version, expected_version, save_id}`. Raises Problem."""
    _only(body, {*NAMING, "version"})
    version, by_header = _version(headers, body)
    restored = version_in(body, "version")
    if restored is None:
        raise Problem("malformed", "version is missing: it says which one is to come back.")
    return Change(version, _save_id(headers, body), restored, by_header)


def _only(body: dict[str, Any], known: set[str]) -> None:
    if alien := [key for key in body if key not in known]:
        named = ", ".join(clean_text(key, 60) for key in alien[:5])
        if "content" in body:
            raise Problem(
                "mixed-update",
                f"Content is saved alone, and this came with it: {named}. Send that by itself. Nothing was written.",
            )
        raise Problem("malformed", f"The body has a field that is not known here: {named}.")


def _version(headers: Headers, body: dict[str, Any]) -> tuple[int, bool]:
    """The version that this was made from, and whether the header says it."""
    named, matched = version_in(body, "expected_version"), if_match(headers)
    if named is not None and matched is not None and named != matched:
        told = f"expected_version is {named} and If-Match is {matched}: send one of them. Nothing was written."
        raise Problem("versions-disagree", told)
    if matched is not None:
        return matched, True
    if named is not None:
        return named, False
    raise Problem(
        "version-required",
        "Say which version this was made from: expected_version in the body, or If-Match. Nothing was written.",
    )


def _save_id(headers: Headers, body: dict[str, Any]) -> str | None:
    """The name of this one save, from the body or, for those whose body is the content, from Idempotency-Key."""
    given = body.get("save_id")
    field = "save_id"
    if given is None and (given := headers.get("idempotency-key")) is not None:
        given, field = given.strip('"'), "Idempotency-Key"
    if given is None:
        return None
    try:
        return str(UUID(given))
    except (ValueError, TypeError, AttributeError):
        raise Problem("malformed", f"{field} is a UUID, the same in every repeat of one save.") from None
