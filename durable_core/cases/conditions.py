"""The parts of a guard as they are declared: named conditions, any-of, and the elements that a step is for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from durable_core.errors import DefinitionError

Predicate = Callable[..., "bool | Unmet"]
"""Pure: the same answer for the same state, actor, element and instant. It reads no clock: it names `as_of`."""

RESERVED = "$"
"""Names of conditions that begin so are ours."""


@dataclass(frozen=True)
class Unmet:
    """What a condition returns for no, with the reason that people are told. It is false, as False is."""

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise TypeError("Unmet takes the reason, a text that is not empty")

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class AnyOf:
    """Named conditions of which one is enough. Made by `any_of`."""

    arms: Mapping[str, Predicate]


def any_of(arms: Mapping[str, Predicate]) -> AnyOf:
    """A condition that holds if one of these does, all of which are evaluated. It stands in no other `any_of`."""
    if not isinstance(arms, Mapping) or not arms:
        raise DefinitionError('any_of takes its conditions by name, at least one: any_of({"is seller": is_seller}).')
    if any(isinstance(arm, AnyOf) for arm in arms.values()):
        raise DefinitionError("any_of within any_of: name the conditions of both in one.")
    return AnyOf(dict(arms))


@dataclass(frozen=True)
class Condition:
    """One named condition of a guard: a function and which of the words it takes, or the arms of an any-of."""

    name: str
    function: Predicate | None = None
    takes: frozenset[str] = frozenset()
    arms: tuple[Condition, ...] = ()


def is_text(text: object) -> bool:
    """Text that people and columns can take: 1 to 200 printable characters."""
    return isinstance(text, str) and 0 < len(text) <= 200 and text.isprintable() and bool(text.strip())


def conditions(where: str, given: object, words: frozenset[str]) -> tuple[Condition, ...]:
    """The conditions of one section, in the order in which they are written. Raises DefinitionError."""
    if not isinstance(given, Mapping):
        raise DefinitionError(f'{where} takes conditions by name: {{"offer is open": offer_is_open}}; got {given!r}.')
    made = []
    for name, function in given.items():
        _check_name(where, name)
        if isinstance(function, AnyOf):
            for arm in function.arms:
                _check_name(f"{where}: any_of {name!r}", arm)
            arms = tuple(_condition(f"{where}: {arm!r}", arm, one, words) for arm, one in function.arms.items())
            made.append(Condition(name, arms=arms))
        else:
            made.append(_condition(f"{where}: {name!r}", name, function, words))
    return tuple(made)


def _check_name(where: str, name: object) -> None:
    if not is_text(name) or str(name).startswith(RESERVED):
        raise DefinitionError(
            f"{where}: the name of a condition is text of 1 to 200 characters that does not begin with {RESERVED!r}; "
            f"got {name!r}."
        )


def _condition(where: str, name: str, function: object, words: frozenset[str]) -> Condition:
    parameters = plain_function(where, function)
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):  # fmt: skip
        raise DefinitionError(f"{where}: a condition takes the state as its first parameter.")
    if parameters[0].name in EVERY_WORD:
        raise DefinitionError(
            f"{where}: the first parameter of a condition is the state, and this one is named {parameters[0].name!r}: "
            f"write (state, {parameters[0].name})."
        )
    for parameter in parameters[1:]:
        if parameter.name not in words or parameter.kind not in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
        ):  # fmt: skip
            may = ", ".join(sorted(words))
            raise DefinitionError(
                f"{where}: it takes {parameter.name!r}, and a condition here is given the state and, by these names, "
                f"{may}{_hint(parameter.name)}."
            )
    assert callable(function)
    return Condition(name, function, frozenset(parameter.name for parameter in parameters[1:]))


EVERY_WORD = frozenset({"actor", "as_of", "element", "key"})


def _hint(word: str) -> str:
    if word == "actor":
        return "; who acts is asked under permits"
    if word in ("element", "key"):
        return "; only a step with a scope has elements"
    return ""


def plain_function(where: str, function: object) -> list[inspect.Parameter]:
    """The parameters of a function that returns what it says, at once. Raises DefinitionError."""
    refuse_unusable(where, function)
    assert callable(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as unreadable:
        raise DefinitionError(f"{where}: give a function that Python can describe, such as a lambda.") from unreadable
    # What functools.partial has bound by name is no longer asked for.
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()
    return [parameter for parameter in parameters if parameter.name not in bound]


def refuse_unusable(where: str, function: object) -> None:
    if not callable(function):
        raise DefinitionError(f"{where}: a function is wanted; got {function!r}.")
    for one in (function, getattr(function, "__call__", None)):  # noqa: B004 an object's own, which may be async
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise DefinitionError(f"{where}: an async function does not answer at once; write a plain one.")
        if inspect.isgeneratorfunction(one):
            raise DefinitionError(f"{where}: a function that yields does not answer at once; return instead.")


@dataclass(frozen=True)
class Scope:
    """
    The elements of the state that a step is for, each with a key of its own; the step is offered once for each.

    `select(state)` gives them in an order that the state alone decides, `key(element)` a text that names one as long as
    it is there, and no other one. Raises DefinitionError.
    """

    select: Callable[[Any], Iterable[Any]]
    key: Callable[[Any], str]

    def __post_init__(self) -> None:
        for name in ("select", "key"):
            _takes(f"Scope: {name}", getattr(self, name), 1, "the state" if name == "select" else "an element")


def _takes(where: str, function: object, count: int, what: str) -> None:
    refuse_unusable(where, function)
    assert callable(function)
    try:
        inspect.signature(function).bind(*(None,) * count)
    except ValueError:
        pass  # one of C, such as operator.attrgetter, that does not say
    except TypeError as unfit:
        raise DefinitionError(f"{where} is called with {what} and nothing else.") from unfit


def check_handler(where: str, handler: object) -> None:
    """A handler is called with the state and its context. Raises DefinitionError."""
    _takes(f"{where}: a handler", handler, 2, "the state and its context")
