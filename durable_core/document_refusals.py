"""What documents refuse. The root, and what all contracts share, stands in `errors`."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from durable_core.errors import DurableError
from durable_core.refusals import Misfit


class DocumentRefused(DurableError):
    """
    What every refusal of a document derives from; never raised itself.

    `http` is the status that an endpoint answers it with.
    """

    reason = "DOCUMENT_REFUSED"
    http: ClassVar[int] = 500


class UnknownDocument(DocumentRefused):
    """There is no such document, or it was deleted, or it is another's: nobody is told which; nothing was written."""

    reason = "NOT_FOUND"
    http = 404

    def __init__(self, document_id: str) -> None:
        super().__init__(document_id)
        self.document_id = document_id

    def __str__(self) -> str:
        return f"there is no document {self.document_id}: look at its id. Nothing was written."


class UnknownRevision(DocumentRefused):
    """The document never had this version, or `keep` let it go; nothing was written."""

    reason = "NOT_FOUND"
    http = 404

    def __init__(self, document_id: str, version: int) -> None:
        super().__init__(document_id, version)
        self.document_id, self.version = document_id, version

    def __str__(self) -> str:
        return (
            f"document {self.document_id} has no version {self.version}, or keeps it no longer: its history says which "
            "there are. Nothing was written."
        )


class VersionConflict(DocumentRefused):
    """
    The document is at another version than the one that this was made from; nothing was written.

    `current_version` was saved by `saved_by` at `saved_at`. The transaction is alive: look at what is there, and save
    again on it what should stand.
    """

    reason = "VERSION_CONFLICT"
    http = 409

    def __init__(
        self, document_id: str, expected: int, current_version: int, saved_by: str, saved_at: datetime
    ) -> None:  # fmt: skip
        super().__init__(document_id, expected, current_version, saved_by, saved_at)
        self.document_id, self.expected, self.current_version = document_id, expected, current_version
        self.saved_by, self.saved_at = saved_by, saved_at

    def __str__(self) -> str:
        return (
            f"document {self.document_id}: this was made from version {self.expected}, and version "
            f"{self.current_version} was saved by {self.saved_by} at {self.saved_at.isoformat()}. Look at that one, "
            "and save again on it. Nothing was written."
        )


class SaveIdReused(VersionConflict):
    """The save id names the current version, saved with other content or from another one; nothing was written."""

    reason = "SAVE_ID_REUSED"

    def __str__(self) -> str:
        return (
            f"document {self.document_id}: its version {self.current_version}, by {self.saved_by}, was saved under "
            "this save id, with other content or from another version than this. Use another id for another save. "
            "Nothing was written."
        )


class InvalidContent(DocumentRefused):
    """The content does not fit the collection's model, with all that is wrong with it; nothing was written."""

    reason = "INVALID_CONTENT"
    http = 422

    def __init__(self, collection: str, issues: tuple[Misfit, ...]) -> None:
        super().__init__(collection, issues)
        self.collection, self.issues = collection, issues

    def __str__(self) -> str:
        return f"{self.collection}: the content is refused: {'; '.join(map(str, self.issues))}. Nothing was written."


class ContentTooLarge(DocumentRefused):
    """The content takes more room than a document has; nothing was written."""

    reason = "CONTENT_TOO_LARGE"
    http = 413

    def __init__(self, collection: str, size: int, limit: int) -> None:
        super().__init__(collection, size, limit)
        self.collection, self.size, self.limit = collection, size, limit

    def __str__(self) -> str:
        return (
            f"{self.collection}: the content takes {self.size:,} bytes, and {self.limit:,} are the most: store large "
            "parts elsewhere and keep their ids. Nothing was written."
        )
