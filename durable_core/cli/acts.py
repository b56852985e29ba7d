"""What a person does to deliveries: to those named by their ids, or to all that a filter chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import click

from durable_core.claims.operate import Act, act_on_each, refusal
from durable_core.cli import database as room
from durable_core.cli import exits
from durable_core.cli.database import answering, reading, writing
from durable_core.cli.output import Output, note
from durable_core.cli.where import Where, options
from durable_core.database.connections import Database
from durable_core.database.transactions import Row
from durable_core.deliveries import bulk, operate, read
from durable_core.errors import NotFound
from durable_core.states import DeliveryState

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType[float]):
    """`90s`, `15m`, `2h`, `7d`, or a number of seconds; in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        unit = UNITS.get(text[-1:])
        try:
            seconds = float(text if unit is None else text[:-1]) * (unit or 1.0)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e10:
            self.fail(f"{value!r} is no duration: write 90s, 15m, 2h or 7d.", param, ctx)
        return seconds


class Rate(click.ParamType[float]):
    """`20/s`: so many rows a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(str(value).removesuffix("/s"))
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e6:
            self.fail(f"{value!r} is no rate: write 20/s.", param, ctx)
        return rate


@dataclass(frozen=True)
class Became:
    """What became of one id: `outcome` is what was done, what would be done, refused or not found."""

    id: str
    outcome: str
    message: str | None = None


HOW = (
    click.option("--rate", type=Rate(), help="Of many: at most so many a second, such as 20/s."),
    click.option("--by", required=True, help="Who acts; kept in the journal."),
    click.option("--reason", required=True, help="Why; kept in the journal."),
    click.option("--dry-run", is_flag=True, help="Say what would happen, and change nothing."),
    click.option("--yes", is_flag=True, help="Do not ask; needed without a terminal."),
    click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout."),
)
"""The options of every act on many deliveries."""


def _command(act: Act, says: str) -> click.Command:
    """The command of one act."""

    def run(where: Where, /, **line: Any) -> int:
        return _act(act, where, **line)

    run.__doc__ = f"""
    {says}

    By their ids, all in one transaction; one in another state, or that somebody is at work on, is refused and does
    not keep the others back. Or all that the filters choose, oldest first, in transactions of at most 100: broken
    off, the same command goes on with the rest.

    Exit 5 if any was refused, else 4 if any was not found. A dry run sees a snapshot: a row may move after it.
    """
    command: Callable[..., Any] = click.pass_obj(run)
    states = [state.value for state in act.states]
    decorations = [
        click.argument("row_ids", metavar="[ID]...", nargs=-1),
        click.option("--kind", help="All of this kind."),
        click.option("--queue", help="All in this queue."),
        click.option("--state", type=click.Choice(states), help="All in this state."),
        click.option("--error-code", help="All that ended, or last failed, with this code."),
        click.option("--ordering-key", help="All with this ordering key."),
        click.option("--older-than", type=Duration(), help="All enqueued longer ago, such as 2h."),
        *HOW,
    ]
    if act is operate.RESCHEDULE:
        decorations += [
            click.option("--in", "countdown", type=Duration(), help="Due so long from now, such as 15m."),
            click.option("--at", "eta", metavar="INSTANT", help="Due then: ISO 8601 with an offset."),
        ]
    for decorate in reversed(decorations):
        command = decorate(command)
    return click.command(act.name)(options(command))


def _act(
    act: Act, where: Where, *, row_ids: tuple[str, ...], by: str, reason: str, dry_run: bool, yes: bool,
    as_json: bool, rate: float | None, countdown: float | None = None, eta: str | None = None, **filters: Any,
) -> int:  # fmt: skip
    out = Output(as_json)
    check_who_and_why(by, reason)
    which = _filter(filters)
    if bool(row_ids) == (which != bulk.Filter()):
        raise click.UsageError("name deliveries by their ids, or choose them by filters: one of the two.")
    more = operate.due(countdown, _instant(eta)) if act is operate.RESCHEDULE else {}
    how = {"by": by, "reason": reason, **more}
    with where.database() as (database, _):
        if row_ids:
            # An id given twice is one act.
            ids = sorted({_spelled(row_id) for row_id in row_ids})
            if not dry_run and not yes:
                _ask(act, len(ids), ids[: bulk.SAMPLE])
            return _told(out, _each(act, database, ids, dry_run, how), dry_run)
        return act_on_chosen(act, database, which, out, rate, dry_run, yes, how)


def check_who_and_why(by: str, reason: str) -> None:
    """Raises UsageError."""
    for name, text in (("--by", by), ("--reason", reason)):
        if not text.strip():
            raise click.UsageError(f"{name} is empty: say who acts and why, both are kept in the journal.")


def _filter(filters: dict[str, Any]) -> bulk.Filter:
    state, older = filters.pop("state"), filters.pop("older_than")
    return bulk.Filter(**filters, older_seconds=older, state=None if state is None else DeliveryState(state))


def _instant(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"--at {text!r} is no instant: write 2026-11-30T08:00:00+01:00.") from None


def _spelled(row_id: str) -> str:
    """An id in its one spelling; what cannot be an id stays as it is, to be reported as not found."""
    try:
        return read.checked_id(row_id)
    except NotFound:
        return row_id


def _ask(act: Act, count: int, sample: list[str]) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("without a terminal to ask on, --yes is needed (or --dry-run to look).")
    for row_id in sample:
        note(f"  {row_id}")
    if count > len(sample):
        note(f"  and {count - len(sample)} more")
    several = "this delivery" if count == 1 else f"these {_counted(count)} deliveries"
    click.confirm(f"{act.name.capitalize()} {several}?", abort=True, err=True)


def _counted(count: int) -> str:
    return f"{count:,} or more" if count >= read.COUNT_LIMIT else f"{count:,}"


# --- by ids ------------------------------------------------------------------------------------------


def _each(act: Act, database: Database, ids: list[str], dry_run: bool, how: dict[str, Any]) -> list[Became]:
    """One transaction for all; of a dry run, undone."""
    known = [row_id for row_id in ids if _spelled_well(row_id)]
    with writing(database, undo=dry_run) as connection:
        # No hint is sent from here: the sweeps find the rows within their interval.
        rows = {row["id"]: row for row in act_on_each(connection, act, known, **how)}
    return [_became(act, row_id, rows.get(row_id), dry_run) for row_id in ids]


def _spelled_well(row_id: str) -> bool:
    try:
        return read.checked_id(row_id) == row_id
    except NotFound:
        return False


def _became(act: Act, row_id: str, row: Row | None, dry_run: bool) -> Became:
    if row is None:
        return Became(row_id, "not found", str(NotFound("delivery", row_id)))
    if row["done"]:
        return Became(row_id, f"would be {act.done}" if dry_run else act.done)
    return Became(row_id, "refused", str(refusal(act, row)))


def _told(out: Output, done: list[Became], dry_run: bool) -> int:
    if out.as_json:
        out.answer({"dry_run": dry_run, "deliveries": done})
    else:
        out.table(("ID", "OUTCOME", "WHY"), [(one.id, one.outcome, one.message) for one in done])
    outcomes = {one.outcome for one in done}
    if "refused" in outcomes:
        return exits.CONFLICT
    return exits.NOT_FOUND if "not found" in outcomes else exits.OK


# --- by a filter -------------------------------------------------------------------------------------


def act_on_chosen(
    act: Act, database: Database, which: bulk.Filter, out: Output, rate: float | None, dry_run: bool, yes: bool,
    how: dict[str, Any],
) -> int:  # fmt: skip
    """One act on all that the filter chooses, asked for first; or, of a dry run, how many and which that would be."""
    with reading(database) as (connection, _):
        chosen = bulk.look(connection, act, which)
    if dry_run or not chosen.count:
        said = f"{_counted(chosen.count)} would be {act.done}"
        if out.as_json:
            out.answer({"dry_run": dry_run, "chosen": chosen.count, "sample": chosen.sample, **asdict(bulk.Moved())})
        else:
            out.line(said)
            for row_id in chosen.sample:
                out.line(f"  {row_id}")
        return exits.OK
    if not yes:
        _ask(act, chosen.count, chosen.sample)
    moved = bulk.Moved()

    def progress(so_far: bulk.Moved) -> None:
        nonlocal moved
        moved = so_far
        note(f"{moved.done:,} {act.done}")

    with answering(so_far=lambda: f"{moved.done:,} {act.done}"):
        bulk.act_on_all(
            database.bounded(room.ANSWER_SECONDS), act, which, rate=rate, progress=progress, **how
        )  # fmt: skip
    if out.as_json:
        out.answer({"dry_run": False, "chosen": chosen.count, "sample": chosen.sample, **asdict(moved)})
    else:
        out.line(f"{moved.done:,} {act.done}, {moved.moved_on:,} had moved on, {moved.busy:,} busy")
    return exits.CONFLICT if moved.busy else exits.OK


ACTS = (
    _command(operate.CANCEL, "Take deliveries back that are not done; what one that runs goes on to write is refused."),
    _command(operate.RESCHEDULE, "Have waiting deliveries come due at another time."),
    _command(operate.REDRIVE, "Send dead or failed deliveries round again, with a new budget and the same key."),
    _command(
        operate.DISCARD, "Give up on dead or failed deliveries: they hold up nobody, and go after their retention."
    ),
    _command(
        operate.RELEASE, "Let the sweeps see deliveries again that one failed on and held back. Mend the cause first."
    ),
)
