"""What several tests of the core share beside the fixtures of all."""

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import create_engine

from durable_core import tracing
from durable_core.database.connections import Database
from tests.operations import declare_operation, look, operation_row, remote, reset, start  # noqa: F401  (fixtures)
from tests.relay import Relay


@pytest.fixture
def relay(engine):
    relay = Relay(engine.url.host, engine.url.port)
    yield relay
    relay.close()


@pytest.fixture
def far(engine, relay):
    """The same database, seen through the relay."""
    far = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    yield Database(far)
    far.dispose()


@pytest.fixture
def provider(monkeypatch):
    """OpenTelemetry as a host sets it up, for this test."""
    provider = TracerProvider()
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "_mode", tracing.Mode.LINK)
    return provider


@pytest.fixture
def spans(provider):
    """What was traced since, the newest last."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter.get_finished_spans
