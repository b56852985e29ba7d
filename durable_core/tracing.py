"""
Spans by OpenTelemetry, where the process has set it up. Nothing of it is imported here before the host has done so.

The names follow the messaging conventions of OpenTelemetry 1.38, which are still in development; all of them stand in
this module. No argument, result, key or error text is in a span.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Any

from durable_core.errors import DefinitionError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
QUEUE = "durable.queue"
ATTEMPT = "durable.attempt"
MAX_ATTEMPTS = "durable.max_attempts"
FENCE = "durable.fence"
STEP = "durable.step"
OUTCOME = "durable.outcome"
CREATED = "durable.created"

LONGEST_STATE = 512
"""Characters of a `tracestate` that are kept; a longer one is left out, as its specification allows."""


class Mode(StrEnum):
    """How the span of an attempt refers to the one that enqueued it."""

    LINK = "link"
    PARENT = "parent"
    OFF = "off"


_mode: Mode | Callable[[], Mode] = Mode.LINK
_spans: tuple[TracerProvider, Spans] | None = None


def use(mode: str | Callable[[], Mode]) -> None:
    """
    Say how attempts refer to their enqueue, in this process: `link`, `parent`, or `off` for no spans at all.

    A function is asked once, when the first span is due. Raises DefinitionError for another word.
    """
    global _mode
    _mode = mode if callable(mode) else checked_mode(mode)


def checked_mode(mode: object) -> Mode:
    """Raises DefinitionError."""
    try:
        return Mode(str(mode))
    except ValueError:
        raise DefinitionError(f"durable_trace={mode!r}: use one of {', '.join(map(repr, map(str, Mode)))}.") from None


def active() -> Spans | None:
    """What makes spans; None where the host has set up no provider of them, or wants none. All that being off costs."""
    asked = getattr(sys.modules.get("opentelemetry.trace"), "get_tracer_provider", None)
    return None if asked is None else _by(asked())


def _by(provider: Any) -> Spans | None:
    global _mode, _spans
    from opentelemetry.trace import NoOpTracerProvider, ProxyTracerProvider

    if isinstance(provider, NoOpTracerProvider | ProxyTracerProvider):
        return None
    if callable(_mode):
        _mode = _mode()
    if _mode is Mode.OFF:
        return None
    if _spans is None or _spans[0] is not provider:
        _spans = (provider, Spans(provider))
    return _spans[1]


class Spans:
    """
    The spans of a delivery: `send KIND` as it is enqueued, `process KIND` for an attempt, `settle KIND`. A step of a
    plan has the last two, an operation `call KIND`, `poll KIND` and `find KIND`.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("durable_core", metadata.version("durable-core"))

    @contextmanager
    def sending(self, kind: str | None) -> Iterator[Span]:
        """A span around an enqueue of one kind or, where it is None, of several."""
        facts = {OPERATION: "enqueue", OPERATION_TYPE: "send", **({DESTINATION: kind} if kind else {})}
        with self._span(f"send {kind}" if kind else "send", self._api.SpanKind.PRODUCER, facts) as span:
            yield span

    @contextmanager
    def processing(self, kind: str, facts: dict[str, Any], written: str | None) -> Iterator[Span]:
        """A span around an attempt; `written` is what `carried` gave the row, if anything did."""
        sent = self._propagator.extract(_headers(written))
        creation = self._api.get_current_span(sent).get_span_context()
        known = creation.is_valid
        within = sent if known and _mode is Mode.PARENT else None
        links = [self._api.Link(creation)] if known and within is None else []
        told = {OPERATION: "process", OPERATION_TYPE: "process", DESTINATION: kind, **facts}
        with self._span(f"process {kind}", self._api.SpanKind.CONSUMER, told, links=links, context=within) as span:
            yield span

    @contextmanager
    def asking(self, what: str, kind: str, facts: dict[str, Any]) -> Iterator[Span]:
        """A span around what an operation asks of the other side: `call`, `poll` or `find`."""
        told = {OPERATION: what, OPERATION_TYPE: "process", DESTINATION: kind, **facts}
        role = self._api.SpanKind.CLIENT if what == "call" else self._api.SpanKind.INTERNAL
        with self._span(f"{what} {kind}", role, told) as span:
            yield span

    @contextmanager
    def settling(self, kind: str, row_id: str) -> Iterator[Span]:
        """A span around the commit of a receipt."""
        facts = {OPERATION: "settle", OPERATION_TYPE: "settle", DESTINATION: kind, MESSAGE_ID: row_id}
        with self._span(f"settle {kind}", self._api.SpanKind.CLIENT, facts) as span:
            yield span

    def carried(self, span: Span) -> str | None:
        """The context of a span as a row keeps it; None for a span that has none."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._api.set_span_in_context(span))
        parent, state = headers.get("traceparent"), headers.get("tracestate", "")
        if parent is None:
            return None
        return f"{parent} {state}" if 0 < len(state) <= LONGEST_STATE else parent

    def failed(self, span: Span, error_type: str) -> None:
        """Mark a span as failed. What failed is a class or a code: its text may be payload."""
        span.set_attribute(ERROR_TYPE, error_type)
        span.set_status(self._api.StatusCode.ERROR)

    @contextmanager
    def _span(
        self, name: str, kind: Any, facts: dict[str, Any], *, links: Any = None, context: Context | None = None
    ) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            name, context=context, kind=kind, attributes={SYSTEM: "durable", **facts}, links=links,
            # An exception is recorded with its text.
            record_exception=False, set_status_on_exception=False,
        ) as span:  # fmt: skip
            try:
                yield span
            except BaseException as error:
                self.failed(span, type(error).__qualname__)
                raise


def settling(kind: str, row_id: str) -> AbstractContextManager[object]:
    """`Spans.settling`, or nothing."""
    spans = active()
    return nullcontext() if spans is None else spans.settling(kind, row_id)


def _headers(written: str | None) -> dict[str, str]:
    parent, _, state = (written or "").partition(" ")
    return {"traceparent": parent, **({"tracestate": state} if state else {})}
