"""Declaring a case type: the schema of its state, and its steps with their guards, scopes, inputs and handlers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar, overload

from durable_core import kinds
from durable_core.cases.conditions import (
    AnyOf,
    Condition,
    Predicate,
    Scope,
    Unmet,
    any_of,
    check_handler,
    conditions,
    is_text,
)
from durable_core.cases.policy import Attempts
from durable_core.cases.schema import Misfits, Schema, plain, recorded
from durable_core.deliveries.options import DEFAULT_QUEUE, QUEUE_RULE, is_queue
from durable_core.errors import DefinitionError
from durable_core.kinds import checked_name
from durable_core.refusals import InvalidInput, InvalidState, Misfit

__all__ = [
    "AnyOf", "Attempts", "CaseType", "Condition", "Guarded", "Recorded", "Scope", "Step", "Unmet", "any_of",
]  # fmt: skip

S = TypeVar("S")
Handler = Callable[[Any, Any], Any]
Guarded = Mapping[str, "Predicate | AnyOf"]
"""Conditions by their names."""

MIGRATION_PREFIX = "migrate:"
"""Steps named so are migrations; no declared step may be."""
DELIVERY_PREFIX = "case."
"""What carries the executions of a case type through Celery is the kind `case.<name of the type>`."""
_INSTANT = frozenset({"as_of"})
_ELEMENT = frozenset({"element", "key"})


@dataclass(frozen=True)
class Recorded:
    """
    Who acts, as conditions and handlers see it, and as the journal keeps it.

    `whole` is False where the journal has a marker instead: an actor that is no JSON cannot be asked again at a replay.
    """

    value: Any
    json: Any
    whole: bool = True


class Step:
    """A declared step. Calling it runs the handler in place, as plain Python, with no guard asked."""

    def __init__(
        self,
        case_type: str,
        name: str,
        handler: Handler,
        *,
        title: str | None = None,
        description: str | None = None,
        requires: Guarded | None = None,
        permits: Guarded | None = None,
        scope: Scope | None = None,
        input: Any = None,
        retry: Attempts | int | None = None,
    ) -> None:
        if not is_text(name):
            raise DefinitionError(
                f"{case_type}: the name of a step is text of 1 to 200 printable characters; got {name!r}."
            )
        where = f"{case_type}: step {name!r}"
        self.case_type, self.name = case_type, name
        for option, text in (("title", title), ("description", description)):
            if text is not None and not isinstance(text, str):
                raise DefinitionError(f"{where}: its {option} is text; got {text!r}.")
        self.title, self.description = title, description
        if scope is not None and not isinstance(scope, Scope):
            raise DefinitionError(f"{where}: a scope is Scope(select=..., key=...); got {scope!r}.")
        self.scope = scope
        words = _INSTANT if scope is None else _INSTANT | _ELEMENT
        self.requires = conditions(f"{where}: requires", {} if requires is None else requires, words)
        self.permits = conditions(f"{where}: permits", {} if permits is None else permits, words | {"actor"})
        self.input = Schema(input, f"{where}: its input")
        if retry is not None and not isinstance(retry, Attempts | int):
            raise DefinitionError(f"{where}: retry is Attempts(limit=..., delay=...) or a number; got {retry!r}.")
        self.retry = Attempts() if retry is None else Attempts.of(retry)
        check_handler(where, handler)
        self.handler = handler
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__module__ = getattr(handler, "__module__", __name__)

    def __call__(self, state: Any, context: Any) -> Any:
        return self.handler(state, context)

    def load_input(self, given: object) -> Any:
        """
        The input as the handler sees it, defaults filled in, from a value or from JSON; None for none.

        Raises InvalidInput, with all that is wrong with it; also for any input to a step that takes none.
        """
        if self.input.model is None:
            if given is not None:
                raise InvalidInput(self.case_type, self.name, (Misfit("", "this step takes no input"),))
            return None
        try:
            try:
                return self.input.load(None if given is None else self.input.dump(given))
            except Misfits:
                if given is not None:
                    raise
            return self.input.load({})  # nothing was given: its defaults may be enough
        except Misfits as unfit:
            raise InvalidInput(self.case_type, self.name, unfit.issues) from None

    def dump_input(self, value: object) -> Any:
        """The JSON of what `load_input` gave, for the journal and for a message. Raises InvalidInput."""
        if self.input.model is None:
            return None
        try:
            return self.input.dump(value)
        except Misfits as unfit:
            raise InvalidInput(self.case_type, self.name, unfit.issues) from None

    def to_json(self) -> dict[str, Any]:
        """What people and tools may know of it: its words, its conditions by name, and the schema of its input."""
        return {
            "name": self.name,
            "title": self.title,
            "description": self.description,
            "scoped": self.scope is not None,
            "requires": [_named(condition) for condition in self.requires],
            "permits": [_named(condition) for condition in self.permits],
            "input": self.input.json_schema(),
            "attempts": self.retry.limit,
        }

    def __repr__(self) -> str:
        return f"<step {self.name} of {self.case_type}>"


def _named(condition: Condition) -> Any:
    return {condition.name: [arm.name for arm in condition.arms]} if condition.arms else condition.name


class CaseType(Generic[S]):
    """
    A name, the schema of a state, and steps; nothing else: what can be done is decided by the state alone.

    Of the type only its name is stored: live cases follow the definition that is deployed. `state` is a pydantic model,
    or another type that pydantic can validate; without it the state is plain JSON. With `actor`, who acts is handed to
    conditions and handlers as that model where it fits, else as the JSON that it is. `queue` is where its executions
    through Celery are carried.

    With `registered=False` the process does not know it by name: for a definition that is handed to one run beside the
    deployed one. Raises DefinitionError, as everything declared here does, when it is declared.
    """

    @overload
    def __init__(
        self: CaseType[Any], name: str, *, state: None = None, actor: Any = None, queue: str | None = None,
        registered: bool = True,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, name: str, *, state: type[S], actor: Any = None, queue: str | None = None, registered: bool = True,
    ) -> None: ...  # fmt: skip
    def __init__(
        self, name: str, *, state: Any = None, actor: Any = None, queue: str | None = None, registered: bool = True,
    ) -> None:  # fmt: skip
        checked_name(f"{DELIVERY_PREFIX}{checked_name(name)}")
        if queue is not None and not is_queue(queue):
            raise DefinitionError(f"case type {name!r}: {QUEUE_RULE}; got {queue!r}.")
        self.name = name
        self.names = (name,)
        self.queue = DEFAULT_QUEUE if queue is None else queue
        self.state = Schema(state, f"case type {name!r}: its state")
        self.actor = Schema(actor, f"case type {name!r}: its actor")
        self._steps: dict[str, Step] = {}
        if registered:
            kinds.case_types.add(self)

    @property
    def delivery_kind(self) -> str:
        """The kind of the deliveries that carry its executions through Celery."""
        return f"{DELIVERY_PREFIX}{self.name}"

    @property
    def steps(self) -> Mapping[str, Step]:
        """The steps by name, in the order in which they are declared."""
        return MappingProxyType(self._steps)

    def step(
        self,
        name: str,
        *,
        title: str | None = None,
        description: str | None = None,
        requires: Guarded | None = None,
        permits: Guarded | None = None,
        scope: Scope | None = None,
        input: Any = None,
        retry: Attempts | int | None = None,
    ) -> Callable[[Callable[[S, Any], S]], Step]:
        """
        Declare a step: a decorator for its handler, which is given the state and a `CaseContext` and returns the state.

        `requires` says when it is possible for anybody, `permits` for whom: conditions by name, all of which must hold.
        A condition is given the state, and those of `as_of`, `actor` (under permits), `element` and `key` (of a scope)
        that it names. `input` is a model as `state` is; a step without one takes no input. Raises DefinitionError.
        """
        if isinstance(name, str) and name.startswith(MIGRATION_PREFIX):
            raise DefinitionError(f"{self.name}: steps named {MIGRATION_PREFIX}... are migrations; got {name!r}.")

        def declare(handler: Callable[[S, Any], S]) -> Step:
            made = Step(
                self.name, name, handler, title=title, description=description, requires=requires, permits=permits,
                scope=scope, input=input, retry=retry,
            )  # fmt: skip
            if name in self._steps:
                raise DefinitionError(f"{self.name}: step {name!r} is declared twice; a step has one handler.")
            self._steps[name] = made
            return made

        return declare

    def with_step(self, step: Step) -> CaseType[S]:
        """This type and one step more, for one run; the process does not know it by name."""
        other = object.__new__(CaseType)
        vars(other).update(vars(self) | {"_steps": {**self._steps, step.name: step}})
        return other

    def load(self, document: object) -> S:
        """A fresh state of this JSON. Raises InvalidState."""
        try:
            state: S = self.state.load(document)
        except Misfits as unfit:
            raise InvalidState(self.name, unfit.issues) from None
        return state

    def load_result(self, document: object) -> S:
        """A fresh state of what `dump` gave: a migration reads otherwise than it writes. Raises InvalidState."""
        return self.load(document)

    def dump(self, state: object) -> Any:
        """
        The JSON to store of a state, validated: what the schema gives back is stored, not what it was given.

        Raises InvalidState; also for None, which is what a handler returns that forgot to return.
        """
        if state is None:
            raise InvalidState(self.name, (Misfit("", "it is None; a handler returns the state"),))
        if inspect.iscoroutine(state):
            state.close()  # it never runs, and is refused below
        try:
            return self.state.dump(state)
        except Misfits as unfit:
            raise InvalidState(self.name, unfit.issues) from None

    def actor_of(self, given: object) -> Recorded:
        """
        Who acts: the same for a guard that is asked now as for one that is asked again from the journal.

        Never raises. What does not fit the model for actors, such as the actor of a system run, stays plain JSON; what
        is no JSON is seen as it was given, and the journal keeps a marker.
        """
        document, whole = recorded(given)
        if not whole:
            return Recorded(given, document, whole=False)
        if self.actor.model is not None and document is not None:
            try:
                kept = self.actor.dump(document)
                return Recorded(self.actor.load(kept), kept)
            except Misfits:
                pass  # a guard that needs the model fails, and says so
        return Recorded(plain(document), document)  # a copy: what a handler does to it stays out of the journal

    def __repr__(self) -> str:
        return f"<case type {self.name}>"
