"""An observer of the test database, whose samples are taken when the test says so; and the page it makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from durable_core.database.connections import Database
from durable_core.exporter import tail
from durable_core.exporter.metrics import BY_NAME
from durable_core.exporter.observe import Observer
from durable_core.exporter.page import rendered
from durable_core.testing import MovableClock
from tests.operations import declare_operation, look, operation_row, remote, reset, start  # noqa: F401  (fixtures)

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Page:
    """The page as OpenMetrics, read back by the parser of another hand."""

    def __init__(self, observer: Observer) -> None:
        self.text = rendered(observer.series(), OPENMETRICS)[0].decode()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self.samples: list[Sample] = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """The value of one series; None where there is none."""
        found = [one.value for one in self.samples if one.name == name and one.labels == labels]
        assert len(found) <= 1, f"{name}{labels} stands twice"
        return found[0] if found else None

    def all(self, name: str) -> dict[tuple[str, ...], float]:
        """Every series of a metric, by the values of its labels in the order of the table."""
        labels = BY_NAME[name].labels
        return {tuple(one.labels[label] for label in labels): one.value for one in self.samples if one.name == name}


@pytest.fixture
def observer(database: Database) -> Observer:
    """One that has begun: what is committed from now on is counted."""
    begun = Observer(database)
    begun.observe()
    assert begun.failed == {}
    return begun


@pytest.fixture
def page(observer: Observer) -> Callable[[], Page]:
    """A new sample, and its page."""

    def _page() -> Page:
        observer.observe()
        assert observer.failed == {}
        return Page(observer)

    return _page


@pytest.fixture
def later(clock: MovableClock, page: Callable[[], Page]) -> Callable[[], Page]:
    """The page once the counters may count what is committed now."""

    def _later() -> Page:
        clock.advance(seconds=tail.ENQUEUE_LAG_SECONDS + 1)
        return page()

    return _later
