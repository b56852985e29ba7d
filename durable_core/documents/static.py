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
    _, digest = _read(browser_path())
    return f"{prefix.rstrip('/')}/{MODULE}?v={digest}"


def served(headers: Headers, asked: str | None) -> Response:
    """The module. Under its digest for good; under another or none to be asked for again, by its entity tag."""
    content, digest = _read(browser_path())
    told = {
        "ETag": f'"{digest}"',
        "Cache-Control": FOREVER if asked == digest else "no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    known = tags(headers.getlist("if-none-match"))
    if known is not None and (known == ["*"] or digest in known):
        return Response(status_code=304, headers=told)
    return Response(content, headers=told, media_type="text/javascript")


@cache
def _read(folder: Path) -> tuple[bytes, str]:
    content = (folder / MODULE).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:20]
