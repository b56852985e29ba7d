"""What a document must be: a pydantic model, another type that pydantic knows, or plain JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

import pydantic
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from durable_core.arguments import MAX_DEPTH, Unfit, check, clean_text
from durable_core.cases.passing import passing
from durable_core.errors import DefinitionError
from durable_core.refusals import Misfit

MOST_ISSUES = 20
"""A document that fits nowhere is told by its first faults."""


class Misfits(ValueError):
    """A document does not fit; `issues` say where and why."""

    def __init__(self, issues: tuple[Misfit, ...]) -> None:
        super().__init__(issues)
        self.issues = issues


def plain(value: object) -> Any:
    """
    The value as strict JSON, copied: tuples become lists, models objects, and -0.0 is 0.0 as the database has it.

    Raises Unfit for what would not come back from JSON as it went in.
    """
    copied = _copied(value, 0)
    check(copied)
    return copied


def _copied(value: object, depth: int) -> object:
    if depth > MAX_DEPTH:  # a cycle too
        raise Unfit(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's member as its text
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) or 0.0
    if isinstance(value, dict):
        return {_key(key): _copied(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, depth + 1) for item in value]
    if isinstance(value, pydantic.BaseModel):
        return _copied(value.model_dump(mode="json", warnings="none"), depth)
    return value


def _key(key: object) -> object:
    return str.__str__(key) if isinstance(key, str) else key


class _Quiet(GenerateJsonSchema):
    """Says nothing of a default that has no place in a JSON Schema: nobody asked for one when a type is declared."""

    def emit_warning(self, kind: Any, detail: str) -> None:
        pass


class Schema:
    """
    A model and the two ways through it. What is stored is what the model gives back, not what it was given.

    Field names and aliases are both taken; field names are stored, unless the model's own configuration says otherwise.
    With `loses_nothing` what no field takes is a misfit where it would else be left out unsaid.
    """

    def __init__(self, model: Any, what: str, *, loses_nothing: bool = False) -> None:
        self.model = model
        self._extra: Literal["forbid"] | None = None
        self._adapter: pydantic.TypeAdapter[Any] | None = None
        if model is None:
            return
        try:
            self._adapter = pydantic.TypeAdapter(model)
            if not self._adapter.pydantic_complete:
                raise TypeError(f"{model!r} names what is not declared yet")
        except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation, TypeError) as unfit:
            raise DefinitionError(
                f"{what} is a pydantic model, or another type that pydantic can validate, all of it declared above; "
                f"got {model!r}."
            ) from unfit
        if loses_nothing:
            self._extra = _forbidden(self.json_schema(), model, what)
        if _hides(self.json_schema()):
            raise DefinitionError(
                f"{what} has a field of a secret type, such as SecretStr: it would be stored as stars, and the secret "
                "lost. Keep the secret in the settings, and its name in the field."
            )
        if _unordered(self._json_schema("serialization")):
            raise DefinitionError(
                f"{what} has a set: each process would write its items in another order, and a document that nobody "
                "changed would differ. Make it a list, or give it an order: "
                "`Annotated[set[str], PlainSerializer(sorted, return_type=list[str])]`."
            )
        if (taken := _ambiguous(model, set())) is not None:
            raise DefinitionError(
                f"{what} has the alias {taken!r}, which is the name of another field beside it: fields are stored by "
                "their names and read by either, so one would come back with the value of the other. Rename the alias."
            )

    def load(self, document: object) -> Any:
        """A fresh value of this JSON. Raises Misfits."""
        try:
            copied = plain(document)
        except Exception as unfit:  # a foreign type's own code may raise anything
            raise Misfits((_unfit(unfit),)) from None
        return copied if self._adapter is None else self._validated(copied)

    def dump(self, value: object) -> Any:
        """
        The JSON to store of a value, or of JSON as it came, validated once more: a model may have been changed since.

        Raises Misfits, also for what the schema would not load again.
        """
        if self._adapter is None:
            try:
                return plain(value)
            except Exception as unfit:
                raise Misfits((_unfit(unfit),)) from None
        given = self._written(value)
        kept = self._written(self._validated(given))
        if json.dumps(kept) != json.dumps(given):
            # A field that writes otherwise than it reads would leave a document that nobody can load.
            self._validated(kept)
        return kept

    def json_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of what is taken, for forms and tools; None for plain JSON, and for what has none."""
        return self._json_schema("validation")

    def _json_schema(self, mode: Literal["validation", "serialization"]) -> dict[str, Any] | None:
        if self._adapter is None:
            return None
        try:
            return self._adapter.json_schema(mode=mode, schema_generator=_Quiet)
        except pydantic.PydanticUserError:
            return None

    def _validated(self, document: object) -> Any:
        assert self._adapter is not None
        try:
            return self._adapter.validate_json(json.dumps(document), by_alias=True, by_name=True, extra=self._extra)
        except pydantic.ValidationError as refused:
            found = refused.errors(include_url=False, include_input=False, include_context=False)
            raise Misfits(
                tuple(
                    Misfit(clean_text(".".join(str(part) for part in one["loc"]), 200), clean_text(one["msg"], 300))
                    for one in found[:MOST_ISSUES]
                )
            ) from None
        except passing():
            raise  # the task ends: that says nothing of the document
        except Exception as raised:  # a validator of the model
            raise Misfits((Misfit("", f"its model raised {type(raised).__name__}"),)) from raised

    def _written(self, value: object) -> Any:
        assert self._adapter is not None
        try:
            return plain(self._adapter.dump_python(value, mode="json", warnings="none"))
        except passing():
            raise
        except Exception as unfit:
            raise Misfits((_unfit(unfit),)) from None


def _hides(schema: object) -> bool:
    """Whether a JSON Schema has a part that is written otherwise than it was read: what pydantic masks."""
    return _has(schema, "writeOnly")


def _unordered(schema: object) -> bool:
    """Whether a JSON Schema of what is written has a part whose items come in no order: a set."""
    return _has(schema, "uniqueItems")


def _has(schema: object, mark: str) -> bool:
    if isinstance(schema, dict):
        return schema.get(mark) is True or any(_has(part, mark) for part in schema.values())
    return isinstance(schema, list) and any(_has(part, mark) for part in schema)


def _forbidden(schema: object, model: Any, what: str) -> Literal["forbid"] | None:
    """
    "forbid", which rules all parts of a model, unless one keeps what it has no field for: then each says so itself.

    Raises DefinitionError for one that does not, beside one that keeps such: what came there would be left out unsaid.
    """
    parts, config = list(_parts(schema)), getattr(model, "model_config", None)
    keeps_itself = isinstance(config, dict) and config.get("extra") == "allow"  # where it has no JSON Schema
    if not keeps_itself and not any(keeps for _, keeps in parts):
        return "forbid"
    if (silent := next((title for title, keeps in parts if keeps is None), None)) is not None:
        raise DefinitionError(
            f"{what} keeps what it has no field for, and {silent} in it would leave that out unsaid: give that "
            'extra="allow" or extra="forbid" too.'
        )
    return None


def _parts(schema: object) -> Iterator[tuple[str, bool | None]]:
    """Each part with fields in a JSON Schema, and whether it keeps what it has no field for; None: it leaves it out."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
            more = schema.get("additionalProperties")
            yield str(schema.get("title", "a part")), None if more is None else more is not False
        for inner in schema.values():
            yield from _parts(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _parts(inner)


def _ambiguous(annotation: Any, seen: set[int]) -> str | None:
    """An alias that is another field's name, in a model or in one that it has somewhere inside."""
    if id(annotation) in seen:
        return None
    seen.add(id(annotation))
    parts: list[Any] = [*get_args(annotation), getattr(annotation, "__value__", None)]
    fields: dict[str, FieldInfo] = getattr(annotation, "__pydantic_fields__", {})
    for name, field in fields.items():
        parts.append(field.annotation)
        for alias in _aliases(field):
            if alias != name and alias in fields:
                return alias
    found = (_ambiguous(part, seen) for part in parts if part is not None)
    return next((alias for alias in found if alias is not None), None)


def _aliases(field: FieldInfo) -> Iterator[str]:
    given = field.validation_alias
    for one in given.choices if isinstance(given, pydantic.AliasChoices) else [given, field.alias]:
        if isinstance(one, pydantic.AliasPath):
            yield str(one.path[0])
        elif one is not None:
            yield one


def _unfit(raised: Exception) -> Misfit:
    if isinstance(raised, Unfit):
        return Misfit("", str(raised))
    return Misfit("", f"it cannot be written as JSON ({type(raised).__name__})")


_ANYTHING = pydantic.TypeAdapter[Any](Any)


def recorded(value: object) -> tuple[Any, bool]:
    """
    A value as a journal keeps it, and whether it is all there: what is no JSON leaves a marker in its place.

    Never raises: who acts is told as well as it can be, and nothing fails for that.
    """
    try:
        return plain(value), True
    except Exception:
        pass  # perhaps pydantic knows how to write it: an instant, a dataclass
    try:
        return plain(_ANYTHING.dump_python(value, mode="json", warnings="none")), True
    except Exception as unfit:  # a cycle, an object of a foreign type
        why = str(unfit) if isinstance(unfit, Unfit) else f"{type(value).__name__} is not JSON"
        return {MARK: "not stored", "why": clean_text(why, 200)}, False


MARK = "durable"


def is_marker(document: object) -> bool:
    """Whether a journal keeps this in the place of what is no JSON."""
    return isinstance(document, dict) and set(document) == {MARK, "why"} and document[MARK] == "not stored"
