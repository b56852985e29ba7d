"""What follows an operation: a span for its call, each poll and each look for what became of it, without a link."""

from __future__ import annotations

from collections.abc import Callable

from durable_core import tracing
from durable_core.claims.claim import Claim
from durable_core.deliveries.traced import FAILURES, ended
from durable_core.deliveries.worker import Attempted, Outcome

UNANSWERED = FAILURES | {Outcome.PUT_OFF, Outcome.UNKNOWN}
"""What a span is marked as failed for: the other side, or the database, gave no answer that helps."""


def followed(what: str, claim: Claim, act: Callable[[], Attempted]) -> Attempted:
    """A `call`, `poll` or `find` under this claim, with its report, inside a span where the process makes spans."""
    spans = tracing.active()
    if spans is None:
        return act()
    facts = {tracing.MESSAGE_ID: claim.id, tracing.FENCE: claim.fence}
    with spans.asking(what, claim.kind, facts) as span:
        attempted = act()
        ended(spans, span, attempted, failures=UNANSWERED)
    return attempted
