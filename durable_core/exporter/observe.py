"""One sample after the other: what the page shows, and whether it may be believed."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection

from durable_core.database.connections import Database
from durable_core.database.transactions import DATABASE_ERRORS, Row, said
from durable_core.exporter import sample
from durable_core.exporter.metrics import METRICS, Labels, Series
from durable_core.exporter.sample import Gauges
from durable_core.exporter.tail import Tails, counters
from durable_core.sweeps import SWEEPS, is_late, loops

log = logging.getLogger("durable.exporter")

INTERVAL_SECONDS = 15.0
"""Between two samples, however often the page is read."""

STALE_AFTER = 4
"""Intervals after which the last good sample is too old to be believed."""


class Observer:
    """
    Takes samples on a thread of its own, and has the newest one at hand.

    Each look is a transaction of its own: one that fails is counted, its series go, and the others stand. A database
    that does not answer the first look, or whose schema is another, is not asked for the rest.
    """

    def __init__(
        self, database: Database, *, interval: float = INTERVAL_SECONDS, sweeps: Mapping[str, float] | None = None
    ) -> None:
        self.interval = interval
        self.sweeps = sweeps if sweeps is not None else {sweep.name: sweep.interval for sweep in SWEEPS}
        self.tails = Tails()
        self.good_at: float | None = None
        """By `time.monotonic()`: the last sample that the database answered."""
        self.failed: dict[str, str] = {}
        """The looks of the last sample that failed, and what they met."""
        self._database = database
        self._gauges: Gauges = {}
        self._counters = counters()
        self._succeeded: dict[Labels, float] = {}
        self._loops: dict[str, Row] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="durable-exporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples; one that runs is waited for as long as an answer may take."""
        self._ends.set()
        self._thread.join(sample.ANSWER_SECONDS)

    def _run(self) -> None:
        while not self._ends.is_set():
            began = time.monotonic()
            try:
                self.observe()
            except Exception:  # of ours: a page that stands still is worse than one that says so
                log.exception("sample_failed")
            self._ends.wait(max(0.0, self.interval - (time.monotonic() - began)))

    @property
    def looks(self) -> dict[str, Callable[[Connection], Gauges | None]]:
        """What a sample consists of, in the order in which it is asked."""
        return {
            "schema": sample.schema,
            "queues": sample.queues,
            "waiting": sample.waiting,
            "processing": sample.processing,
            "dead": sample.dead,
            "pauses": sample.pauses,
            "schedules": sample.schedules,
            "plans": sample.plans,
            "operations": sample.operations,
            "loops": self._look_at_loops,
            "finished": self.tails.finished,
            "journal": self.tails.journal,
            "steps": self.tails.steps,
            "polls": self.tails.polls,
            "operations_ended": self.tails.operations_ended,
            "enqueued": self.tails.enqueued,
        }

    def _look_at_loops(self, connection: Connection) -> Gauges:
        rows = loops(connection)
        self._loops = {row["name"]: row for row in rows}
        return sample.loops(rows)

    def observe(self) -> None:
        """Take one sample. Raises nothing that the database raises."""
        gauges: Gauges = {}
        failed: dict[str, str] = {}
        took: dict[Labels, float] = {}
        for name, look in self.looks.items():
            began = time.monotonic()
            try:
                with sample.looking(self._database) as connection:
                    found = look(connection)
            except DATABASE_ERRORS as error:
                failed[name] = said(error)
                log.warning("look_failed", extra={"query": name, "error": failed[name]})
                if name == "schema":
                    break
            else:
                took[(name,)] = time.monotonic() - began
                for metric, values in (found or {}).items():
                    gauges.setdefault(metric, {}).update(values)
                if name == "schema" and not gauges["durable_schema_supported"][()]:
                    break
        self._keep(gauges, failed, took)

    def _keep(self, gauges: Gauges, failed: dict[str, str], took: dict[Labels, float]) -> None:
        up = "schema" not in failed
        with self._lock:
            self._succeeded.update(gauges.get("durable_loop_last_success_timestamp_seconds", {}))
            if up:
                self.good_at = time.monotonic()
                # A run that fails does not take away when one last went well.
                gauges["durable_loop_last_success_timestamp_seconds"] = dict(self._succeeded)
                gauges["durable_exporter_last_sample_timestamp_seconds"] = {(): time.time()}
            else:
                kept = self._gauges.get("durable_exporter_last_sample_timestamp_seconds", {})
                gauges["durable_exporter_last_sample_timestamp_seconds"] = kept
            gauges["durable_up"] = {(): float(up)}
            gauges["durable_exporter_scrape_duration_seconds"] = took
            gauges["durable_exporter_counted_until_timestamp_seconds"] = {
                (name,): place.at.timestamp() for name, place in self.tails.places.items()
            }
            for name in failed:
                self.tails.series["durable_exporter_errors_total"].add((name,), 1)
            self.failed, self._gauges, self._counters = failed, gauges, copy.deepcopy(self.tails.series)

    def series(self) -> list[Series]:
        """Every metric as the last sample has it; before the first one, what needs none."""
        own: Gauges = {
            **sample.build(),
            "durable_loop_interval_seconds": {(name,): seconds for name, seconds in self.sweeps.items()},
        }
        nothing: Gauges = {"durable_up": {(): 0.0}}
        with self._lock:
            gauges, counted = {**nothing, **self._gauges, **own}, self._counters
        return [counted.get(metric.name) or Series(metric, gauges.get(metric.name, {})) for metric in METRICS]

    # --- health --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the last sample was answered, lately enough, by a schema that this code runs on."""
        return all(check["status"] != "fail" for check in self.checks() if check["name"] in ("database", "schema"))

    def checks(self) -> list[dict[str, Any]]:
        """What a person or a program asks first, each with what mends it."""
        with self._lock:
            gauges, failed, good_at = self._gauges, self.failed, self.good_at
        age = None if good_at is None else time.monotonic() - good_at
        fresh = age is not None and age <= STALE_AFTER * self.interval and "schema" not in failed
        seen = "no sample yet" if age is None else f"last answered {age:.0f} s ago"
        checks = [
            _check("database", fresh, f"{seen}; {failed['schema']}" if "schema" in failed else seen,
                   "look at the database's address, password and load"),
        ]  # fmt: skip
        if not fresh:
            return checks
        ((revision,),) = gauges["durable_schema"]
        supported = bool(gauges["durable_schema_supported"][()])
        checks.append(
            _check("schema", supported, f"revision {revision}",
                   "run `durable migrate`, or deploy the version that knows this revision"),
        )  # fmt: skip
        if supported:
            checks += [self._sweep(name) for name in self.sweeps]
            broken = ", ".join(f"{name}: {error}" for name, error in sorted(failed.items()))
            checks.append(
                _check("looks", not failed, broken or "all answered", "look at the log of the exporter", soft=True)
            )
        return checks

    def _sweep(self, name: str) -> dict[str, Any]:
        """Late as `durable status` says it, by the database's clock, when it was last looked at."""
        row = self._loops.get(name)
        age = None if row is None else float(row["age_seconds"])
        failed = row is not None and row["error"] is not None
        observed = "never seen to begin" if age is None else f"began {age:.0f} s before the last sample"
        if failed:
            observed += "; its last run failed"
        fix = (
            "`durable status` says why it failed"
            if failed
            else "see that a beat runs, and a worker that reads durable.control"
        )
        return _check(f"sweep {name}", not (failed or is_late(age, self.sweeps[name])), observed, fix, soft=True)


def _check(name: str, good: bool, observed: str, fix: str, *, soft: bool = False) -> dict[str, Any]:
    status = "pass" if good else "warn" if soft else "fail"
    return {"name": name, "status": status, "observed": observed, "fix": None if good else fix}
