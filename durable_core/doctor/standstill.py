"""Plans and operations that do not go on by themselves: held back, without code, or past a time that nobody minds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection

from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import Row, run
from durable_core.doctor.database import ROOM, inside
from durable_core.doctor.findings import Check, Finding, Reason, found, or_well
from durable_core.doctor.work import LOOKED_AT, UNREAD_SECONDS, Installation, counted, named

_statements = beside(__file__)


@dataclass(frozen=True)
class Contract:
    """What differs between the two: the check and its command, the statement, the words of what is overdue."""

    name: str
    look: Statement
    overdue: Reason
    is_over: str


PLANS = Contract("plans", _statements.plans, Reason.PLAN_OVERDUE, "past the time to approve, to start or to go on")
OPERATIONS = Contract(
    "operations", _statements.operations, Reason.OPERATION_OVERDUE, "past its patience, or not issued in time"
)


def checks(database: Database, installation: Callable[[], Installation]) -> list[Check]:
    """They are behind the gate of the schema, in the same room. The installation is asked when its turn comes."""
    return [
        Check("plans", ROOM, inside(database, lambda tx: standing(tx, PLANS, installation().steps))),
        Check("operations", ROOM, inside(database, lambda tx: standing(tx, OPERATIONS, installation().operations))),
    ]


def standing(connection: Connection, of: Contract, known: Collection[str] | None) -> list[Finding]:
    """What stands still of one contract. A row has one finding: what a person has to act on first."""
    rows = run(connection, of.look, most=LOOKED_AT, patience_seconds=UNREAD_SECONDS)
    return or_well(
        [finding for row in rows for finding in _of_row(of, row)] + list(_undeclared(of, rows, known)),
        of.name, f"of the {LOOKED_AT} looked at in each state, none waits for code, for a sweep or for its release",
    )  # fmt: skip


def _of_row(of: Contract, row: Row) -> Iterator[Finding]:
    kind, queue, many = row["kind"], row["queue"], counted(row["rows"])
    if row["held"]:
        yield found(
            of.name, Reason.HELD_ROWS,
            f"{many} of {kind} made a sweep fail ({row['held']}) and {_are(row)} passed over, {_such(row)}",
            f"mend the cause, then: durable {of.name} release {row['id']} --by … --reason …",
        )  # fmt: skip
    elif row["waiting_for"] == "handler":
        yield found(
            of.name, Reason.WAITING_FOR_HANDLER,
            f"{many} of {kind} met a worker without its code, on queue {queue}, {_such(row)}",
            f"deploy the code of {kind} to the workers that read {queue}",
        )  # fmt: skip
    elif row["waiting_for"] == "arguments":
        yield found(
            of.name, Reason.WAITING_FOR_ARGUMENTS,
            f"{many} of {kind} {'has' if row['rows'] == 1 else 'have'} other arguments than its handler takes, on "
            f"queue {queue}, {_such(row)}",
            f"deploy the {kind} that takes them; durable {of.name} list shows them",
        )  # fmt: skip
    elif row["is_overdue"]:
        is_over = "past the time that its worker had for it" if row["is_past_claim"] else of.is_over
        yield found(
            of.name, of.overdue,
            f"{many} of {kind} {_are(row)} {is_over}, and no sweep has ended that, {_such(row)}",
            "start a beat (celery -A … beat) and a worker that reads durable.control; one whose row is locked is left "
            "to whoever has it",
        )  # fmt: skip
    elif row["is_late"]:
        yield found(
            of.name, Reason.POLL_LATE,
            f"{many} of {kind} on queue {queue} {'was' if row['rows'] == 1 else 'were'} to be polled more than "
            f"{UNREAD_SECONDS:g} s ago, {_such(row)}",
            f"a worker that has the code of {kind} and reads durable.{queue}, with a free child; patience runs out "
            "meanwhile",
        )  # fmt: skip


def _are(row: Row) -> str:
    return "is" if row["rows"] == 1 else "are"


def _such(row: Row) -> str:
    """The id, where it is one row; else that of one among them."""
    return str(row["id"]) if row["rows"] == 1 else f"{row['id']} among them"


def _undeclared(of: Contract, rows: Iterable[Row], known: Collection[str] | None) -> Iterator[Finding]:
    strange = sorted({row["kind"] for row in rows if known is not None and row["kind"] not in known})
    if strange:
        yield found(
            of.name, Reason.KIND_UNDECLARED, f"of kinds that this app does not declare: {named(strange)}",
            "nothing, if another app on this schema declares them; else import the module that does",
        )  # fmt: skip


def due_queues(connection: Connection) -> dict[str, bool]:
    """
    The queues in which a step waits, or an operation is to be issued or polled; and whether one is overdue there.

    Overdue as of deliveries: for UNREAD_SECONDS, and neither a pause nor a sweep keeps it.
    """
    queues: dict[str, bool] = {}
    for look in (_statements.plan_queues, _statements.operation_queues):
        for row in run(connection, look, patience_seconds=UNREAD_SECONDS, most=LOOKED_AT):
            queues[row["queue"]] = queues.get(row["queue"], False) or row["overdue"]
    return queues
