"""One act on many locked rows, where one that the database refuses must not keep the rest from it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable_core.database.statements import Statement
from durable_core.database.transactions import Row, is_infrastructure, run, said

log = logging.getLogger("durable.sweep")

CHECKED_AT_ONCE = Statement("checked_at_once", "set constraints all immediate")
"""A constraint of the host's that is checked at COMMIT is checked with each statement: there a row can be told from the
rest. No named statement, for it cannot be prepared."""


def each(
    connection: Connection,
    rows: list[Row],
    act: Callable[[list[Row]], list[Row]],
    sweep: str,
    refused: Callable[[Row, str], None],
) -> list[Row]:
    """
    Act on locked rows at once; or, where the database refuses one of them, on each by itself; what the acts answered.

    One raising row (a trigger or a foreign key of the host's) must not keep the rest from
    being swept. Raises what says nothing about a row: a deadlock, a lost connection.
    """
    if not rows:
        return []
    run(connection, CHECKED_AT_ONCE)
    try:
        with connection.begin_nested():
            return act(rows)
    except (DBAPIError, psycopg.Error) as error:
        if is_infrastructure(error):
            raise
        log.warning("sweep_goes_row_by_row", extra={"sweep": sweep, "error": said(error)})
    done: list[Row] = []
    for row in rows:
        try:
            with connection.begin_nested():
                done += act([row])
        except (DBAPIError, psycopg.Error) as error:
            if is_infrastructure(error):
                raise
            refused(row, f"{sweep} failed: {said(error)}")
    return done


def holding(connection: Connection, hold: Statement, **more: object) -> Callable[[Row, str], None]:
    """
    What `each` does with a refused row: it stays where it is, out of every sweep, until an operator releases it.

    `hold` is the contract's statement, which takes the row's id, its fence and the reason. A row that cannot be held
    either is logged: the next sweep meets it again.
    """

    def held(row: Row, reason: str) -> None:
        facts = {"row_id": str(row["id"]), "error": reason}
        log.error("row_held", extra=facts)
        try:
            with connection.begin_nested():
                run(connection, hold, id=row["id"], fence=row["fence"], reason=reason, **more)
        except (DBAPIError, psycopg.Error):
            log.error("row_not_held", extra=facts, exc_info=True)

    return held
