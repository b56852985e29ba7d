"""What changes a document: creating it, saving, restoring and deleting, each from the version that was looked at."""

from __future__ import annotations

from uuid import UUID

from uuid_utils.compat import uuid7

from durable_core.claims.operate import who_or_why
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, Steps
from durable_core.document_refusals import SaveIdReused, UnknownDocument, VersionConflict
from durable_core.documents.read import Scope, checked_id, checked_owner, checked_version
from durable_core.documents.rows import Document, Saved, Source
from durable_core.errors import InvalidArguments

_statements = beside(__file__)

SOURCES = ("user", "ai")
HISTORY = "its history"


def created(
    collection: str, content: str, document_id: str | UUID | None, owner: str, by: str, source: Source, why: str | None
) -> Steps[Document]:  # fmt: skip
    """One document at version 0. Raises InvalidArguments for an id that is none, or taken."""
    wanted = uuid7() if document_id is None else _uuid(collection, "document_id", document_id)
    rows = yield _statements.create, {
        "id": str(wanted), "collection": collection, "owner": checked_owner(collection, owner), "content": content,
        **_said("create", collection, by, source, why),
    }  # fmt: skip
    if not rows:
        raise InvalidArguments(collection, "document_id", f"there is a document {wanted} already")
    return Document(**rows[0])


def saved(
    scope: Scope, keep: int | None, document_id: str | UUID, content: str, expected_version: int,
    save_id: str | UUID | None, by: str, source: Source, why: str | None,
) -> Steps[Saved]:  # fmt: skip
    """The next version, with this content. Raises UnknownDocument, VersionConflict, SaveIdReused, InvalidArguments."""
    row_id = checked_id(document_id)
    expected = checked_version(scope.name, "expected_version", expected_version)
    rows = yield _statements.save, {
        "id": row_id, "collection": scope.name, "owner": scope.parameters["owner"], "content": content,
        "expected": expected, "keep": keep,
        "save_id": None if save_id is None else str(_uuid(scope.name, "save_id", save_id)),
        **_said("save", scope.name, by, source, why),
    }  # fmt: skip
    row = _there(row_id, rows)
    if row["version"] is not None:
        return Saved(row["version"], False, row["saved_at"])
    if row["repeated"]:
        return Saved(row["was"], True, row["was_saved_at"])
    refusal = SaveIdReused if row["same_id"] else VersionConflict
    raise refusal(row_id, expected, row["was"], row["saved_by"], row["was_saved_at"])


def let_go(
    scope: Scope, keep: int | None, document_id: str | UUID, version: int, expected_version: int,
    save_id: str | UUID | None,
) -> Steps[Saved | None]:  # fmt: skip
    """The save under this id that restored the version, and let it go; None without one. Raises InvalidArguments."""
    row_id, restored = checked_id(document_id), checked_version(scope.name, "version", version)
    expected = checked_version(scope.name, "expected_version", expected_version)
    if save_id is None or keep is None:
        return None
    rows = yield _statements.let_go, {
        "id": row_id, "collection": scope.name, "owner": scope.parameters["owner"], "keep": keep, "restored": restored,
        "expected": expected, "save_id": str(_uuid(scope.name, "save_id", save_id)),
    }  # fmt: skip
    return Saved(rows[0]["version"], True, rows[0]["saved_at"]) if rows else None


def deleted(
    scope: Scope, keep: int | None, document_id: str | UUID, expected_version: int, by: str, why: str | None
) -> Steps[None]:  # fmt: skip
    """The document's end. Raises UnknownDocument, VersionConflict and InvalidArguments."""
    row_id = checked_id(document_id)
    expected = checked_version(scope.name, "expected_version", expected_version)
    said = _said("delete", scope.name, by, "user", why)
    rows = yield _statements.delete, {
        "id": row_id, "collection": scope.name, "owner": scope.parameters["owner"], "expected": expected, "keep": keep,
        "by": said["by"], "why": said["why"],
    }  # fmt: skip
    row = _there(row_id, rows)
    if row["version"] is None:
        raise VersionConflict(row_id, expected, row["was"], row["saved_by"], row["was_saved_at"])


def _there(row_id: str, rows: list[Row]) -> Row:
    if not rows:
        raise UnknownDocument(row_id)
    return rows[0]


def _said(act: str, collection: str, by: str, source: Source, why: str | None) -> dict[str, object]:
    if source not in SOURCES:
        raise InvalidArguments(collection, "source", f"it is one of {', '.join(SOURCES)}")
    return {
        "by": who_or_why(act, "by", by, HISTORY), "source": source,
        "why": None if why is None else who_or_why(act, "why", why, HISTORY),
    }  # fmt: skip


def _uuid(collection: str, argument: str, given: object) -> UUID:
    try:
        return given if isinstance(given, UUID) else UUID(given)  # type: ignore[arg-type]  # refused below
    except (ValueError, AttributeError, TypeError):
        raise InvalidArguments(collection, argument, "it is a UUID") from None
