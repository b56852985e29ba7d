"""A document as it is read, one version of it, and what came of a save."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

Source = Literal["user", "ai"]
"""Whether a person wrote it, or a program that writes in a person's name."""


@dataclass(frozen=True)
class Document:
    """One document at its current version. Instants are aware datetimes by the database's clock."""

    id: str
    collection: str
    owner: str
    content: Any = field(repr=False)
    version: int
    saved_by: str
    saved_at: datetime
    source: Source
    created_at: datetime
    deleted_at: datetime | None = None
    why: str | None = None

    def as_json(self, *, content: bool = True) -> dict[str, Any]:
        """The document, its instants as ISO 8601 in UTC; without its payload where that stays unseen."""
        return _plain(vars(self), content)


@dataclass(frozen=True)
class Revision:
    """
    One version of a document. `reason` is what ended it, `overwrite` or `delete`, and None for the current one.

    `content` is None where a history was asked for without.
    """

    document_id: str
    version: int
    content: Any = field(repr=False)
    saved_by: str
    saved_at: datetime
    source: Source
    reason: Literal["overwrite", "delete"] | None
    why: str | None = None

    def as_json(self, *, content: bool = True) -> dict[str, Any]:
        """The version, its instant as ISO 8601 in UTC; without its payload where that stays unseen."""
        return _plain(vars(self), content)


@dataclass(frozen=True)
class Saved:
    """
    A save that stands: the version it made, and when.

    `repeated` says that it stood already, under the same save id: this call wrote nothing.
    """

    version: int
    repeated: bool
    saved_at: datetime


def _plain(facts: dict[str, Any], content: bool) -> dict[str, Any]:
    return {
        name: value.astimezone(UTC).isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value
        for name, value in facts.items()
        if content or name != "content"
    }
