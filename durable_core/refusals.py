"""What plans and operations refuse at the door. The root, and what all contracts share, stands in `errors`."""

from __future__ import annotations

from dataclasses import dataclass

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


# --- stop: running user code alone meets these ---------------------------------------------------
