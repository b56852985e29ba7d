"""The addresses of a collection as OpenAPI describes them, for clients that are made from such a description."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pydantic

from durable_core.documents.declare import Documents
from durable_core.documents.problems import KINDS, MEDIA_TYPE

_VERSION = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_INSTANT = {"type": "string", "format": "date-time"}
_UUID = {"type": "string", "format": "uuid"}
_TEXT = {"type": "string"}

_READING = (401, 403, 404, 503)
_WRITING = (400, 401, 403, 404, 409, 412, 413, 415, 422, 428, 429, 503)


def described(documents: Documents, prefix: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the router, below `prefix`."""
    content, models = _content(documents)
    name = documents.name
    past = {"version": _VERSION, "saved_by": _TEXT, "saved_at": _INSTANT, "source": _TEXT}
    current = _object({"id": _UUID, "content": content, **past})
    saved = _object({"version": _VERSION, "saved_at": _INSTANT, "repeated": {"type": "boolean"}})
    naming = {"expected_version": _VERSION, "save_id": _UUID}
    save = _object({**naming, "content": content}, optional={"save_id"}, closed=True)
    restore = _object({**naming, "version": _VERSION}, optional={"save_id"}, closed=True)
    ended = {"reason": {"enum": ["overwrite", "delete", None]}, "why": {"type": ["string", "null"]}}
    one_version = _object({**past, "content": content, **ended})
    versions = _object({"versions": {"type": "array", "items": _object({**past, **ended})}})
    one = f"{prefix.rstrip('/')}/{{document_id}}"
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Documents: {name}", "version": "1"},
        "paths": {
            one: {
                "parameters": [_in_path("document_id", _UUID)],
                "get": _act(f"{name}: the document", _READING, {200: current, 304: None}, headers=["If-None-Match"]),
                "put": _act(
                    f"{name}: save, from the version in If-Match", _WRITING, {200: saved}, body=content,
                    headers=["If-Match", "Idempotency-Key"],
                ),
            },
            f"{one}/versions": {
                "parameters": [_in_path("document_id", _UUID)],
                "get": _act(
                    f"{name}: its versions, the newest first", (400, *_READING),
                    {200: versions}, query=["limit", "before"],
                ),
                "post": _act(f"{name}: save", _WRITING, {201: saved, 200: saved}, body=save),
            },
            f"{one}/versions/{{version}}": {
                "parameters": [_in_path("document_id", _UUID), _in_path("version", _VERSION)],
                "get": _act(f"{name}: one version", _READING, {200: one_version, 304: None}),
            },
            f"{one}/restore": {
                "parameters": [_in_path("document_id", _UUID)],
                "post": _act(
                    f"{name}: save an older version anew", _WRITING, {201: saved, 200: saved}, body=restore
                ),
            },
        },
        "components": {"schemas": {**models, "DocumentProblem": _PROBLEM}},
    }  # fmt: skip


def _content(documents: Documents) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of the content, and those of the models it is made of."""
    if documents.model is None:
        return {"type": "object"}, {}
    schema = pydantic.TypeAdapter(documents.model).json_schema(ref_template="#/components/schemas/{model}")
    models = schema.pop("$defs", {})
    title = schema.get("title")
    if title is None:
        return schema, models
    return {"$ref": f"#/components/schemas/{title}"}, {**models, title: schema}


def _object(fields: dict[str, Any], *, optional: Collection[str] = (), closed: bool = False) -> dict[str, Any]:
    required = [name for name in fields if name not in optional]
    made: dict[str, Any] = {"type": "object", "properties": fields, "required": required}
    return {**made, "additionalProperties": False} if closed else made


_ALWAYS = {
    "type": _TEXT, "title": _TEXT, "status": {"type": "integer"}, "detail": _TEXT, "instance": _TEXT,
    "reason": {"type": "string", "enum": list(KINDS)},
}  # fmt: skip
_AT_TIMES = {
    "expected_version": _VERSION, "current_version": _VERSION, "saved_by": _TEXT, "saved_at": _INSTANT, "current": {},
    "errors": {"type": "array", "items": _object({"at": _TEXT, "problem": _TEXT})},
    "limit": {"type": "integer"}, "retry_after": {"type": "integer"},
}  # fmt: skip
_PROBLEM = _object({**_ALWAYS, **_AT_TIMES}, optional=_AT_TIMES)


def _in_path(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _act(
    summary: str,
    refusals: tuple[int, ...],
    answers: dict[int, dict[str, Any] | None],
    *,
    body: dict[str, Any] | None = None,
    headers: list[str] | None = None,
    query: list[str] | None = None,
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "summary": summary,
        "responses": {
            **{str(status): _answer(status, schema) for status, schema in answers.items()},
            **{str(status): _PROBLEM_ANSWER for status in refusals},
        },
    }
    named = [{"name": name, "in": "header", "schema": _TEXT} for name in headers or []]
    named += [{"name": name, "in": "query", "schema": _VERSION} for name in query or []]
    if named:
        told["parameters"] = named
    if body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return told


def _answer(status: int, schema: dict[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {"description": "Not changed"}
    return {
        "description": "Made" if status == 201 else "What is there",
        "content": {"application/json": {"schema": schema}},
    }


_PROBLEM_ANSWER = {
    "description": "Refused; `reason` says why",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/DocumentProblem"}}},
}
