"""`durable journal`: what failed, was rescued or was done by a person; of one row, or of all lately."""

from __future__ import annotations

import click

from durable_core.cli.acts import Duration
from durable_core.cli.database import reading
from durable_core.cli.find import one_row
from durable_core.cli.output import Output, note, span
from durable_core.cli.where import Where, options
from durable_core.deliveries import read
from durable_core.deliveries.history import history
from durable_core.deliveries.read import MOST_PER_PAGE


@click.command()
@options
@click.argument("text", metavar="[ID]", required=False)
@click.option("--since", type=Duration(), help="Only lines of so long ago at most, such as 1h.")
@click.option("--move", help="Only this move, such as fail, reap, redrive or cancel.")
@click.option("--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many.")
@click.option("--after", type=int, metavar="NUMBER", help="The last line of the page before.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def journal(
    where: Where, text: str | None, since: float | None, move: str | None, limit: int, after: int | None, as_json: bool
) -> None:
    """
    The journal, newest first, a page at a time: of one row, named as for `durable find`, or of all.

    Every failure, rescue and act of a person has a line; a claim and a success have none. A page reads 10,000 lines at
    most: with --move it may be short and have a next one all the same.
    """
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = read.now(connection)
        row_id = None if text is None else one_row(connection, text).id
        page = history(connection, row_id=row_id, since_seconds=since, move=move, after=after, limit=limit)
    if as_json:
        out.answer({"lines": page.entries, "next_after": page.next_after, "looked_at": page.looked_at})
        return
    out.table(
        ("LINE", "AGO", "KIND", "ID", "MOVE", "FROM", "TO", "ATTEMPT", "BY", "REASON"),
        [
            (
                n.seq, span((now - n.at).total_seconds()), n.kind or n.contract, n.row_id, n.move, n.from_state,
                n.to_state, n.attempt, n.by, n.reason,
            )
            for n in page.entries
        ],
    )  # fmt: skip
    if page.next_after is not None:
        note(f"there may be more: --after {page.next_after}")
