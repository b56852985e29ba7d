"""What follows the end of a delivery: the kind's `on_dead` in the same transaction, a hint for the next of its line."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sqlalchemy import Connection

from durable_core import wakes
from durable_core.arguments import clean_text
from durable_core.database.connections import Database
from durable_core.database.statements import beside
from durable_core.database.transactions import DATABASE_ERRORS, Transaction, is_infrastructure, run
from durable_core.deliveries import read
from durable_core.deliveries.declare import registry

log = logging.getLogger("durable.run")
_statements = beside(__file__)


def tell_dead(database: Database, connection: Connection, kind_name: str, row_id: str) -> None:
    """
    Run the hook of a delivery that has just died in this transaction, inside a savepoint.

    What the hook raises is undone and journalled: the delivery is dead all the same. Raises what says nothing about
    the hook, such as a connection that was lost.
    """
    kind = registry.find(kind_name)
    facts = {"row_id": row_id, "kind": kind_name}
    if kind is None:
        log.warning("on_dead_not_run", extra={**facts, "reason": "the kind is not declared in this process"})
        return
    if kind.dead_hook is None:
        return
    # Of the host's own class. Its commits and rollbacks end at its savepoint, and nothing of it is left here.
    session = database.sessions.class_(bind=connection, join_transaction_mode="create_savepoint")
    try:
        kind.dead_hook(session, read.get(session, row_id))
        session.commit()
    except Exception as error:
        if is_infrastructure(error):
            raise
        session.rollback()
        log.exception("on_dead_failed", extra=facts)
        said = clean_text(f"{type(error).__name__}: {error}", 1000)
        run(connection, _statements.remark_hook, id=row_id, said=said)
    finally:
        session.close()


def has_hook(kind_name: str) -> bool:
    """Whether the death of a delivery of this kind is to be told."""
    kind = registry.find(kind_name)
    return kind is not None and kind.dead_hook is not None


def hint_next(database: Database, ordering_key: str | None) -> None:
    """Tell a worker of the delivery that may go next in this line. Without it dispatch does, within seconds."""
    carrier = wakes.carrier()
    if ordering_key is None or carrier is None:
        return
    try:
        with database.autocommit() as connection:
            hints = next_hints(connection, [ordering_key])
    except DATABASE_ERRORS:
        log.debug("next_of_line_not_hinted", exc_info=True)
    else:
        carrier.offer(hints)


def next_hints(tx: Transaction, ordering_keys: Iterable[str]) -> list[wakes.Hint]:
    """A hint for the delivery of each of these lines that may be taken now."""
    rows = [row for line in ordering_keys for row in run(tx, _statements.next_of_line, ordering_key=line)]
    return [
        wakes.Hint(row["kind"], row["id"], row["queue"], row["priority"], row["attempt"], first=False) for row in rows
    ]
