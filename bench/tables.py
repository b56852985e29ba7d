"""Tables in Markdown, and a figure beside its limit."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "-"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] + ["---:"] * (len(head) - 1), *rest)]
    return "\n".join(lines)


def number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def verdict(what: str, value: float, limit: float, digits: int) -> str:
    return f"{'reached' if value <= limit else 'MISSED':7} {what}: {value:.{digits}f}, limit {limit:g}"
