"""`durable doctor`: every fact that has to hold, looked at once, with what mends those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from durable_core import sweeps
from durable_core.cli import exits
from durable_core.cli.output import Output
from durable_core.cli.where import Where, options
from durable_core.database.connections import Database
from durable_core.database.statements import use_schema
from durable_core.doctor import database as of_database
from durable_core.doctor import process, standstill, work
from durable_core.doctor.findings import Check, Examination, Finding, Status, examine

if TYPE_CHECKING:
    from durable_core.celery_binding import Durable

NO_APP = "no app was named with -A"

MARKS = {Status.FAIL: "FAIL", Status.WARN: "warn", Status.NOTE: "note", Status.PASS: "ok"}


@click.command()
@options
@click.option("--strict", is_flag=True, help="Exit 6 on warnings too; for a gate before a deploy.")
@click.option("-v", "--verbose", is_flag=True, help="Show what is well, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def doctor(where: Where, strict: bool, verbose: bool, as_json: bool) -> int:
    """
    Look at the schema, the server, the work, the broker, the workers and the settings; name what mends each fault.

    It changes nothing, needs no right but those of the application, and waits for nothing longer than some seconds.
    Without -A it cannot look at the broker, the workers and the app's settings. Exit 6 when a check fails.
    """
    out = Output(as_json)
    with where.database() as (database, durable):
        made = examine(_checks(database, durable, schema_given="schema" in where.given))
    if durable is None:
        made.skipped |= {check: NO_APP for check in ("settings", "beat", "celery", "broker", "workers")}
    unhealthy = made.unhealthy(strict=strict)
    if as_json:
        out.answer(
            {
                "healthy": not unhealthy,
                "failed": len(made.of(Status.FAIL)),
                "warned": len(made.of(Status.WARN)),
                "noted": len(made.of(Status.NOTE)),
                "passed": len(made.of(Status.PASS)),
                "findings": made.findings,
                "not_looked_at": made.skipped,
            }
        )
    else:
        _print(out, made, verbose)
    return exits.UNHEALTHY if unhealthy else exits.OK


def _checks(database: Database, durable: Durable | None, *, schema_given: bool) -> Sequence[Check]:
    if durable is None:
        installation = work.Installation(sweeps.SWEEPS, assumed=f"the interval is the default, for {NO_APP}")
        return [
            *of_database.checks(
                database, grace_seconds=sweeps.Bounds().lease_seconds,
                assumed_grace=f"the lease is the default, for {NO_APP}",
                assumed_connection=f"the app may connect otherwise, for {NO_APP}",
            ),
            *work.checks(database, lambda: installation),
            *standstill.checks(database, lambda: installation),
            *process.checks(),
        ]  # fmt: skip
    # Not at the top: the commands that need no Celery do not wait for its import.
    from durable_core.celery_binding import doctor as of_celery

    of_app = of_celery.checks(durable, lambda: _due(database))
    at_hand = of_celery.usable(durable)
    if at_hand.faults and not schema_given:
        # The app's own way to its schema raises for any setting that is wrong, and would close the whole database.
        use_schema(at_hand.settings.schema)
    # What the app declares is known once its modules are loaded, which is a check of its own: the settings come first.
    return [
        *(check for check in of_app if check.room == of_celery.SETTINGS_ROOM),
        *of_database.checks(
            database, grace_seconds=at_hand.settings.lease_seconds,
            assumed_grace=at_hand.instead_of(of_celery.LEASE, "the lease is the default"),
        ),
        *work.checks(database, lambda: of_celery.installation(durable)),
        *standstill.checks(database, lambda: of_celery.installation(durable)),
        *(check for check in of_app if check.room != of_celery.SETTINGS_ROOM),
        *process.checks(),
    ]  # fmt: skip


def _due(database: Database) -> dict[str, bool]:
    with of_database.looking(database) as connection:
        due, others = work.due_queues(connection), standstill.due_queues(connection)
    return {queue: due.get(queue, False) or others.get(queue, False) for queue in {*due, *others}}


def _print(out: Output, made: Examination, verbose: bool) -> None:
    """The worst first, with its mend below; what is well only where it was asked for."""
    shown = [Status.FAIL, Status.WARN, Status.NOTE, *([Status.PASS] if verbose else [])]
    findings: list[Finding] = [finding for status in shown for finding in made.of(status)]
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        code = "" if finding.status is Status.PASS else f"  [{finding.reason}]"
        out.line(f"{MARKS[finding.status]:<4}  {finding.check:<{width}}  {finding.observed}{code}")
        if finding.fix:
            out.line(f"{'':<4}  {'':<{width}}  mend: {finding.fix}")
    if findings:
        out.line()
    if made.skipped:
        whys = sorted(set(made.skipped.values()))
        for why in whys:
            out.line(f"not looked at: {', '.join(c for c, w in made.skipped.items() if w == why)} ({why})")
    counts = {status: len(made.of(status)) for status in Status}
    noted = f"{counts[Status.NOTE]} noted, " if counts[Status.NOTE] else ""
    out.line(f"{counts[Status.FAIL]} failed, {counts[Status.WARN]} to mind, {noted}{counts[Status.PASS]} well")
