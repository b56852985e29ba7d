"""An event of another system: what it says, and the key by which it is known when it comes again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import quote

from durable_core.errors import InvalidArguments

LONGEST = {"system": 200, "external_id": 1000, "key": 1000}
"""Bytes in UTF-8, for these stand in an index."""
LONGEST_WORD = 500
"""And of each other word."""

LONGEST_EVENT = 4 * 1024 * 1024
"""Bytes of an event as JSON. It is kept as it came, and its payload is the input of a step."""


@dataclass(frozen=True)
class Event:
    """
    What another system says happened: `type` about what it calls `external_id`, with a payload of any JSON.

    `event_id` is the sender's own id of the event, the same when it sends it again; without one the payload is what
    it is known by. `key` takes the place of all that. `step` and `scope_key` name a step themselves, where the
    correlation is not to say which. Raises InvalidArguments for what is no event at all.
    """

    system: str
    external_id: str
    type: str
    payload: Any = None
    event_id: str | None = None
    step: str | None = None
    scope_key: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        for name in ("system", "external_id", "type", "event_id", "step", "scope_key", "key"):
            given = getattr(self, name)
            if given is None and name not in ("system", "external_id", "type"):
                continue
            most = LONGEST.get(name, LONGEST_WORD)
            if not isinstance(given, str) or not _is_text(given) or not 0 < len(given.encode()) <= most:
                raise InvalidArguments("event", name, f"it is text of 1 to {most} bytes, without NUL")
        size = len(self.text())
        if size > LONGEST_EVENT:
            raise InvalidArguments("event", "payload", f"the event has {size:,} bytes; at most {LONGEST_EVENT:,} fit")

    @staticmethod
    def of(given: Mapping[str, Any]) -> Event:
        """The event that a JSON object is. Raises InvalidArguments, for a name that no event has too."""
        known = {field.name for field in fields(Event)}
        if not isinstance(given, Mapping):
            raise InvalidArguments("event", "event", f"it is a JSON object; got {type(given).__name__}")
        for name in given:
            if name not in known:
                raise InvalidArguments("event", str(name)[:60], f"an event has {', '.join(sorted(known))}")
        for name in ("system", "external_id", "type"):
            if name not in given:
                raise InvalidArguments("event", name, "it is missing")
        return Event(**given)

    def text(self) -> str:
        """The event as JSON, as it came: with what was said, in the order of its fields. It is kept so."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return _written({name: value for name, value in said.items() if value is not None or name == "payload"})

    @staticmethod
    def read(kept: str) -> dict[str, Any]:
        """The JSON of a kept event."""
        said: dict[str, Any] = json.loads(kept)
        return said

    @staticmethod
    def kept(kept: str) -> Event:
        """The event that was kept, equal to what it was."""
        return Event(**Event.read(kept))

    @property
    def idempotency_key(self) -> str:
        """
        The one key of this event: the given one, or system, external id, type, and its id or its payload's digest.

        Its parts are percent-encoded: no two events whose parts differ have the same.
        """
        if self.key is not None:
            return self.key
        last = f"id:{self.event_id}" if self.event_id is not None else f"sha256:{payload_digest(self.payload)}"
        key = "/".join(quote(part, safe=":@") for part in (self.system, self.external_id, self.type, last))
        return key if len(key) <= LONGEST["key"] else f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def payload_digest(payload: object) -> str:
    """The first 32 hex digits of SHA-256 over the payload with its keys sorted: their order makes no difference."""
    return hashlib.sha256(_written(payload, sort_keys=True).encode()).hexdigest()[:32]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\x00" not in text


def _written(value: object, *, sort_keys: bool = False) -> str:
    """As ASCII, so that a NUL or a lone surrogate in it, which jsonb has no room for, is kept as it was escaped."""
    try:
        _check_names(value)
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as refused:
        raise InvalidArguments("event", "payload", f"it is no JSON ({type(refused).__name__}: {refused})") from None


def _check_names(value: object) -> None:
    """Python writes the names 1 and True as text, and a reader would take them for others."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"a name in it is {type(name).__name__}")
            _check_names(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_names(item)
