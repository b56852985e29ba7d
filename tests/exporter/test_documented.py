"""The page of documentation says what the code does: every metric, label, bucket, option and limit."""

import re
from pathlib import Path

import pytest

from durable_core.cli.exporter import DEFAULT_PORT, exporter
from durable_core.database.environment import EXPORTER_HOST_VARIABLE, EXPORTER_PORT_VARIABLE
from durable_core.deliveries.read import COUNT_LIMIT
from durable_core.exporter import metrics, observe, sample, tail
from durable_core.exporter.metrics import METRICS, Type, exposed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def table(first: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    lines = PAGE.split(f"\n| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_of_the_page_is_the_table_of_the_code():
    wanted = [
        [
            f"`{next(exposed(one)) if one.type is Type.INFO else one.name}`", one.type.value,
            ", ".join(f"`{label}`" for label in one.labels), one.help,
        ]
        for one in METRICS
    ]  # fmt: skip
    assert table("metric") == wanted


def test_the_buckets_of_the_page_are_those_of_the_code():
    assert table("histogram") == [
        [f"`{one.name}`", ", ".join(f"{bound:g}" for bound in one.buckets)] for one in METRICS if one.buckets
    ]


@pytest.mark.parametrize(
    "said",
    [
        f"http://127.0.0.1:{DEFAULT_PORT}/metrics",
        EXPORTER_HOST_VARIABLE,
        EXPORTER_PORT_VARIABLE,
        f"every {observe.INTERVAL_SECONDS:g} s",
        f"ended after {sample.STATEMENT_SECONDS:g} s",
        f"Of the pending rows {COUNT_LIMIT:,} are read in all",
        f"{sample.MOST_DUE:,} due rows are read in all",
        f"At most {sample.MOST_QUEUES} queues are shown, and {metrics.MOST_SERIES:,} series",
        f"{tail.BATCH:,} at a time",
    ],
)
def test_the_page_names_the_numbers_of_the_code(said):
    assert said in " ".join(PAGE.split())


def test_the_lags_are_those_that_the_page_and_the_metrics_name():
    assert (tail.LAG_SECONDS, tail.ENQUEUE_LAG_SECONDS) == (30, 60)


def test_the_defaults_of_the_command_are_those_of_the_code():
    defaults = {one.name: one.default for one in exporter.params}
    assert defaults["interval"] == observe.INTERVAL_SECONDS
    assert defaults["host"] == "127.0.0.1"
    assert set(re.findall(r"--(\w+)", PAGE)) <= set(defaults)
