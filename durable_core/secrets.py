"""
Arguments that hold a secret: which names look like one, and how one is stored knowingly and shown masked.

An argument is stored as it is, readable by whoever reads the table, its backups and its replicas.
So a secret belongs into the settings of the process that needs it, and its name into the argument.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

T = TypeVar("T")

MASK = "***"


class _Marker:
    """What tells a `Secret[...]` from its bare type."""

    def __repr__(self) -> str:
        return "Secret"


Secret = Annotated[T, _Marker()]
"""
`password: Secret[str]`: this argument holds a secret, and that is known. The handler gets a plain `str`.

Masked in `durable deliveries show`, in `Delivery.as_json` and in every repr of ours. The hole: the row
stores it as any other argument, so `psql`, backups and `Delivery.arguments` have it in the clear; an
exception of the handler that quotes it is kept as it is.
"""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ENDINGS = {
    ("password",), ("passwords",), ("passwd",), ("pwd",), ("passphrase",), ("secret",), ("secrets",), ("token",),
    ("apikey",), ("credential",), ("credentials",),
    ("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("signing", "key"),
    ("encryption", "key"),
}  # fmt: skip
_ALONE = {("authorization",), ("proxy", "authorization")}
_SAYS_NOTHING = {"value", "text", "string", "plain", "raw", "new", "old", "current"}


def looks_secret(name: str) -> bool:
    """
    Whether a name says that its value is a secret: `password`, `api_key`, `csrfToken`, `old_password_2`.

    The last word decides, as it does in English: a `token_count` is a count, a `password_reset_url` an
    address, a `secret_name` a name. `max_tokens` counts, and a `payment_authorization` may be a number. A
    name that means well and is refused all the same is another name away.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    while words and (words[-1].isdigit() or words[-1] in _SAYS_NOTHING):
        words.pop()
    return tuple(words) in _ALONE or tuple(words[-1:]) in _ENDINGS or tuple(words[-2:]) in _ENDINGS


def is_secret(annotation: Any) -> bool:
    """Whether `Secret[...]` stands anywhere in a type, as in `Secret[str] | None`."""
    if typing.get_origin(annotation) is Annotated and any(
        isinstance(mark, _Marker) for mark in annotation.__metadata__
    ):
        return True
    return any(is_secret(part) for part in typing.get_args(annotation))


def is_declared_secret(handler: Callable[..., object], name: str) -> bool:
    """The same of one parameter, read when its handler is declared: types below it may be missing yet."""
    annotation = getattr(handler, "__annotations__", {}).get(name)
    if not isinstance(annotation, str):
        return is_secret(annotation)
    alone = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        hints = typing.get_type_hints(
            alone, globalns=getattr(handler, "__globals__", {}), localns={}, include_extras=True
        )
    except Exception:  # a type that is declared later, or none at all: its first use says so
        return re.search(r"\bSecret\[", annotation) is not None
    return is_secret(hints[name])


def masked(arguments: Mapping[str, Any], hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The arguments as people may see them: the hidden ones, and whatever is named like a secret at any depth."""
    return {
        name: MASK if name in hidden or looks_secret(name) else _masked_within(value)
        for name, value in arguments.items()
    }


def _masked_within(value: Any) -> Any:
    if isinstance(value, dict):
        return masked(value)
    return [_masked_within(item) for item in value] if isinstance(value, list) else value
