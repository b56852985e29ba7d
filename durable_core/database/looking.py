"""The one way of looking at the database: read-only, by its indexes, and over in time whatever the server does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from durable_core.database.connections import Database, raw
from durable_core.database.statements import beside
from durable_core.database.transactions import run

_statements = beside(__file__)


class NoAnswer(Exception):
    """Nobody let us in within the time that a look gets."""


@contextmanager
def looking(
    database: Database,
    *,
    statement_seconds: float,
    answer_seconds: float,
    snapshot: bool = False,
    aside: bool = False,
) -> Iterator[Connection]:
    """
    A transaction that cannot write. No statement of it runs longer than this, its waits for locks included.

    A server that falls silent is given up when the whole of it has taken `answer_seconds`, and a second more: to the
    caller that is a lost connection. With `snapshot` all of its statements see one state of the rows. The bounds are
    the transaction's own, so a pooled connection keeps nothing of them.

    Until it is connected, the host's own bounds hold. With `aside` ours does too, and NoAnswer is raised; but the
    thread that waits is left behind, so that is for a process that ends soon.
    """
    connection = connected(database, answer_seconds) if aside else database.engine.connect()
    level = "REPEATABLE READ" if snapshot else "READ COMMITTED"
    with (
        connection.execution_options(isolation_level=level),
        database.watch.over(raw(connection), answer_seconds),
        connection.begin(),
    ):
        run(connection, _statements.bound, milliseconds=str(int(statement_seconds * 1000)))
        yield connection


def connected(database: Database, seconds: float) -> Connection:
    """
    A connection, or NoAnswer. The driver bounds no more than the greeting, and a host's engine that at 130 s; the
    questions that SQLAlchemy asks of a new server have no bound.
    """
    made: list[Connection | BaseException] = []

    def connect() -> None:
        try:
            made.append(database.engine.connect())
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=connect, name="durable-look", daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise NoAnswer
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]
