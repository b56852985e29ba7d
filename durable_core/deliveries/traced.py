"""
What follows a delivery: a span where it is enqueued, whose context its row keeps, and one for each attempt, whose ids
the log's context has too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import chain
from typing import Any, Concatenate, ParamSpec

from durable_core import tracing
from durable_core.claims.claim import Claim
from durable_core.database.statements import beside
from durable_core.database.transactions import DATABASE_ERRORS, run, said
from durable_core.deliveries.rows import New, Ref
from durable_core.deliveries.worker import Attempted, Outcome, Worker
from durable_core.logging import attempting

log = logging.getLogger("durable.run")
_statements = beside(__file__)

P = ParamSpec("P")

FAILURES = frozenset({Outcome.RETRY, Outcome.FAILED, Outcome.DEAD, Outcome.INTERRUPTED, Outcome.CLAIM_LOST})

Batches = Iterator[list[New]]


@contextmanager
def sending(batches: Batches) -> Iterator[tuple[Batches, Callable[[list[Ref]], list[Ref]]]]:
    """
    Around an enqueue: the batches, each row with the context of the span; and what is to see the refs.

    Without a provider of spans both are as they were.
    """
    spans = tracing.active()
    first = None if spans is None else next(batches, None)
    if spans is None or first is None:
        yield batches, lambda refs: refs
        return
    kinds = {new.kind for new in first}
    with spans.sending(kinds.pop() if len(kinds) == 1 else None) as span:
        trace = spans.carried(span)

        def told(refs: list[Ref]) -> list[Ref]:
            if len(refs) == 1:
                span.set_attributes({tracing.MESSAGE_ID: refs[0].id, tracing.CREATED: refs[0].created})
            else:
                span.set_attribute(tracing.BATCH_COUNT, len(refs))
            return refs

        yield ([replace(new, trace=trace) for new in batch] for batch in chain([first], batches)), told


def followed(
    carry_out: Callable[Concatenate[Worker, Any, Claim, P], Attempted],
) -> Callable[Concatenate[Worker, Any, Claim, P], Attempted]:
    """An attempt with its ids in the log's context and, where the process makes spans, a span around it."""

    @wraps(carry_out)
    def _followed(worker: Worker, kind: Any, claim: Claim, /, *args: P.args, **kwargs: P.kwargs) -> Attempted:
        with attempting(
            delivery_id=claim.id, kind=claim.kind, attempt=claim.attempt, max_attempts=claim.max_attempts,
            fence=claim.fence,
        ):  # fmt: skip
            return _traced(worker, kind, claim, *args, **kwargs)

    def _traced(worker: Worker, kind: Any, claim: Claim, /, *args: P.args, **kwargs: P.kwargs) -> Attempted:
        spans = tracing.active()
        if spans is None:
            return carry_out(worker, kind, claim, *args, **kwargs)
        written, queue = _sent_by(worker, claim)
        facts = {
            tracing.MESSAGE_ID: claim.id, tracing.ATTEMPT: claim.attempt, tracing.MAX_ATTEMPTS: claim.max_attempts,
            tracing.FENCE: claim.fence, **({tracing.QUEUE: queue} if queue else {}),
        }  # fmt: skip
        with spans.processing(claim.kind, facts, written) as span:
            attempted = carry_out(worker, kind, claim, *args, **kwargs)
            ended(spans, span, attempted)
        return attempted

    return _followed


def ended(
    spans: tracing.Spans, span: Any, attempted: Attempted, *, failures: Collection[Outcome] = FAILURES
) -> None:  # fmt: skip
    """What came of it, on its span: a code where it failed, and never the text, which may be payload."""
    span.set_attribute(tracing.OUTCOME, attempted.outcome.name.lower())
    if attempted.outcome in failures:
        spans.failed(span, attempted.error_code or attempted.outcome.name)


def _sent_by(worker: Worker, claim: Claim) -> tuple[str | None, str | None]:
    """The context that the row keeps, and its queue; nothing where the database has other troubles."""
    try:
        with worker.database.autocommit() as connection:
            rows = run(connection, _statements.sent_by, id=claim.id)
    except DATABASE_ERRORS as error:
        log.debug("trace_not_read", extra={"row_id": claim.id, "error": said(error)})
        return None, None
    return (rows[0]["trace"], rows[0]["queue"]) if rows else (None, None)
