"""`durable errors`: what fails, grouped by what it has in common; and a whole group sent round again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from sqlalchemy import Connection

from durable_core.claims.operate import Act
from durable_core.cli import exits
from durable_core.cli.acts import HOW, act_on_chosen, check_who_and_why
from durable_core.cli.database import reading
from durable_core.cli.exits import CommandError
from durable_core.cli.output import Output, note, span
from durable_core.cli.where import Where, options
from durable_core.deliveries import bulk, operate, read
from durable_core.deliveries.groups import LOOKED_AT, Errors, Failed
from durable_core.deliveries.groups import errors as failed_lately
from durable_core.deliveries.read import MOST_PER_PAGE

BOUND = (
    f"the newest {LOOKED_AT:,} failed and dead deliveries, and those that retry after one of the newest {LOOKED_AT:,} "
    "lines of the journal, were read; there are more"
)


class NoSuchGroup(CommandError):
    """No delivery that failed lately has this fingerprint."""

    reason = "NOT_FOUND"
    code = exits.NOT_FOUND


class ListedByDefault(click.Group):
    """A group that lists where no command of it is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args[:1] and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["list", *args])


@click.group(cls=ListedByDefault)
def errors() -> None:
    """
    What fails, grouped by fingerprint: kind, error code, and the message without its ids, numbers and quoted text.

    Failed and dead deliveries that nobody discarded, and those that are tried again: the newest 10,000 of each. Without
    a command the groups are listed.
    """


_limit = click.option(
    "--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many."
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")


@errors.command("list")
@options
@click.option("--kind", help="Only of this kind.")
@_limit
@click.option("--after", metavar="FINGERPRINT", help="The last group of the page before.")
@_json
@click.pass_obj
def list_(where: Where, kind: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """The groups, the largest first: how many, since when, when last, and one to look at."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = read.now(connection)
        found = failed_lately(connection, kind=kind)
    groups = found.groups()
    if after is not None:
        groups = groups[_place([group.fingerprint for group in groups], after) + 1 :]
    page = groups[:limit]
    more = page[-1].fingerprint if len(groups) > limit else None
    if as_json:
        out.answer({"errors": page, "next_after": more, "complete": found.complete, "looked_at": LOOKED_AT})
        return
    out.table(
        ("FINGERPRINT", "COUNT", "DEAD", "FAILED", "RETRYING", "FIRST", "LAST", "KIND", "CODE", "MESSAGE", "SAMPLE"),
        [
            (
                group.fingerprint, group.count, group.dead, group.failed, group.retrying,
                f"{span((now - group.first_seen_at).total_seconds())} ago",
                f"{span((now - group.last_seen_at).total_seconds())} ago",
                group.kind, group.error_code, group.shape, group.sample,
            )
            for group in page
        ],
    )  # fmt: skip
    if not page:
        out.line("nothing failed that was not done since, or discarded")
    _say_what_is_left_out(found, more)


@errors.command()
@options
@click.argument("fingerprint")
@_limit
@click.option("--after", metavar="ID", help="The last id of the page before.")
@_json
@click.pass_obj
def show(where: Where, fingerprint: str, limit: int, after: str | None, as_json: bool) -> None:
    """The deliveries of one group, the one that failed last first. The beginning of a fingerprint is enough."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = read.now(connection)
        found, rows = _group(connection, fingerprint)
    group = Errors(rows, found.complete).groups()[0]
    if after is not None:
        rows = rows[_place([row.id for row in rows], after) + 1 :]
    page = rows[:limit]
    more = page[-1].id if len(rows) > limit else None
    if as_json:
        shown = [
            {
                "id": row.id, "queue": row.queue, "state": row.state.value, "failed_at": row.at,
                "due_at": row.due_at if row.retries else None,
            }
            for row in page
        ]  # fmt: skip
        out.answer({"error": group, "deliveries": shown, "next_after": more, "complete": found.complete})
        return
    out.line(f"{group.kind}  {group.error_code or '-'}  {group.shape}")
    out.line()
    out.table(
        ("ID", "QUEUE", "STATE", "FAILED"),
        [(row.id, row.queue, row.state.value, f"{span((now - row.at).total_seconds())} ago") for row in page],
    )
    _say_what_is_left_out(found, more)


def _command(act: Act, says: str) -> click.Command:
    """One act on all of a group that wait for a person."""

    def run(
        where: Where, /, fingerprint: str, rate: float | None, by: str, reason: str, dry_run: bool, yes: bool,
        as_json: bool,
    ) -> int:  # fmt: skip
        check_who_and_why(by, reason)
        with where.database() as (database, _):
            with reading(database) as (connection, _):
                found, rows = _group(connection, fingerprint)
            ids = tuple(row.id for row in rows if not row.retries)
            # One that failed in another way since it was seen is another group's.
            which = bulk.Filter(ids=ids, kind=rows[0].kind, error_code=rows[0].error_code)
            code = act_on_chosen(
                act, database, which, Output(as_json), rate, dry_run, yes, {"by": by, "reason": reason}
            )
        if not found.complete:
            note(f"{BOUND}: the same command again takes the rest")
        return code

    run.__doc__ = f"""
    {says}

    The beginning of a fingerprint is enough. Those that are tried again by themselves are left to it. Otherwise as
    `durable deliveries {act.name}` with filters: in transactions of at most 100, and broken off, the same command goes
    on with the rest.
    """
    command: Callable[..., Any] = click.pass_obj(run)
    for decorate in reversed((click.argument("fingerprint"), *HOW)):
        command = decorate(command)
    return click.command(act.name)(options(command))


errors.add_command(_command(operate.REDRIVE, "Send the dead and failed deliveries of one group round again."))
errors.add_command(_command(operate.DISCARD, "Give up on the dead and failed deliveries of one group."))


def _group(tx: Connection, fingerprint: str) -> tuple[Errors, list[Failed]]:
    """What failed lately, and of it the rows of one group. Raises NoSuchGroup and UsageError."""
    found = failed_lately(tx)
    begun = [row for row in found.rows if row.fingerprint.startswith(fingerprint.lower())]
    names = sorted({row.fingerprint for row in begun})
    if not names:
        raise NoSuchGroup(
            f"no error has the fingerprint {fingerprint[:60]!r}: it was mended, or is older than what is read. "
            "`durable errors list` has those of now."
        )
    if len(names) > 1:
        raise click.UsageError(f"{fingerprint!r} begins {len(names)} fingerprints: {', '.join(names[:5])}.")
    return found, begun


def _place(names: list[str], after: str) -> int:
    try:
        return names.index(after)
    except ValueError:
        raise NoSuchGroup(f"--after {after[:60]!r} is not there any more: begin again without it.") from None


def _say_what_is_left_out(found: Errors, more: str | None) -> None:
    if more is not None:
        note(f"there is more: --after {more}")
    if not found.complete:
        note(BOUND)
