"""Arguments and results as strict JSON: what is accepted here comes back equal, byte for byte of meaning."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, time
from decimal import Decimal
from functools import cached_property
from typing import Any, Union

import pydantic

from durable_core.errors import DefinitionError, InvalidArguments
from durable_core.secrets import is_declared_secret, is_secret, looks_secret

MAX_BYTES = 256 * 1024
"""Largest payload, in bytes of its canonical text; design, section 4."""
MAX_DEPTH = 32
INT64 = range(-(2**63), 2**63)
"""Integers outside are accepted by jsonb and then lost in other readers."""


class Unfit(ValueError):
    """A value has no place in strict JSON; the message says which part and why."""


def check(value: object, at: str = "", depth: int = 0) -> None:
    """Refuse what Postgres, JSON or a later reader would refuse, change or lose. Raises Unfit."""
    where = f" at {at}" if at else ""
    if depth > MAX_DEPTH:
        raise Unfit(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if value not in INT64:
            raise Unfit(f"an integer{where} does not fit in 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Unfit(f"a number{where} is NaN or infinite")
    elif isinstance(value, str):
        if "\x00" in value:
            raise Unfit(f"a text{where} holds a NUL character")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unfit(f"a text{where} holds a lone surrogate") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Unfit(f"a key{where} is {type(key).__name__}, and JSON keys are text")
            check(key, at, depth + 1)
            check(item, f"{at}.{key}" if at else key, depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check(item, f"{at}[{index}]", depth + 1)
    else:
        raise Unfit(f"{type(value).__name__}{where} is not JSON")


_encoded = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def _written(value: object) -> str:
    """The canonical text of a value that was checked."""
    text = _encoded(value)
    # Seen in the text, for a look at every number would cost more; a string that looks so costs a moment.
    return _spelled_out(value) if "e+" in text or "-0.0" in text else text


def _spelled_out(value: object) -> str:
    """
    The same, with its floats as jsonb gives them back.

    jsonb keeps 1e+16 as 10000000000000000, which a reader takes for an integer, and knows no
    negative zero. So a large float is written with all its digits and `.0`, and -0.0 as 0.0.
    """
    if isinstance(value, float):
        text = float.__repr__(value or 0.0)
        return f"{Decimal(text):f}.0" if "e+" in text else text
    if isinstance(value, dict):
        return f"{{{','.join(f'{_encoded(key)}:{_spelled_out(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_spelled_out(item) for item in value)}]"
    return _encoded(value)


def canonical(value: object, *, around: int = 0) -> str:
    """
    The one text of a JSON value: keys sorted, no spaces. The digest and the size are over this text.

    `around` is how many levels we ourselves put around a document, which may be as deep as any.
    """
    check(value, depth=-around)
    return _written(value)


def digest(canonical_text: str) -> str:
    """SHA-256, in hex, of a canonical text. Never recomputed from jsonb, which reorders keys and rewrites numbers."""
    return hashlib.sha256(canonical_text.encode()).hexdigest()


class Argument:
    """One argument of a handler: how what is handed over becomes text, and the text that its default has."""

    def __init__(self, name: str, annotation: Any, default: object) -> None:
        self.name = name
        self.key = f"{_written(name)}:"
        self._default = default
        self._plain = _plain_types(annotation)
        # A pydantic model or dataclass brings its own configuration, and refuses another beside it.
        config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        try:
            self._adapter = pydantic.TypeAdapter[Any](annotation, config=config)
        except pydantic.PydanticUserError:
            self._adapter = pydantic.TypeAdapter[Any](annotation)

    def text(self, given: object) -> str:
        """Its canonical text, checked once; refused with Unfit unless that text gives back an equal value."""
        if type(given) in self._plain:
            check(given, self.name, 1)
            return _written(given)
        if (naive := _naive(given)) is not None:
            raise Unfit(f"a {naive} without a time zone; give it one")
        try:
            valid = self._adapter.validate_python(given, strict=True)
            value = self._adapter.dump_python(valid, mode="json")
            # At depth 1: it will lie in the object of all arguments.
            check(value, self.name, 1)
            text = _written(value)
            back = self._adapter.validate_json(text, strict=True)
        except Unfit:
            raise
        except pydantic.ValidationError as refused:
            first = refused.errors(include_url=False, include_input=False)[0]
            inner = ".".join(str(part) for part in first["loc"])
            raise Unfit(f"{first['msg']}{f' (at {inner})' if inner else ''}") from None
        except Exception as refused:  # pydantic wraps what a foreign type's own code raises in many classes
            raise Unfit(f"{type(given).__name__} is not JSON ({type(refused).__name__})") from None
        if type(back) is not type(valid) or back != valid:
            raise Unfit(f"{type(given).__name__} would come back from JSON as {type(back).__name__}, another value")
        return text

    @cached_property
    def default_text(self) -> str | None:
        """None without a default, and for one that is no JSON or not of its own type: nothing given equals that."""
        if self._default is inspect.Parameter.empty:
            return None
        try:
            return self.text(self._default)
        except Unfit:
            return None


_PLAIN: frozenset[type] = frozenset({str, int, float, bool, types.NoneType})


def _plain_types(annotation: Any) -> frozenset[type]:
    """The types whose values pydantic and JSON give back unchanged under this annotation; none where in doubt."""
    if annotation is Any:
        return _PLAIN
    of_union = typing.get_origin(annotation) in (Union, types.UnionType)
    members = typing.get_args(annotation) if of_union else (annotation,)
    # Of a union all: another member may take the value and change it.
    return frozenset(members) if all(isinstance(m, type) and m in _PLAIN for m in members) else frozenset()


_NO_STEP = frozenset({"str", "int", "float", "bool", "bytes", "dict", "list", "tuple", "UUID", "datetime", "Decimal"})
"""Annotations of a first parameter that was meant as an argument, as Celery's tasks have it."""


class Signature:
    """
    The arguments a handler takes, from its annotations, checked strictly.

    The first parameter is the step. Unannotated parameters take any JSON. Types are
    resolved at first use, so that a module may declare them below the handler. A name that
    looks like a secret is refused unless it is annotated `Secret[...]`.
    """

    def __init__(self, kind: str, handler: Callable[..., object]) -> None:
        self.kind = kind
        self._handler = handler
        try:
            parameters = list(inspect.signature(handler).parameters.values())
        except (TypeError, ValueError) as unreadable:
            raise DefinitionError(f"kind {kind!r}: a handler is a function that Python can describe.") from unreadable
        if not parameters or parameters[0].kind in (
            inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
        ):  # fmt: skip
            raise DefinitionError(f"kind {kind!r}: a handler takes the step as its first parameter.")
        first = parameters[0]
        # An annotation may be a text, where the module postpones them.
        if getattr(first.annotation, "__name__", first.annotation) in _NO_STEP:
            raise DefinitionError(
                f"kind {kind!r}: a handler takes the step as its first parameter, and {first.name!r} is annotated as "
                f"an argument: write (step: Step, {first.name}: …)."
            )
        for parameter in parameters:
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise DefinitionError(
                    f"kind {kind!r}: name the arguments one by one; *{parameter.name} cannot be checked at enqueue."
                )
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and parameter is not parameters[0]:
                raise DefinitionError(
                    f"kind {kind!r}: argument {parameter.name!r} is positional only; arguments are stored by name."
                )
        for parameter in parameters[1:]:
            if looks_secret(parameter.name) and not is_declared_secret(handler, parameter.name):
                raise DefinitionError(
                    f"kind {kind!r}: argument {parameter.name!r} looks like a secret, and arguments are stored "
                    "readable. Keep it in the settings and pass its name; or, knowing that, annotate Secret[...]."
                )
        self._parameters = parameters[1:]
        self._signature = inspect.Signature(self._parameters)
        self._fields = {parameter.name: f"argument_{n}" for n, parameter in enumerate(self._parameters)}
        self._model: type[pydantic.BaseModel] | None = None
        self._arguments: dict[str, Argument] = {}

    @property
    def model(self) -> type[pydantic.BaseModel]:
        """The pydantic model of the arguments: strict, nothing extra."""
        if self._model is None:
            hints = typing.get_type_hints(self._handler, include_extras=True)
            # Fields under names of ours, the arguments as aliases: `copy`, `json` or `_id` would meet pydantic's own.
            fields: dict[str, Any] = {
                self._fields[parameter.name]: (
                    hints.get(parameter.name, Any),
                    pydantic.Field(
                        ... if parameter.default is inspect.Parameter.empty else parameter.default,
                        alias=parameter.name,
                    ),
                )
                for parameter in self._parameters
            }
            self._model = pydantic.create_model(
                f"{self.kind}.arguments",
                __config__=pydantic.ConfigDict(
                    strict=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
                ),
                **fields,
            )
        return self._model

    @cached_property
    def hidden(self) -> frozenset[str]:
        """The arguments annotated `Secret[...]`, which nothing of ours shows."""
        hints = typing.get_type_hints(self._handler, include_extras=True)
        return frozenset(parameter.name for parameter in self._parameters if is_secret(hints.get(parameter.name)))

    def pack(self, args: Sequence[object], kwargs: Mapping[str, object], *, whole: bool = False) -> str:
        """
        The canonical text to store for this call; arguments equal to their defaults are left out.

        With `whole` they are not, as far as a default is JSON: what is frozen must not change when the code does.

        Raises InvalidArguments, naming the argument, for a wrong name or type and for
        anything that would not come back from JSON as it went in.
        """
        packed: dict[str, str] = {}
        for name, text in self._texts(self._signature.bind, args, kwargs):
            if text is not None:
                packed[name] = f"{self._argument(name).key}{text}"
        if whole:
            for argument in (self._argument(name) for name in self._fields if name not in packed):
                if argument.default_text is not None:
                    packed[argument.name] = f"{argument.key}{argument.default_text}"
        packed_text = f"{{{','.join(packed[name] for name in sorted(packed))}}}"
        if (size := len(packed_text.encode())) > MAX_BYTES:
            raise InvalidArguments(self.kind, max(packed, key=lambda name: len(packed[name])), _too_big(size))
        return packed_text

    def some(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, str | None]:
        """
        The canonical text of each of these arguments, of which some may be missing; None for one equal to its default.

        For looking at rows, where such a one is not stored. Raises InvalidArguments as `pack` does.
        """
        return dict(self._texts(self._signature.bind_partial, args, kwargs))

    def _texts(
        self, bind: Callable[..., inspect.BoundArguments], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Iterator[tuple[str, str | None]]:
        try:
            bound = bind(*args, **kwargs).arguments
        except TypeError as refused:
            culprit = _culprit(refused, kwargs, self._parameters)
            if culprit is None:
                raise InvalidArguments(self.kind, "arguments", self._too_many(len(args)), of_all=True) from None
            raise InvalidArguments(self.kind, clean_text(culprit, 100), clean_text(str(refused), 300)) from None
        for name, given in bound.items():
            argument = self._argument(name)
            try:
                text = argument.text(given)
            except Unfit as unfit:
                raise InvalidArguments(self.kind, name, clean_text(str(unfit), 300)) from None
            # Compared as text: to Python True is 1 and 1.0 is 1, to a handler they are not.
            yield name, None if text == argument.default_text else text

    def _too_many(self, given: int) -> str:
        """The one thing that is wrong with a call and with none of its arguments."""
        names = [one.name for one in self._parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        takes = f"it takes {len(names)} at most: {', '.join(names)}" if names else "it takes none"
        return f"{given} arguments by position are too many; {takes}"

    def _argument(self, name: str) -> Argument:
        if name not in self._arguments:
            annotation = self.model.model_fields[self._fields[name]].rebuild_annotation()
            self._arguments[name] = Argument(name, annotation, self._signature.parameters[name].default)
        return self._arguments[name]

    def unpack(self, text: str) -> dict[str, object]:
        """The keyword arguments for the handler, from the stored text. Raises InvalidArguments."""
        try:
            model = self.model.model_validate_json(text, strict=True)
        except pydantic.ValidationError as refused:
            first = refused.errors(include_url=False, include_input=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "arguments"
            raise InvalidArguments(self.kind, name, str(first["msg"])) from None
        return {name: getattr(model, field) for name, field in self._fields.items()}


def _naive(value: object, depth: int = 0) -> str | None:
    """The type of an instant without a time zone anywhere in the value; None where there is none."""
    if isinstance(value, datetime | time):
        return type(value).__name__ if value.tzinfo is None else None
    if isinstance(value, pydantic.BaseModel):
        value = vars(value)
    if depth > MAX_DEPTH or not isinstance(value, Mapping | list | tuple | set | frozenset):
        return None
    items = value.values() if isinstance(value, Mapping) else value
    return next((found for item in items if (found := _naive(item, depth + 1)) is not None), None)


def _culprit(refused: TypeError, kwargs: Mapping[str, object], parameters: Sequence[inspect.Parameter]) -> str | None:
    """The argument a failed call is about, from Python's own sentence; None where there are too many by position."""
    names = {parameter.name for parameter in parameters}
    for name in kwargs:
        if name not in names:
            return name
    for parameter in parameters:
        if f"'{parameter.name}'" in str(refused):
            return parameter.name
    return None


def _too_big(size: int) -> str:
    return f"the arguments take {size} bytes, more than {MAX_BYTES}; store the data and pass its id"


def by_name(kind: str, arguments: object) -> Mapping[str, object]:
    """The arguments, if they are a mapping of names. Raises InvalidArguments."""
    if not isinstance(arguments, Mapping):
        got = type(arguments).__name__
        problem = f"arguments are a mapping of names to values; got {got}"
        raise InvalidArguments(kind, "arguments", problem, of_all=True)
    for name in arguments:
        if not isinstance(name, str):
            raise InvalidArguments(kind, clean_text(repr(name), 100), f"a name is text, and not {type(name).__name__}")
    return arguments


def packed_freely(kind: str, arguments: Mapping[str, object]) -> str:
    """The canonical text for a kind whose code is not here; checked as JSON, not against a signature."""
    for name, value in arguments.items():
        try:
            check({name: value})
        except Unfit as unfit:
            raise InvalidArguments(kind, clean_text(name, 100), clean_text(str(unfit), 300)) from None
    text = _written(dict(arguments))
    if (size := len(text.encode())) > MAX_BYTES:
        largest = max(arguments, key=lambda name: len(_written(arguments[name])))
        raise InvalidArguments(kind, clean_text(largest, 100), _too_big(size))
    return text


def result_text(value: object) -> tuple[str, str | None]:
    """
    A handler's return value as JSON text, and a warning when it had to be replaced by a marker.

    Never raises: the effect has happened, and what it returned must not undo that.
    """
    try:
        text = canonical(value)
    except Exception as unfit:  # a foreign type's own code may raise anything
        why = str(unfit) if isinstance(unfit, Unfit) else type(unfit).__name__
        problem = f"the return value is not stored: {why}"
    else:
        if len(text.encode()) <= MAX_BYTES:
            return text, None
        problem = f"the return value is not stored: it takes more than {MAX_BYTES} bytes"
    return canonical({"durable": "not stored", "why": clean_text(problem, 500)}), problem


def clean_text(text: str, longest: int = 8192) -> str:
    """Error text that any column, log and terminal can take: no NUL or control characters, bounded."""
    cleaned = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text[: longest * 2])
    return cleaned if len(cleaned) <= longest else cleaned[: longest - 1] + "…"
