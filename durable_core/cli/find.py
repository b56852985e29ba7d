"""`durable find` and `durable why`: what an id names, and in one sentence why it does not run."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Connection

from durable_core.cases import survey as cases
from durable_core.claims import journal
from durable_core.cli import exits
from durable_core.cli.database import reading
from durable_core.cli.exits import CommandError
from durable_core.cli.output import Output, note
from durable_core.cli.where import Where, options
from durable_core.deliveries import read
from durable_core.deliveries.find import MOST, SHORTEST, Found, find, is_short
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.waiting import Cause, waits_of
from durable_core.deliveries.why import Because, says, why
from durable_core.documents import find as documents
from durable_core.operations import find as operations
from durable_core.operations import read as operations_read
from durable_core.operations import why as why_operations
from durable_core.operations.read import Operation
from durable_core.plans import find as plans
from durable_core.plans import read as plans_read
from durable_core.plans import why as why_plans
from durable_core.plans.rows import Plan
from durable_core.states import DeliveryState

if TYPE_CHECKING:
    from durable_core.celery_binding import Durable


class NothingFound(CommandError):
    """No row has this text for its id, its key or its line."""

    reason = "NOT_FOUND"
    code = exits.NOT_FOUND


class Ambiguous(CommandError):
    """The text names several deliveries where one is to be named."""

    reason = "AMBIGUOUS"
    code = exits.USAGE


def everything(tx: Connection, text: str) -> list[Found]:
    """All that this text names, of whatever contract."""
    return [
        *find(tx, text), *plans.find(tx, text), *operations.find(tx, text), *cases.find(tx, text),
        *documents.find(tx, text),
    ]  # fmt: skip


def nothing(text: str) -> NothingFound:
    shown = repr(text[:200])
    named = f"nothing is named {shown}"
    if is_short(text):
        named = (
            f"{shown} is too short for the beginning of an id, of which {SHORTEST} characters are needed. Nothing is "
            "named so"
        )
    return NothingFound(
        f"{named}: no delivery or operation by its id, the beginning of it, its key or its step.key, no delivery by "
        "its ordering key, no plan by its id, the beginning of it, a step.key or its origin, no case by its id, the id "
        "of an execution or an event of it, or what another system calls it, no document by its id, and no schedule. "
        "It never existed or was pruned after its retention. If it is the id of a Celery task: the first hint of a row "
        "has the row's own; later ones are not kept; the task's kwargs in Flower hold the row's id."
    )


def one_row(tx: Connection, text: str) -> Found:
    """The one row that this text names. Raises NothingFound and Ambiguous."""
    found = {one.id: one for one in reversed(everything(tx, text))}
    if not found:
        raise nothing(text)
    if len(found) > 1:
        few = ", ".join(sorted(found, reverse=True)[:3])
        raise Ambiguous(
            f"{text[:200]!r} names {len(found)} rows, {few} among them: `durable find {shlex.quote(text)}` lists them."
        )
    return next(iter(found.values()))


def one_delivery(tx: Connection, text: str) -> Delivery:
    """The one delivery that this text names. Raises NothingFound, Ambiguous, and NotFound for what is no delivery."""
    return read.get(tx, one_row(tx, text).id)


SHOWN = {
    "delivery": "deliveries", "plan": "plans", "operation": "operations", "case": "cases", "document": "documents",
}  # fmt: skip


def look_on(what: str, row_id: str) -> str:
    """The command that shows more of a row."""
    show = SHOWN.get(what)
    return f"durable journal {row_id}" if show is None else f"durable {show} show {row_id}"


@click.command("find")
@options
@click.argument("text", metavar="ANY_ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def find_(where: Where, text: str, as_json: bool) -> None:
    """
    What an id from a log, a mail or Flower names, and the command that shows more of it. Exit 4 when nothing.

    The id of a delivery, a plan or an operation, or its beginning (8 characters at least), a step.key, an idempotency
    key, an ordering key, the origin of plans, the id of a schedule or of a document; of a case its id, that of an
    execution or an event of it, and what another system calls it. The Celery task of a row's first hint has the row's
    own id; of later hints it is not kept.
    """
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        found = everything(connection, text)
    if not found:
        raise nothing(text)
    if as_json:
        out.answer(
            {"found": [{**asdict(one), "look": look_on(one.what, one.id)} for one in found], "most_of_each": MOST}
        )
        return
    out.table(
        ("WHAT", "BY", "KIND", "QUEUE", "STATE", "LOOK"),
        [(one.what, one.by, one.kind, one.queue, one.state, look_on(one.what, one.id)) for one in found],
    )
    if len(found) >= MOST:
        note(f"there may be more: {MOST} of each way of naming are shown")


@click.command("why")
@options
@click.argument("text", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def why_(where: Where, text: str, as_json: bool) -> None:
    """
    In one sentence: what a delivery, a plan or an operation waits for first, where it runs, or how and when it ended.

    The id may be whatever `durable find` finds. With -A the workers are asked, for a second, whether any of them reads
    its queue.
    """
    out = Output(as_json)
    with where.database() as (database, durable):
        with reading(database) as (connection, _):
            told = _told(connection, one_row(connection, text))
        asked = None
        if told.waits_for_a_worker and durable is not None:
            asked = _readers(durable)
            told.sentences[0] = _of_workers(told.queue, told.sentences[0], asked)
    if as_json:
        mine = None if asked is None else sorted(name for name, queues in asked.items() if told.queue in queues)
        named = {"what": told.what, "id": told.id, "kind": told.kind, "queue": told.queue, "state": told.state}
        said = {"why": told.sentences[0], "also": told.sentences[1:], "waits": told.waits, "readers": mine}
        out.answer({**named, **said})
        return
    out.line(told.sentences[0])
    if len(told.sentences) > 1:
        note(f"and more: `{look_on(told.what, told.id)}`")


@dataclass
class Told:
    """Why one row is where it is, whatever its contract; `waits` as the answer for programs has them."""

    what: str
    id: str
    kind: str
    queue: str
    state: str
    sentences: list[str]
    waits: list[dict[str, Any]]
    waits_for_a_worker: bool


def _told(tx: Connection, found: Found) -> Told:
    """Raises NotFound for what is no delivery, plan or operation."""
    match found.what:
        case "plan":
            plan = plans_read.get(tx, found.id)
            return _because("plan", plan, why_plans.reasons_of(tx, plan))
        case "operation":
            row = operations_read.get(tx, found.id)
            return _because("operation", row, why_operations.reasons_of(tx, row))
        case _:
            return _of_delivery(tx, read.get(tx, found.id))


def _of_delivery(tx: Connection, row: Delivery) -> Told:
    now = read.now(tx)
    found = waits_of(tx, row)
    lines = journal.read(tx, row.id) if row.state is DeliveryState.CANCELED else []
    return Told(
        "delivery", row.id, row.kind, row.queue, row.state.value, why(row, found, now, lines),
        [{**asdict(one), "blocks": one.blocks, "says": says(row, one, now)} for one in found],
        bool(found) and found[0].cause is Cause.WORKER,
    )  # fmt: skip


def _because(what: str, row: Plan | Operation, found: list[Because]) -> Told:
    return Told(
        what, row.id, row.kind, row.queue, row.state.value, [f"{one.says}." for one in found],
        [asdict(one) for one in found], found[0].cause in WORKERS,
    )  # fmt: skip


WORKERS = (why_plans.Cause.WORKER, why_operations.Cause.WORKER, why_operations.Cause.POLL_DUE)
"""What any worker that reads the queue would end."""


def _readers(durable: Durable) -> dict[str, set[str]] | None:
    from durable_core.celery_binding.readers import readers

    return readers(durable.app)


def _of_workers(queue: str, sentence: str, asked: dict[str, set[str]] | None) -> str:
    """The sentence of a row that any worker of its queue could take, with what the workers answered."""
    said = sentence.rstrip(".")
    if asked is None:
        return f"{said}; the broker did not answer, so which worker reads it is not known."
    if not asked:
        return f"{said}; no worker answered: none runs, or they take no remote control."
    mine = sum(queue in queues for queues in asked.values())
    if not mine:
        return f"{said}, and none of the {len(asked)} that answered reads it: start one with `-Q durable.{queue}`."
    return f"{said}; {mine} of the {len(asked)} workers that answered {'reads' if mine == 1 else 'read'} it."
