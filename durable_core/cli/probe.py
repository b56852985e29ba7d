"""`durable probe`: one question of a container, one line, and an exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from durable_core import probe as quick
from durable_core import pulse
from durable_core.cli import exits
from durable_core.cli.output import Output
from durable_core.cli.where import Where, options
from durable_core.database.environment import REDIS_VARIABLE
from durable_core.doctor import database as of_database
from durable_core.doctor.findings import Check, Finding, Status, examine
from durable_core.doctor.schema import revision

if TYPE_CHECKING:
    from kombu import Connection

    from durable_core.celery_binding import Durable

BROKER_ROOM = "broker"


@click.command()
@options
@click.option("--live", "asked", flag_value="live", help="Is it to be left alone? Asks no server.")
@click.option("--ready", "asked", flag_value="ready", help="Could it work now? Database, schema, broker, consumer.")
@click.option("--worker", metavar="NAME", help="The worker that is meant: mail@host, or mail.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def probe(where: Where, asked: str | None, worker: str | None, as_json: bool) -> int:
    """
    Ask for a container, in one line: exit 0, or 6 when the answer is no.

    --live reads the pulse that each worker's process writes to a file on this machine: it says no when the process is
    gone, stopped, or its main loop hangs, whatever the servers do. `python -m durable_core.probe --live` answers the
    same in a tenth of the time. --ready asks the database, its schema and the broker; with --worker also whether that
    worker consumes, and tells one that is idle from one that is alive and consumes nothing.
    """
    if asked is None:
        raise click.UsageError("say what is asked: --live or --ready.")
    out = Output(as_json)
    if asked == "live":
        ok, says, answer = quick.live(worker)
    else:
        ok, says, answer = _ready(where, worker)
    if as_json:
        out.answer(answer)
    else:
        out.line(says)
    return exits.OK if ok else exits.UNHEALTHY


def _ready(where: Where, worker: str | None) -> tuple[bool, str, dict[str, object]]:
    with where.database() as (database, durable):
        broker = _broker(durable)
        made = examine(
            [
                Check("database", of_database.ROOM, lambda: of_database.reachable(database), gate=True),
                Check("revision", of_database.ROOM, of_database.inside(database, revision)),
                *([] if broker is None else [Check("broker", BROKER_ROOM, _answers(broker), gate=True)]),
            ]
        )
        app = None if durable is None else str(durable.app.main or "")
        reads = pulse.judged(worker, app) if worker is not None else []
        if broker is not None and not any(one.check == "broker" and one.status is Status.FAIL for one in made.findings):
            reads = [_beside_its_queues(read, broker) for read in reads]
            if any(read.verdict is pulse.Verdict.MESSAGES_LIE for read in reads):
                # The count was of now, and its word older: what came in between is no fault of a worker that slept.
                time.sleep(pulse.WRITTEN_EVERY * 1.5)
                reads = [_beside_its_queues(read, broker) for read in pulse.judged(worker, app)]
    # A look that failed is no yes.
    wrong = [one for one in made.findings if one.status is Status.FAIL or one.reason == "COULD_NOT_LOOK"]
    ok = not wrong and all(read.consuming for read in reads)
    told = [f"{one.check}: {one.observed} [{one.reason}]" for one in wrong]
    told += [quick.said(read) for read in reads if ok or not read.consuming]
    if ok and not told:
        told = [
            "the database answers, at a revision that this code runs on"
            + ("" if broker is None else "; so does the broker")
        ]
    if broker is None:
        made.skipped["broker"] = f"neither -A nor {REDIS_VARIABLE} names one"
        told.append(f"broker not asked: {made.skipped['broker']}")
    answer: dict[str, object] = {
        "ok": ok, "asked": "ready", "findings": made.findings, "not_looked_at": made.skipped,
        "workers": quick.as_json(reads),
    }  # fmt: skip
    return ok, f"{'ready' if ok else 'not ready'}: {'; '.join(told)}", answer


def _broker(durable: Durable | None) -> Callable[[], Connection] | None:
    """How to reach the broker: as the app does, or as the variable says; None where nobody names one."""
    url = os.environ.get(REDIS_VARIABLE)
    if durable is None and not url:
        return None
    from durable_core.celery_binding import doctor as of_celery

    if durable is not None:
        return lambda: of_celery.bounded(durable)
    return lambda: of_celery.bounded_at(str(url))


def _answers(broker: Callable[[], Connection]) -> Callable[[], Iterable[Finding]]:
    def look() -> Iterator[Finding]:
        from durable_core.celery_binding import doctor as of_celery

        return of_celery.answers(broker())

    return look


def _beside_its_queues(read: pulse.Read, broker: Callable[[], Connection]) -> pulse.Read:
    from durable_core.celery_binding import doctor as of_celery

    if read.pulse is None or not read.consuming or not read.pulse.free:
        return read
    try:
        return pulse.with_lying(read, of_celery.lying(broker(), read.pulse.queues))
    except Exception as error:  # it answered a moment ago; what it says now is no fault of the worker
        return replace(read, says=f"{read.says} (its queues could not be counted: {type(error).__name__})")
