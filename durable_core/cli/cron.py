"""`durable cron`: the schedules of periodic kinds, and what a person does to them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from durable_core import periodic
from durable_core.cli import exits
from durable_core.cli.database import reading, writing
from durable_core.cli.output import Output, instant, span
from durable_core.cli.where import Where, options
from durable_core.deliveries import read
from durable_core.periodic import Schedule

OVERDUE_SECONDS = 60.0
"""A slot that is due so long has nobody to fire it; a sweep that runs comes within seconds."""


@click.group()
def cron() -> None:
    """The schedules of periodic kinds: when they are due next; pause one, resume it, or run it now."""


_by = click.option("--by", required=True, help="Who acts; kept in the journal.")
_why = click.option("--reason", help="Why; kept in the journal.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")


@cron.command("list")
@options
@_json
@click.pass_obj
def list_(where: Where, as_json: bool) -> None:
    """
    Every schedule: its cron, its last and its next slot, and why it does not run where it does not.

    Whether the code still declares a kind can be said with -A alone.
    """
    out = Output(as_json)
    with where.database() as (database, durable), reading(database) as (connection, _):
        now = read.now(connection)
        if durable is not None:
            durable.app.loader.import_default_modules()
        found = periodic.schedules(connection)
    told = [(one, why(one, now, known=durable is not None)) for one in found]
    if as_json:
        out.answer({"schedules": [_shown(one, said, known=durable is not None) for one, said in told]})
        return
    out.table(
        ("KIND", "CRON", "ZONE", "MISSED", "LAST SLOT", "NEXT SLOT", "WHY"),
        [(one.kind, one.cron, one.timezone, one.missed, one.last_slot, one.next_slot, said) for one, said in told],
    )


@cron.command()
@options
@click.argument("kind")
@_by
@click.option("--reason", required=True, help="Why; kept in the journal.")
@click.option(
    "--until", type=click.DateTime(["%Y-%m-%dT%H:%M:%S%z"]), metavar="INSTANT",
    help="Resume by itself then; with an offset, such as 2026-03-29T08:00:00+0200.",
)  # fmt: skip
@_json
@click.pass_obj
def pause(where: Where, kind: str, by: str, reason: str, until: datetime | None, as_json: bool) -> None:
    """Let no slot of a kind run, until it is resumed or until then. What is missed meanwhile is not made up for."""
    with where.database() as (database, _), writing(database) as connection:
        periodic.pause(connection, kind, by=by, reason=reason, until=until)
    _told(as_json, kind, "paused")


@cron.command()
@options
@click.argument("kind")
@_by
@_why
@_json
@click.pass_obj
def resume(where: Where, kind: str, by: str, reason: str | None, as_json: bool) -> int:
    """Let the slots of a kind run again, from the next one on. Exit 5 when it was not paused."""
    with where.database() as (database, _), writing(database) as connection:
        done = periodic.resume(connection, kind, by=by, reason=reason)
    _told(as_json, kind, "resumed" if done else "was not paused")
    return exits.OK if done else exits.CONFLICT


@cron.command("run-now")
@options
@click.argument("kind")
@_by
@_why
@_json
@click.pass_obj
def run_now(where: Where, kind: str, by: str, reason: str | None, as_json: bool) -> None:
    """Enqueue one delivery of a periodic kind at once, beside its slots. Needs -A, for the code says how."""
    with where.database() as (database, durable):
        if durable is not None:
            durable.app.loader.import_default_modules()
        with writing(database) as connection:
            ref = periodic.run_now(connection, kind, by=by, reason=reason)
    _told(as_json, kind, "enqueued", id=ref.id)


def _told(as_json: bool, kind: str, outcome: str, **facts: Any) -> None:
    out = Output(as_json)
    if as_json:
        out.answer({"kind": kind, "outcome": outcome, **facts})
    else:
        out.line(" ".join([kind, outcome, *facts.values()]))


def why(one: Schedule, now: datetime, *, known: bool) -> str:
    """In one sentence: why it does not run, or when it left something out; empty where all is as it should be."""
    if known and not one.declared:
        return "no code declares it; it never runs"
    if one.paused_at is not None and (one.paused_until is None or one.paused_until > now):
        until = "" if one.paused_until is None else f" until {instant(one.paused_until)}"
        return f"paused{until} by {one.paused_by}: {one.paused_reason}"
    if one.next_slot is not None and (late := (now - one.next_slot).total_seconds()) > OVERDUE_SECONDS:
        return f"due for {span(late)}: no process that declares it runs the sweep"
    if one.skipped_from is not None and one.skipped_to is not None:
        return f"left out what was due from {instant(one.skipped_from)} to {instant(one.skipped_to)}"
    return ""


def _shown(one: Schedule, said: str, *, known: bool) -> dict[str, Any]:
    shown = dict(vars(one))
    # Without the app nobody can tell, and false would be a claim.
    return {**shown, "declared": one.declared if known else None, "why": said}
