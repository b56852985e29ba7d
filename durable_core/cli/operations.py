"""`durable operations`: what was called outside, how it stands, and what a person may do about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from durable_core.claims import journal
from durable_core.claims.operate import Act, act_on_each, refusal
from durable_core.cli import exits
from durable_core.cli.acts import Became, check_who_and_why
from durable_core.cli.database import reading, writing
from durable_core.cli.output import Output, instant, note, span
from durable_core.cli.where import Where, options
from durable_core.database.connections import Database
from durable_core.deliveries.read import MOST_PER_PAGE, now
from durable_core.errors import NotFound
from durable_core.operations import operate, read
from durable_core.operations.read import Operation
from durable_core.operations.why import reasons_of
from durable_core.states import OPERATION_TERMINAL, OperationState

JOURNAL_LINES = 200
"""Lines of its history that `show` has, the newest; `durable journal` pages through all."""


@click.group()
def operations() -> None:
    """Look at calls of other sides; cancel or release them, or have them polled. None can be issued again."""


@operations.command("list")
@options
@click.option("--state", type=click.Choice([state.value for state in OperationState]), help="Only in this state.")
@click.option("--kind", help="Only of this kind.")
@click.option("--key", help="Only with this idempotency key.")
@click.option("--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many.")
@click.option("--after", metavar="ID", help="The last id of the page before.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def list_(
    where: Where, state: str | None, kind: str | None, key: str | None, limit: int, after: str | None, as_json: bool
) -> None:
    """Operations, newest first, a page at a time. Of the other side's own there is a count, never an id."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        at = now(connection)
        found = read.page(connection, state=state, kind=kind, key=key, after=after, limit=limit)
    more = found[-1].id if len(found) == limit else None
    if as_json:
        out.answer({"operations": [row.as_json() for row in found], "next_after": more})
        return
    out.table(
        ("ID", "KIND", "STATE", "BY", "STARTED", "EXTERNAL", "PATIENCE", "ERROR"),
        [
            (
                row.id, row.kind, row.state.value, row.started_by, _since(row.created_at, at),
                row.external_operations, _patience(row, at), row.error_code,
            )
            for row in found
        ],
    )  # fmt: skip
    if more:
        note(f"there may be more: --after {more}")


@operations.command()
@options
@click.argument("row_id", metavar="ID")
@click.option("--arguments", is_flag=True, help="Show the payload too, secrets masked; it may hold personal data.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def show(where: Where, row_id: str, arguments: bool, as_json: bool) -> None:
    """One operation: where it is, what it waits for, why it failed, and its history."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        at = now(connection)
        row = read.get(connection, row_id)
        why = [f"{one.says}." for one in reasons_of(connection, row)]
        lines = journal.read(connection, row.id, limit=JOURNAL_LINES)
    if as_json:
        told = {"why": why[0], "also": why[1:], "journal": lines, "journal_complete": len(lines) < JOURNAL_LINES}
        out.answer({**row.as_json(arguments=arguments), **told})
        return
    out.facts(
        [
            ("id", row.id),
            ("kind", row.kind),
            ("queue", f"{row.queue}, priority {row.priority}"),
            ("key", row.key),
            ("state", row.state.value),
            *(("why" if one is why[0] else "and", one) for one in why),
            ("held", row.held_reason),
            ("started", f"{_since(row.created_at, at)} by {row.started_by} ({row.trigger})"),
            ("issued", _since(row.issued_at, at)),
            ("external", None if row.external_operations is None else f"{row.external_operations} operations"),
            ("polls", f"{row.polls}, the last {_since(row.polled_at, at)}" if row.polls else None),
            ("patience", _patience(row, at)),
            ("finished", _since(row.finished_at, at)),
            ("canceled", f"by {row.canceled_by}: {row.canceled_reason}" if row.canceled_by else None),
            ("fence", f"{row.fence}, settled {row.settled_fence}"),
            ("error", f"{row.error_code}: {row.error_message}" if row.error_code else None),
            ("arguments", str(row.shown_arguments) if arguments else None),
        ]
    )
    if lines:
        out.line()
        out.table(
            ("AT", "MOVE", "FROM", "TO", "FENCE", "BY", "REASON"),
            [(instant(n.at), n.move, n.from_state, n.to_state, n.fence, n.by, n.reason) for n in lines],
        )
    if len(lines) == JOURNAL_LINES:
        note(f"older lines: `durable journal {row.id} --after {lines[0].seq}`")


def _since(at: datetime | None, now: datetime) -> str | None:
    return None if at is None else f"{span((now - at).total_seconds())} ago"


def _patience(row: Operation, at: datetime) -> str | None:
    """How long the other side may be silent yet."""
    if row.state is not OperationState.RUNNING or row.patience_until is None:
        return None
    left = (row.patience_until - at).total_seconds()
    return f"{span(left)} left" if left > 0 else f"over since {span(-left)}"


# --- acts ------------------------------------------------------------------------------------------


def _command(act: Act, says: str) -> click.Command:
    def run(where: Where, /, **line: Any) -> int:
        return _act(act, where, **line)

    run.__doc__ = f"""
    {says}

    By their ids, all in one transaction; one in another state, or that somebody writes to, is refused and does not
    keep the others back. Exit 5 if any was refused, else 4 if any was not found.
    """
    command: Callable[..., Any] = click.pass_obj(run)
    decorations = [
        click.argument("row_ids", metavar="ID...", nargs=-1, required=True),
        click.option("--by", required=True, help="Who acts; kept in the journal."),
        click.option("--reason", required=True, help="Why; kept in the journal."),
        click.option("--dry-run", is_flag=True, help="Say what would happen, and change nothing."),
        click.option("--yes", is_flag=True, help="Do not ask; needed without a terminal."),
        click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout."),
    ]
    for decorate in reversed(decorations):
        command = decorate(command)
    return click.command(act.name)(options(command))


def _act(
    act: Act, where: Where, *, row_ids: tuple[str, ...], by: str, reason: str, dry_run: bool, yes: bool, as_json: bool
) -> int:
    out = Output(as_json)
    check_who_and_why(by, reason)
    ids = sorted({_spelled(row_id) for row_id in row_ids})
    if not dry_run and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("without a terminal to ask on, --yes is needed (or --dry-run to look).")
        these = "this operation" if len(ids) == 1 else f"these {len(ids)} operations"
        click.confirm(f"{act.name.capitalize()} {these}?", abort=True, err=True)
    with where.database() as (database, _):
        done = _each(act, database, ids, dry_run, by, reason)
    if as_json:
        out.answer({"dry_run": dry_run, "operations": done})
    else:
        out.table(("ID", "OUTCOME", "WHY"), [(one.id, one.outcome, one.message) for one in done])
    outcomes = {one.outcome for one in done}
    if "refused" in outcomes:
        return exits.CONFLICT
    return exits.NOT_FOUND if "not found" in outcomes else exits.OK


def _spelled(row_id: str) -> str:
    """An id in its one spelling; what cannot be an id stays as it is, to be reported as not found."""
    try:
        return read.checked_id(row_id)
    except NotFound:
        return row_id


def _is_id(text: str) -> bool:
    try:
        return read.checked_id(text) == text
    except NotFound:
        return False


def _each(act: Act, database: Database, ids: list[str], dry_run: bool, by: str, reason: str) -> list[Became]:
    """One transaction for all; of a dry run, undone."""
    with writing(database, undo=dry_run) as connection:
        # No hint is sent from here: the sweeps find what is due within a second.
        known = [row_id for row_id in ids if _is_id(row_id)]
        rows = {row["id"]: row for row in act_on_each(connection, act, known, by=by, reason=reason)}
    done = []
    for row_id in ids:
        row = rows.get(row_id)
        if row is None:
            done.append(Became(row_id, "not found", str(NotFound("operation", row_id))))
        elif row["done"]:
            done.append(Became(row_id, f"would be {act.done}" if dry_run else act.done))
        elif act is operate.CANCEL and row["was"] in OPERATION_TERMINAL:
            done.append(Became(row_id, "unchanged", f"it had ended: {row['was']}"))
        else:
            done.append(Became(row_id, "refused", str(refusal(act, row))))
    return done


operations.add_command(
    _command(operate.CANCEL, "Give operations up: their slot is free, the other side may still finish them.")
)
operations.add_command(_command(operate.POLL, "Have running operations polled now; nothing is issued."))
operations.add_command(
    _command(operate.RELEASE, "Let the sweeps see operations again that one failed on and held back.")
)
