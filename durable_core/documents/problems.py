"""What a request about a document is refused with over HTTP: problem details, RFC 9457."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

TYPES = "urn:durable-core:problem:"
"""Before the reason it is a problem's `type`; whoever has pages about them names their address instead."""

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True)
class Kind:
    """One reason why a request is refused; the status may be another where HTTP has one for the form of the request."""

    status: int
    title: str


KINDS: dict[str, Kind] = {
    "malformed": Kind(400, "The request is not as it should be"),
    "mixed-update": Kind(400, "Content came together with something else"),
    "version-malformed": Kind(400, "The version is no version"),
    "versions-disagree": Kind(400, "The header and the body name different versions"),
    "not-signed-in": Kind(401, "Nobody is signed in"),
    "refused": Kind(400, "The application refused this"),
    "forbidden": Kind(403, "This is not allowed"),
    "cross-site": Kind(403, "The request comes from another site"),
    "not-found": Kind(404, "There is no such document"),
    "version-not-found": Kind(404, "There is no such version"),
    "no-such-address": Kind(404, "There is nothing at this address"),
    "method-not-allowed": Kind(405, "This address does not take this method"),
    "version-conflict": Kind(409, "A newer version exists"),
    "save-id-reused": Kind(409, "The save id was used for another save"),
    "content-too-large": Kind(413, "The content is too large"),
    "unsupported-media-type": Kind(415, "The body is not sent as JSON"),
    "invalid-content": Kind(422, "The content does not fit"),
    "version-required": Kind(428, "The version that this was made from is missing"),
    "too-many-writes": Kind(429, "Too many writes"),
    "internal": Kind(500, "The server failed"),
    "unavailable": Kind(503, "The database cannot be asked just now"),
}
"""Every reason there is. A reason is stable and meant for programs; titles and details are for people."""


class Problem(Exception):
    """
    A refusal on its way out. Nothing was written, but where it is `internal` or `unavailable` that is not known.

    `facts` are the extension members of this problem, such as `current_version`.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        **facts: object,
    ) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
        self.status = KINDS[reason].status if status is None else status
        self.headers = dict(headers or {})
        self.facts = facts

    def response(self, instance: str, types: str = TYPES) -> Response:
        """The answer, about the address `instance`."""
        told: dict[str, object] = {
            "type": types + self.reason, "title": KINDS[self.reason].title, "status": self.status,
            "detail": self.detail, "instance": instance, "reason": self.reason, **self.facts,
        }  # fmt: skip
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **self.headers}
        return JSONResponse(told, self.status, headers, media_type=MEDIA_TYPE)
