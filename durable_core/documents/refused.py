"""What each error is told as over HTTP. Nothing of the inside is shown: no statement, no trace, no value."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from http import HTTPStatus

from starlette.exceptions import HTTPException

from durable_core.arguments import clean_text
from durable_core.database.transactions import is_infrastructure, said
from durable_core.document_refusals import (
    ContentTooLarge,
    InvalidContent,
    SaveIdReused,
    UnknownDocument,
    UnknownRevision,
    VersionConflict,
)
from durable_core.documents.problems import Problem
from durable_core.documents.rows import Document
from durable_core.documents.wire import too_large
from durable_core.errors import InvalidArguments

log = logging.getLogger("durable.documents")

RETRY_AFTER = 2
"""Seconds. The document's row may be locked, or the database be about to return."""
OF_THE_REQUEST = {"limit", "before"}
"""Arguments that came as they stood in the address."""


def problem_of(error: Exception) -> Problem:
    """The problem that this error is told as; one that nobody expected is logged, and told as `internal`."""
    match error:
        case Problem():
            return error
        case UnknownDocument():
            # The same for a deleted one, another's and one that never was: no word that differs.
            return Problem("not-found", "It never was, was deleted, or is not yours to see. Nothing was written.")
        case UnknownRevision():
            return Problem("version-not-found", "The document never had it, or lets it go. Nothing was written.")
        case ContentTooLarge():
            return too_large(error.limit)
        case InvalidContent():
            issues = [{"at": issue.at, "problem": issue.problem} for issue in error.issues]
            named = ", ".join(issue.at for issue in error.issues[:5] if issue.at) or "the whole of it"
            return Problem("invalid-content", f"It does not fit at: {named}. Nothing was written.", errors=issues)
        case InvalidArguments(argument=argument) if argument in OF_THE_REQUEST:
            return Problem("malformed", f"{argument}: {error.problem}.")
        case HTTPException():
            return _of_the_hook(error)
    if is_infrastructure(error):
        log.warning("document_request_unavailable", extra={"error": said(error)})
        return Problem(
            "unavailable",
            "Whether this was saved is not known. Send it again with the same save_id: it is saved once.",
            headers={"Retry-After": str(RETRY_AFTER)},
        )
    log.error("document_request_failed", exc_info=error)
    return Problem("internal", "It has been logged.")


def conflict(refused: VersionConflict, current: Document, by_header: bool) -> Problem:
    """
    A save from a version that is not the current one, with that one: 412 where it came as a precondition, else 409.

    One look at the document says all of it, for it may have changed again since the save was refused.
    """
    saved_at = instant(current.saved_at)
    facts = {
        "expected_version": refused.expected, "current_version": current.version, "saved_by": current.saved_by,
        "saved_at": saved_at, "current": current.content,
    }  # fmt: skip
    if isinstance(refused, SaveIdReused):
        detail = f"Version {current.version} was saved under this save id, with other content or from another version."
        return Problem("save-id-reused", f"{detail} Nothing was written.", **facts)
    detail = (
        f"You edited version {refused.expected}; version {current.version} was saved by {current.saved_by} at "
        f"{saved_at}. Nothing was written."
    )
    return Problem("version-conflict", detail, status=412 if by_header else None, **facts)


def instant(at: datetime) -> str:
    """An instant as ISO 8601 in UTC."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _of_the_hook(refused: HTTPException) -> Problem:
    reason = {401: "not-signed-in", 403: "forbidden"}.get(refused.status_code, "refused")
    if refused.status_code >= 500:
        reason = "unavailable" if refused.status_code == 503 else "internal"
    detail = refused.detail if isinstance(refused.detail, str) else HTTPStatus(refused.status_code).phrase
    return Problem(reason, clean_text(detail, 500), status=refused.status_code, headers=refused.headers)
