"""Each step of a plan, and each call and poll of an operation, is a span of a real OpenTelemetry SDK; no payload."""

import re
from pathlib import Path

import opentelemetry.trace
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from durable_core import GiveUp, Retry, operations, tracing
from durable_core.deliveries.worker import Outcome
from tests.core.spans import SECRET, named

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")


def current():
    return opentelemetry.trace.get_current_span().get_span_context().span_id


def test_a_step_is_a_span_and_its_commit_is_one_in_it(spans, provider, worker, shop):
    seen = []
    kind = shop.step(lambda step, name: seen.append(current()))
    plan = shop.approved(kind.planned("x"), kind.planned(SECRET))
    shop.run(worker, plan)
    with provider.get_tracer("celery").start_as_current_span("run/task") as ambient:
        shop.run(worker, plan)
    process = [span for span in spans() if span.name == f"process {kind.name}"][1]
    settle = [span for span in spans() if span.name == f"settle {kind.name}"][1]
    assert process.kind is SpanKind.CONSUMER
    assert process.links == ()
    assert process.parent.span_id == ambient.get_span_context().span_id
    assert dict(process.attributes) == {
        "messaging.system": "durable",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": kind.name,
        "messaging.message.id": plan.id,
        "durable.step": 1,
        "durable.fence": 2,
        "durable.outcome": "done",
    }
    assert process.status.status_code is StatusCode.UNSET
    assert seen[1] == process.context.span_id
    assert settle.parent.span_id == process.context.span_id
    assert settle.attributes["messaging.message.id"] == plan.id
    assert SECRET not in "".join(span.to_json() for span in spans())


@pytest.mark.parametrize("raised", [ValueError(SECRET), GiveUp(SECRET)])
def test_a_step_that_fails_is_a_failed_span_without_its_text(spans, worker, shop, raised):
    def broken(step):
        raise raised

    shop.run(worker, shop.approved(shop.step(broken).planned()))
    (process,) = [span for span in spans() if span.name.startswith("process")]
    assert process.attributes["durable.outcome"] == "failed"
    assert process.attributes["error.type"] in ("WORKER_ERROR", "GAVE_UP")
    assert process.status.status_code is StatusCode.ERROR
    assert SECRET not in "".join(span.to_json() for span in spans())


def test_a_step_whose_process_is_told_to_go_ends_its_span(spans, worker, shop):
    def leaves(step):
        raise SystemExit(3)

    plan = shop.approved(shop.step(leaves).planned())
    with pytest.raises(SystemExit):
        shop.run(worker, plan)
    (process,) = [span for span in spans() if span.name.startswith("process")]
    assert process.attributes["error.type"] == "SystemExit"


def test_a_call_and_a_poll_are_spans_of_their_own(spans, start, look, reset, remote):
    row = start(reset, SECRET)
    assert look(reset, row.id).outcome is Outcome.ISSUED
    call = named(spans, f"call {reset.name}")
    assert call.kind is SpanKind.CLIENT
    assert call.links == ()
    assert dict(call.attributes) == {
        "messaging.system": "durable",
        "messaging.operation.name": "call",
        "messaging.operation.type": "process",
        "messaging.destination.name": reset.name,
        "messaging.message.id": row.id,
        "durable.fence": 1,
        "durable.outcome": "issued",
    }
    remote.set("done")
    look(reset, row.id, after=5)
    poll = named(spans, f"poll {reset.name}")
    assert poll.kind is SpanKind.INTERNAL
    assert (poll.attributes["durable.outcome"], poll.attributes["durable.fence"]) == ("succeeded", 2)
    assert poll.context.trace_id != call.context.trace_id
    ids = remote.ids()
    assert not [one for one in (SECRET, *ids) if one in "".join(span.to_json() for span in spans())]


def test_the_handler_runs_inside_the_span_of_its_call(spans, start, look, reset):
    seen = []
    before = reset.handler

    def handler(*args, **kwargs):
        seen.append(current())
        return before(*args, **kwargs)

    reset.handler = handler
    look(reset, start(reset).id)
    assert seen == [named(spans, f"call {reset.name}").context.span_id]


def test_a_poll_without_an_answer_and_a_call_that_failed_are_failed_spans(spans, start, look, declare_operation):
    def broken(*_, **__):
        raise ValueError(SECRET)

    polls, fails = declare_operation(), declare_operation()
    row = start(polls)
    look(polls, row.id)
    polls.poll_hook = broken
    assert look(polls, row.id, after=5).outcome is Outcome.PUT_OFF
    fails.handler = broken
    look(fails, start(fails).id)
    for name, outcome, error_type in (
        (f"poll {polls.name}", "put_off", "POLL_FAILED"),
        (f"call {fails.name}", "failed", "CALL_FAILED"),
    ):
        span = named(spans, name)
        assert (span.attributes["durable.outcome"], span.attributes["error.type"]) == (outcome, error_type)
        assert span.status.status_code is StatusCode.ERROR
        assert SECRET not in span.to_json()


def test_a_look_for_what_became_of_a_call_is_a_span(spans, start, look, declare_operation):
    def unsure(*_, **__):
        raise Retry("it may have got through")

    kind = declare_operation(finds=True)
    kind.handler = unsure
    row = start(kind)
    look(kind, row.id)
    look(kind, row.id, after=5)
    assert named(spans, f"find {kind.name}").attributes["error.type"] == "NOT_FOUND_YET"


def test_a_hint_that_finds_nothing_is_no_span(spans, engine, start, look, reset, worker, shop):
    row = start(reset)
    with engine.begin() as tx:
        operations.cancel(tx, row.id, by="dana", reason="no")
    look(reset, row.id)
    shop.run(worker, shop.propose(shop.step().planned()))
    assert spans() == ()


def test_without_a_provider_of_spans_all_runs_the_same(start, look, reset, worker, shop, monkeypatch):
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", None)
    assert tracing.active() is None
    assert look(reset, start(reset).id).outcome is Outcome.ISSUED
    assert [one.outcome for one in shop.run(worker, shop.approved(shop.step().planned()))] == [Outcome.DONE]


@pytest.mark.parametrize(
    ("on", "outcomes"),
    [
        ("`process` of a step", {"DONE", "FAILED", "INTERRUPTED", "CLAIM_LOST", "UNKNOWN"}),
        (
            "`call`, `poll`, `find`",
            {"ISSUED", "POLLED", "SUCCEEDED", "FAILED", "PUT_OFF", "CLAIM_LOST", "UNKNOWN"},
        ),
    ],
)
def test_the_page_names_every_outcome(on, outcomes):
    told = PAGE.split(f"| `durable.outcome` | {on} |")[1].split("|")[0]
    assert set(re.findall(r"`(\w+)`", told)) == {Outcome[name].name.lower() for name in outcomes}
