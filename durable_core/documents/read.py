"""Looking at documents: one, a version of it, its history, a page of them. Reads only, and nothing is locked."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from durable_core.arguments import INT64
from durable_core.database.statements import beside
from durable_core.database.transactions import Steps, run
from durable_core.document_refusals import UnknownDocument, UnknownRevision
from durable_core.documents.rows import Document, Revision
from durable_core.errors import InvalidArguments

_statements = beside(__file__)

MOST_PER_PAGE = 1000


def checked_id(document_id: str | UUID) -> str:
    """A document's id in its one spelling. Raises UnknownDocument for what cannot be an id."""
    try:
        return str(UUID(str(document_id)))
    except ValueError:
        raise UnknownDocument(str(document_id)[:60]) from None


def checked_version(collection: str, argument: str, version: object) -> int:
    """A version: a whole number that the database has room for. Raises InvalidArguments."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0 or version not in INT64:
        raise InvalidArguments(collection, argument, "a version is a whole number from 0 to 2^63 - 1")
    return version


def checked_limit(collection: str, limit: object) -> int:
    """Raises InvalidArguments."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidArguments(collection, "limit", f"it is a whole number from 1 to {MOST_PER_PAGE:,}")
    return limit


def checked_owner(collection: str, owner: object) -> str:
    """Text that names somebody. Raises InvalidArguments."""
    if not isinstance(owner, str) or not 0 < len(owner) <= 200 or not owner.isprintable() or not owner.strip():
        raise InvalidArguments(collection, "owner", "it is text of 1 to 200 printable characters")
    return owner


class Scope:
    """Which documents a look may see: those of a collection and of an owner, where they are said, and deleted ones."""

    def __init__(self, collection: str | None, owner: str | None = None, deleted: bool = False) -> None:
        self.name = collection or "documents"
        if owner is not None:
            checked_owner(self.name, owner)
        self.parameters: dict[str, object] = {"collection": collection, "owner": owner, "deleted": deleted}


EVERYTHING = Scope(None, deleted=True)
"""What operators see."""


def got(scope: Scope, document_id: str | UUID) -> Steps[Document]:
    """One document. Raises UnknownDocument."""
    row_id = checked_id(document_id)
    rows = yield _statements.get, {"id": row_id, **scope.parameters}
    if not rows:
        raise UnknownDocument(row_id)
    return Document(**rows[0])


def listed(scope: Scope, after: str | UUID | None, limit: int) -> Steps[list[Document]]:
    """A page of documents without their content, newest first. Raises InvalidArguments."""
    last = None
    if after is not None:
        try:
            last = str(UUID(str(after)))
        except ValueError:
            raise InvalidArguments(scope.name, "after", "it is the last id of the page before") from None
    wanted = {"after": last, "limit": checked_limit(scope.name, limit), **scope.parameters}
    rows = yield _statements.page, wanted
    return [Document(**row) for row in rows]


def past(
    scope: Scope, document_id: str | UUID, limit: int, before: int | None, contents: bool
) -> Steps[list[Revision]]:  # fmt: skip
    """The current version and those before it, newest first. Raises UnknownDocument and InvalidArguments."""
    row_id, left = checked_id(document_id), checked_limit(scope.name, limit)
    if before is not None:
        before = checked_version(scope.name, "before", before)
    rows = yield _statements.current, {"id": row_id, "contents": contents, **scope.parameters}
    if not rows:
        raise UnknownDocument(row_id)
    current = {name: value for name, value in rows[0].items() if name != "deleted"}
    shown: list[dict[str, Any]] = []
    if not rows[0]["deleted"] and (before is None or current["version"] < before):
        shown, before = [current], current["version"]
    if len(shown) < left:
        # Below the current version that was read: a save that committed since would else be half shown.
        older = yield _statements.revisions, {
            "id": row_id, "before": before, "limit": left - len(shown), "contents": contents,
        }  # fmt: skip
        shown += [dict(row) for row in older]
    return [Revision(document_id=row_id, **row) for row in shown]


def at_version(scope: Scope, document_id: str | UUID, version: int) -> Steps[Revision]:
    """One version, the current one included. Raises UnknownDocument, UnknownRevision and InvalidArguments."""
    row_id, wanted = checked_id(document_id), checked_version(scope.name, "version", version)
    rows = yield _statements.revision, {"id": row_id, "version": wanted, **scope.parameters}
    if not rows:
        raise UnknownDocument(row_id)
    if rows[0]["version"] is None:
        raise UnknownRevision(row_id, wanted)
    return Revision(document_id=row_id, **rows[0])


def version_for_change(collection: str, session: Session, document_id: object) -> int | None:
    """The version of a plan's reviewed document, its row locked for the step; None where it is gone."""
    try:
        row_id = checked_id(str(document_id))
    except UnknownDocument:
        return None
    rows = run(session, _statements.version, id=row_id, collection=collection)
    return rows[0]["version"] if rows else None
