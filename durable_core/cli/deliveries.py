"""`durable deliveries`: find a delivery, and read what became of it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from durable_core.claims import journal
from durable_core.cli.acts import ACTS
from durable_core.cli.database import reading
from durable_core.cli.exits import TooSlow
from durable_core.cli.find import one_delivery
from durable_core.cli.output import Output, instant, note, span
from durable_core.cli.where import Where, options
from durable_core.deliveries import read
from durable_core.deliveries.read import MOST_PER_PAGE, Delivery
from durable_core.deliveries.waiting import waits_of
from durable_core.deliveries.why import attempts, says, why
from durable_core.states import DeliveryState

if TYPE_CHECKING:
    from durable_core.celery_binding import Durable


JOURNAL_LINES = 200
"""Lines of its history that `show` has, the newest; `durable journal` pages through all."""


@click.group()
def deliveries() -> None:
    """Look at deliveries; cancel, reschedule, redrive, discard or release them, one by one or by a filter."""


for act in ACTS:
    deliveries.add_command(act)


@deliveries.command("list")
@options
@click.option("--state", type=click.Choice([state.value for state in DeliveryState]), help="Only in this state.")
@click.option("--kind", help="Only of this kind.")
@click.option("--queue", help="Only in this queue.")
@click.option("--key", help="Only with this idempotency key.")
@click.option("--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many.")
@click.option("--after", metavar="ID", help="The last id of the page before.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def list_(
    where: Where, state: str | None, kind: str | None, queue: str | None, key: str | None, limit: int,
    after: str | None, as_json: bool,
) -> None:  # fmt: skip
    """
    Deliveries, newest first, a page at a time.

    Filters read until a page is full: with a filter that few rows of a large table match, the database may
    need longer than the 5 seconds that any look gets. Then how many there are is said, by the planner's estimate.
    """
    out = Output(as_json)
    filters = {"state": state, "kind": kind, "queue": queue, "key": key}
    with where.database() as (database, _):
        try:
            with reading(database) as (connection, _):
                now = read.now(connection)
                found = read.page(connection, **filters, after=after, limit=limit)
        except TooSlow as slow:
            with reading(database) as (connection, _):
                about = read.estimate(connection, **filters)
            raise TooSlow(
                f"a page of these took longer than any look gets and was given up; estimate of how many there are: "
                f"about {about:,}, by the planner's statistics. --state dead, failed or processing, and --kind with "
                "--key, go by an index."
            ) from slow
    more = found[-1].id if len(found) == limit else None
    if as_json:
        out.answer({"deliveries": [_json(row) for row in found], "next_after": more})
        return
    out.table(
        ("ID", "KIND", "QUEUE", "STATE", "ATTEMPTS", "DUE", "KEY", "ERROR"),
        [
            (row.id, row.kind, row.queue, row.state.value, attempts(row), _due(row, now), row.key, row.error_code)
            for row in found
        ],
    )
    if more:
        note(f"there may be more: --after {more}")


@deliveries.command()
@options
@click.argument("row_id", metavar="ID")
@click.option("--arguments", is_flag=True, help="Show the payload too, secrets masked; it may hold personal data.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def show(where: Where, row_id: str, arguments: bool, as_json: bool) -> None:
    """One delivery: where it is, why it waits, its last error, and its history. Any name of it that `find` knows."""
    out = Output(as_json)
    with where.database() as (database, durable), reading(database) as (connection, _):
        if arguments and durable is not None:
            _learn_secrets(durable)
        now = read.now(connection)
        row = one_delivery(connection, row_id)
        found = waits_of(connection, row)
        lines = journal.read(connection, row.id, limit=JOURNAL_LINES)
    if as_json:
        waiting = [{**asdict(one), "blocks": one.blocks, "says": says(row, one, now)} for one in found]
        complete = len(lines) < JOURNAL_LINES
        told = {
            "why": " ".join(why(row, found, now, lines)), "waits": waiting, "journal": lines,
            "journal_complete": complete,
        }  # fmt: skip
        out.answer({**_json(row, arguments=arguments), **told})
        return
    out.facts(
        [
            ("id", row.id),
            ("kind", row.kind),
            ("queue", f"{row.queue}, priority {row.priority}"),
            ("key", row.key),
            ("state", row.state.value),
            *(("why", sentence) for sentence in why(row, found, now, lines)),
            ("held", row.held_reason),
            ("attempts", attempts(row)),
            ("interrupted", f"{row.interruptions} of {row.max_interruptions}" if row.interruptions else None),
            ("created", _ago(row.created_at, now)),
            ("due", _due(row, now) if row.state is DeliveryState.PENDING else None),
            ("expires", None if row.expires_at is None else instant(row.expires_at)),
            ("ordering key", row.ordering_key),
            ("discarded", _ago(row.discarded_at, now)),
            ("finished", _ago(row.finished_at, now)),
            ("fence", f"{row.fence}, settled {row.settled_fence}"),
            ("error", row.error_code),
            ("result", None if row.result is None else str(row.result)),
            ("arguments", str(row.shown_arguments) if arguments else None),
        ]
    )
    if row.error_message:
        out.line()
        for text in row.error_message.rstrip().splitlines():
            out.line(f"  {text}")
    if lines:
        out.line()
        out.table(
            ("AT", "MOVE", "FROM", "TO", "FENCE", "BY", "REASON"),
            [(instant(n.at), n.move, n.from_state, n.to_state, n.fence, n.by, n.reason) for n in lines],
        )
    if len(lines) == JOURNAL_LINES:
        note(f"older lines: `durable journal {row.id} --after {lines[0].seq}`")


def _learn_secrets(durable: Durable) -> None:
    """Load the app's task modules, as a worker does: their kinds say which arguments are secret."""
    try:
        durable.app.loader.import_default_modules()
    except Exception as error:  # whatever the host's modules raise while they load
        note(f"the app's modules did not load ({type(error).__name__}): secrets are known by their names alone")


# --- words about one row -----------------------------------------------------------------------------


def _due(row: Delivery, now: datetime) -> str:
    if row.state is not DeliveryState.PENDING:
        return ""
    seconds = (row.due_at - now).total_seconds()
    return f"in {span(seconds)}" if seconds > 0 else f"{span(-seconds)} ago"


def _ago(at: datetime | None, now: datetime) -> str | None:
    return None if at is None else f"{instant(at)} ({span((now - at).total_seconds())} ago)"


def _json(row: Delivery, *, arguments: bool = False) -> dict[str, Any]:
    return {**row.as_json(arguments=arguments), "attempts_used": attempts(row)}
