"""`durable migrate`, and the bounds on what every other command asks of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from alembic.script.revision import RevisionError
from alembic.util import CommandError as AlembicError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable_core.cli.exits import NoAnswer, TooSlow
from durable_core.cli.output import Output
from durable_core.cli.where import Where, options
from durable_core.database import looking as bounds
from durable_core.database import migrate as migrations
from durable_core.database.connections import Database, raw
from durable_core.database.statements import beside, current_schema, use_schema
from durable_core.database.transactions import CANCELED, run, sqlstate
from durable_core.database.watch import ReplicationUnconfirmed

READ_SECONDS = 5.0
"""No read of ours runs longer: looking at a struggling database must not add to its load."""

ANSWER_SECONDS = 10.0
"""All of a look is over by then, and a second more; also where the database takes connections and says nothing."""

_statements = beside(__file__)
JOURNAL = "durable journal"
"""What shows that an act was done: it has a line of each."""

_SAID = logging.NullHandler()


@contextmanager
def reading(database: Database) -> Iterator[tuple[Connection, str]]:
    """
    One snapshot, read-only and bounded in time, of a schema that this code supports; and its revision.

    Raises SchemaBehind, TooSlow and NoAnswer.
    """
    # What the watch logs is said in the sentence. Without a handler of the app's Python would print its name as well.
    logging.getLogger("durable.commit").addHandler(_SAID)
    began = time.monotonic()
    look = bounds.looking(
        database, statement_seconds=READ_SECONDS, answer_seconds=ANSWER_SECONDS, snapshot=True, aside=True
    )
    try:
        with look as connection:
            revision = migrations.check(connection)
            yield connection, revision
    except bounds.NoAnswer as error:
        raise NoAnswer(_silent()) from error
    except DBAPIError as error:
        if sqlstate(error) == CANCELED:
            raise TooSlow(
                f"the database did not answer within {READ_SECONDS:g} s, which is all that a look gets: it is busy, or "
                "somebody has a table locked. Nothing was changed; try again, or ask for less."
            ) from error
        if error.connection_invalidated and time.monotonic() - began >= ANSWER_SECONDS:
            raise NoAnswer(_silent()) from error
        raise


@contextmanager
def writing(database: Database, *, undo: bool = False, shown_by: str = JOURNAL) -> Iterator[Connection]:
    """
    One transaction that acts, in a schema that this code supports, bounded in time as a look is; undone with `undo`.

    Raises SchemaBehind, TooSlow and NoAnswer. What was not answered before its COMMIT was not done; of a COMMIT that
    was not answered the outcome is unknown, and the sentence names the command that shows it.
    """
    committing = False
    with answering(lambda: committing, shown_by):
        connection = bounds.connected(database, ANSWER_SECONDS)
        with (
            connection.execution_options(isolation_level="READ COMMITTED"),
            database.watch.over(raw(connection), ANSWER_SECONDS),
            connection.begin() as transaction,
        ):
            run(connection, _statements.bound, milliseconds=str(int(READ_SECONDS * 1000)))
            migrations.check(connection)
            yield connection
            if undo:
                transaction.rollback()
            else:
                committing = True


@contextmanager
def answering(
    may_be_done: Callable[[], bool] = lambda: True, shown_by: str = JOURNAL, so_far: Callable[[], str] | None = None
) -> Iterator[None]:
    """
    What a database that gives no answer is told as; whether the act may have been done is asked then.

    `so_far` says what the transactions before it have done, where an act has many: they stand.
    """
    # What the watch logs is said in the sentence.
    logging.getLogger("durable.commit").addHandler(_SAID)
    began = time.monotonic()
    try:
        yield
    except bounds.NoAnswer as error:
        raise NoAnswer(_silent()) from error
    except ReplicationUnconfirmed as error:
        raise NoAnswer(
            "the database has done it, and its standby did not confirm that: after a failover it may be gone. "
            f"`{shown_by}` shows it."
        ) from error
    except DBAPIError as error:
        if sqlstate(error) == CANCELED and so_far is not None:
            raise TooSlow(
                "the database broke off a statement: by a statement_timeout of yours, or because somebody canceled it. "
                f"{so_far()} before that, which stands; the transaction that was broken off was rolled back. The same "
                "command goes on with the rest."
            ) from error
        if sqlstate(error) == CANCELED:
            raise TooSlow(
                f"the database did not carry this out within {READ_SECONDS:g} s: it is busy, or somebody has a table "
                "locked. The transaction was rolled back; try again."
            ) from error
        silent = error.connection_invalidated and time.monotonic() - began >= ANSWER_SECONDS
        if error.connection_invalidated and may_be_done():
            lost = _GAVE_NO_ANSWER.format(ANSWER_SECONDS) if silent else "the connection to the database was lost"
            raise NoAnswer(f"{lost}. Whether it was done is not known: `{shown_by}` shows it.") from error
        if silent:
            raise NoAnswer(_silent()) from error
        raise


_GAVE_NO_ANSWER = (
    "the database takes connections and has not answered for {:g} s: it is frozen, or the way to it is cut"
)


def _silent() -> str:
    return (
        f"{_GAVE_NO_ANSWER.format(ANSWER_SECONDS)}. Nothing was changed; see that the server runs and can be reached, "
        "then try again."
    )


@click.command()
@options
@click.option("--sql", "as_sql", is_flag=True, help="Print the SQL instead of running it; needs no database.")
@click.option("--from", "start", metavar="REVISION", help="With --sql: the revision the database is at.")
@click.option("--dry-run", is_flag=True, help="Say which revisions would run, and run none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def migrate(where: Where, as_sql: bool, start: str | None, dry_run: bool, as_json: bool) -> None:
    """
    Bring the schema to the newest revision, in one transaction.

    Safe to run while the application works and from several places at once; waits 2 seconds for a table lock,
    tries again, and gives up after the fifth time with nothing changed.
    """
    out = Output(as_json)
    if as_sql and dry_run:
        raise click.UsageError("--sql and --dry-run are two ways of looking; give one.")
    if start and not as_sql:
        raise click.UsageError("--from says where the printed SQL starts; it needs --sql.")
    if as_sql:
        _print_sql(where, start, out)
        return
    with where.database() as (database, _):
        with database.engine.connect() as connection:
            at = migrations.found(connection)
            todo = migrations.pending(connection)
        if not dry_run:
            todo = migrations.migrate(database.engine)
    if as_json:
        out.answer(
            {
                "schema": current_schema(), "was": at, "newest": migrations.newest(), "dry_run": dry_run,
                "revisions": todo,
            }
        )  # fmt: skip
        return
    for revision in todo:
        out.line(f"{'would run' if dry_run else 'ran'} {revision}")
    if not todo:
        out.line(f'schema "{current_schema()}" is at {migrations.newest()}: nothing to do')


def _print_sql(where: Where, start: str | None, out: Output) -> None:
    if where.schema:
        use_schema(where.schema)
    try:
        text = migrations.sql(start)
    except (AlembicError, RevisionError):
        raise click.UsageError(
            f"there is no revision {start!r}; there are {', '.join(migrations.SUPPORTED)}."
        ) from None
    if out.as_json:
        out.answer({"schema": current_schema(), "from": start, "to": migrations.newest(), "sql": text})
    else:
        click.echo(text, nl=False)
