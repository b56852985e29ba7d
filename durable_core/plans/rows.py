"""A plan as it is read, and its report: one line for each step, made from the receipts and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from durable_core import kinds, secrets
from durable_core.plans.target import Target, target_of
from durable_core.states import PLAN_TERMINAL, PlanState


@dataclass(frozen=True)
class StepOf:
    """One frozen step of a plan. `arguments` are in no repr; `shown_arguments` are for people."""

    kind: str
    queue: str
    arguments: dict[str, Any] = field(repr=False)
    label: str | None
    rationale: str | None
    target: Target | None

    @staticmethod
    def of(frozen: Mapping[str, Any]) -> StepOf:
        return StepOf(
            kind=frozen["kind"], queue=frozen["queue"], arguments=frozen["arguments"], label=frozen["label"],
            rationale=frozen["rationale"], target=target_of(frozen),
        )  # fmt: skip

    @property
    def shown_arguments(self) -> dict[str, Any]:
        """The arguments with secrets masked: those annotated `Secret[...]`, and whatever is named like one."""
        kind = kinds.plan_steps.find(self.kind)
        try:
            hidden = frozenset[str]() if kind is None else kind.signature.hidden
        except Exception:  # a type that its module never declared: the kind is broken, and its rows are to be read
            hidden = frozenset()
        return secrets.masked(self.arguments, hidden)


@dataclass(frozen=True)
class Receipt:
    """Proof, committed together with the effect, that a step ran; `outcome` is ok, failed or conflict."""

    step: int
    kind: str
    outcome: str
    output: Any = field(repr=False)
    error_code: str | None
    error_message: str | None
    at: datetime


@dataclass(frozen=True)
class Plan:
    """One plan, as it was read. Instants are aware datetimes by the database's clock."""

    id: str
    origin: str | None
    risk: str
    rationale: str | None
    steps: tuple[StepOf, ...]
    digest: str
    scopes: tuple[str, ...]
    self_approval: bool
    proposed_by: str
    compensates: str | None
    state: PlanState
    kind: str
    queue: str
    approved_by: str | None
    approved_at: datetime | None
    rejected_by: str | None
    rejected_reason: str | None
    fence: int
    settled_fence: int
    owner: str | None
    owner_pid: int | None
    owner_host: str | None
    claimed_at: datetime | None
    lease_expires_at: datetime | None
    deadline_at: datetime | None
    continue_until: datetime | None
    waiting_for: str | None
    held_reason: str | None
    error_code: str | None
    error_message: str | None
    created_at: datetime
    expires_at: datetime
    finished_at: datetime | None
    receipts: tuple[Receipt, ...] = ()

    @property
    def in_flight(self) -> bool:
        """Whether a worker is inside one of its steps."""
        return self.owner is not None

    @property
    def reason(self) -> str | None:
        """Why it ended as it did, in one word for programs: `conflict`, `interrupted`, or the failed step's code."""
        return None if self.error_code is None else _REASONS.get(self.error_code, self.error_code)

    def as_json(self, *, arguments: bool = True) -> dict[str, Any]:
        """The plan, its instants as ISO 8601 in UTC, secrets masked; without its payload where that stays unseen."""
        facts = asdict(self)
        for told, step in zip(facts["steps"], self.steps, strict=True):
            told["arguments"] = step.shown_arguments
            if not arguments:
                del told["arguments"]
        for receipt in facts["receipts"] if not arguments else ():
            del receipt["output"]
        told_all: dict[str, Any] = _plain({**facts, "reason": self.reason, "in_flight": self.in_flight})
        return told_all


_REASONS = {"CONFLICT": "conflict", "INTERRUPTED": "interrupted", "EXPIRED": "expired"}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class Became(StrEnum):
    """What became of one step."""

    DONE = "done"
    FAILED = "failed"
    CONFLICT = "conflict"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Line:
    """One step of a report. `output` is what it returned, if it is done."""

    step: int
    kind: str
    label: str | None
    became: Became
    output: Any = field(repr=False)
    error_code: str | None
    error_message: str | None
    at: datetime | None

    def __str__(self) -> str:
        named = f"{self.step + 1}. {self.label or self.kind}: {self.became}"
        if self.error_code is None:
            return named
        first = (self.error_message or "").split("\n", 1)[0]
        return f"{named} ({self.error_code}{f': {first}' if first else ''})"


_BECAME = {"ok": Became.DONE, "failed": Became.FAILED, "conflict": Became.CONFLICT}


def lines_of(steps: Sequence[StepOf], receipts: Sequence[Receipt]) -> tuple[Line, ...]:
    """What became of each step, from the receipts alone: the same while the plan runs and ever after."""
    by_step = {receipt.step: receipt for receipt in receipts}
    return tuple(_line(index, step, by_step.get(index)) for index, step in enumerate(steps))


def _line(index: int, step: StepOf, receipt: Receipt | None) -> Line:
    if receipt is None:
        return Line(index, step.kind, step.label, Became.NOT_RUN, None, None, None, None)
    return Line(
        index, step.kind, step.label, _BECAME[receipt.outcome], receipt.output, receipt.error_code,
        receipt.error_message, receipt.at,
    )  # fmt: skip


@dataclass(frozen=True)
class Report:
    """
    What came of a plan, for people: its state, and one line for each of its steps.

    Steps that are done stay done when a later one fails: nothing is rolled back. `in_flight` says that a worker is
    inside the first step that has no line but "not run".
    """

    id: str
    state: PlanState
    reason: str | None
    message: str | None
    in_flight: bool
    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        """The report in plain language."""
        return "\n".join([self.summary, *(f"  {line}" for line in self.lines)])

    @property
    def summary(self) -> str:
        """Its first line, in which nothing of what steps were given or said."""
        done = sum(line.became is Became.DONE for line in self.lines)
        counted = f"{done} of {len(self.lines)} steps done"
        if self.state not in PLAN_TERMINAL:
            where = "; a step is in flight" if self.in_flight else ""
            return f"plan {self.id} is {self.state}: {counted}{where}"
        stays = "; what is done stays done" if done and self.state is PlanState.FAILED else ""
        reason = f" ({self.reason})" if self.reason else ""
        return f"plan {self.id} {_ENDED[self.state]}{reason}: {counted}{stays}"


_ENDED = {
    PlanState.EXECUTED: "was executed", PlanState.FAILED: "failed", PlanState.REJECTED: "was rejected",
    PlanState.EXPIRED: "expired",
}  # fmt: skip


def report_of(plan: Plan) -> Report:
    message = plan.rejected_reason if plan.state is PlanState.REJECTED else plan.error_message
    return Report(plan.id, plan.state, plan.reason, message, plan.in_flight, lines_of(plan.steps, plan.receipts))
