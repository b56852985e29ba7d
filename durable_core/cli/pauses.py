"""`durable pause`, `resume`, `pauses`: nothing more of a queue or a kind is claimed, until somebody says so."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import click

from durable_core.cli import exits
from durable_core.cli.acts import Duration
from durable_core.cli.database import reading, writing
from durable_core.cli.output import Output, instant, span
from durable_core.cli.where import Where, options
from durable_core.deliveries import paused, read


def _one(queue: str | None, kind: str | None) -> tuple[paused.What, str]:
    if (queue is None) == (kind is None):
        raise click.UsageError("name a queue with --queue or a kind with --kind: one of the two.")
    return ("queue", queue) if queue is not None else ("kind", str(kind))


@click.command()
@options
@click.option("--queue", help="This queue.")
@click.option("--kind", help="This kind, by the name its rows have.")
@click.option("--for", "lasting", type=Duration(), help="Until so long from now, such as 2h; else until a resume.")
@click.option("--by", required=True, help="Who pauses it; kept.")
@click.option("--reason", required=True, help="Why; kept.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def pause(
    where: Where, queue: str | None, kind: str | None, lasting: float | None, by: str, reason: str, as_json: bool
) -> None:
    """Claim nothing more of a queue or a kind. What runs goes on; what waits keeps its place."""
    out = Output(as_json)
    what, name = _one(queue, kind)
    with where.database() as (database, _), writing(database, shown_by="durable pauses") as connection:
        until = None if lasting is None else read.now(connection) + timedelta(seconds=lasting)
        made = paused.pause(connection, what, name, by=by, reason=reason, until=until)
    if as_json:
        out.answer(asdict(made))
    else:
        out.line(f"{what} {name} is paused" + ("." if made.until is None else f" until {instant(made.until)}."))


@click.command()
@options
@click.option("--queue", help="This queue.")
@click.option("--kind", help="This kind.")
@click.option("--by", required=True, help="Who resumes it; kept.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def resume(where: Where, queue: str | None, kind: str | None, by: str, as_json: bool) -> int:
    """End a pause. Exit 4 where there was none."""
    out = Output(as_json)
    what, name = _one(queue, kind)
    with where.database() as (database, _), writing(database, shown_by="durable pauses") as connection:
        was = paused.resume(connection, what, name, by=by)
    if as_json:
        out.answer({"what": what, "name": name, "was_paused": was})
    else:
        out.line(f"{what} {name} is resumed." if was else f"{what} {name} was not paused.")
    return exits.OK if was else exits.NOT_FOUND


@click.command()
@options
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def pauses(where: Where, as_json: bool) -> None:
    """The queues and kinds that are paused: by whom, why, until when."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = read.now(connection)
        found = paused.pauses(connection)
    if as_json:
        out.answer({"pauses": found})
        return
    rows: list[tuple[Any, ...]] = [
        (
            one.what, one.name, one.by, one.reason, f"{span((now - one.since).total_seconds())} ago",
            None if one.until is None else f"{instant(one.until)}, in {span((one.until - now).total_seconds())}",
        )
        for one in found
    ]  # fmt: skip
    out.table(("WHAT", "NAME", "BY", "REASON", "SINCE", "UNTIL"), rows)
    if not rows:
        out.line("nothing is paused")
