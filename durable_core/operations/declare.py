"""Declaring an operation: the call that is issued once, the poll that follows, and the hooks around them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar

from durable_core import kinds
from durable_core.arguments import Signature
from durable_core.claims.claim import Claim
from durable_core.claims.heartbeat import Held
from durable_core.database.transactions import AsyncTransaction, Transaction, achecked, checked
from durable_core.deliveries.options import (
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE,
    LEAST_URGENT,
    MOST_URGENT,
    QUEUE_RULE,
    is_queue,
    is_whole,
)
from durable_core.errors import DefinitionError
from durable_core.kinds import Registry, checked_name
from durable_core.operations.start import OperationRef, Placement, Start, astarted, started
from durable_core.operations.statuses import Issued, Poll, Said, checked_words

PATIENCE_SECONDS = 300.0
EVERY_SECONDS = 2.0
TIMEOUT_SECONDS = 300.0
LEAST_START_SECONDS = 3600.0
"""One that nobody issued fails after its patience, and after an hour at least."""
LONGEST_SECONDS = 30 * 24 * 3600.0

OURS = frozenset({"by", "trigger", "auto"})
"""What `start` takes beside the arguments; a handler's own may not be called so."""

H = TypeVar("H", bound=Callable[..., Any])


class OperationStep:
    """
    One look at an operation, as its hooks see it.

    `key` is the same over the call and all polls of this operation, and no other has it: hand it to the other side
    with the call, and `find` can ask for it.
    """

    def __init__(
        self, kind: OperationKind, row_id: str, arguments: str, claim: Claim | None = None, held: Held | None = None,
        deadline: float | None = None,
    ) -> None:  # fmt: skip
        self._kind, self._id, self._arguments = kind, row_id, arguments
        self._claim, self._held, self._deadline = claim, held, deadline

    @property
    def id(self) -> str:
        """The operation's id, a UUIDv7."""
        return self._id

    @property
    def kind(self) -> str:
        return self._kind.name

    @property
    def key(self) -> str:
        """`kind:id`, to be handed to the other side with the call."""
        return f"{self._kind.name}:{self._id}"

    @cached_property
    def arguments(self) -> Mapping[str, object]:
        """What the operation was started with, by name. Raises InvalidArguments where the code no longer takes it."""
        return self._kind.signature.unpack(self._arguments)

    @property
    def fence(self) -> int:
        """The number under which this look may report; 0 where nothing is claimed, as in a pre-check."""
        return 0 if self._claim is None else self._claim.fence

    @property
    def deadline(self) -> datetime | None:
        """When this look's time is over, by the database's clock; None where nothing is claimed."""
        return None if self._claim is None else self._claim.deadline_at

    @property
    def cancelled(self) -> bool:
        """Whether going on is pointless, as far as a heartbeat ago: canceled, taken over, or out of time."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return late or (self._held is not None and self._held.given_up)


class OperationKind:
    """A declared operation. Calling it issues in place, as plain Python; `start` makes it durable."""

    def __init__(
        self, name: str, handler: Callable[..., Any], *, lease: float | timedelta, every: float | timedelta,
        one_in_flight: bool, queue: str, timeout: float | timedelta, priority: int,
        start_within: float | timedelta | None, statuses: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        self.name = checked_name(name)
        self.names = (self.name,)
        self.handler = handler
        self.queue, self.priority = queue, priority
        self.patience = _seconds(name, "lease", lease)
        self.every = _seconds(name, "every", every)
        self.timeout = _seconds(name, "timeout", timeout)
        self.start_within = (
            max(self.patience, LEAST_START_SECONDS)
            if start_within is None
            else _seconds(name, "start_within", start_within)
        )
        self.one_in_flight = one_in_flight
        self.words = checked_words(name, statuses)
        self.signature = Signature(name, handler)
        self.poll_hook: Callable[..., Said | Poll | Awaitable[Said | Poll]] | None = None
        self.precheck_hook: Callable[..., Any] | None = None
        self.cancel_hook: Callable[..., Any] | None = None
        self.find_hook: Callable[..., Any] | None = None
        self.configured_hook: Callable[[], object] | None = None
        self.targets_hook: Callable[..., object] | None = None
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__module__ = handler.__module__
        taken = [one for one in inspect.signature(handler).parameters if one in OURS]
        if taken:
            raise DefinitionError(
                f"kind {name!r}: argument {taken[0]!r} is one of `start` itself; give it another name."
            )
        if not is_queue(queue):
            raise DefinitionError(f"kind {name!r}: {QUEUE_RULE}; got {queue!r}.")
        if not is_whole(priority, MOST_URGENT, LEAST_URGENT):
            raise DefinitionError(f"kind {name!r}: a priority is a whole number from 0 (most urgent) to 9.")
        if not isinstance(one_in_flight, bool):
            raise DefinitionError(f"kind {name!r}: one_in_flight is True or False; got {one_in_flight!r}.")
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise DefinitionError(f"kind {name!r}: a handler that yields would never run; return, or await, instead.")

    # --- the hooks -------------------------------------------------------------------------------

    def poll(self, hook: H) -> H:
        """
        `poll(step, external_ids)` asks the other side: a dict of id to status, or a `Poll`. A decorator, and needed.

        It reads and changes nothing there. What it raises changes nothing of the operation, and it is asked again
        later; `Retry(after=…)` says when, within the patience, which it does not move. A wait past the patience is
        returned as `Poll(statuses, retry_after=…)`: the other side has answered.
        """
        return self._hook("poll", hook)

    def precheck(self, hook: H) -> H:
        """
        `precheck(step, ...)` looks, in the task and before the call, whether the other side would refuse: a decorator.

        It takes the handler's arguments, reads only, and may run twice. `GiveUp("why", code=…)` ends the operation
        as failed with nothing issued; anything else it raises puts the start off.
        """
        return self._hook("precheck", hook)

    def cancel(self, hook: H) -> H:
        """
        `cancel(step, external_ids)` asks the other side to stop, after an operator's cancel: a decorator.

        At most once, best effort: the operation is canceled whatever comes of it.
        """
        return self._hook("cancel", hook)

    def find(self, hook: H) -> H:
        """
        `find(step)` looks up, by `step.key`, what became of a call whose answer was lost: a decorator.

        `Issued` where the other side knows it, None where it does not: asked again until 30 s after the call, or half
        of the patience, for it may still be taking the request. It reads and issues nothing. Without it such an
        operation ends as failed, outcome unknown.
        """
        return self._hook("find", hook)

    def configured(self, hook: H) -> H:
        """`configured()` says whether this process has what the call needs; asked first at each start: a decorator."""
        return self._hook("configured", hook)

    def targets(self, hook: H) -> H:
        """
        `targets(...)` says what these arguments would act on; where that is nothing, the start is refused: a decorator.

        It is called inside the caller's transaction, so it talks to nobody.
        """
        return self._hook("targets", hook)

    def _hook(self, name: str, hook: H) -> H:
        slot = f"{name}_hook"
        if getattr(self, slot) is not None or not callable(hook):
            raise DefinitionError(f"kind {self.name!r}: {name} takes one function, once.")
        if name in ("configured", "targets") and inspect.iscoroutinefunction(hook):
            raise DefinitionError(f"kind {self.name!r}: {name} is asked in the caller's transaction; no `async def`.")
        setattr(self, slot, hook)
        return hook

    @property
    def finds(self) -> bool:
        return self.find_hook is not None

    def check(self) -> None:
        """Raises DefinitionError for an operation that nobody could poll."""
        if self.poll_hook is None:
            raise DefinitionError(f"kind {self.name!r}: an operation is polled; declare `@{self.__name__}.poll`.")

    # --- starting --------------------------------------------------------------------------------

    def __call__(self, step: OperationStep, /, *args: Any, **kwargs: Any) -> Any:
        return self.handler(step, *args, **kwargs)

    def options(self, *, key: str | None = None, queue: str | None = None, priority: int | None = None) -> Prepared:
        """
        The same kind with options for one operation.

        `key` names one intention, unique per kind while its row is kept: started again with the same arguments, the
        first is given back. Raises InvalidOption.
        """
        return Prepared(self, Placement.of(self.name, key, queue, priority))

    def start(
        self, tx: Transaction, /, *args: Any, by: str, trigger: str = "manual", auto: object = True, **kwargs: Any
    ) -> OperationRef:
        """
        Write one operation in the caller's transaction; a worker issues its call after the commit, at most once, ever.

        No network call is made here. Raises NotConfigured, InvalidArguments, TargetsUnresolved and OperationInFlight,
        each with nothing written and the transaction alive. With `trigger="scheduled"` one in flight is no error but
        a skip (`ref.skipped`). `auto` is the flag of a scheduled start: anything but True or the text "true" skips it
        before anything is looked at.
        """
        return self.options().start(tx, *args, by=by, trigger=trigger, auto=auto, **kwargs)

    async def astart(
        self, tx: AsyncTransaction, /, *args: Any, by: str, trigger: str = "manual", auto: object = True, **kwargs: Any
    ) -> OperationRef:
        """As `start`, in an AsyncSession, an AsyncConnection or a psycopg AsyncConnection."""
        return await self.options().astart(tx, *args, by=by, trigger=trigger, auto=auto, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


@dataclass(frozen=True)
class Prepared:
    """An operation with its options; what remains are the arguments, and who starts it."""

    kind: OperationKind
    placement: Placement

    def start(
        self, tx: Transaction, /, *args: Any, by: str, trigger: str = "manual", auto: object = True, **kwargs: Any
    ) -> OperationRef:
        """
        As `OperationKind.start`, with the options.

        With a `key`: the same arguments give the first row back (`ref.created` is False, `ref.replayed` True), and
        nothing is issued; other arguments raise IdempotencyConflict. A key that another open transaction is writing
        raises KeyInFlight after 0.1 s at most.
        """
        if not is_on(auto):
            return OperationRef("", self.kind.name, created=False, skipped=True)
        return started(checked(tx), self._start(args, kwargs, by, trigger))

    async def astart(
        self, tx: AsyncTransaction, /, *args: Any, by: str, trigger: str = "manual", auto: object = True, **kwargs: Any
    ) -> OperationRef:
        """As `start`, in an async transaction."""
        if not is_on(auto):
            return OperationRef("", self.kind.name, created=False, skipped=True)
        return await astarted(achecked(tx), self._start(args, kwargs, by, trigger))

    def _start(self, args: Sequence[Any], kwargs: Mapping[str, Any], by: str, trigger: str) -> Start:
        kind = self.kind
        kind.check()
        new = Start.of(
            kind.name, kind.configured_hook, by=by, trigger=trigger, placement=replace(
                self.placement, queue=self.placement.queue or kind.queue,
                priority=kind.priority if self.placement.priority is None else self.placement.priority,
            ),
            one_in_flight=kind.one_in_flight, finds=kind.finds, patience_seconds=kind.patience,
            every_seconds=kind.every, start_seconds=kind.start_within,
        )  # fmt: skip
        arguments = kind.signature.pack(args, kwargs)
        asked = None if kind.targets_hook is None else _asking(kind.targets_hook, kind.signature, arguments)
        return replace(new, arguments=arguments, targets=asked)


def _asking(hook: Callable[..., object], signature: Signature, arguments: str) -> Callable[[], object]:
    return lambda: hook(**signature.unpack(arguments))


def is_on(flag: object) -> bool:
    """Whether a flag is on: True, or the text "true", exactly. "TRUE", "1" and nothing at all are off."""
    return flag is True or flag == "true"


def called(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a hook returns; one that is `async def` runs in an event loop of its own."""
    value = hook(*args, **kwargs)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def issued_of(value: object) -> Issued:
    """What a handler returned, as `Issued`. Raises TypeError or ValueError for what names no ids."""
    if isinstance(value, Issued):
        return value
    if isinstance(value, list | tuple):
        return Issued(list(value))
    raise TypeError(f"the handler returned {type(value).__name__}; it returns Issued(external_ids=[...])")


def polled_of(value: object) -> Poll:
    """What a poll returned, as `Poll`. Raises TypeError or ValueError."""
    if isinstance(value, Poll):
        return value
    if isinstance(value, Mapping):
        return Poll(value)
    raise TypeError(f"the poll returned {type(value).__name__}; it returns a dict of id to status, or a Poll")


def _seconds(kind: str, option: str, given: object) -> float:
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_SECONDS:
        raise DefinitionError(f"kind {kind!r}: {option} is more than 0 seconds and at most 30 days; got {given!r}.")
    return float(seconds)


registry: Registry[OperationKind] = kinds.operations
"""The operations that this process knows."""


def operation(
    name: str, *, lease: float | timedelta = PATIENCE_SECONDS, every: float | timedelta = EVERY_SECONDS,
    one_in_flight: bool = True, queue: str = DEFAULT_QUEUE, timeout: float | timedelta = TIMEOUT_SECONDS,
    priority: int = DEFAULT_PRIORITY, start_within: float | timedelta | None = None,
    statuses: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], OperationKind]:  # fmt: skip
    """
    Declare an operation: `handler(step, ...)` makes one external call and returns `Issued(external_ids=[...])`.

    The call is issued at most once per operation, ever: no crash, retry or operator repeats it. Then `poll` is asked
    `every` so many seconds until the other side is done. `lease` is the patience: how long the other side may be
    silent. `timeout` is for one call or poll. `one_in_flight`: a second start is refused until the first has ended.
    `statuses` translates the other side's words, `{"done": "ok", "error": "failed"}`: a word that it does not have is
    unknown, and renews no patience. `start_within`: one that no worker issued by then fails; an hour, or the patience.
    Raises DefinitionError when the declaration cannot work.
    """
    if callable(name):
        raise DefinitionError('write @operation("some.kind"), with the kind\'s name in parentheses.')

    def declare(handler: Callable[..., Any]) -> OperationKind:
        kind = OperationKind(
            name, handler, lease=lease, every=every, one_in_flight=one_in_flight, queue=queue, timeout=timeout,
            priority=priority, start_within=start_within, statuses=statuses,
        )  # fmt: skip
        registry.add(kind)
        return kind

    return declare
