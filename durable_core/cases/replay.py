"""
Asking a guard again, of a moment in the past: today's definition, on the state, the actor and the instant of a claim.

A mismatch says that definitions have changed since, or that a condition is not pure. It is no error. What today's
definitions cannot be asked about is said with its reason; nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from durable_core.cases.declare import MIGRATION_PREFIX, CaseType
from durable_core.cases.guards import Evaluation, Result, address, evaluate
from durable_core.cases.journal import Entry, EntryKind
from durable_core.cases.schema import is_marker
from durable_core.refusals import BadScopeKey, InvalidState, UnknownStep


class Unasked(StrEnum):
    """Why a guard could not be asked again."""

    NOT_A_CLAIM = "NOT_A_CLAIM"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    ERASED = "ERASED"
    UNREADABLE = "UNREADABLE"
    INVALID_STATE = "INVALID_STATE"
    NO_STEP = "NO_STEP"
    NO_ELEMENT = "NO_ELEMENT"
    ACTOR_NOT_STORED = "ACTOR_NOT_STORED"


@dataclass(frozen=True)
class Drift:
    """One condition, or one arm of an any-of, that answers otherwise now; None where it was or is not there."""

    section: str
    condition: str
    arm: str | None
    recorded: bool | None
    now: bool | None

    def __str__(self) -> str:
        name = self.condition if self.arm is None else f"{self.condition} / {self.arm}"
        return f"{name} was {_word(self.recorded)} and is {_word(self.now)}"


def _word(ok: bool | None) -> str:
    return "absent" if ok is None else "met" if ok else "unmet"


@dataclass(frozen=True)
class Replayed:
    """
    One claim, asked again. `matches` is False where a condition differs, or where nothing could be asked.

    Then `unasked` and `problem` say why; else `drift` names the conditions.
    """

    number: int
    execution_id: str
    step: str
    scope_key: str | None
    as_of: datetime | None
    matches: bool
    drift: tuple[Drift, ...] = ()
    recorded: Evaluation | None = field(default=None, repr=False)
    reproduced: Evaluation | None = field(default=None, repr=False)
    unasked: Unasked | None = None
    problem: str | None = None


def replayed(case_type: CaseType[Any] | None, entry: Entry) -> Replayed:
    """
    The guard of a `claimed` entry, by this definition of its case's type; None where no such type is known.

    Conditions are compared by what they answered, not by the words of their reasons.
    """
    recorded: Evaluation | None = None

    def unasked(why: Unasked, problem: str) -> Replayed:
        return Replayed(
            entry.number, entry.execution_id, entry.step, entry.scope_key, entry.as_of, False, recorded=recorded,
            unasked=why, problem=problem,
        )  # fmt: skip

    if entry.entry != EntryKind.CLAIMED:
        return unasked(Unasked.NOT_A_CLAIM, f"entry {entry.number} is {entry.entry}; only a claim has a guard")
    if entry.erased_at is not None:
        return unasked(Unasked.ERASED, "what it was asked about was erased")
    try:
        recorded = Evaluation.from_json(entry.guard)
        state, actor = entry.state, entry.actor
    except (KeyError, TypeError, ValueError, AttributeError):
        return unasked(Unasked.UNREADABLE, "the entry is not as it was written: verify the journal")
    if case_type is None:
        return unasked(Unasked.UNKNOWN_TYPE, "its case type is not known here")
    if entry.step.startswith(MIGRATION_PREFIX) and entry.step not in case_type.steps:
        reproduced = Evaluation(recorded.as_of, True, True, ())  # a migration has no guard, then as now
    else:
        if is_marker(actor):
            return unasked(Unasked.ACTOR_NOT_STORED, "who acted is no JSON, so the journal could not keep it")
        try:
            loaded = case_type.load(state)
            at = address(case_type, loaded, entry.step, entry.scope_key)
        except InvalidState as invalid:
            wrong = "; ".join(str(issue) for issue in invalid.issues)
            return unasked(Unasked.INVALID_STATE, f"its state is none of today's schema: {wrong}")
        except UnknownStep:
            return unasked(Unasked.NO_STEP, f"there is no step {entry.step!r} any more")
        except BadScopeKey as bad:
            return unasked(Unasked.NO_ELEMENT, bad.problem)
        reproduced = evaluate(
            at.step, loaded, actor=case_type.actor_of(actor).value, element=at.element, key=at.key, as_of=recorded.as_of
        )
    drift = tuple(_drifted(recorded.conditions, reproduced.conditions))
    return Replayed(
        entry.number, entry.execution_id, entry.step, entry.scope_key, entry.as_of, not drift, drift, recorded,
        reproduced,
    )  # fmt: skip


def _drifted(recorded: Sequence[Result], now: Sequence[Result], within: str | None = None) -> Iterator[Drift]:
    """Where they differ: in the order of what was recorded, then what is new."""
    then, today = _by_name(recorded), _by_name(now)
    for at in [*then, *(at for at in today if at not in then)]:
        before, after = then.get(at), today.get(at)
        was, is_now = before.ok if before else None, after.ok if after else None
        section, name = at
        if was is not is_now:
            yield Drift(section, name if within is None else within, None if within is None else name, was, is_now)
        if within is None:
            yield from _drifted(before.arms if before else (), after.arms if after else (), name)


def _by_name(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    return {(result.section, result.name): result for result in results}
