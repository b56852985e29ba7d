"""
What a command prints: data on stdout, messages on stderr.

Tables are drawn on a terminal only; in a pipe the same rows are plain aligned text, never cut. With `--json`
stdout carries exactly one JSON value. Passwords are masked in all of it, and control characters from the
database never reach a terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any

import click

from durable_core.deliveries.why import instant as instant  # said again for the commands
from durable_core.deliveries.why import span as span

_URL_PASSWORD = re.compile(r"(://[^:/@\s]*:)\S*@")
_WORD_PASSWORD = re.compile(r"\b(password\s*=\s*)\S+", re.IGNORECASE)
_SHORTEST_SECRET = 8

_secrets: set[str] = set()


def keep_secret(text: str | None) -> None:
    """Mask this text wherever it would be printed. Shorter ones are masked inside addresses alone."""
    if text and len(text) >= _SHORTEST_SECRET:
        _secrets.add(text)


def masked(text: str) -> str:
    """The text without passwords: those in addresses, and those that were named with `keep_secret`."""
    text = _WORD_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", text))
    for secret in _secrets:
        text = text.replace(secret, "***")
    return text


def safe(text: str) -> str:
    """One line without control characters: what a row holds must not steer a terminal or break a table."""
    text = masked(text).replace("\r\n", "\n").replace("\n", " ⏎ ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(value: Any) -> Any:
    """A value as JSON has it: instants as ISO 8601 UTC, dataclasses as objects, passwords masked."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, str):
        return masked(str(value))
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


class Output:
    """Where one command puts its answer, as people or as programs read it."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def answer(self, value: Mapping[str, Any], *, one_line: bool = False) -> None:
        """The one JSON value, on one line in a pipe."""
        click.echo(json.dumps(plain(value), indent=2 if sys.stdout.isatty() and not one_line else None))
        ctx = click.get_current_context(silent=True)
        if ctx is not None:
            ctx.find_root().meta[ANSWERED] = True

    def line(self, text: str = "") -> None:
        """A line of the answer to a person."""
        click.echo(safe(text))

    def facts(self, facts: Iterable[tuple[str, str | None]]) -> None:
        """Names and values, one pair a line; those without a value are left out."""
        known = [(name, value) for name, value in facts if value is not None]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            click.echo(f"{name:<{width}}  {safe(value)}")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Rows under headings: drawn on a terminal, plain and uncut elsewhere. None and "" are shown as `-`."""
        cells = [[_cell(value) for value in row] for row in rows]
        numeric = [all(_is_number(row[column]) for row in cells) if cells else False for column in range(len(headings))]
        if sys.stdout.isatty():
            _draw(headings, cells, numeric)
            return
        widths = [max(len(line[column]) for line in [list(headings), *cells]) for column in range(len(headings))]
        for line in [list(headings), *cells]:
            padded = (
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(line, widths, numeric, strict=True)
            )
            click.echo("  ".join(padded).rstrip())


ANSWERED = "durable_core.cli.answered"


def note(text: str) -> None:
    """A message: on stderr, so that it never mixes with data."""
    click.echo(safe(text), err=True)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return instant(value)
    return safe(str(value))


def _is_number(text: str) -> bool:
    return text == "-" or text.rstrip("+").isdigit()


def _draw(headings: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> None:
    # Imported here: half the commands end in a pipe, and rich costs a tenth of a second.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading, right in zip(headings, numeric, strict=True):
        table.add_column(Text(heading), justify="right" if right else "left", overflow="fold")
    for row in cells:
        # Text, not str: a key with brackets in it is no markup.
        table.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout).print(table)
