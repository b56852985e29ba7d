"""An enqueue is a span by a real OpenTelemetry SDK, whose context the row keeps; no payload is in it."""

import asyncio
import re
from pathlib import Path

import opentelemetry.trace
import pytest
from celery import Celery
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from sqlalchemy.ext.asyncio import create_async_engine

from durable_core import enqueue_many, tracing
from durable_core.celery_binding.settings import Settings
from durable_core.deliveries.worker import Outcome
from durable_core.errors import DefinitionError, IdempotencyConflict
from tests.core.spans import SECRET, kept, named, written


def test_an_enqueue_is_a_span_whose_context_the_row_keeps(spans, engine, declare):
    kind = declare(lambda step, name: None)
    with engine.begin() as tx:
        ref = kind.enqueue(tx, SECRET)
    span = named(spans, f"send {kind.name}")
    assert span.kind is SpanKind.PRODUCER
    assert dict(span.attributes) == {
        "messaging.system": "durable",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
        "messaging.destination.name": kind.name,
        "messaging.message.id": ref.id,
        "durable.created": True,
    }
    assert kept(engine, ref.id) == written(span)


def test_an_enqueue_belongs_to_the_trace_of_its_caller(spans, provider, engine, kind):
    with provider.get_tracer("the app").start_as_current_span("POST /orders") as outer, engine.begin() as tx:
        kind.enqueue(tx)
    assert named(spans, f"send {kind.name}").parent.span_id == outer.get_span_context().span_id


@pytest.mark.parametrize("keyed", [False, True])
def test_many_are_one_span_that_all_their_rows_keep(spans, engine, kind, declare, keyed):
    other = declare()
    with engine.begin() as tx:
        news = [one.options(**({"key": str(n)} if keyed else {})).new(n) for one in (kind, other) for n in range(3)]
        refs = enqueue_many(tx, iter(news))
        assert enqueue_many(tx, []) == []
    span = named(spans, "send")
    assert span.attributes["messaging.batch.message_count"] == 6
    assert {kept(engine, ref.id) for ref in refs} == {written(span)}


def test_a_key_that_is_taken_keeps_the_trace_of_who_came_first_and_a_refusal_is_a_failed_span(spans, engine, declare):
    kind = declare(lambda step, name: None)
    with engine.begin() as tx:
        first = kind.options(key=SECRET).enqueue(tx, "a")
        again = kind.options(key=SECRET).enqueue(tx, "a")
        with pytest.raises(IdempotencyConflict):
            kind.options(key=SECRET).enqueue(tx, "b")
    assert again.id == first.id
    sent, repeated, refused = spans()
    assert f"{sent.context.span_id:016x}" in kept(engine, first.id)
    assert (sent.attributes["durable.created"], repeated.attributes["durable.created"]) == (True, False)
    assert refused.attributes["error.type"] == "IdempotencyConflict"
    assert refused.status.status_code is StatusCode.ERROR
    assert SECRET not in "".join(span.to_json() for span in spans())


def test_an_async_enqueue_is_the_same_span(spans, engine, kind):
    async def enqueued():
        aengine = create_async_engine(engine.url)
        async with aengine.begin() as tx:
            ref = await kind.aenqueue(tx, 7)
        await aengine.dispose()
        return ref

    ref = asyncio.run(enqueued())
    span = named(spans, f"send {kind.name}")
    assert span.attributes["messaging.message.id"] == ref.id
    assert f"{span.context.span_id:016x}" in kept(engine, ref.id)


def test_a_state_of_the_trace_travels_and_one_that_is_too_long_is_left_out(spans, provider, engine, kind):
    refs = []
    for state in ("a=1", "a=" + "x" * 200 + ",b=" + "y" * 200 + ",c=" + "z" * 200):
        outer = SpanContext(1, 2, True, TraceFlags(1), TraceState.from_header([state]))
        token = opentelemetry.context.attach(set_span_in_context(NonRecordingSpan(outer)))
        try:
            with engine.begin() as tx:
                refs.append(kind.enqueue(tx))
        finally:
            opentelemetry.context.detach(token)
    short, long = (kept(engine, ref.id) for ref in refs)
    assert short.startswith(f"00-{1:032x}-")
    assert short.endswith(" a=1")
    assert len(long) == 55


def test_without_a_provider_of_spans_the_row_keeps_nothing(engine, kind, monkeypatch):
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", None)
    assert tracing.active() is None
    with engine.begin() as tx:
        assert kept(engine, kind.enqueue(tx).id) is None


def test_spans_can_be_turned_off_and_an_unknown_mode_is_refused(spans, engine, kind):
    tracing.use("off")
    with engine.begin() as tx:
        kind.enqueue(tx)
    assert spans() == ()
    with pytest.raises(DefinitionError, match="'link', 'parent', 'off'"):
        tracing.use("always")


def test_the_mode_is_asked_for_once_and_not_before_there_are_spans(provider, monkeypatch):
    asked = []

    def mode():
        asked.append(1)
        return tracing.Mode.OFF

    tracing.use(mode)
    with monkeypatch.context() as without:
        without.setattr(opentelemetry.trace, "_TRACER_PROVIDER", None)
        assert tracing.active() is None
    assert asked == []
    assert tracing.active() is None
    assert tracing.active() is None
    assert asked == [1]


def test_the_mode_is_a_setting_of_the_celery_app():
    app = Celery("traced", set_as_current=False)
    assert Settings.of(app).trace is tracing.Mode.LINK
    app.conf.durable_trace = "parent"
    assert Settings.of(app).trace is tracing.Mode.PARENT
    app.conf.durable_trace = "always"
    with pytest.raises(DefinitionError, match="durable_trace='always'"):
        Settings.of(app)


def test_the_page_of_tracing_names_every_attribute_outcome_and_limit():
    page = (Path(__file__).resolve().parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")
    attributes = {
        value for name, value in vars(tracing).items() if name.isupper() and isinstance(value, str) and "." in value
    }
    cells = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    shown = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert {name for name in shown if "." in name} == attributes
    outcomes = page.split("| `durable.outcome` | `process` |")[1].split("|")[0]
    never = {Outcome.NOTHING_TO_DO, Outcome.UNAVAILABLE}  # no claim, so no attempt
    never |= {Outcome.ISSUED, Outcome.POLLED, Outcome.SUCCEEDED, Outcome.CANCELED, Outcome.PUT_OFF}  # of operations
    never.add(Outcome.DONE)  # of plans
    assert set(re.findall(r"`(\w+)`", outcomes)) == {one.name.lower() for one in Outcome if one not in never}
    assert f"up to {tracing.LONGEST_STATE}" in page
