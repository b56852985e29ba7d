"""Declaring a step of plans: its handler, its scope and its compensation; and how the version of a target is read."""

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
from durable_core.retry import LONGEST_DELAY_SECONDS

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TIMEOUT = 300.0
OPTIONS = frozenset({"target", "label", "rationale"})
"""Words of `planned` that no argument of a handler may have."""


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


@dataclass(frozen=True)
class Planned:
    """A step to be proposed: not yet checked, not yet written. Made by `kind.planned(...)` or `plans.planned(...)`."""

    kind: str
    args: tuple[object, ...] = field(default=(), repr=False)
    kwargs: Mapping[str, object] = field(default_factory=dict, repr=False)
    target: Target | None = None
    label: str | None = None
    rationale: str | None = None


def planned(
    kind: str,
    arguments: Mapping[str, object],
    *,
    target: Target | None = None,
    label: str | None = None,
    rationale: str | None = None,
) -> Planned:
    """A step by the name of its kind, as an assistant names its tools; what is wrong with it `propose` says."""
    return Planned(kind, (), arguments, target, label, rationale)


class PlanStep:
    """
    One step of an approved plan, as its handler sees it: it runs inside the step's own transaction.

    So call nothing outside the database here: the row is locked as long as the step runs, and whatever it wrote is
    rolled back when it raises. What must reach further is enqueued in `session`, as a delivery or an operation. A step
    runs once: there is no retry, `Retry` and `Snooze` are failures as any other exception is.
    """

    def __init__(self, claim: Claim, index: int, transaction: StepTransaction) -> None:
        self._claim, self._index, self._transaction = claim, index, transaction

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
        self, name: str, handler: Callable[Concatenate[PlanStep, P], R], *, scope: str | None, target: str | None,
        queue: str, timeout: float, formerly: Sequence[str],
    ) -> None:  # fmt: skip
        self.name = checked_name(name)
        if isinstance(formerly, str) or not isinstance(formerly, Sequence):
            raise DefinitionError(f"kind {name!r}: formerly is a tuple of names, such as ({formerly!r},).")
        self.names = (self.name, *(checked_name(former) for former in formerly))
        self.handler: Callable[..., R] = handler
        self.scope, self.target = scope, target
        self.queue, self.priority, self.timeout = queue, DEFAULT_PRIORITY, timeout
        self.compensate: Compensation | None = None
        if inspect.iscoroutinefunction(handler):
            raise DefinitionError(
                f"kind {name!r}: a step of a plan is a plain function: it talks to its session and to nothing else."
            )
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise DefinitionError(f"kind {name!r}: a handler that yields would never run; return instead.")
        self.signature = Signature(name, handler)
        if taken := OPTIONS & set(inspect.signature(handler).parameters):
            raise DefinitionError(
                f"kind {name!r}: an argument {min(taken)!r} cannot be told from planned({min(taken)}=...); rename it."
            )
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__module__ = handler.__module__
        for option, text in (("scope", scope), ("target", target)):
            if text is not None and not is_word(text):
                raise DefinitionError(f"kind {name!r}: {option} is text of 1 to 200 characters; got {text!r}.")
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
        `rationale` says why.
        """
        return Planned(self.name, args, kwargs, target, label, rationale)

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
    target: str | None = None,
    queue: str = DEFAULT_QUEUE,
    timeout: float = DEFAULT_TIMEOUT,
    formerly: Sequence[str] = (),
) -> Callable[[Callable[Concatenate[PlanStep, P], R]], StepKind[P, R]]:
    """
    Declare a step of plans.

    `scope` must be among those granted when the plan was proposed, or the step fails. With `target`, the kind of thing
    that it changes, a plan is refused that gives no reviewed one. `timeout` is in seconds. Raises DefinitionError.
    """

    def declare(handler: Callable[Concatenate[PlanStep, P], R]) -> StepKind[P, R]:
        declared = StepKind(
            kind, handler, scope=scope, target=target, queue=queue, timeout=timeout, formerly=formerly
        )  # fmt: skip
        kinds.plan_steps.add(declared)
        return declared

    return declare


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
