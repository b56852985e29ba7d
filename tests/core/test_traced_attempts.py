"""Each attempt is a span by a real OpenTelemetry SDK, linked to the enqueue; no payload is in it."""

import subprocess
import sys

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags
from sqlalchemy import create_engine, event, text

from durable_core import GiveUp, Retry, Snooze, deliveries, tracing
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import perform
from durable_core.deliveries.worker import Worker
from tests.core.spans import SECRET, kept, named


def enqueued(engine, kind, *arguments, **options):
    with engine.begin() as tx:
        return kind.options(**options).enqueue(tx, *arguments).id


def test_an_attempt_is_a_span_linked_to_its_enqueue_and_the_commit_is_one_in_it(spans, engine, worker, declare):
    seen = []
    kind = declare(lambda step, name: seen.append(opentelemetry.trace.get_current_span().get_span_context()))
    row_id = enqueued(engine, kind, SECRET)
    perform(worker, kind, row_id)
    sent, process, settle = (named(spans, f"{what} {kind.name}") for what in ("send", "process", "settle"))
    assert process.kind is SpanKind.CONSUMER
    assert process.parent is None
    assert [link.context.span_id for link in process.links] == [sent.context.span_id]
    assert dict(process.attributes) == {
        "messaging.system": "durable",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": kind.name,
        "messaging.message.id": row_id,
        "durable.queue": "durable",
        "durable.attempt": 1,
        "durable.max_attempts": 5,
        "durable.fence": 1,
        "durable.outcome": "sent",
    }
    assert [one.span_id for one in seen] == [process.context.span_id]
    assert settle.kind is SpanKind.CLIENT
    assert settle.parent.span_id == process.context.span_id
    assert settle.attributes["messaging.message.id"] == row_id
    assert settle.status.status_code is StatusCode.UNSET
    assert SECRET not in "".join(span.to_json() for span in spans())


def test_an_attempt_may_be_a_child_of_its_enqueue_instead(spans, engine, worker, kind):
    tracing.use("parent")
    perform(worker, kind, enqueued(engine, kind))
    sent, process = named(spans, f"send {kind.name}"), named(spans, f"process {kind.name}")
    assert process.parent.span_id == sent.context.span_id
    assert process.context.trace_id == sent.context.trace_id
    assert process.links == ()


@pytest.mark.parametrize("mode", ["link", "parent"])
def test_a_row_that_was_enqueued_without_a_trace_is_attempted_in_one_of_its_own(
    spans, provider, engine, worker, kind, monkeypatch, mode
):
    tracing.use(mode)
    with monkeypatch.context() as without:
        without.setattr(opentelemetry.trace, "_TRACER_PROVIDER", None)
        row_id = enqueued(engine, kind)
    with provider.get_tracer("celery").start_as_current_span("run/task") as ambient:
        perform(worker, kind, row_id)
    process = named(spans, f"process {kind.name}")
    assert process.links == ()
    assert process.parent.span_id == ambient.get_span_context().span_id


@pytest.mark.parametrize(
    ("raised", "outcome", "error_type"),
    [
        (ValueError(SECRET), "retry", "WORKER_ERROR"),
        (Retry(after=5, message=SECRET), "retry", "RETRY_ASKED"),
        (GiveUp(SECRET), "failed", "GAVE_UP"),
        (Snooze(5, message=SECRET), "snoozed", None),
    ],
)
def test_what_a_handler_raises_is_an_outcome_without_its_text(
    spans, engine, worker, declare, raised, outcome, error_type
):
    def broken(step):
        raise raised

    kind = declare(broken)
    perform(worker, kind, enqueued(engine, kind))
    process = named(spans, f"process {kind.name}")
    assert process.attributes["durable.outcome"] == outcome
    assert process.attributes.get("error.type") == error_type
    assert process.status.status_code is (StatusCode.ERROR if error_type else StatusCode.UNSET)
    assert SECRET not in process.to_json()
    assert not process.events


def test_each_attempt_links_to_the_same_enqueue(spans, engine, worker, declare, clock):
    kind = declare(lambda step: 1 / 0)
    row_id = enqueued(engine, kind)
    perform(worker, kind, row_id)
    clock.advance(seconds=3600)
    perform(worker, kind, row_id)
    one, two = (span for span in spans() if span.name == f"process {kind.name}")
    assert (one.attributes["durable.attempt"], two.attributes["durable.attempt"]) == (1, 2)
    assert [link.context for link in one.links] == [link.context for link in two.links]
    assert one.context.trace_id != two.context.trace_id


def test_a_claim_that_was_lost_is_a_failed_attempt_and_a_failed_commit(spans, engine, worker, declare):
    def cancelled(step):
        with engine.begin() as tx:
            deliveries.cancel(tx, step.id, by="dana", reason="wrong customer")

    kind = declare(cancelled)
    perform(worker, kind, enqueued(engine, kind))
    process, settle = named(spans, f"process {kind.name}"), named(spans, f"settle {kind.name}")
    assert process.attributes["durable.outcome"] == "claim_lost"
    assert process.attributes["error.type"] == "CLAIM_LOST"
    assert settle.attributes["error.type"] == "ClaimLost"


def test_an_attempt_whose_process_is_told_to_go_ends_its_span(spans, engine, worker, declare):
    def leaves(step):
        raise SystemExit(3)

    kind = declare(leaves)
    with pytest.raises(SystemExit):
        perform(worker, kind, enqueued(engine, kind))
    assert named(spans, f"process {kind.name}").attributes["error.type"] == "SystemExit"


def test_an_async_handler_runs_inside_the_span_of_its_attempt(spans, engine, worker, declare):
    seen = []

    async def handler(step):
        seen.append(opentelemetry.trace.get_current_span().get_span_context().span_id)

    kind = declare(handler)
    perform(worker, kind, enqueued(engine, kind))
    assert seen == [named(spans, f"process {kind.name}").context.span_id]


def test_work_enqueued_by_a_handler_belongs_to_its_attempt(spans, engine, worker, declare, kind):
    outer = declare(lambda step: kind.enqueue(step.session).id)
    perform(worker, outer, enqueued(engine, outer))
    process = named(spans, f"process {outer.name}")
    assert named(spans, f"send {kind.name}").parent.span_id == process.context.span_id


def test_a_trace_that_is_not_sampled_is_kept_and_costs_no_attempt(engine, worker, kind, monkeypatch):
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", TracerProvider(sampler=ALWAYS_OFF))
    row_id = enqueued(engine, kind)
    assert int(kept(engine, row_id)[-2:], 16) & TraceFlags.SAMPLED == 0
    assert perform(worker, kind, row_id).outcome.name == "SENT"


@pytest.mark.parametrize("written", ["", "rubbish", "00-zz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01 a=1"])
def test_a_damaged_context_of_a_row_is_no_link_and_no_error(spans, engine, worker, kind, written):
    row_id = enqueued(engine, kind)
    with engine.begin() as tx:
        tx.execute(
            text("update durable.deliveries set trace = :trace where id = :id"), {"trace": written, "id": row_id}
        )
    assert perform(worker, kind, row_id).outcome.name == "SENT"
    assert named(spans, f"process {kind.name}").links == ()


def test_an_attempt_whose_trace_cannot_be_read_runs_all_the_same(spans, engine, worker, kind):
    row_id = enqueued(engine, kind)
    with engine.begin() as tx:
        tx.execute(text("alter table durable.deliveries rename column trace to away"))
    try:
        assert perform(worker, kind, row_id).outcome.name == "SENT"
    finally:
        with engine.begin() as tx:
            tx.execute(text("alter table durable.deliveries rename column away to trace"))
    assert named(spans, f"process {kind.name}").links == ()


def test_an_attempt_reads_the_trace_only_where_spans_are_made(provider, engine, worker, kind, monkeypatch):
    asked = []
    through = Worker(Database(create_engine(engine.url)))
    event.listen(
        through.database.engine, "before_cursor_execute", lambda c, cursor, said, *_: asked.append("d.trace" in said)
    )
    with monkeypatch.context() as without:
        without.setattr(opentelemetry.trace, "_TRACER_PROVIDER", None)
        perform(through, kind, enqueued(engine, kind))
    assert not any(asked)
    perform(through, kind, enqueued(engine, kind))
    through.heartbeat.stop()
    through.database.engine.dispose()
    assert sum(asked) == 1


PROGRAM = """
import sys, redis, kombu.transport.redis
from celery import Celery
from sqlalchemy import create_engine
before = set(sys.modules)  # a library of others may have loaded parts of it
from durable_core import delivery
from durable_core.celery_binding import install
from durable_core.database.connections import Database
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import perform
from durable_core.deliveries.worker import Worker
from durable_core.deliveries.worker import Worker
engine = create_engine(sys.argv[1])
install(Celery("shop", set_as_current=False))
from durable_core import tracing
tracing.use("link")
from durable_core.database.statements import use_schema
use_schema("durable")
@delivery("test.untraced")
def untraced(step): pass
with engine.begin() as tx:
    ref = untraced.enqueue(tx)
worker = Worker(Database(engine))
outcome = perform(worker, untraced, ref.id).outcome
print(outcome, [name for name in set(sys.modules) - before if name.startswith("opentelemetry")])
worker.heartbeat.stop()
"""


def test_a_process_without_opentelemetry_never_imports_it(engine):
    url = engine.url.render_as_string(hide_password=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "sent []"
