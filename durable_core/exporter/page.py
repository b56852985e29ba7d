"""The page itself, by prometheus-client: the one module that needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from durable_core.exporter.metrics import Series, Type


class _Page(Collector):
    def __init__(self, series: Iterable[Series]) -> None:
        self.series = series

    def collect(self) -> Iterator[Metric]:
        for one in self.series:
            yield _family(one)


def rendered(series: Iterable[Series], accept: str) -> tuple[bytes, str]:
    """The page in the format that the reader asks for, OpenMetrics or Prometheus' text; and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(series))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(one: Series) -> Metric:
    metric = one.metric
    match metric.type:
        case Type.GAUGE:
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, value in sorted(one.values.items()):
                gauge.add_metric(labels, value)
            return gauge
        case Type.COUNTER:
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, value in sorted(one.values.items()):
                counter.add_metric(labels, value)
            return counter
        case Type.INFO:
            info = InfoMetricFamily(metric.name, metric.help, labels=[])
            for labels in sorted(one.values):
                info.add_metric([], dict(zip(metric.labels, labels, strict=True)))
            return info
        case Type.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, counted in sorted(one.histograms.items()):
                bounds = (*(str(bound) for bound in metric.buckets), "+Inf")
                below, buckets = 0.0, []
                for bound, count in zip(bounds, counted.counts, strict=True):
                    below += count
                    buckets.append((bound, below))
                histogram.add_metric(labels, buckets, counted.total)
            return histogram
