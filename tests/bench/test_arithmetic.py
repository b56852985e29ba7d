"""What the benchmark makes of its measures; no test holds a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.arithmetic import median, paired_ratio, percentile
from bench.measure import bare

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_a_value_that_was_measured(share, value):
    assert percentile([float(n) for n in range(100, 0, -1)], share) == value


def test_there_is_no_percentile_of_nothing():
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_a_median_leaves_out_what_was_not_measured():
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None


def test_a_ratio_compares_within_each_round():
    """The third round ran on a busy machine: both took ten times as long, and the ratio stays."""
    assert paired_ratio([2.0, 2.2, 20.0], [1.0, 1.0, 10.0]) == 2.0
    assert paired_ratio([None], [1.0]) is None


def test_statements_are_known_again_without_comments_parameters_and_constants():
    assert bare("select 1, :a -- why\n  from t where x = 'y';".replace(":a", "%(a)s")) == bare(
        "SELECT $1, $2 FROM t WHERE x = $3"
    )


def test_help_says_what_can_be_asked_for():
    shown = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for option in (
        "--quick",
        "--jobs",
        "--rounds",
        "--steady",
        "--idle",
        "--cases",
        "--documents",
        "--saves",
        "--json",
    ):
        assert option in shown
