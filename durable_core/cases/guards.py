"""
Evaluating guards: what can be done with a state, by whom, and why not. Knows no database and no clock.

Every condition is asked, also behind one that does not hold, so that people are told all that is missing. A condition
that raises, or answers anything but True, False or Unmet, does not hold, and its result says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

from durable_core.arguments import clean_text
from durable_core.cases.conditions import Condition, Scope, Unmet
from durable_core.cases.declare import CaseType, Step
from durable_core.cases.passing import passing
from durable_core.deliveries.options import in_utc
from durable_core.refusals import BadScopeKey, UnknownStep

REQUIRES, PERMITS = "requires", "permits"
SCOPE = "$scope"
"""The condition that does not hold where the elements of a scope cannot be told."""


LONGEST_REASON, LONGEST_KEY = 1000, 500


class NotGiven(Enum):
    """No actor was given, which None is not: None is nobody in particular, and is asked about."""

    NOT_GIVEN = "not given"


NOT_GIVEN: Final = NotGiven.NOT_GIVEN


@dataclass(frozen=True)
class Result:
    """
    One condition as it was answered: `ok` is None where it was not asked, for nobody was named who would act.

    `reason` is what the condition gives for no, or what is wrong with the condition.
    """

    section: str
    name: str
    ok: bool | None
    reason: str | None = None
    arms: tuple[Result, ...] = ()

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name}: {self.reason}"
        arms = "; ".join(str(arm) for arm in self.arms if arm.ok is False)
        return f"{self.name} (none of: {arms})" if arms and self.ok is False else self.name

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"section": self.section, "name": self.name, "ok": self.ok}
        if self.reason is not None:
            told["reason"] = self.reason
        if self.arms:
            told["arms"] = [arm.to_json() for arm in self.arms]
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Result:
        arms = tuple(cls.from_json(arm) for arm in told.get("arms", ()))
        return cls(told["section"], told["name"], told["ok"], told.get("reason"), arms)


@dataclass(frozen=True)
class Evaluation:
    """
    A guard as it was at one instant: `possible` for anybody, `permitted` to who was named, None where nobody was.

    `conditions` are all of them, `requires` first, in the order in which they are declared.
    """

    as_of: datetime
    possible: bool
    permitted: bool | None
    conditions: tuple[Result, ...]

    @property
    def available(self) -> bool:
        """Possible, and permitted to somebody who was named."""
        return self.possible and self.permitted is True

    @property
    def unmet(self) -> tuple[Result, ...]:
        """The conditions that do not hold, with their reasons."""
        return tuple(result for result in self.conditions if result.ok is False)

    def to_json(self) -> dict[str, Any]:
        """As the journal keeps it; `from_json` gives an equal one."""
        return {
            "as_of": self.as_of.isoformat(timespec="microseconds"),
            "possible": self.possible,
            "permitted": self.permitted,
            "available": self.available,
            "conditions": [result.to_json() for result in self.conditions],
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Evaluation:
        conditions = tuple(Result.from_json(result) for result in told["conditions"])
        as_of = datetime.fromisoformat(told["as_of"]).astimezone(UTC)
        return cls(as_of, told["possible"], told["permitted"], conditions)


def evaluate(
    step: Step,
    state: Any,
    *,
    actor: Any = NOT_GIVEN,
    element: Any = None,
    key: str | None = None,
    as_of: datetime,
) -> Evaluation:
    """
    Ask every condition of the step.

    `actor` is the `value` of what `CaseType.actor_of` gives. Raises InvalidOption for an instant without a time zone.
    """
    as_of = in_utc(step.case_type, "as_of", as_of)
    words = {"as_of": as_of, "element": element, "key": key}
    required = tuple(_asked(REQUIRES, condition, state, words) for condition in step.requires)
    permits: tuple[Result, ...]
    permitted: bool | None = None
    if actor is NOT_GIVEN:
        permits = tuple(_unasked(condition) for condition in step.permits)
    else:
        words["actor"] = actor
        permits = tuple(_asked(PERMITS, condition, state, words) for condition in step.permits)
        permitted = all(result.ok for result in permits)
    return Evaluation(as_of, all(result.ok for result in required), permitted, required + permits)


def _unasked(condition: Condition) -> Result:
    return Result(PERMITS, condition.name, None, None, tuple(_unasked(arm) for arm in condition.arms))


def _asked(section: str, condition: Condition, state: Any, words: Mapping[str, Any]) -> Result:
    if condition.arms:
        arms = tuple(_asked(section, arm, state, words) for arm in condition.arms)
        return Result(section, condition.name, any(arm.ok for arm in arms), None, arms)
    assert condition.function is not None
    try:
        answer: object = condition.function(state, **{word: words[word] for word in condition.takes})
    except passing():
        raise  # the task ends, whatever it was about to ask
    except Exception as raised:  # whatever a condition does, it is a condition that does not hold
        return Result(section, condition.name, False, f"the condition raised {_told(raised)}")
    if isinstance(answer, bool):
        return Result(section, condition.name, answer)
    if isinstance(answer, Unmet):
        return Result(section, condition.name, False, clean_text(answer.reason, LONGEST_REASON))
    _close(answer)
    wrong = f"the condition returned {_kind(answer)}, which is neither True, False nor Unmet(reason)"
    return Result(section, condition.name, False, wrong)


def _told(raised: Exception) -> str:
    """Its class and where it came from. Its text is left out, for it may hold what the caller must not see."""
    trace = raised.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({PurePath(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
    return f"{type(raised).__name__}{where}"


def _kind(answer: object) -> str:
    return "None" if answer is None else f"a value of type {type(answer).__name__}"


def _close(answer: object) -> None:
    if inspect.iscoroutine(answer):
        answer.close()  # it never runs, and Python would complain of that later, elsewhere


# --- addresses -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Addressed:
    """A step, and for one with a scope the element that its key names."""

    step: Step
    element: Any = None
    key: str | None = None


class _Unselectable(Exception):
    """A selector or key function raised; the message says what."""


def address(case_type: CaseType[Any], state: Any, step_name: str, scope_key: str | None = None) -> Addressed:
    """The step of this name, and the element that this key names in this state. Raises UnknownStep and BadScopeKey."""
    step = _step(case_type, step_name)
    _check_key(step, scope_key)
    if step.scope is None:
        return Addressed(step)
    try:
        elements = _selected(step, step.scope, state)
    except _Unselectable as defect:
        raise BadScopeKey(case_type.name, step.name, scope_key, str(defect)) from defect.__cause__
    return _named(step, elements, scope_key)


def explain(
    case_type: CaseType[Any],
    state: Any,
    step_name: str,
    scope_key: str | None = None,
    *,
    actor: Any = NOT_GIVEN,
    as_of: datetime,
) -> Evaluation:
    """
    Why a step can or cannot be done. Without an actor its permits are not asked; an actor that is None is one.

    A scope whose elements cannot be told is an answer too: `$scope` does not hold. Raises UnknownStep, BadScopeKey.
    """
    step = _step(case_type, step_name)
    _check_key(step, scope_key)
    seen = actor if actor is NOT_GIVEN else case_type.actor_of(actor).value
    if step.scope is None:
        return evaluate(step, state, actor=seen, as_of=as_of)
    try:
        elements = _selected(step, step.scope, state)
    except _Unselectable as defect:
        return _blocked(step, as_of, defect)
    found = _named(step, elements, scope_key)
    return evaluate(step, state, actor=seen, element=found.element, key=found.key, as_of=as_of)


def _step(case_type: CaseType[Any], name: str) -> Step:
    step = case_type.steps.get(name) if isinstance(name, str) else None
    if step is None:
        raise UnknownStep(case_type.name, name, tuple(case_type.steps))
    return step


def _check_key(step: Step, key: object) -> None:
    if step.scope is None and key is not None:
        raise BadScopeKey(step.case_type, step.name, str(key), "it has no scope, so it takes no key")
    if key is not None and not isinstance(key, str):
        raise BadScopeKey(step.case_type, step.name, str(key), f"a key is text, not {_kind(key)}")


def _named(step: Step, elements: Mapping[str, Any], key: str | None) -> Addressed:
    if key is None:
        raise BadScopeKey(
            step.case_type, step.name, None, "it is for one of several, so it takes a key", tuple(elements)
        )
    if key not in elements:
        problem = f"nothing with key {clean_text(key, 100)!r} is selected now"
        raise BadScopeKey(step.case_type, step.name, key, problem, tuple(elements))
    return Addressed(step, elements[key], key)


def is_key(text: str) -> bool:
    """Whether a journal and its index can hold this as the key of an element."""
    try:
        return 0 < len(text) <= LONGEST_KEY and "\x00" not in text and bool(text.encode())
    except UnicodeEncodeError:
        return False


def _selected(step: Step, scope: Scope, state: Any) -> dict[str, Any]:
    """
    The elements by their keys, in the order of the selection.

    Keys that do not tell them apart are a defect of the definition, told to everybody: BadScopeKey. Raises
    _Unselectable where the selector, or its key function, raised.
    """

    def defective(problem: str) -> BadScopeKey:
        return BadScopeKey(step.case_type, step.name, None, f"its scope is defective: {problem}")

    try:
        given: object = scope.select(state)
    except passing():
        raise
    except Exception as raised:
        raise _Unselectable(f"its selector raised {_told(raised)}") from raised
    _close(given)
    if isinstance(given, str | bytes | Mapping | set | frozenset) or not isinstance(given, Iterable):
        raise defective(f"it selects {_kind(given)}, not a list")
    try:
        elements = list(given)
        keys: list[object] = [scope.key(element) for element in elements]
    except passing():
        raise
    except Exception as raised:
        raise _Unselectable(f"its selector or its key raised {_told(raised)}") from raised
    selected: dict[str, Any] = {}
    for key, element in zip(keys, elements, strict=True):
        if not isinstance(key, str) or not is_key(key):
            wrong = clean_text(repr(key), 100) if isinstance(key, str) else _kind(key)
            raise defective(f"a key is text of 1 to {LONGEST_KEY} characters without a NUL, and one of them is {wrong}")
        if key in selected:
            raise defective(f"two elements have the key {clean_text(key, 100)!r}")
        selected[key] = element
    return selected


def _blocked(step: Step, as_of: datetime, defect: _Unselectable) -> Evaluation:
    result = Result(REQUIRES, SCOPE, False, str(defect))
    return Evaluation(in_utc(step.case_type, "as_of", as_of), False, None, (result,))


# --- listings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Affordance:
    """
    A step, and the key of its element for one with a scope, that can be done now: advice, not a reservation.

    `available` is False for one that is listed as blocked.
    """

    step: str
    scope_key: str | None
    evaluation: Evaluation
    title: str | None = None

    @property
    def available(self) -> bool:
        return self.evaluation.available

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "scope_key": self.scope_key,
            "title": self.title,
            "available": self.available,
            "evaluation": self.evaluation.to_json(),
        }


def affordances(
    case_type: CaseType[Any], state: Any, actor: Any, as_of: datetime, *, blocked: bool = False
) -> tuple[Affordance, ...]:
    """
    What this actor can do with the state now: steps in their declared order, within a step in the order of its scope.

    With `blocked` also what cannot be done, with the reasons. A step whose selector raises is always listed, blocked
    by `$scope`: nobody can tell what it would be for. Raises BadScopeKey where keys do not tell elements apart.
    """
    seen = case_type.actor_of(actor).value
    found: list[Affordance] = []
    for step in case_type.steps.values():
        if step.scope is None:
            found.append(Affordance(step.name, None, evaluate(step, state, actor=seen, as_of=as_of), step.title))
            continue
        try:
            elements = _selected(step, step.scope, state)
        except _Unselectable as defect:
            found.append(Affordance(step.name, None, _blocked(step, as_of, defect), step.title))
            continue
        for key, element in elements.items():
            evaluation = evaluate(step, state, actor=seen, element=element, key=key, as_of=as_of)
            found.append(Affordance(step.name, key, evaluation, step.title))
    return tuple(one for one in found if blocked or one.available or _is_scope(one.evaluation.conditions))


def _is_scope(conditions: Sequence[Result]) -> bool:
    return any(result.name == SCOPE for result in conditions)
