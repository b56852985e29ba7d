"""What a step changes: which target its arguments name, what was reviewed of it, and whether that is still so."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from durable_core.errors import DefinitionError


@dataclass(frozen=True)
class Target:
    """
    What a step changes, as its approver sees it: the step is a conflict if its version is another by then.

    `name` is what people call it; only `kind`, `id` and `version` are compared.
    """

    kind: str
    id: int | str
    version: int | str
    name: str | None = None


TargetOf = Callable[[dict[str, Any]], "tuple[str, int | str] | None"]
"""Given the arguments of a step by name: the kind and the id of what it changes, or None where that is nothing."""


@dataclass(frozen=True)
class Changes:
    """What steps of one kind change: a thing of this kind, or the one that their arguments name; or nothing is said."""

    step: str
    kind: str | None = None
    of_arguments: TargetOf | None = None

    @staticmethod
    def declared(step: str, target: object) -> Changes:
        """Raises DefinitionError."""
        if target is None:
            return Changes(step)
        if callable(target) and not inspect.iscoroutinefunction(target) and not isinstance(target, type):
            return Changes(step, of_arguments=target)
        if isinstance(target, str) and is_word(target):
            return Changes(step, target)
        raise DefinitionError(
            f"kind {step!r}: target is text of 1 to 200 characters, or a plain function of the arguments that tells "
            f"(kind, id); got {target!r}."
        )

    def named_by(self, arguments: str) -> tuple[str, int | str] | None:
        """
        The kind and id that these frozen arguments name, where a function tells.

        Raises DefinitionError for an answer that is none, and whatever the function raises.
        """
        if self.of_arguments is None:
            return None
        named = self.of_arguments(json.loads(arguments))
        if named is None or (isinstance(named, tuple) and len(named) == 2 and isinstance(named[0], str)):
            return named
        raise DefinitionError(
            f"kind {self.step!r}: its target is told as (kind, id), or None; got {type(named).__name__}."
        )

    def reviewed(self, arguments: str | None, target: object, version: object) -> tuple[object, str | None]:
        """
        The target to be frozen, out of what was given for it, or what is wrong with that; its form is not looked at.

        `arguments` are None where they do not fit the handler: then they name nothing.
        """
        if self.of_arguments is None:
            if version is not None:
                return None, "its kind does not tell its target from the arguments: give target=Target(...)"
            return target, None
        if target is not None and version is not None:
            return None, "it is given a target and a version: one of them is enough"
        if arguments is None:
            return target, None
        named = self.named_by(arguments)
        if named is None:
            if target is None and version is None:
                return None, None
            given = "a version" if target is None else "a target"
            return None, f"with these arguments it changes nothing that is reviewed, and {given} is given"
        if version is not None:
            return Target(*named, version=version), None  # type: ignore[arg-type]  # its form is looked at next
        if target is None:
            return None, f"its arguments name {_spelled(*named)}, and no reviewed version of it is given"
        if isinstance(target, Target) and not _same((target.kind, target.id), named):
            return None, f"its arguments name {_spelled(*named)}, and its target is {_spelled(target.kind, target.id)}"
        return target, None


@dataclass(frozen=True)
class Unfit:
    """Why a step may not run: what it changes is not what was reviewed (`conflict`), or nothing says what was."""

    conflict: bool
    message: str


def unfit(session: Session, changes: Changes, frozen: Mapping[str, Any], arguments: str) -> Unfit | None:
    """Whether the target stands as it was reviewed, by the step's own transaction; None where it does."""
    target, named = target_of(frozen), changes.named_by(arguments)
    if target is None:
        wanted = changes.kind if named is None else _spelled(*named)
        return None if wanted is None else Unfit(False, f"it changes {wanted}, and no reviewed one was proposed")
    if changes.of_arguments is not None and (named is None or not _same((target.kind, target.id), named)):
        # Proposed before the code told the target from the arguments, or as it told another.
        told = "nothing" if named is None else _spelled(*named)
        return Unfit(False, f"its arguments name {told}, and {_spelled(target.kind, target.id)} was reviewed")
    called = f"{target.kind} {target.name or target.id}"
    read = reader_of(target.kind)
    if read is None or (changes.kind is not None and target.kind != changes.kind):
        return Unfit(False, f"how the version of {called} is read is not declared in this process")
    version = read(session, target.id)
    if version is None:
        return Unfit(True, f"{called} is gone")
    if isinstance(version, bool) or not isinstance(version, int | str):
        told = type(version).__name__
        return Unfit(False, f"target_version({target.kind!r}) gave a {told}, no whole number or text")
    # Of one type: 3 is not "3", or a reader that changes its mind would look like a change of the target.
    if type(version) is not type(target.version) or version != target.version:
        return Unfit(True, f"{called} was reviewed at version {target.version!r} and is at {version!r}")
    return None


def target_of(frozen: Mapping[str, Any]) -> Target | None:
    """The reviewed target of a frozen step."""
    target = frozen["target"]
    return None if target is None else Target(**target)


def _same(one: tuple[object, object], other: tuple[object, object]) -> bool:
    """7 is not "7": a reader of versions is given the id as it is."""
    return one == other and type(one[1]) is type(other[1])


def _spelled(kind: object, id_: object) -> str:
    return f"{kind} {id_!r}"[:200]


VersionReader = Callable[[Session, Any], "int | str | None"]
"""Given the step's session and the target's id: its version now, or None where it is gone."""

_readers: dict[str, VersionReader] = {}


def target_version(kind: str) -> Callable[[VersionReader], VersionReader]:
    """
    Say how the version of a kind of target is read: `read(session, id)`, in the step's own transaction. A decorator.

    It decides whether the step is a conflict, so it should lock what it reads (`with_for_update()`): else somebody may
    change the target between the look and the step's own write. Raises DefinitionError for a second one.
    """
    if not is_word(kind):
        raise DefinitionError(f"target_version({kind!r}): the kind of a target is text of 1 to 200 characters.")

    def declare(read: VersionReader) -> VersionReader:
        if kind in _readers:
            raise DefinitionError(f"target_version({kind!r}) is declared twice; one function reads it.")
        if not callable(read) or inspect.iscoroutinefunction(read):
            raise DefinitionError(f"target_version({kind!r}) takes a plain function.")
        _readers[kind] = read
        return read

    return declare


def reader_of(kind: str) -> VersionReader | None:
    return _readers.get(kind)


def forget_reader(kind: str) -> None:
    """Forget how a kind of target is read; for tests that declare their own."""
    _readers.pop(kind, None)


def is_word(text: object) -> bool:
    """Text that people and columns can take: 1 to 200 printable characters."""
    return isinstance(text, str) and 0 < len(text) <= 200 and text.isprintable() and bool(text.strip())
