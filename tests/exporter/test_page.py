"""The page, as promtool would lint it: two parsers read it, and each metric keeps the rules of its trade."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from durable_core.deliveries.attempt import perform
from durable_core.exporter.metrics import BY_NAME, LABELS, METRICS, Type, exposed
from durable_core.exporter.observe import Observer
from durable_core.exporter.page import rendered
from tests.exporter.conftest import OPENMETRICS, Page

UNITS = ("_seconds", "_bytes", "_ratio")
NO_BASE_UNIT = re.compile(r"_(milliseconds|ms|minutes|hours|days|kilobytes|percent)\b")


@pytest.fixture
def full(make, worker, declare, clock, later, observer):
    """A page on which every kind of metric has a series."""
    kind, broken = declare(lambda step: None), declare(lambda step: 1 / 0, max_attempts=1)
    perform(worker, kind, make(kind).id)
    perform(worker, broken, make(broken).id)
    make(kind)
    return later()


def test_both_formats_are_read_by_their_parsers_and_say_the_same(full, observer):
    text, content_type = rendered(observer.series(), "text/plain")
    assert content_type.startswith("text/plain")
    assert rendered(observer.series(), OPENMETRICS)[1].startswith("application/openmetrics-text")
    plain = {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text.decode())
        for one in family.samples
    }
    assert plain == {(one.name, tuple(sorted(one.labels.items()))): one.value for one in full.samples}


def test_the_page_has_the_metrics_of_the_table_and_no_others(full):
    stands = {family.name + ("_total" if family.type == "counter" else "") for family in full.families.values()}
    assert stands == set(BY_NAME)
    for metric in METRICS:
        family = full.families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.type, metric.help)
        assert {one.name for one in family.samples} <= set(exposed(metric))
        for one in family.samples:
            assert set(one.labels) - {"le"} == set(metric.labels)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_the_rules(metric):
    assert re.fullmatch(r"durable(_[a-z]+)+", metric.name)
    assert metric.help.strip().endswith(".")
    assert set(metric.labels) <= LABELS - {"le"}
    assert metric.name.endswith("_total") == (metric.type is Type.COUNTER)
    assert not NO_BASE_UNIT.search(metric.name)
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_info"))
    if metric.type is Type.HISTOGRAM:
        assert metric.name.endswith(UNITS)
        assert metric.buckets == tuple(sorted(set(metric.buckets)))
    else:
        assert metric.buckets == ()
    if "timestamp" in metric.name:
        assert metric.name.endswith("_timestamp_seconds")


def test_a_page_before_the_first_sample_says_that_nothing_is_known(database):
    shown = Page(Observer(database))
    assert shown.value("durable_up") == 0
    assert shown.all("durable_deliveries") == {}
