"""
Secrets and addresses that a payload names and the settings hold.

A payload says `sign_with="billing"`; what "billing" is never enters the row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from pydantic import AfterValidator, ValidationInfo

T = TypeVar("T")
Named = Mapping[str, T] | Callable[[], Mapping[str, T]]
"""By name; or a function that returns this, called at each attempt, for names that live in a vault."""


def found(named: Named[T], name: str) -> T | None:
    """What has this name now; None where nothing has."""
    return (named() if callable(named) else named).get(name)


def known(named: Named[T], what: str) -> AfterValidator:
    """
    Refuse at enqueue a name that the settings of this process do not hold, where they can be told.

    Not when a worker reads the row: a name taken out of the settings meanwhile ends the delivery
    with a code of its own, and does not make it wait for a handler that takes it.
    """
    names: Collection[str] | None = None if callable(named) else named.keys()

    def check(name: str, info: ValidationInfo) -> str:
        if names is not None and name not in names and info.mode == "python":
            has = ", ".join(sorted(names)) or "none"
            raise ValueError(f"the settings have no {what} of this name; they have {has}")
        return name

    return AfterValidator(check)


def one_or_more(given: str | Collection[str]) -> list[str]:
    """A text or several, as a list."""
    return [given] if isinstance(given, str) else list(given)
