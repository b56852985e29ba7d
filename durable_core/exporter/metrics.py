"""The metrics: their names, labels and meaning. One table, for the page, its documentation and the tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

LABELS = frozenset({"queue", "kind", "state", "outcome", "loop", "scope", "name", "query", "version", "le"})
"""All labels there are. Each has few values, and they come from the code or from an operator, never from a payload."""

QUICK = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)
WAITS = (0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
LONG = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)

OTHER = "other"
MOST_SERIES = 2000
"""Series of one metric. What comes later is counted as `other`: names made of ids would else fill the memory."""


class Type(StrEnum):
    """What a metric is to Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True)
class Metric:
    """One metric. `query` names the looks at the database it comes from; None where the exporter knows it itself."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str
    query: str | None = None
    buckets: tuple[float, ...] = ()


Labels = tuple[str, ...]


@dataclass
class Histogram:
    """What one series of a histogram has counted: observations by bucket, the last without a bound, and their sum."""

    counts: list[float]
    total: float = 0.0


@dataclass
class Series:
    """The values of one metric, by its labels in their order."""

    metric: Metric
    values: dict[Labels, float] = field(default_factory=dict)
    histograms: dict[Labels, Histogram] = field(default_factory=dict)

    def add(self, labels: Labels, count: float) -> None:
        """Count more of a counter."""
        labels = self._within(labels, self.values)
        self.values[labels] = self.values.get(labels, 0.0) + count

    def observe(self, labels: Labels, bucket: int, count: float, total: float) -> None:
        """Count more in one bucket of a histogram, by its number."""
        labels = self._within(labels, self.histograms)
        histogram = self.histograms.setdefault(labels, Histogram([0.0] * (len(self.metric.buckets) + 1)))
        histogram.counts[bucket] += count
        histogram.total += total

    def _within(self, labels: Labels, known: Mapping[Labels, object]) -> Labels:
        return labels if labels in known or len(known) < MOST_SERIES else (OTHER,) * len(labels)


_GAUGE, _COUNTER, _HISTOGRAM, _INFO = Type.GAUGE, Type.COUNTER, Type.HISTOGRAM, Type.INFO

METRICS: tuple[Metric, ...] = (
    Metric(
        "durable_deliveries", _GAUGE, ("queue", "kind", "state"),
        "Deliveries that wait, run, or need a person: pending, processing, failed, dead; discarded ones left out. "
        "At least so many, or the planner's estimate, where durable_deliveries_estimated says so.",
        "waiting, processing, dead",
    ),
    Metric(
        "durable_deliveries_estimated", _GAUGE, ("queue", "state"),
        "1 where there was more than is counted; else no series. Of one queue, or one state, the planner's estimate is "
        "shown, of several queues at least what was read. The queue is empty but for pending.",
        "waiting, processing, dead",
    ),
    Metric(
        "durable_queue_oldest_ready_timestamp_seconds", _GAUGE, ("queue",),
        "When the delivery became due that is due longest and free to run: not paused, not held, not behind another of "
        "its ordering key. No series where there is none.",
        "queues",
    ),
    Metric(
        "durable_held", _GAUGE, ("queue", "kind", "state"),
        "Deliveries, plans and operations on which a sweep failed, and which wait until a person releases them; among "
        "those counted. A kind is of one contract.",
        "waiting, processing, plans, operations",
    ),
    Metric(
        "durable_dead_letters", _GAUGE, ("kind",),
        "Failed and dead deliveries that nobody has redriven or discarded.", "dead",
    ),
    Metric("durable_paused", _GAUGE, ("scope", "name"), "1 while this queue, kind or schedule is paused.", "pauses"),
    Metric(
        "durable_schedule_next_slot_timestamp_seconds", _GAUGE, ("kind",),
        "When a periodic kind is due next. In the past: no process that declares it runs the sweep. Paused ones have "
        "no series.",
        "schedules",
    ),
    Metric(
        "durable_plans", _GAUGE, ("state",),
        "Plans that wait for a person (pending), for a worker (approved), or have begun (executing); 10,000 means or "
        "more, of the first two together.",
        "plans",
    ),
    Metric(
        "durable_plan_oldest_pending_timestamp_seconds", _GAUGE, (),
        "When the plan that waits for a person longest was proposed. No series where none waits.", "plans",
    ),
    Metric(
        "durable_operations", _GAUGE, ("kind", "state"),
        "Operations that wait for their call (queued), or run: are called or polled (running); 10,000 means or more.",
        "operations",
    ),
    Metric(
        "durable_operations_overdue", _GAUGE, ("kind",),
        "Operations past their patience, or not issued in time, which no sweep has ended yet; among those counted.",
        "operations",
    ),
    Metric(
        "durable_loop_last_success_timestamp_seconds", _GAUGE, ("loop",),
        "When this sweep last ended well, as far as this exporter has seen.", "loops",
    ),
    Metric("durable_loop_failed", _GAUGE, ("loop",), "1 where the sweep's last run ended with an error.", "loops"),
    Metric(
        "durable_loop_last_duration_seconds", _GAUGE, ("loop",), "How long the sweep's last run took.", "loops"
    ),
    Metric("durable_loop_interval_seconds", _GAUGE, ("loop",), "How often the sweep is to run.", None),
    Metric(
        "durable_enqueued_total", _COUNTER, ("queue", "kind"),
        "Deliveries that were committed. Counted a minute later, by their ids.", "enqueued",
    ),
    Metric(
        "durable_attempts_total", _COUNTER, ("queue", "kind", "outcome"),
        "Attempts that ended: committed, retry, failed, dead, cancelled, lease_lost, given_back. Snoozes are left out.",
        "finished, journal",
    ),
    Metric(
        "durable_expired_total", _COUNTER, ("queue", "kind"), "Deliveries that expired before anybody ran them.",
        "finished",
    ),
    Metric(
        "durable_lease_expirations_total", _COUNTER, ("queue",),
        "Attempts whose worker was lost: its lease lapsed, or its process died.", "journal",
    ),
    Metric(
        "durable_plan_steps_total", _COUNTER, ("kind", "outcome"),
        "Steps of plans that have ended: ok, failed, conflict by their receipts; no_receipt where a plan has failed "
        "without one, such as an interrupted one. Counted when the plan ends.",
        "steps",
    ),
    Metric(
        "durable_operations_ended_total", _COUNTER, ("kind", "outcome"),
        "Operations that ended: succeeded, failed, canceled; outcome_unknown where a call may have got through.",
        "operations_ended",
    ),
    Metric(
        "durable_operation_polls_total", _COUNTER, ("kind", "outcome"),
        "Polls by what came of them: answered, or unanswered: one that failed, or a look for what became of a call.",
        "polls, operations_ended",
    ),
    Metric(
        "durable_attempt_duration_seconds", _HISTOGRAM, ("kind",),
        "From claim to receipt, of the attempts that committed.", "finished", QUICK,
    ),
    Metric(
        "durable_queue_wait_seconds", _HISTOGRAM, ("queue",),
        "From due to claimed, of the attempts that committed.", "finished", WAITS,
    ),
    Metric(
        "durable_delivery_latency_seconds", _HISTOGRAM, ("kind",),
        "From enqueue to receipt, retries and countdowns included.", "finished", LONG,
    ),
    Metric("durable_schema", _INFO, ("version",), "The revision of the schema.", "schema"),
    Metric("durable_schema_supported", _GAUGE, (), "1 where this version runs on that revision.", "schema"),
    Metric("durable_build", _INFO, ("version",), "The version of this exporter.", None),
    Metric("durable_up", _GAUGE, (), "1 where the database answered the last sample.", None),
    Metric(
        "durable_exporter_last_sample_timestamp_seconds", _GAUGE, (),
        "When the last sample was taken that the database answered, by the exporter's clock.", None,
    ),
    Metric(
        "durable_exporter_scrape_duration_seconds", _GAUGE, ("query",),
        "How long each look at the database took in the last sample.", None,
    ),
    Metric(
        "durable_exporter_errors_total", _COUNTER, ("query",),
        "Looks at the database that failed. What they read keeps no series until they succeed.", None,
    ),
    Metric(
        "durable_exporter_counted_until_timestamp_seconds", _GAUGE, ("query",),
        "Until when the counters of this look have counted: half a minute or a minute ago, longer while it catches up.",
        None,
    ),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}


def exposed(metric: Metric) -> Iterator[str]:
    """The names under which its samples stand on the page."""
    if metric.type is Type.HISTOGRAM:
        yield from (f"{metric.name}_bucket", f"{metric.name}_count", f"{metric.name}_sum")
    else:
        yield f"{metric.name}_info" if metric.type is Type.INFO else metric.name
