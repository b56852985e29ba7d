"""What the commands about cases share: naming one, JSON on the line, the app's types."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from sqlalchemy import Connection

from durable_core import kinds
from durable_core.cases import later
from durable_core.cases.cases import Cases
from durable_core.cli.exits import AppNotLoaded
from durable_core.cli.find import one_row
from durable_core.database.connections import Database
from durable_core.errors import NotFound


class Document(click.ParamType[Any]):
    """JSON on the line, or `@file`, or `-` for stdin."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        try:
            if text == "-":
                text = sys.stdin.read()
            elif text.startswith("@"):
                with open(text[1:], encoding="utf-8") as file:
                    text = file.read()
            return json.loads(text)
        except (OSError, ValueError) as unreadable:
            self.fail(f"it is no JSON ({unreadable}): write it on the line, or @file, or - for stdin.", param, ctx)


as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
key_option = click.option("--key", "scope_key", metavar="KEY", help="The element, for a step with a scope.")
case_argument = click.argument("case_id", metavar="ID")


def named_case(connection: Connection, text: str) -> str:
    """The id of the one case that this text names. Raises NothingFound, Ambiguous, and NotFound for what is no case."""
    found = one_row(connection, text)
    if found.what != "case":
        raise NotFound("case", found.id)
    return found.id


def of_the_app(database: Database, durable: Any) -> Cases:
    """
    The cases of the app, as its modules make them, on this database. Raises AppNotLoaded without an app.

    Where the app has several `Cases`, or none, all types that it declares are taken, with the defaults.
    """
    if durable is None:
        raise AppNotLoaded(
            "the code of the case types is needed: name your Celery app, as in `durable -A proj cases affordances ID`."
        )
    durable.app.loader.import_default_modules()
    known = later.known()
    if len(known) == 1 and isinstance(known[0], Cases):
        return known[0].on(database)
    return Cases(database, list(kinds.case_types))


def at(step: str, scope_key: str | None) -> str:
    """A step and its element, in words."""
    return step if scope_key is None else f"{step} for {scope_key}"
