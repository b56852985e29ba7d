"""Percentiles, medians and ratios of what was measured; nothing here looks at a clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed (nearest rank). Raises ValueError on none."""
    if not values:
        raise ValueError("no percentile of nothing")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Iterable[float | None]) -> float | None:
    """The median of those that were measured; None where none was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def paired_ratio(mine: Sequence[float | None], base: Sequence[float | None]) -> float | None:
    """
    The median of the ratios round by round: each round compares what ran within the same minute.

    The ratio of two medians would compare a quiet minute with a busy one.
    """
    pairs = zip(mine, base, strict=True)
    return median(one / other for one, other in pairs if one is not None and other)
