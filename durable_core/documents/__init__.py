"""
Documents: JSON that people and programs edit at once, and nobody overwrites unseen.

`Documents(name, model, keep=...)` is a collection of them: `create, get, save, history, revision, restore, delete` and
`page`, each with the caller's transaction first; their async forms begin with an a.

`router(documents, sessionmaker, user=...)` serves a collection over HTTP; it, `User`, `browser_path` and `static_url`
need the extra `web`, and are imported when they are first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from durable_core.documents.declare import MOST_BYTES, Documents
from durable_core.documents.rows import Document, Revision, Saved
from durable_core.errors import NotInstalled

if TYPE_CHECKING:
    from durable_core.documents.http import User, router
    from durable_core.documents.static import browser_path, static_url

__all__ = [
    "MOST_BYTES",
    "Document",
    "Documents",
    "Revision",
    "Saved",
    "User",
    "browser_path",
    "router",
    "static_url",
]

_WEB = {"User": "http", "router": "http", "browser_path": "static", "static_url": "static"}


def __getattr__(name: str) -> object:
    if name not in _WEB:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_WEB[name]}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("starlette", "limits"):
            raise
        raise NotInstalled("documents over HTTP need an extra: pip install 'durable-core[web]'.") from missing
