"""The browser's half, one ES module, as a file for the host's static files or served by the router itself."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

from durable_core.documents.wire import tags

MODULE = "document-session.js"
FOREVER = "public, max-age=31536000, immutable"


def browser_path() -> Path:
    """The folder that holds `document-session.js`, to be added to the static files of the host."""
    return Path(__file__).parent / "browser"


def static_url(prefix: str) -> str:
    """The module's address below a router's `prefix`, with the digest of its content: a browser keeps it for good."""
    return f"{prefix.rstrip('/')}/{MODULE}?v={_digest()}"


def served(headers: Headers, digest: str | None) -> Response:
    """The module. Under its digest for good; else to be asked for again, by its entity tag."""
    tag = _digest()
    told = {
        "ETag": f'"{tag}"',
        "Cache-Control": FOREVER if digest == tag else "no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    known = tags(headers.getlist("if-none-match"))
    if known is not None and (known == ["*"] or tag in known):
        return Response(status_code=304, headers=told)
    return Response(_content(), headers=told, media_type="text/javascript")


@cache
def _content() -> bytes:
    return (browser_path() / MODULE).read_bytes()


@cache
def _digest() -> str:
    return hashlib.sha256(_content()).hexdigest()[:20]
