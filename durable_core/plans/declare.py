"""Declaring a step of plans: its handler, its scope, what it changes, and its compensation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from durable_core import kinds
from durable_core.arguments import Signature
from durable_core.claims.claim import Claim
from durable_core.claims.session import StepTransaction
from durable_core.deliveries.options import DEFAULT_PRIORITY, DEFAULT_QUEUE, QUEUE_RULE, is_queue
from durable_core.errors import DefinitionError
from durable_core.kinds import checked_name
from durable_core.plans.target import Changes, Target, TargetOf, is_word, target_of
from durable_core.retry import LONGEST_DELAY_SECONDS

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TIMEOUT = 300.0
OPTIONS = frozenset({"target", "label", "rationale"})
"""Words of `planned` that no argument of a handler may have."""


@dataclass(frozen=True)
class Planned:
    """A step to be proposed: not yet checked, not yet written. Made by `kind.planned(...)` or `plans.planned(...)`."""

    kind: str
    args: tuple[object, ...] = field(default=(), repr=False)
    kwargs: Mapping[str, object] = field(default_factory=dict, repr=False)
    target: Target | None = None
    label: str | None = None
    rationale: str | None = None
    version: int | str | None = None
    """The reviewed version of the target that its arguments name."""


def planned(
    kind: str,
    arguments: Mapping[str, object],
    *,
    target: Target | None = None,
    version: int | str | None = None,
    label: str | None = None,
    rationale: str | None = None,
) -> Planned:
    """
    A step by the name of its kind, as an assistant names its tools; what is wrong with it `propose` says.

    `version` takes the place of `target` where the kind tells its target from the arguments.
    """
    return Planned(kind, (), arguments, target, label, rationale, version)


class PlanStep:
    """
    One step of an approved plan, as its handler sees it: it runs inside the step's own transaction.

    So call nothing outside the database here: the row is locked as long as the step runs, and whatever it wrote is
    rolled back when it raises. What must reach further is enqueued in `session`, as a delivery or an operation. A step
    runs once: there is no retry, `Retry` and `Snooze` are failures as any other exception is.
    """

    def __init__(self, claim: Claim, index: int, frozen: Mapping[str, Any], transaction: StepTransaction) -> None:
        self._claim, self._index, self._frozen, self._transaction = claim, index, frozen, transaction

    @property
    def id(self) -> str:
        """The plan's id, a UUIDv7."""
        return self._claim.id

    @property
    def index(self) -> int:
        """Which step of the plan this is, from 0."""
        return self._index

    @property
    def kind(self) -> str:
        return self._claim.kind

    @property
    def key(self) -> str:
        """`plan id:step`, a name for this step that no other has."""
        return f"{self._claim.id}:{self._index}"

    @property
    def target(self) -> Target | None:
        """What the approver reviewed, and at which version: what the step may change. It is still at that version."""
        return target_of(self._frozen)

    @property
    def fence(self) -> int:
        """The number under which this step may write; it grows with every claim."""
        return self._claim.fence

    @property
    def deadline(self) -> datetime:
        """When this step's time is over, by the database's clock, in UTC."""
        return self._claim.deadline_at

    @property
    def session(self) -> Session:
        """The session of the step's transaction: its work commits together with the receipt, or not at all."""
        return self._transaction.session()

    @property
    def connection(self) -> Connection:
        """The connection under `session`, for SQL without the ORM; the same promise."""
        return self._transaction.session().connection()


Compensation = Callable[[dict[str, Any], Any], "Planned | None"]
"""Given the arguments of a step that is done and what it returned: the step that makes up for it, if there is one."""


class StepKind(Generic[P, R]):
    """A declared kind of step. Calling it runs the handler in place, as plain Python; `planned` proposes it."""

    def __init__(
        self, name: str, handler: Callable[Concatenate[PlanStep, P], R], *, scope: str | None,
        target: str | TargetOf | None, queue: str, timeout: float, formerly: Sequence[str],
    ) -> None:  # fmt: skip
        self.name = checked_name(name)
        if isinstance(formerly, str) or not isinstance(formerly, Sequence):
            raise DefinitionError(f"kind {name!r}: formerly is a tuple of names, such as ({formerly!r},).")
        self.names = (self.name, *(checked_name(former) for former in formerly))
        self.handler: Callable[..., R] = handler
        self.scope = scope
        self.changes = Changes.declared(name, target)
        self.queue, self.priority, self.timeout = queue, DEFAULT_PRIORITY, timeout
        self.compensate: Compensation | None = None
        if inspect.iscoroutinefunction(handler):
            raise DefinitionError(
                f"kind {name!r}: a step of a plan is a plain function: it talks to its session and to nothing else."
            )
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise DefinitionError(f"kind {name!r}: a handler that yields would never run; return instead.")
        self.signature = Signature(name, handler)
        options = OPTIONS | ({"version"} if self.changes.of_arguments else frozenset())
        if taken := options & set(inspect.signature(handler).parameters):
            raise DefinitionError(
                f"kind {name!r}: an argument {min(taken)!r} cannot be told from planned({min(taken)}=...); rename it."
            )
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__module__ = handler.__module__
        if scope is not None and not is_word(scope):
            raise DefinitionError(f"kind {name!r}: scope is text of 1 to 200 characters; got {scope!r}.")
        if not is_queue(queue):
            raise DefinitionError(f"kind {name!r}: {QUEUE_RULE}; got {queue!r}.")
        seconds = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not seconds or not 0 < timeout <= LONGEST_DELAY_SECONDS:
            raise DefinitionError(f"kind {name!r}: a timeout is more than 0 seconds and at most a year.")

    def __call__(self, step: PlanStep, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.handler(step, *args, **kwargs)

    def planned(
        self,
        /,
        *args: Any,
        target: Target | None = None,
        label: str | None = None,
        rationale: str | None = None,
        **kwargs: Any,
    ) -> Planned:
        """
        This step with its arguments, to be proposed; `propose` checks them, and says all that is wrong at once.

        `target` is what it changes, at the version that the approver sees; `label` names the step for people,
        `rationale` says why. A kind that tells its target from the arguments takes `version=` in its place.
        """
        # Of other kinds it is an argument like any.
        version = kwargs.pop("version", None) if self.changes.of_arguments else None
        return Planned(self.name, args, kwargs, target, label, rationale, version)

    def compensation(self, plan: Compensation) -> Compensation:
        """
        Say how a done step of this kind is made up for: a decorator.

        `plan(arguments, output)` is given the frozen arguments by name and what the step returned, and returns
        `other.planned(...)`, or None where nothing is to be done. It is proposed, not carried out: a person approves
        it. Raises DefinitionError for a second one.
        """
        if self.compensate is not None or not callable(plan) or inspect.iscoroutinefunction(plan):
            raise DefinitionError(f"kind {self.name!r}: compensation takes one plain function, once.")
        self.compensate = plan
        return plan

    def __repr__(self) -> str:
        return f"<plan step {self.name}>"


def plan_step(
    kind: str,
    *,
    scope: str | None = None,
    target: str | TargetOf | None = None,
    queue: str = DEFAULT_QUEUE,
    timeout: float = DEFAULT_TIMEOUT,
    formerly: Sequence[str] = (),
) -> Callable[[Callable[Concatenate[PlanStep, P], R]], StepKind[P, R]]:
    """
    Declare a step of plans.

    `scope` must be among those granted when the plan was proposed, or the step fails. With `target`, a plan is refused
    that gives no reviewed one. It is the kind of thing that the step changes, or better a function that tells from the
    arguments, by name, which one that is: `lambda arguments: ("invoice", arguments["invoice_id"])`, or None where these
    change nothing that is reviewed. Then a plan that reviewed another one is refused, too. The hole: with the kind
    alone, nothing ties what was reviewed to the arguments. `timeout` is in seconds. Raises DefinitionError.
    """

    def declare(handler: Callable[Concatenate[PlanStep, P], R]) -> StepKind[P, R]:
        declared = StepKind(
            kind, handler, scope=scope, target=target, queue=queue, timeout=timeout, formerly=formerly
        )  # fmt: skip
        kinds.plan_steps.add(declared)
        return declared

    return declare
