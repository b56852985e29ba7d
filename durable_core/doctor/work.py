"""The work itself: whether the sweeps run, and what waits for a deploy or for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from zoneinfo import ZoneInfo

from sqlalchemy import Connection

from durable_core.database.connections import Database
from durable_core.database.migrate import found as found_revision
from durable_core.database.statements import beside
from durable_core.database.transactions import Row, run
from durable_core.deliveries import paused, read
from durable_core.doctor.database import MOST_NAMED, ROOM, inside
from durable_core.doctor.findings import Check, Finding, Reason, found, or_well, well
from durable_core.sweeps import Sweep, standings

_statements = beside(__file__)

UNREAD_SECONDS = 60.0
"""What is due for less may meet a worker that starts."""

LOOKED_AT = 2000
"""Of each queue so many due rows are looked at, those that have waited longest."""

SLOT_SECONDS = 60.0
"""A slot that nobody decided for so long is passed over; cron looks every second."""

SCHEDULES_SINCE = "0003"


@dataclass(frozen=True)
class Installation:
    """
    What the code at hand knows: the kinds of deliveries, the `steps` of plans, `operations`, and what is `periodic`.

    Each is None where no app was loaded: then nothing is undeclared. `assumed` says why the intervals of the sweeps are
    the defaults, where nobody could be asked.
    """

    sweeps: tuple[Sweep, ...]
    kinds: Collection[str] | None = None
    periodic: Collection[str] | None = None
    steps: Collection[str] | None = None
    operations: Collection[str] | None = None
    assumed: str = ""


def checks(database: Database, installation: Callable[[], Installation]) -> list[Check]:
    """They are behind the gate of the schema, in the same room. The installation is asked when its turn comes."""

    def check(name: str, look: Callable[[Connection], Iterable[Finding]]) -> Check:
        return Check(name, ROOM, inside(database, look))

    return [
        check("sweeps", lambda connection: sweeps(connection, installation())),
        check("waiting", lambda connection: waiting(connection, installation().kinds)),
        check("ended", ended),
        check("pauses", pauses),
        check("schedules", lambda connection: schedules(connection, installation().periodic)),
    ]


def sweeps(connection: Connection, installation: Installation) -> Iterator[Finding]:
    """Whether each began lately, ended well, and was driven by a beat."""
    for one in standings(connection, installation.sweeps):
        name, age = one.sweep.name, one.age_seconds
        if one.missing:
            yield found(
                "sweeps", Reason.SWEEP_LATE, f"{name} {_since(age)}, and is to every {one.sweep.interval:g} s",
                "start a beat (celery -A … beat) and a worker that reads durable.control", assumed=installation.assumed,
            )  # fmt: skip
        elif one.by_a_worker:
            yield found(
                "sweeps", Reason.SWEEP_BY_A_WORKER, f"{name} was last run by a worker, to the rescue",
                "start a beat (celery -A … beat) and a worker that reads durable.control",
            )  # fmt: skip
        if one.error is not None:
            yield found(
                "sweeps", Reason.SWEEP_FAILED, f"{name} ended with an error: {one.error}",
                "mend what the error names; the sweep tries again by itself",
            )  # fmt: skip
        elif age is not None and not one.missing and not one.by_a_worker:
            yield well(
                "sweeps", f"{name} began {age:.0f} s ago on {one.host or 'a host unknown'}",
                assumed=installation.assumed,
            )  # fmt: skip
    for row in run(connection, _statements.hold):
        yield found(
            "sweeps", Reason.SWEEP_HELD_BACK, f"reap takes nothing for another {row['seconds']:.0f} s, after an outage",
            "nothing: live workers beat first; ask again in a minute",
        )  # fmt: skip


def _since(age: float | None) -> str:
    if age is None:
        return "has never begun"
    if age < 0:
        return f"last began {-age:.0f} s ahead of the database's clock, which was set back"
    return f"last began {age:.0f} s ago"


def waiting(connection: Connection, known: Collection[str] | None) -> list[Finding]:
    """Due rows that no deploy has the code for, and rows that a sweep put aside."""
    rows = run(connection, _statements.waiting, most=LOOKED_AT)
    held = [*(row for row in rows if row["held"]), *run(connection, _statements.held)]
    return or_well(
        [*_remarked(rows), *_undeclared(rows, known), *_held(held)],
        "waiting", f"of the {LOOKED_AT} longest due of each queue, none waits for code or for a person",
    )  # fmt: skip


def _remarked(rows: Iterable[Row]) -> Iterator[Finding]:
    for row in rows:
        kind, queue = row["kind"], row["queue"]
        if row["held"]:
            continue  # told below
        if row["waiting_for"] == "handler":
            yield found(
                "waiting", Reason.WAITING_FOR_HANDLER,
                f"{counted(row['rows'])} of {kind} met a worker without its code, on queue {queue}",
                f"deploy the code of {kind} to the workers that read {queue}",
            )  # fmt: skip
        elif row["waiting_for"] == "arguments":
            yield found(
                "waiting", Reason.WAITING_FOR_ARGUMENTS,
                f"{counted(row['rows'])} of {kind} have other arguments than its handler takes, on queue {queue}",
                f"deploy the {kind} that takes them; durable deliveries list --kind {kind} shows them",
            )  # fmt: skip


def _undeclared(rows: Iterable[Row], known: Collection[str] | None) -> Iterator[Finding]:
    strange = _by_kind(row for row in rows if known is not None and row["kind"] not in known)
    if strange:
        yield found(
            "waiting", Reason.KIND_UNDECLARED,
            f"due of kinds that this app does not declare: {named([f'{counted(n)} of {kind}' for kind, n in strange])}",
            "nothing, if another app on this schema declares them; else import the module that does",
        )  # fmt: skip


def _held(rows: Iterable[Row]) -> Iterator[Finding]:
    for kind, count in _by_kind(rows):
        yield found(
            "waiting", Reason.HELD_ROWS, f"{counted(count)} of {kind} made a sweep fail and are passed over",
            f"durable deliveries list --kind {kind}, mend the cause, then: durable deliveries release ID",
        )  # fmt: skip


def _by_kind(rows: Iterable[Row]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["kind"]] += row["rows"]
    return sorted(counts.items())


def due_queues(connection: Connection) -> dict[str, bool]:
    """
    The queues in which a row is due, and whether one of them is overdue: somebody ought to have taken it.

    It has been due for UNREAD_SECONDS, and neither a pause nor a sweep keeps it. One that only became due, or whose
    worker starts anew, is no fault.
    """
    rows = run(connection, _statements.due, patience_seconds=UNREAD_SECONDS, most=LOOKED_AT)
    return {row["queue"]: row["overdue"] for row in rows}


def named(names: Sequence[str]) -> str:
    """So many as anybody reads."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f", and {rest} more" if rest > 0 else "")


def counted(count: int) -> str:
    """Rows as people say them; at the limit it means "or more"."""
    return "1 row" if count == 1 else f"{count}{'+' if count >= LOOKED_AT else ''} rows"


def ended(connection: Connection) -> list[Finding]:
    """What was given up, and waits for a person."""
    counts = read.ended(connection)
    return or_well(
        (
            found(
                "ended", reason, f"{counts[state]}{'+' if counts[state] >= read.COUNT_LIMIT else ''} {state}",
                f"durable deliveries list --state {state}, then redrive or discard them",
            )
            for state, reason in (("dead", Reason.DEAD_DELIVERIES), ("failed", Reason.FAILED_DELIVERIES))
            if counts[state]
        ),
        "ended", "nothing is dead or failed",
    )  # fmt: skip


def pauses(connection: Connection) -> list[Finding]:
    """What is paused, by whom, and why."""
    return or_well(map(_paused, paused.pauses(connection)), "pauses", "nothing is paused")


def _paused(pause: paused.Pause) -> Finding:
    until = "" if pause.until is None else f" until {pause.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return found(
        "pauses", Reason.PAUSED, f"{pause.what} {pause.name} is paused{until} by {pause.by}: {pause.reason}",
        f"durable resume --{pause.what} {pause.name} --by …",
    )  # fmt: skip


def schedules(connection: Connection, declared: Collection[str] | None) -> list[Finding]:
    """Whether every schedule can be followed here."""
    at = found_revision(connection)
    rows = run(connection, _statements.schedules) if at is not None and at >= SCHEDULES_SINCE else []
    strange = [row["kind"] for row in rows if declared is not None and row["kind"] not in declared]
    findings = [finding for row in rows for finding in _of_schedule(row)]
    if strange:
        findings.append(
            found(
                "schedules", Reason.SCHEDULE_UNDECLARED, f"of kinds that this app does not declare: {named(strange)}",
                "nothing, if another app on this schema declares them; else import the module that does, or: "
                "durable cron pause KIND --by … --reason …",
            )
        )  # fmt: skip
    return or_well(findings, "schedules", f"{len(rows)}, in zones that this machine knows")


def _of_schedule(row: Row) -> Iterator[Finding]:
    kind = row["kind"]
    try:
        ZoneInfo(row["timezone"])
    except (KeyError, ValueError, OSError):
        yield found(
            "schedules", Reason.TIMEZONE_UNKNOWN, f"{kind} follows {row['timezone']}, which this machine lacks",
            "pip install --upgrade tzdata, or correct the zone in its declaration",
        )  # fmt: skip
    if row["is_paused"]:
        yield found(
            "schedules", Reason.SCHEDULE_PAUSED, f"{kind} is paused by {row['paused_by']}: {row['paused_reason']}",
            f"durable cron resume {kind} --by …",
        )  # fmt: skip
    elif row["late_seconds"] > SLOT_SECONDS:
        yield found(
            "schedules", Reason.SCHEDULE_LATE,
            f"{kind} was due {row['late_seconds']:.0f} s ago, and no sweep of an app that declares it has looked",
            f"start a beat and a worker of that app; if the kind is gone: durable cron pause {kind} --by … --reason …",
        )  # fmt: skip
