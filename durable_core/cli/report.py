"""`durable report`: what belongs into a bug report, and nothing that does not."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import click
from sqlalchemy import Connection

import durable_core
from durable_core import sweeps
from durable_core.cli import exits
from durable_core.cli.config import configured
from durable_core.cli.database import reading
from durable_core.cli.output import Output, span
from durable_core.cli.status import counted
from durable_core.cli.where import Where, load_app, options
from durable_core.database.migrate import SUPPORTED
from durable_core.database.statements import beside, current_schema
from durable_core.database.transactions import run
from durable_core.deliveries import paused, read
from durable_core.deliveries.groups import errors
from durable_core.deliveries.read import COUNT_LIMIT
from durable_core.deliveries.survey import COUNTS, Count, survey

_statements = beside(__file__)

LIBRARIES = (
    "celery", "kombu", "billiard", "redis", "sqlalchemy", "psycopg", "psycopg-binary", "alembic", "pydantic", "flower",
)  # fmt: skip

MOST_CODES = 20

PLACES = ("durable_engine", "durable_sessionmaker")
"""Settings that say where the rows are: that they are set is told, and no more."""


@click.command()
@options
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def report(where: Where, as_json: bool) -> None:
    """
    Versions, settings, schema, sweeps and counts, to paste into a bug report.

    It holds no payload, no error text, no password, no address and no host name; kinds and queues are counted and not
    named. A server that does not answer is said, and the rest is there all the same.
    """
    out = Output(as_json)
    told: dict[str, Any] = {
        "versions": _versions(),
        "platform": {
            "system": platform.system(), "release": platform.release(), "machine": platform.machine(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
        },
        "app": _app(where),
        "database": _database(where),
    }  # fmt: skip
    if as_json:
        out.answer(told)
        return
    for name, section in told.items():
        out.line(f"## {name}")
        out.facts(_facts(section))
        out.line()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"durable-core": durable_core.__version__}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _app(where: Where) -> dict[str, Any]:
    """What is set, as far as it is no place; and which transport carries the hints."""
    try:
        config = configured(where)
    except Exception as error:  # whatever the host's modules raise while they load
        return {"error": _named(error)}
    settings = {
        one.name: {"value": "set" if one.name in PLACES and one.value else one.value, "source": one.source}
        for one in config.settings
    }
    variables = {one.name: "set" for one in config.variables}
    told = {"named": where.app is not None, "settings": settings, "variables": variables}
    # Names that nobody knows may be anything: how many there are is enough.
    return {**told, "unknown_names": len(config.unknown), **_transport(where)}


def _transport(where: Where) -> dict[str, Any]:
    if where.app is None:
        return {"transport": None}
    conf = load_app(where.app).conf
    return {
        "transport": str(conf.get("broker_url") or "").partition(":")[0] or None,
        "worker_pool": str(conf.get("worker_pool")),
        "worker_prefetch_multiplier": conf.get("worker_prefetch_multiplier"),
        "task_acks_late": conf.get("task_acks_late"),
    }


def _database(where: Where) -> dict[str, Any]:
    try:
        with where.database() as (database, _), reading(database) as (connection, revision):
            (server,) = run(connection, _statements.server)
            schema = {"is_default": current_schema() == "durable", "revision": revision, "supported": list(SUPPORTED)}
            return {"server": dict(server), "schema": schema, **_counts(connection), "sweeps": _sweeps(connection)}
    except Exception as error:  # a report of what is broken is the point of it
        return {"error": _named(error)}


def _named(error: Exception) -> str:
    """The reason of an error, without its message: that may hold an address."""
    failure = exits.failure_of(error)
    return type(error).__name__ if failure is None else failure.reason


def _counts(connection: Connection) -> dict[str, Any]:
    lines = survey(connection).by_queue()
    found = errors(connection)
    codes: dict[str, int] = {}
    for row in found.rows:
        codes[row.error_code or "none"] = codes.get(row.error_code or "none", 0) + 1
    totals = {name: sum((line.counts[name] for line in lines), Count()) for name in COUNTS}
    pauses = paused.pauses(connection)
    return {
        "deliveries": {name: f"{count.rows}{'+' if count.at_least else ''}" for name, count in totals.items()},
        "queues": len(lines),
        "kinds": len({kind for line in lines for kind in line.others}),
        "pauses": {what: sum(one.what == what for one in pauses) for what in ("queue", "kind")},
        "for_a_person": {state: counted(count) for state, count in read.ended(connection).items()},
        "error_codes": dict(sorted(codes.items(), key=lambda code: (-code[1], code[0]))[:MOST_CODES]),
        "count_limit": COUNT_LIMIT,
    }


def _sweeps(connection: Connection) -> dict[str, Any]:
    told = {}
    for row in sweeps.loops(connection):
        told[row["name"]] = {
            "began": f"{span(abs(row['age_seconds']))} {'ago' if row['age_seconds'] >= 0 else 'ahead'}",
            "moved": row["moved"],
            "by_a_worker": (row["host"] or "").endswith(sweeps.BY_A_WORKER),
            # The class of the error alone: its text may hold an address, or what a row holds.
            "error": None if row["error"] is None else row["error"].partition(":")[0],
        }
    return told


def _facts(section: Mapping[str, Any], before: str = "") -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, value in section.items():
        if isinstance(value, Mapping):
            if set(value) == {"value", "source"}:
                found.append((f"{before}{name}", f"{value['value']} ({value['source']})"))
            else:
                found += _facts(value, f"{before}{name}.")
        else:
            found.append((f"{before}{name}", None if value is None else str(value)))
    return found
