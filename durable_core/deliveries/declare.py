"""Declaring a kind of delivery: its handler, its budget, and what the handler is given."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, Unpack

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable_core import kinds
from durable_core.arguments import Signature
from durable_core.claims.claim import Claim
from durable_core.claims.heartbeat import Held
from durable_core.claims.session import Effect, StepTransaction
from durable_core.database.connections import Database
from durable_core.database.transactions import AsyncTransaction, Transaction, achecked, checked
from durable_core.deliveries.enqueue import aenqueue_new, enqueue_new
from durable_core.deliveries.not_a_task import NoTask
from durable_core.deliveries.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_INTERRUPTIONS,
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE,
    EARLIEST,
    LARGEST_BUDGET,
    LEAST_URGENT,
    MOST_URGENT,
    QUEUE_RULE,
    Options,
    Placement,
    is_queue,
    is_whole,
)
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.rows import New, Ref
from durable_core.deliveries.slots import DEFAULT_MISSED, DEFAULT_TIMEZONE, SLOT, Cadence, checked_handler
from durable_core.errors import DefinitionError, InvalidArguments
from durable_core.kinds import Registry, checked_name
from durable_core.retry import LONGEST_DELAY_SECONDS, Backoff

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Step")
"""What the handler takes: a Step, or an AsyncStep where it is `async def`."""


class Step:
    """
    One attempt, as its handler sees it.

    `key` is the same over all attempts of this delivery, and no other delivery has it:
    hand it to the other side of an external call, which may happen more than once.
    """

    def __init__(
        self, claim: Claim, transaction: StepTransaction, held: Held, effects: list[Effect], deadline: float
    ) -> None:
        self._claim, self._transaction, self._held = claim, transaction, held
        self._effects, self._deadline = effects, deadline
        self._returned = False

    @property
    def id(self) -> str:
        """The delivery's id, a UUIDv7."""
        return self._claim.id

    @property
    def kind(self) -> str:
        return self._claim.kind

    @property
    def key(self) -> str:
        """`kind:id`, to be handed to whatever an external call talks to."""
        return f"{self._claim.kind}:{self._claim.id}"

    @property
    def attempt(self) -> int:
        """Which go of the budget this is, from 1; a lost worker's go does not count."""
        return self._claim.attempt

    @property
    def max_attempts(self) -> int:
        return self._claim.max_attempts

    @property
    def fence(self) -> int:
        """The number under which this attempt may write; it grows with every claim."""
        return self._claim.fence

    @property
    def deadline(self) -> datetime:
        """When this attempt's time is over, by the database's clock, in UTC."""
        return self._claim.deadline_at

    @property
    def cancelled(self) -> bool:
        """
        Whether going on is pointless: the claim is lost, or the time is over.

        A courtesy to stop early. It may turn true a heartbeat late; what is written is
        decided by the fence alone. True as well where no heartbeat got through for a whole
        lease, for then others may have the row.
        """
        return self._held.given_up or time.monotonic() >= self._deadline

    @property
    def session(self) -> Session:
        """
        A session whose work commits together with the receipt, or not at all.

        Opening it locks the row until the attempt ends, so open it last, after external
        calls. Raises ClaimLost when somebody else has the row; then nothing was written.
        """
        return self._transaction.session()

    @property
    def connection(self) -> Connection:
        """The connection under `session`, for SQL without the ORM; the same promise, the same caution."""
        return self._transaction.session().connection()

    def in_commit(self, effect: Effect) -> None:
        """
        Run `effect(session)` inside the commit, after the handler has returned.

        The better form after an external call: the row is locked for the commit only, and a
        commit that must be tried again runs `effect` again without repeating the call. So
        `effect` must be re-runnable, and talk to nothing but its session.
        """
        if self._returned:
            raise DefinitionError(
                "step.in_commit() is for the handler, before it returns; an effect cannot add another."
            )
        self._effects.append(effect)

    def handler_returned(self) -> None:
        """From here on the commit's effects are settled."""
        self._returned = True


def database_of(step: Step) -> Database:
    """The database of the worker that carries this step out, for handlers of ours whose transactions are their own."""
    return step._transaction.database


class AsyncStep(Step):
    """
    The same for an `async def` handler, which runs in an event loop of its own.

    Its `session` is an AsyncSession on the attempt's one connection. That connection is a
    blocking one: a statement holds up the loop, as the handler is all that runs in it.
    """

    @property
    def session(self) -> AsyncSession:  # type: ignore[override]  # an async handler can do nothing with the other
        """An AsyncSession whose work commits together with the receipt, or not at all. See `Step.session`."""
        if self._async_session is None:
            own: Any = lambda **_: self._transaction.session()  # noqa: E731  (it stands where a class is asked for)
            self._async_session = AsyncSession(sync_session_class=own)
        return self._async_session

    _async_session: AsyncSession | None = None

    @property
    def connection(self) -> NoReturn:
        """Not for async handlers: `await step.session.connection()`."""
        raise AttributeError("an async handler asks `await step.session.connection()`")


DeadHook = Callable[[Session, Delivery], object]
"""Called with the session of the move and the delivery as it died."""

_Errors = type[BaseException] | tuple[type[BaseException], ...]


def _errors(kind: str, option: str, given: _Errors) -> tuple[type[BaseException], ...]:
    errors = given if isinstance(given, tuple) else (given,)
    if not all(isinstance(error, type) and issubclass(error, Exception) for error in errors):
        raise DefinitionError(f"kind {kind!r}: {option} is an exception class or a tuple of them; got {given!r}.")
    return errors


class DeliveryKind(NoTask, Generic[P, R]):
    """A declared kind. Calling it runs the handler in place, as plain Python; `enqueue` makes it durable."""

    def __init__(
        self, name: str, handler: Callable[Concatenate[S, P], R], *, queue: str, max_attempts: int,
        max_interruptions: int, backoff: Backoff, timeout: float, priority: int, formerly: Sequence[str] = (),
        ordering: str = "loose", retry_on: _Errors = (Exception,), give_up_on: _Errors = (),
        cadence: Cadence | None = None,
    ) -> None:  # fmt: skip
        self.name = checked_name(name)
        if isinstance(formerly, str) or not isinstance(formerly, Sequence):
            raise DefinitionError(f"kind {name!r}: formerly is a tuple of names, such as ({formerly!r},).")
        self.names = (self.name, *(checked_name(former) for former in formerly))
        self.handler: Callable[..., R] = handler
        self.queue, self.priority = queue, priority
        self.max_attempts, self.max_interruptions = max_attempts, max_interruptions
        self.backoff, self.timeout = backoff, timeout
        self.retry_on, self.give_up_on = _errors(name, "retry_on", retry_on), _errors(name, "give_up_on", give_up_on)
        self.dead_hook: DeadHook | None = None
        self.signature = Signature(name, handler)
        self.is_async = inspect.iscoroutinefunction(handler)
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise DefinitionError(f"kind {name!r}: a handler that yields would never run; return, or await, instead.")
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__module__ = handler.__module__
        if not is_queue(queue):
            raise DefinitionError(f"kind {name!r}: {QUEUE_RULE}; got {queue!r}.")
        if not is_whole(priority, MOST_URGENT, LEAST_URGENT):
            raise DefinitionError(f"kind {name!r}: a priority is a whole number from 0 (most urgent) to 9.")
        if not is_whole(max_attempts, 1, LARGEST_BUDGET) or not is_whole(max_interruptions, 0, LARGEST_BUDGET):
            raise DefinitionError(
                f"kind {name!r}: max_attempts is a whole number of at least 1, max_interruptions one of at least 0, "
                f"and both are at most {LARGEST_BUDGET:,}."
            )
        seconds = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not seconds or not 0 < timeout <= LONGEST_DELAY_SECONDS:
            raise DefinitionError(f"kind {name!r}: a timeout is more than 0 seconds and at most a year.")
        if ordering not in ("loose", "strict"):
            raise DefinitionError(f"kind {name!r}: ordering is 'loose' or 'strict'; got {ordering!r}.")
        self.is_strict = ordering == "strict"
        if not isinstance(backoff, Backoff):
            raise DefinitionError(f"kind {name!r}: backoff is a Backoff(...); got {type(backoff).__name__}.")

        self.cadence = cadence
        self._takes_slot = cadence is not None and checked_handler(self.name, handler)
        if cadence is not None:
            try:
                self.slot_arguments(cadence.after(EARLIEST))
            except InvalidArguments as refused:
                raise DefinitionError(
                    f"kind {name!r}: its cron cannot call the handler: {refused.what}. Write slot: datetime."
                ) from None
            except NameError:
                pass  # a type declared below the handler: then the sweep meets what is wrong, and says so

    def slot_arguments(self, slot: datetime) -> str:
        """The arguments of the row of a slot: the slot in the schedule's own zone, or none. Raises InvalidArguments."""
        assert self.cadence is not None
        given = {SLOT: slot.astimezone(self.cadence.zone)} if self._takes_slot else {}
        return self.signature.pack((), given)

    def __call__(self, step: Step, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.handler(step, *args, **kwargs)

    def enqueue(self, tx: Transaction, /, *args: P.args, **kwargs: P.kwargs) -> Ref:
        """
        Write one delivery in the caller's transaction: it commits or vanishes with the caller's rows.

        Never commits, and never waits for the broker. Raises InvalidArguments, with nothing
        written and the transaction alive.
        """
        return self.options().enqueue(tx, *args, **kwargs)

    async def aenqueue(self, tx: AsyncTransaction, /, *args: P.args, **kwargs: P.kwargs) -> Ref:
        """As `enqueue`, in an AsyncSession, an AsyncConnection or a psycopg AsyncConnection."""
        return await self.options().aenqueue(tx, *args, **kwargs)

    def options(self, **options: Unpack[Options]) -> Prepared[P]:
        """
        The same kind with options for one delivery.

        `key` names one intention, unique per kind while its row is kept; `key_policy` says what
        a second one under it becomes: `return_first`, `raise`, `replace` or `debounce`.
        `countdown` (seconds or timedelta) or `eta` (aware datetime) delays it; `expires` (the
        same) is when it has lost its use, unless it has begun. `ordering_key`: deliveries with
        the same one, of whatever kind, run one at a time, oldest committed first. `queue` and
        `priority` (0 is most urgent) override the kind's. Raises InvalidOption.
        """
        return Prepared(self, Placement.of(self.name, options))

    def gives_up_on(self, error: BaseException) -> bool:
        """Whether this exception of the handler ends the delivery at once, whatever budget remains."""
        # What is no Exception, such as a time limit of a library, says nothing about the work.
        unwanted = isinstance(error, Exception) and not isinstance(error, self.retry_on)
        return unwanted or isinstance(error, self.give_up_on)

    def on_dead(self, hook: DeadHook) -> DeadHook:
        """
        Run `hook(session, delivery)` in the transaction in which a delivery of this kind dies: a decorator.

        What it writes commits together with that move, once, whether the last attempt failed or the last worker was
        lost. It must not talk to anything but its session. What it raises is undone, logged (`on_dead_failed`) and
        journalled, and the delivery is dead all the same. The hole: where a sweep finds the lost worker, and its
        process does not declare this kind, nothing can be run (`on_dead_not_run`): have the modules with your kinds
        imported wherever `durable.control` is read. Raises DefinitionError for a second hook.
        """
        if self.dead_hook is not None or not callable(hook) or inspect.iscoroutinefunction(hook):
            raise DefinitionError(f"kind {self.name!r}: on_dead takes one plain function, once.")
        self.dead_hook = hook
        return hook

    def __repr__(self) -> str:
        return f"<delivery {self.name}>"


@dataclass(frozen=True)
class Prepared(NoTask, Generic[P]):
    """A kind with its options; what remains are the arguments."""

    kind: DeliveryKind[P, Any]
    placement: Placement

    def enqueue(self, tx: Transaction, /, *args: P.args, **kwargs: P.kwargs) -> Ref:
        """
        As `DeliveryKind.enqueue`, with the options.

        With a `key`: the same arguments give the first row back (`ref.created` is False);
        other arguments raise IdempotencyConflict; a twin that another open transaction is
        writing raises KeyInFlight after 50 ms at most. None of these writes anything or
        ends the caller's transaction. Another `key_policy`: `raise` raises KeyTaken; `replace`
        and `debounce` give the waiting row this call's arguments (`ref.replaced`), and where it
        has begun, its key to a new row.
        """
        return enqueue_new(checked(tx), self.new(*args, **kwargs))

    async def aenqueue(self, tx: AsyncTransaction, /, *args: P.args, **kwargs: P.kwargs) -> Ref:
        """As `enqueue`, in an async transaction."""
        return await aenqueue_new(achecked(tx), self.new(*args, **kwargs))

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> New:
        """The row to be, for `enqueue_many`; nothing is written yet. Raises InvalidArguments."""
        return New.of(self.kind, self.placement, self.kind.signature.pack(args, kwargs))


registry: Registry[DeliveryKind[..., Any]] = kinds.deliveries
"""The delivery kinds that this process knows."""


def delivery(
    name: str,
    *,
    queue: str = DEFAULT_QUEUE,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    max_interruptions: int = DEFAULT_MAX_INTERRUPTIONS,
    backoff: Backoff | None = None,
    timeout: float = 300.0,
    priority: int = DEFAULT_PRIORITY,
    formerly: Sequence[str] = (),
    ordering: str = "loose",
    retry_on: _Errors = (Exception,),
    give_up_on: _Errors = (),
    cron: str | None = None,
    timezone: str = DEFAULT_TIMEZONE,
    missed: str = DEFAULT_MISSED,
) -> Callable[[Callable[Concatenate[S, P], R]], DeliveryKind[P, R]]:
    """
    Declare a kind of delivery: `handler(step, ...)` runs at least once per delivery, until it returns.

    What it writes with `step.session` or `step.in_commit` are its database effects: exactly once.
    What it does elsewhere may repeat, so it carries `step.key`. At most once is `max_attempts=1,
    max_interruptions=0`: then a lost worker ends the delivery dead, outcome unknown.

    `max_attempts` counts failures; `max_interruptions` lost workers; `timeout` is seconds for
    one attempt. `formerly` are names the kind had before: rows enqueued under them are carried
    out too, under their own name, key and `step.key`.

    An exception in `give_up_on`, or in none of `retry_on`, fails the delivery at once; `Retry`, `Snooze` and `GiveUp`
    go before both. `ordering="strict"` keeps what comes after a failed or dead delivery of the same `ordering_key`
    waiting until a person acts.

    `cron`, a crontab of five fields, makes the kind periodic: one delivery per slot, in `timezone`. `missed` says what
    becomes of slots that no sweep came to in time: `once` (the latest runs), `skip` or `all`. The handler is given
    the step and, if it has such a parameter, `slot: datetime`. Raises DefinitionError when the declaration cannot work.
    """

    if callable(name):
        raise DefinitionError('write @delivery("some.kind"), with the kind\'s name in parentheses.')

    cadence = None if cron is None else Cadence.of(name, cron, timezone, missed)
    if cadence is None and (timezone, missed) != (DEFAULT_TIMEZONE, DEFAULT_MISSED):
        raise DefinitionError(f"kind {name!r}: timezone and missed say how a cron runs, and there is none.")

    def declare(handler: Callable[Concatenate[S, P], R]) -> DeliveryKind[P, R]:
        kind = DeliveryKind(
            name, handler, queue=queue, max_attempts=max_attempts, max_interruptions=max_interruptions,
            backoff=Backoff() if backoff is None else backoff, timeout=timeout, priority=priority, formerly=formerly,
            ordering=ordering, retry_on=retry_on, give_up_on=give_up_on,
            cadence=cadence,
        )  # fmt: skip
        registry.add(kind)
        return kind

    return declare


def terms(kinds: Iterable[DeliveryKind[..., Any]]) -> list[dict[str, object]]:
    """What a claim writes on the row of each kind."""
    return [
        {
            "kind": name,
            "timeout_seconds": kind.timeout,
            "max_attempts": kind.max_attempts,
            "max_interruptions": kind.max_interruptions,
        }
        for kind in kinds
        for name in kind.names
    ]
