"""Databases for tests. Everything here needs the role that owns the schema; a runtime role is refused by Postgres."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from psycopg import sql
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

import durable_core.database
from durable_core.database.connections import Database
from durable_core.database.statements import Statements, beside, current_schema, in_schema
from durable_core.database.transactions import LOCK_TIMEOUT, run, sqlstate

_statements = beside(__file__)
_clock = Statements(Path(durable_core.database.__file__).with_name("clock.sql"))

LOCK_SECONDS = 10
"""How long emptying waits for a transaction that is still open before it ends it."""

TABLES = (
    "case_claims", "case_correlations", "case_events", "case_journal", "cases", "deliveries",
    "document_revisions", "documents", "journal", "loops", "operations", "pauses", "plan_receipts", "plans",
    "schedules",
)  # fmt: skip


def create_database(server: str | URL, name: str, *, template: str | None = None) -> URL:
    """Create a database on the server of this URL, dropping one of that name; the URL of the new one."""
    url = make_url(server)
    drop_database(url, name)
    clause = f' template "{template}"' if template else ""
    _on_server(url, f'create database "{name}"{clause}')
    return url.set(database=name)


def drop_database(server: str | URL, name: str) -> None:
    """Drop a database, ending whatever is still connected to it."""
    _on_server(make_url(server), f'drop database if exists "{name}" with (force)')


@contextmanager
def cloned_database(server: str | URL, template: str, name: str) -> Iterator[Database]:
    """A database cloned from a migrated template, which nobody may be connected to; dropped at the end."""
    engine = create_engine(create_database(server, name, template=template))
    try:
        yield Database(engine)
    finally:
        engine.dispose()
        drop_database(server, name)


def clear(engine: Engine) -> None:
    """
    Delete every durable row and line, past the guards: for a test database only, as its superuser.

    A transaction that a test forgot to end makes this fail after 10 s rather than hang: it is ended, the rows go,
    and AssertionError says so.
    """
    _at_last(engine, _clear)


def empty(engine: Engine) -> None:
    """
    `clear`, then empty every table of the host's own, except those of extensions, and start their identities anew.

    Rows that a migration of the host's wrote go too. A transaction that a test forgot to end makes this fail as it
    makes `clear`.
    """

    def both(connection: Connection) -> None:
        _clear(connection)
        _truncate_the_hosts(connection)

    _at_last(engine, both)


class MovableClock:
    """
    The database's clock, moved for everybody who uses this database.

    Installing it replaces `durable_now()`. It is no part of any migration, so a production
    schema has nothing to fake time with.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def install(self) -> None:
        with self._engine.begin() as connection:
            for statement in (_clock.install_table, _clock.install_row, _clock.install_function):
                run(connection, statement)

    def uninstall(self) -> None:
        with self._engine.begin() as connection:
            for statement in (_clock.uninstall_function, _clock.uninstall_table):
                run(connection, statement)

    def advance(self, seconds: float) -> None:
        """Move the clock; a negative number sets it back."""
        with self._engine.begin() as connection:
            run(connection, _clock.move, seconds=seconds)

    def freeze(self) -> None:
        """Stop it; `advance` still moves it."""
        with self._engine.begin() as connection:
            run(connection, _clock.freeze)

    def reset(self) -> None:
        """Real time again."""
        with self._engine.begin() as connection:
            run(connection, _clock.reset)

    def now(self) -> datetime:
        with self._engine.begin() as connection:
            instant: datetime = run(connection, _clock.now)[0]["now"]
            return instant


def migrated(url: str | URL) -> Engine:
    """An engine on this database, brought to the newest schema."""
    # Not at the top: Alembic takes a third of a second to import, which every pytest run of the environment would wait.
    from durable_core.database.migrate import migrate

    engine = create_engine(url)
    migrate(engine)
    return engine


@contextmanager
def fresh_database(server: str | URL, prepare: Callable[[Engine], None] | None = None) -> Iterator[Database]:
    """
    A migrated database of this process alone, with a movable clock, on the server of this URL; dropped at the end.

    The database that the URL names is not touched. The new one is called `durable_test_`, then the process's place
    under pytest-xdist, then a number drawn at random, so two runs on one server never meet. `prepare` makes the
    host's own tables. A process that is killed leaves its database behind.
    """
    from durable_core.database.migrate import migrate

    name = f"durable_test_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}_{secrets.token_hex(4)}"
    engine = create_engine(create_database(server, name))
    try:
        migrate(engine)
        MovableClock(engine).install()
        if prepare is not None:
            prepare(engine)
        yield Database(engine)
    finally:
        engine.dispose()
        drop_database(server, name)


def _on_server(url: URL, statement: str) -> None:
    engine = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(statement))
    finally:
        engine.dispose()


def _clear(connection: Connection) -> None:
    connection.execute(text("set local session_replication_role = replica"))
    for table in TABLES:
        connection.execute(text(in_schema(f"delete from durable.{table}")))
    connection.execute(text("set local session_replication_role = origin"))


def _truncate_the_hosts(connection: Connection) -> None:
    found = run(connection, _statements.host_tables, durable=current_schema())
    if found:
        tables = sql.SQL(", ").join(sql.Identifier(table["schema"], table["name"]) for table in found)
        truncate = sql.SQL("truncate {} restart identity cascade").format(tables)
        connection.exec_driver_sql(truncate.as_string(None).replace("%", "%%"))


def _at_last(engine: Engine, emptying: Callable[[Connection], None]) -> None:
    """Empty it even past a transaction that was left open: else every test behind this one meets its rows and locks."""
    __tracebackhide__ = True
    try:
        _in_time(engine, emptying)
        return
    except OperationalError as error:
        if sqlstate(error) != LOCK_TIMEOUT:
            raise
        with engine.begin() as connection:
            ended = run(connection, _statements.end_left_open)
        if not ended:
            raise
    _in_time(engine, emptying)
    said = "; ".join(" ".join(str(one["query"]).split())[:200] for one in ended)
    raise AssertionError(f"a transaction was left open, so the tables could not be emptied; it last said: {said}")


def _in_time(engine: Engine, emptying: Callable[[Connection], None]) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"set local lock_timeout = '{LOCK_SECONDS}s'"))
        emptying(connection)
