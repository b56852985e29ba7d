"""What follows a step of a plan: a span, where the process makes spans. No row keeps the trace of its approval."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from durable_core import tracing
from durable_core.deliveries.traced import ended
from durable_core.deliveries.worker import Attempted, Worker


class Claimed(Protocol):
    """What a span says of a claim of a step."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def fence(self) -> int: ...
    @property
    def index(self) -> int: ...


def followed(carry_out: Callable[[Worker, Any, Any], Attempted]) -> Callable[[Worker, Any, Any], Attempted]:
    """A step with a span around it, where the process makes spans; it belongs to the span that is open."""

    @wraps(carry_out)
    def _followed(worker: Worker, kind: Any, claim: Claimed) -> Attempted:
        spans = tracing.active()
        if spans is None:
            return carry_out(worker, kind, claim)
        facts = {tracing.MESSAGE_ID: claim.id, tracing.STEP: claim.index, tracing.FENCE: claim.fence}
        with spans.processing(claim.kind, facts, None) as span:
            attempted = carry_out(worker, kind, claim)
            ended(spans, span, attempted)
        return attempted

    return _followed
