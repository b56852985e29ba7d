"""What plans, operations and cases refuse. The root, and what all contracts share, stands in `errors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Protocol

from durable_core.errors import DurableError


@dataclass(frozen=True)
class Issue:
    """One thing that is wrong with a proposal; `step` is its index, from 0, or None for the plan as a whole."""

    step: int | None
    problem: str

    def __str__(self) -> str:
        return self.problem if self.step is None else f"step {self.step + 1}: {self.problem}"


class PlanRefused(DurableError):
    """A proposal was refused at the door, with all that is wrong with it; nothing was written."""

    reason = "PLAN_REFUSED"

    def __init__(self, issues: tuple[Issue, ...]) -> None:
        super().__init__(issues)
        self.issues = issues

    def __str__(self) -> str:
        return f"the plan is refused: {'; '.join(str(issue) for issue in self.issues)}. Nothing was written."


class StalePlan(DurableError):
    """The digest is not that of the plan: what was approved is not what is there. Look again; nothing was written."""

    reason = "STALE_PLAN"

    def __init__(self, plan_id: str) -> None:
        super().__init__(plan_id)
        self.plan_id = plan_id

    def __str__(self) -> str:
        return (
            f"plan {self.plan_id} has another digest than the one that you name, so it says something else than what "
            "you saw: look at it again, and approve what it says. Nothing was written."
        )


class PlanExpired(DurableError):
    """The time in which the plan could be approved is over; nothing was written. Propose it again."""

    reason = "PLAN_EXPIRED"

    def __init__(self, plan_id: str) -> None:
        super().__init__(plan_id)
        self.plan_id = plan_id

    def __str__(self) -> str:
        return f"plan {self.plan_id} has expired and can never run: propose it again. Nothing was written."


class SelfApproval(DurableError):
    """Who proposed this plan may not approve it; nothing was written. Somebody else approves it."""

    reason = "SELF_APPROVAL"

    def __init__(self, plan_id: str, by: str) -> None:
        super().__init__(plan_id, by)
        self.plan_id, self.by = plan_id, by

    def __str__(self) -> str:
        return f"plan {self.plan_id} was proposed by {self.by!r}: somebody else approves it. Nothing was written."


class OperationInFlight(DurableError):
    """
    Another operation of this kind is queued or running, and the kind has one at a time; nothing was written.

    `row_id` is that operation's; None where another transaction, still open, is starting it.
    """

    reason = "OPERATION_IN_FLIGHT"

    def __init__(self, kind: str, row_id: str | None) -> None:
        super().__init__(kind, row_id)
        self.kind, self.row_id = kind, row_id

    def __str__(self) -> str:
        if self.row_id is None:
            return (
                f"{self.kind}: another transaction that is still open is starting one, and one is in flight at a time. "
                "Try again once it has ended. Nothing was written."
            )
        return (
            f"{self.kind}: operation {self.row_id} is in flight, and one is at a time. "
            "Wait for its end, or cancel it. Nothing was written."
        )


class NotConfigured(DurableError):
    """The operation's `configured` hook says that this process lacks what the call needs; nothing was written."""

    reason = "NOT_CONFIGURED"

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind}: it is not configured here, such as its credentials. Configure it. Nothing was written."


class TargetsUnresolved(DurableError):
    """The operation's `targets` hook cannot work out what to act on; nothing was written."""

    reason = "TARGETS_UNRESOLVED"

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind}: these arguments name nothing that it could act on. Correct them. Nothing was written."


# --- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Misfit:
    """One place where a document does not fit its schema; `at` is the path to it, empty for the whole."""

    at: str
    problem: str

    def __str__(self) -> str:
        return f"{self.at}: {self.problem}" if self.at else self.problem


class GuardResult(Protocol):
    """What a refusal needs of an evaluated guard (`durable_core.cases.guards.Evaluation`)."""

    @property
    def possible(self) -> bool: ...

    @property
    def permitted(self) -> bool | None: ...

    @property
    def unmet(self) -> Sequence[object]: ...


class CaseRefused(DurableError):
    """
    What every refusal of a case derives from; never raised itself.

    `reason` is one of seven, a closed set, and `http` the status that an endpoint answers it with.
    """

    reason = "CASE_REFUSED"
    http: ClassVar[int] = 500


class CaseNotFound(CaseRefused):
    """There is no such case; nothing was written."""

    reason = "NOT_FOUND"
    http = 404

    def __init__(self, case_id: str) -> None:
        super().__init__(case_id)
        self.case_id = case_id

    def __str__(self) -> str:
        return f"there is no case {self.case_id}: look at its id. Nothing was written."


class UnknownCaseType(CaseRefused):
    """No case type of this name is known here; nothing was written."""

    reason = "NOT_FOUND"
    http = 404

    def __init__(self, case_type: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(case_type, known)
        self.case_type, self.known = case_type, known

    def __str__(self) -> str:
        known = _listed(self.known, "there is none")
        return (
            f"no case type {self.case_type!r} is known here ({known}): import the module that declares it, and hand it "
            "to Cases. Nothing was written."
        )


class InvalidState(CaseRefused):
    """
    A state does not fit the schema of its case type; nothing was written.

    `case_id` is that of the stored state; None for a state that was about to be stored.
    """

    reason = "INVALID_STATE"
    http = 500

    def __init__(self, case_type: str, issues: tuple[Misfit, ...], case_id: str | None = None) -> None:
        super().__init__(case_type, issues, case_id)
        self.case_type, self.issues, self.case_id = case_type, issues, case_id

    def __str__(self) -> str:
        wrong = "; ".join(str(issue) for issue in self.issues)
        if self.case_id is None:
            return f"{self.case_type}: this is no state of it: {wrong}. Nothing was written."
        return (
            f"case {self.case_id}: its stored state is none of {self.case_type!r} as it is declared now: {wrong}. "
            "Give the schema defaults for old states, or migrate them. Nothing was written."
        )


class CaseBusy(CaseRefused):
    """Somebody is at work on the case; nothing was written. Try again, at the latest after `expires_at`."""

    reason = "CASE_BUSY"
    http = 409

    def __init__(
        self, case_id: str, execution_id: str, step: str, scope_key: str | None, expires_at: datetime
    ) -> None:  # fmt: skip
        super().__init__(case_id, execution_id, step, scope_key, expires_at)
        self.case_id, self.execution_id, self.step, self.scope_key = case_id, execution_id, step, scope_key
        self.expires_at = expires_at

    def __str__(self) -> str:
        at = _addressed(self.step, self.scope_key)
        return (
            f"case {self.case_id} is busy: execution {self.execution_id} is at {at}, and its claim lasts until "
            f"{self.expires_at.isoformat()}. Try again. Nothing was written."
        )


class CaseClaimLost(CaseRefused):
    """
    Another execution took the case over while this one ran: its effects were not committed, only its end is journalled.

    `holder` is the execution that has it now, None where nobody has.
    """

    reason = "CASE_BUSY"
    http = 409

    def __init__(self, case_id: str, execution_id: str, holder: str | None) -> None:
        super().__init__(case_id, execution_id, holder)
        self.case_id, self.execution_id, self.holder = case_id, execution_id, holder

    def __str__(self) -> str:
        now = "nobody has it now" if self.holder is None else f"execution {self.holder} has it now"
        return (
            f"case {self.case_id}: execution {self.execution_id} lost its claim, {now}. Nothing of it was committed: "
            "look at the case again, and execute the step anew if it is still wanted."
        )


class UnknownStep(CaseRefused):
    """The case type has no such step; nothing was written."""

    reason = "BAD_REQUEST"
    http = 400

    def __init__(self, case_type: str, step: str, steps: tuple[str, ...]) -> None:
        super().__init__(case_type, step, steps)
        self.case_type, self.step, self.steps = case_type, step, steps

    def __str__(self) -> str:
        named = repr(str(self.step)[:LONGEST_WORD])
        return f"{self.case_type}: no step {named}; {_listed(self.steps, 'it has none')}. Nothing was written."


class BadScopeKey(CaseRefused):
    """The step cannot be addressed with this key, or its scope is defective; nothing was written."""

    reason = "BAD_REQUEST"
    http = 400

    def __init__(
        self, case_type: str, step: str, scope_key: str | None, problem: str, keys: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        super().__init__(case_type, step, scope_key, problem, keys)
        self.case_type, self.step, self.scope_key, self.problem, self.keys = case_type, step, scope_key, problem, keys

    def __str__(self) -> str:
        keys = f"; {_listed(self.keys, '')}" if self.keys else ""
        return f"{self.case_type}: step {self.step!r}: {self.problem}{keys}. Nothing was written."


class InvalidInput(CaseRefused):
    """The input does not fit the step, with all that is wrong with it; nothing was written."""

    reason = "INVALID_INPUT"
    http = 422

    def __init__(self, case_type: str, step: str, issues: tuple[Misfit, ...]) -> None:
        super().__init__(case_type, step, issues)
        self.case_type, self.step, self.issues = case_type, step, issues

    def __str__(self) -> str:
        wrong = "; ".join(str(issue) for issue in self.issues)
        return f"{self.case_type}: the input of step {self.step!r} is refused: {wrong}. Nothing was written."


class StepNotAvailable(CaseRefused):
    """
    The step's guard does not hold now; nothing was written.

    `evaluation` is the whole guard as it was evaluated, `unmet` the conditions of it that do not hold, with their
    reasons. What of it a caller may see is the application's to say.
    """

    reason = "STEP_NOT_AVAILABLE"
    http = 409

    def __init__(self, case_id: str | None, step: str, scope_key: str | None, evaluation: GuardResult) -> None:
        super().__init__(case_id, step, scope_key, evaluation)
        self.case_id, self.step, self.scope_key, self.evaluation = case_id, step, scope_key, evaluation

    @property
    def possible(self) -> bool:
        """Whether anybody could do it now."""
        return self.evaluation.possible

    @property
    def permitted(self) -> bool | None:
        """Whether this actor may; None where no actor was given."""
        return self.evaluation.permitted

    @property
    def unmet(self) -> Sequence[object]:
        return self.evaluation.unmet

    def __str__(self) -> str:
        of = "" if self.case_id is None else f"case {self.case_id}: "
        why = "; ".join(str(condition) for condition in self.unmet)
        return f"{of}{_addressed(self.step, self.scope_key)} is not available now: {why}. Nothing was written."


class ExecutionFailed(CaseRefused):
    """
    The attempts are used up, or the step cannot work: nothing of it was committed, and the journal has every attempt.

    `error` is the name of what the last attempt raised and `message` its text; the exception itself is the cause.
    """

    reason = "EXECUTION_FAILED"
    http = 500

    def __init__(
        self, case_id: str, execution_id: str, step: str, scope_key: str | None, attempts: int, error: str,
        message: str = "",
    ) -> None:  # fmt: skip
        super().__init__(case_id, execution_id, step, scope_key, attempts, error, message)
        self.case_id, self.execution_id, self.step, self.scope_key = case_id, execution_id, step, scope_key
        self.attempts, self.error, self.message = attempts, error, message

    @property
    def cause(self) -> BaseException | None:
        """What the last attempt raised; None in another process than the one it ran in."""
        return self.__cause__

    def __str__(self) -> str:
        times = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return (
            f"case {self.case_id}: {_addressed(self.step, self.scope_key)} failed after {times}, the last with "
            f"{self.error} (execution {self.execution_id}). Nothing of it was committed: see the cause, and execute it "
            "again once that is mended."
        )


def _addressed(step: str, scope_key: str | None) -> str:
    return f"step {step!r}" if scope_key is None else f"step {step!r} for {scope_key!r}"


LONGEST_LIST, LONGEST_WORD = 20, 60


def _listed(words: tuple[str, ...], none: str) -> str:
    """What there is instead, for people: some of it, where it is much."""
    if not words:
        return none
    more = f" and {len(words) - LONGEST_LIST} more" if len(words) > LONGEST_LIST else ""
    return f"there is {', '.join(repr(word[:LONGEST_WORD]) for word in words[:LONGEST_LIST])}{more}"
