"""The sweep of cases: events whose process was lost between their row and their end. Any number may run at once."""

from __future__ import annotations

import json
import logging

from durable_core import wakes
from durable_core.cases import later
from durable_core.cases.event import Event
from durable_core.cases.inbox import PostgresInbox
from durable_core.cases.ingest import FAILED, UNROUTED
from durable_core.cases.letters import Address, Waiting
from durable_core.database.connections import Database
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import run

log = logging.getLogger("durable.sweep")
_statements = beside(__file__)

STUCK_SECONDS = 60.0
"""An event that is pending for longer, and has no live claim, was left alone."""

BATCH = 100

MOST_TRIES = 20
"""An event that was taken up so often, and never came to an end, ends the processes that execute it."""


def look() -> tuple[Statement, dict[str, object]]:
    """A statement that has a row where an event is stuck."""
    return _statements.an_event_is_stuck, {"stuck_seconds": STUCK_SECONDS}


def recover(database: Database) -> int:
    """
    Have stuck events brought to their end, each by a delivery of its own; how many were taken up.

    One whose execution was committed is answered by it and runs no more. The hole: events for a type that this
    process does not know are left to one that does.
    """
    with database.transaction() as connection:
        rows = run(
            connection, _statements.take_stuck, stuck_seconds=STUCK_SECONDS, limit=BATCH,
            types=json.dumps(later.known_types()),
        )  # fmt: skip
        for row in rows:
            waiting = Waiting(row["id"], row["tries"], Event.kept(row["event"]))
            if row["case_type"] is None:
                _bury(connection, waiting, UNROUTED, "no case is correlated with it")
            elif waiting.tries > MOST_TRIES:
                _bury(connection, waiting, FAILED, f"it was taken up {MOST_TRIES} times and came to no end")
            else:
                later.resumed(connection, row["case_type"], waiting.id, waiting.tries)
    wakes.wake()
    return len(rows)


def _bury(connection: object, waiting: Waiting, reason: str, detail: str) -> None:
    log.warning("event_dead_lettered", extra={"row_id": waiting.id, "error_code": reason})
    PostgresInbox(connection).bury(waiting, Address(), reason, detail)  # type: ignore[arg-type]
