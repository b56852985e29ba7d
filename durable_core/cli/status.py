"""`durable status`: one screen that says whether work is late, where, and whether the rescue runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import click

from durable_core import sweeps
from durable_core.cases import survey as cases
from durable_core.cli import exits
from durable_core.cli.database import reading
from durable_core.cli.output import Output, note, span
from durable_core.cli.queues import paused_by
from durable_core.cli.where import Where, options
from durable_core.database.statements import beside, current_schema
from durable_core.database.transactions import run
from durable_core.deliveries import paused, read
from durable_core.deliveries.paused import Pause
from durable_core.deliveries.read import COUNT_LIMIT, EXPIRES_SOON_SECONDS, Expiries, QueueLine
from durable_core.operations import read as operations
from durable_core.operations.read import Live
from durable_core.plans import read as plans

_statements = beside(__file__)

DEFAULT_MAX_AGE = 300.0
REASONS = {
    "paused": "paused",
    "behind": "behind another of their ordering key",
    "waiting_for_handler": "no worker that was told knows the kind",
    "waiting_for_arguments": "their arguments do not fit the code",
    "held": "held back by a sweep that failed on them",
    "retrying": "backing off after a failure",
}
"""Why what waits does: the count of a queue, and its words."""


@dataclass(frozen=True)
class SweepLine:
    """
    One sweep as it stands; `age_seconds` is None for one that has never begun, `error` for one that ended well.

    `late` is shown after three intervals, and `missing` is a problem: a deploy may hold up a sweep of every second.
    `by_a_worker` says that a worker ran it last, because no beat did.
    """

    name: str
    interval_seconds: float
    began_at: datetime | None
    age_seconds: float | None
    ended_at: datetime | None
    moved: int | None
    error: str | None
    late: bool
    missing: bool
    by_a_worker: bool


@click.command()
@options
@click.option(
    "--check", "gate", is_flag=True,
    help="Exit 6 when work or a sweep is late, or a sweep failed; for probes and deploys.",
)  # fmt: skip
@click.option(
    "--max-age", type=click.FloatRange(min=0), default=DEFAULT_MAX_AGE, show_default=True, metavar="SECONDS",
    help="How old the oldest due delivery may be, and the oldest lease that ended.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def status(where: Where, gate: bool, max_age: float, as_json: bool) -> int:
    """
    How old the oldest due delivery of each queue is, why what waits does, what is paused and by whom, what died, and
    when the sweeps last ran.
    """
    out = Output(as_json)
    with where.database() as (database, durable), reading(database) as (connection, revision):
        now = read.now(connection)
        queues = read.queues(connection)
        pauses = paused.pauses(connection)
        ended = read.ended(connection)
        expiries = read.expiries(connection)
        stand = sweeps.standings(connection, durable.settings.sweeps() if durable else sweeps.SWEEPS)
        live = operations.live(connection)
        at_cases = cases.counts(connection)
        lapsed = run(connection, _statements.lapsed)[0]["seconds"]
        proposed = plans.waiting(connection)
    lines = [_sweep(one) for one in stand]
    problems = _problems(queues, pauses, lines, now, lapsed, max_age)
    if live.overdue:
        problems.append(
            f"{counted(live.overdue)} operations are overdue: `durable operations list` shows their patience"
        )
    if as_json:
        out.answer(
            {
                "healthy": not problems,
                "problems": problems,
                "now": now,
                "schema": {"name": current_schema(), "revision": revision},
                "count_limit": COUNT_LIMIT,
                "queues": [_queue_json(line, now) for line in queues],
                "waiting": {reason: sum(getattr(line, reason) for line in queues) for reason in REASONS},
                "pauses": pauses,
                **ended,
                "plans": proposed,
                "expiring": expiries.expiring,
                "expiring_within_seconds": EXPIRES_SOON_SECONDS,
                "expired": expiries.expired,
                "expired_within_seconds": expiries.expired_within_seconds,
                "oldest_lapsed_lease_seconds": lapsed,
                "operations": asdict(live),
                "cases": asdict(at_cases),
                "sweeps": lines,
            }
        )
    else:
        _print(out, queues, pauses, ended, expiries, proposed, live, at_cases, lines, now)
    if gate:
        for problem in problems:
            note(f"unhealthy: {problem}")
    return exits.UNHEALTHY if gate and problems else exits.OK


def _sweep(one: sweeps.Standing) -> SweepLine:
    return SweepLine(
        one.sweep.name, one.sweep.interval, one.began_at, one.age_seconds, one.ended_at, one.moved, one.error,
        one.late, one.missing, one.by_a_worker,
    )  # fmt: skip


def _age(line: QueueLine, now: datetime) -> float | None:
    return None if line.oldest_due_at is None else max(0.0, (now - line.oldest_due_at).total_seconds())


def _problems(
    queues: list[QueueLine], pauses: list[Pause], lines: list[SweepLine], now: datetime, lapsed: float | None,
    max_age: float,
) -> list[str]:  # fmt: skip
    found = []
    for queue in queues:
        age = _age(queue, now)
        if age is not None and age > max_age:
            found.append(
                f"the oldest due delivery of queue {queue.queue} has waited {span(age)}, more than {span(max_age)}"
                f"{_paused(queue, pauses)}"
            )
    if lapsed is not None and lapsed > max_age:
        found.append(f"a lease ended {span(lapsed)} ago and reap has not taken its delivery back")
    for line in lines:
        if line.missing:
            found.append(f"sweep {line.name} {_since(line)}; it is to begin every {span(line.interval_seconds)}")
        elif line.by_a_worker:
            found.append(
                f"sweep {line.name} was last run by a worker: no beat drives it, or nobody reads durable.control"
            )
        if line.error is not None:
            found.append(f"sweep {line.name} failed: {line.error}")
    return found


def _paused(queue: QueueLine, pauses: list[Pause]) -> str:
    """That nobody is to wonder about workers: the queue is paused; or how many of its due rows are, by their kind."""
    for one in pauses:
        if (one.what, one.name) == ("queue", queue.queue):
            return f"; the queue is paused by {paused_by(one)}"
    return f"; {counted(queue.paused)} of its due rows are of a paused kind" if queue.paused else ""


def _since(line: SweepLine) -> str:
    if line.age_seconds is None:
        return "has never begun"
    if line.age_seconds < 0:
        return f"last began {span(-line.age_seconds)} ahead of the database's clock, which was set back"
    return f"last began {span(line.age_seconds)} ago"


def _queue_json(line: QueueLine, now: datetime) -> dict[str, Any]:
    return {
        "queue": line.queue,
        "oldest_due_at": line.oldest_due_at,
        "oldest_due_age_seconds": _age(line, now),
        "due": line.due,
        "later": line.later,
        "processing": line.processing,
        **{reason: getattr(line, reason) for reason in REASONS},
    }


def counted(count: int) -> str:
    """A count as people read it: at the limit it means "or more"."""
    return f"{count}+" if count >= COUNT_LIMIT else str(count)


def _print(
    out: Output, queues: list[QueueLine], pauses: list[Pause], ended: dict[str, int], expiries: Expiries,
    proposed: plans.Waiting, live: Live, at_cases: cases.Counts, lines: list[SweepLine], now: datetime,
) -> None:  # fmt: skip
    if queues:
        out.table(
            ("QUEUE", "OLDEST DUE", "DUE", "PAUSED", "BEHIND", "NO HANDLER", "LATER", "PROCESSING"),
            [
                (
                    line.queue,
                    None if (age := _age(line, now)) is None else span(age),
                    counted(line.due), counted(line.paused), counted(line.behind), counted(line.waiting_for_handler),
                    counted(line.later), counted(line.processing),
                )
                for line in queues
            ],
        )  # fmt: skip
    else:
        out.line("no delivery waits or runs")
    out.line()
    reasons = [(words, sum(getattr(line, reason) for line in queues)) for reason, words in REASONS.items()]
    if any(count for _, count in reasons):
        out.facts([(counted(count), words) for words, count in reasons if count])
        out.line()
    if pauses:
        out.table(
            ("PAUSED", "NAME", "SINCE", "BY"),
            [(one.what, one.name, f"{span((now - one.since).total_seconds())} ago", paused_by(one)) for one in pauses],
        )
        out.line()
    out.line(
        f"dead {counted(ended['dead'])}, failed {counted(ended['failed'])}, "
        f"expiring within {span(EXPIRES_SOON_SECONDS)} {counted(expiries.expiring)}, "
        f"expired in the last {span(expiries.expired_within_seconds)} {counted(expiries.expired)}"
    )
    if proposed.pending or proposed.executing:
        oldest = proposed.oldest_pending_at
        since = "" if oldest is None else f", the oldest for {span((now - oldest).total_seconds())}"
        out.line(
            f"plans that wait for a person {counted(proposed.pending)}{since}; executing {counted(proposed.executing)}"
        )
    if live.queued or live.running:
        out.line(
            f"operations: {counted(live.queued)} to be issued, {counted(live.running)} running, "
            f"{counted(live.overdue)} overdue"
        )
    if any(asdict(at_cases).values()):
        out.line(
            f"cases: {counted(at_cases.claimed)} claimed, {counted(at_cases.lapsed)} of them lapsed; "
            f"events: {counted(at_cases.pending_events)} pending, {counted(at_cases.dead_letters)} dead letters"
        )
    out.line()
    out.table(
        ("SWEEP", "BEGAN", "EVERY", "MOVED", "LATE", "ERROR"),
        [
            (
                line.name,
                "never" if line.age_seconds is None else f"{span(line.age_seconds)} ago",
                span(line.interval_seconds), line.moved,
                "late" if line.late else "by a worker" if line.by_a_worker else "", line.error,
            )
            for line in lines
        ],
    )  # fmt: skip
