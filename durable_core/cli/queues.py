"""`durable queues` and `durable kinds`: how much work is in which state, what is paused, what is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Connection

from durable_core import kinds as registry
from durable_core.cli.database import reading
from durable_core.cli.output import Output, instant, note, span
from durable_core.cli.where import Where, options
from durable_core.deliveries import paused, read
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.paused import Pause
from durable_core.deliveries.read import MOST_PER_PAGE
from durable_core.deliveries.survey import COUNTS, Count, Line, Survey, survey
from durable_core.kinds import Kind
from durable_core.operations.survey import survey as survey_of_operations
from durable_core.plans.survey import survey as survey_of_plans

if TYPE_CHECKING:
    from durable_core.celery_binding import Durable

SHOWN = ("due", "later", "retrying", "processing", "failed", "dead", "sent", "steps", "operations")
HEADINGS = (
    "OLDEST DUE", "DUE", "LATER", "RETRYING", "PROCESSING", "FAILED", "DEAD", "SENT", "STEPS", "OPERATIONS",
    "LAST ENDED", "PAUSED BY",
)  # fmt: skip

MOST_DELAYS = 5
"""So many delays of a back-off are shown: by then it is at its cap, or plain how it goes on."""

_limit = click.option(
    "--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many."
)
_after = click.option("--after", metavar="NAME", help="The last name of the page before.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")


@click.command()
@options
@_limit
@_after
@_json
@click.pass_obj
def queues(where: Where, limit: int, after: str | None, as_json: bool) -> None:
    """
    Each queue by name: its oldest due delivery, how many are in which state, who paused it and why.

    Counts are of a bounded look: 20,000 due rows, as many later ones, the newest 10,000 that failed, that are dead and
    that are done with. Where there are more a count has a + and means at least. SENT is of those not pruned yet.
    STEPS of plans and OPERATIONS are those that wait for a worker, at most 1,000 of each queue.
    """
    out = Output(as_json)
    with where.database() as (database, durable), reading(database) as (connection, _):
        now = read.now(connection)
        pauses = {one.name: one for one in paused.pauses(connection) if one.what == "queue"}
        _load(durable)
        declared = {kind.queue for kind in registry.known()} if durable else set()
        lines = _survey(connection).by_queue({*pauses, *declared})
    page, more = _page(lines, after, limit)
    if as_json:
        shown = [{"queue": one.name, **_facts(one, now), "kinds": one.others, **_pause(pauses, one)} for one in page]
        out.answer({"queues": shown, "next_after": more})
        return
    out.table(("QUEUE", *HEADINGS), [(one.name, *_cells(one, now, pauses)) for one in page])
    _say_more(more)


@click.command()
@options
@_limit
@_after
@_json
@click.pass_obj
def kinds(where: Where, limit: int, after: str | None, as_json: bool) -> None:
    """
    Each kind by name: as `durable queues`, and with -A what the code declares of it.

    With -A a kind that has rows and no code that declares it is named: no worker of this app can run them.
    """
    out = Output(as_json)
    with where.database() as (database, durable), reading(database) as (connection, _):
        now = read.now(connection)
        pauses = {one.name: one for one in paused.pauses(connection) if one.what == "kind"}
        _load(durable)
        declared = {kind.name: kind for kind in registry.deliveries} if durable else {}
        names = {kind.name for kind in registry.known()} if durable else set()
        lines = _survey(connection).by_kind({*pauses, *names})
    page, more = _page(lines, after, limit)
    known = durable is not None
    if as_json:
        shown = [
            {
                "kind": one.name, "declared": _is_declared(one.name) if known else None,
                "policy": _policy(declared.get(one.name)), **_facts(one, now), "queues": one.others,
                **_pause(pauses, one),
            }
            for one in page
        ]  # fmt: skip
        out.answer({"kinds": shown, "next_after": more})
        return
    out.table(
        ("KIND", "DECLARED", *HEADINGS),
        [(one.name, _declared_as(one.name) if known else None, *_cells(one, now, pauses)) for one in page],
    )
    if declared:
        out.line()
        out.table(
            ("KIND", "QUEUE", "PRIORITY", "ATTEMPTS", "BACKOFF", "TIMEOUT", "CRON"),
            [_terms(declared[one.name]) for one in page if one.name in declared],
        )
    _say_more(more)


def _survey(tx: Connection) -> Survey:
    return survey(tx) + survey_of_plans(tx) + survey_of_operations(tx)


def _load(durable: Durable | None) -> None:
    """Load the app's task modules as a worker loads them: the registry then has all that it declares."""
    if durable is None:
        return
    try:
        durable.app.loader.import_default_modules()
    except Exception as error:  # whatever the host's modules raise while they load
        note(f"the app's modules did not load ({type(error).__name__}): kinds that they declare are missing here")


def _page(lines: list[Line], after: str | None, limit: int) -> tuple[list[Line], str | None]:
    left = [one for one in lines if after is None or one.name > after]
    return left[:limit], left[limit - 1].name if len(left) > limit else None


def _say_more(more: str | None) -> None:
    if more is not None:
        note(f"there are more: --after {more}")


def _cells(one: Line, now: datetime, pauses: dict[str, Pause]) -> Sequence[object]:
    pause = pauses.get(one.name)
    return (
        None if one.oldest_due_at is None else span((now - one.oldest_due_at).total_seconds()),
        *(_counted(one.counts[name]) for name in SHOWN),
        None if one.last_finished_at is None else f"{span((now - one.last_finished_at).total_seconds())} ago",
        None if pause is None else paused_by(pause),
    )


def paused_by(pause: Pause) -> str:
    """Who paused it, why, until when."""
    until = "" if pause.until is None else f", until {instant(pause.until)}"
    return f"{pause.by}: {pause.reason}{until}"


def _counted(count: Count) -> str:
    return f"{count.rows}{'+' if count.at_least else ''}"


def _facts(one: Line, now: datetime) -> dict[str, Any]:
    age = None if one.oldest_due_at is None else max(0.0, (now - one.oldest_due_at).total_seconds())
    return {
        "oldest_due_at": one.oldest_due_at,
        "oldest_due_age_seconds": age,
        "last_finished_at": one.last_finished_at,
        "counts": {name: asdict(one.counts[name]) for name in COUNTS},
    }


def _pause(pauses: dict[str, Pause], one: Line) -> dict[str, Any]:
    return {"pause": pauses.get(one.name)}


# --- what the code says of a kind ----------------------------------------------------------------------


def _is_declared(name: str) -> bool:
    return _found(name) is not None


def _declared_as(name: str) -> str:
    kind = _found(name)
    if kind is None:
        return "no code declares it"
    return "yes" if kind.name == name else f"as {kind.name}"


def _found(name: str) -> Kind | None:
    """The kind of this name, of whatever contract."""
    return next((kind for one in registry.CONTRACTS.values() if (kind := one.find(name)) is not None), None)


def _policy(kind: DeliveryKind[..., Any] | None) -> dict[str, Any] | None:
    if kind is None:
        return None
    cadence = kind.cadence
    return {
        "queue": kind.queue,
        "priority": kind.priority,
        "max_attempts": kind.max_attempts,
        "max_interruptions": kind.max_interruptions,
        "timeout_seconds": kind.timeout,
        "backoff": asdict(kind.backoff),
        "ordering": "strict" if kind.is_strict else "loose",
        "formerly": list(kind.names[1:]),
        "cron": None if cadence is None else cadence.cron,
        "timezone": None if cadence is None else cadence.timezone,
        "missed": None if cadence is None else cadence.missed,
    }


def _terms(kind: DeliveryKind[..., Any]) -> Sequence[object]:
    delays = [kind.backoff.seconds(failure) for failure in range(1, min(kind.max_attempts, MOST_DELAYS + 1))]
    return (
        kind.name, kind.queue, kind.priority, kind.max_attempts,
        ", ".join(span(delay) if delay >= 1 else f"{delay:g}s" for delay in delays), span(kind.timeout),
        None if kind.cadence is None else f"{kind.cadence.cron} {kind.cadence.timezone}",
    )  # fmt: skip
