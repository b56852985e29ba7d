"""`durable migrate`, and the check that code and schema fit. Forward only."""

from __future__ import annotations

import io
import random
import re
import time
from contextlib import redirect_stdout
from pathlib import Path

from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from durable_core.database.connections import raw
from durable_core.database.statements import current_schema, in_schema
from durable_core.database.transactions import DATABASE_ERRORS, sqlstate
from durable_core.database.transactions import LOCK_TIMEOUT as LOCK_TIMED_OUT
from durable_core.errors import SchemaAhead, SchemaBehind, TooOldServer

MIGRATIONS = Path(__file__).parent / "migrations"
SUPPORTED = ("0012",)
"""Revisions this code runs on. The last is the newest; an older one listed here still works during a rolling deploy."""

LOCK_TIMEOUT = "2s"
"""A migration waits this long for a table lock and then lets go: whoever queued behind it goes on."""

TRIES = 5
"""So often it is tried, with a pause of a second or two, before it gives up with nothing changed."""

MIGRATION_LOCK = 0x6475_7261_626C_65
"""Key of the transaction's advisory lock: two `durable migrate` at once run one after the other."""


_SAYS = re.compile(r"revision (\d+): runs with code that knows (\d+), or newer\Z")


def runs_with_code_from(oldest: str, revision: str) -> None:
    """
    Write down, in a revision's `upgrade`, the oldest code that may still run when it is applied.

    Code is named by its own newest revision. A worker that restarts during a deploy meets a
    revision it has never heard of; this is how it learns that it may go on. A revision that
    only adds names the one before the oldest code in use; one that takes away names itself.
    """
    said = f"revision {revision}: runs with code that knows {oldest}, or newer"
    assert _SAYS.match(said), said
    op.execute(text(in_schema(f"comment on table durable.schema_version is '{said}'")))


def apply(*names: str) -> None:
    """Run SQL files in a revision, in the schema in use."""
    for name in names:
        sql = in_schema((MIGRATIONS / name).read_text(encoding="utf-8"))
        # Without parameters the driver takes several statements at once, and ':' and '%' stand for themselves.
        if op.get_context().as_sql:
            op.execute(text(sql.replace(":", r"\:")))
        else:
            raw(op.get_bind()).execute(sql.encode())


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def newest() -> str:
    """The newest revision of this code."""
    return SUPPORTED[-1]


def found(connection: Connection) -> str | None:
    """The revision the database is at; None where nothing is installed."""
    context = MigrationContext.configure(
        connection, opts={"version_table": "schema_version", "version_table_schema": current_schema()}
    )
    return context.get_current_revision()


def pending(connection: Connection) -> list[str]:
    """
    The revisions `migrate` would run, oldest first, each with its title. Raises SchemaAhead.

    Nothing is pending where newer code has migrated to a revision that this code may run on.
    """
    at = found(connection)
    if _is_ahead(connection, at):
        return []
    script = ScriptDirectory.from_config(_config())
    revisions = list(script.iterate_revisions("head", at or "base"))
    return [f"{revision.revision}: {revision.doc}" for revision in reversed(revisions)]


def migrate(engine: Engine) -> list[str]:
    """
    Bring the schema to the newest revision, in one transaction; the revisions it ran. Safe to call twice at once.

    Raises TooOldServer, SchemaAhead, and the database's lock timeout where a long transaction held on to a table
    through all its tries; with nothing changed.
    """
    for tries_left in reversed(range(TRIES)):
        try:
            return _migrate(engine)
        except DATABASE_ERRORS as error:
            if not tries_left or sqlstate(error) != LOCK_TIMED_OUT:
                raise
        time.sleep(1 + random.random())
    raise AssertionError("the last try returns or raises")


def _migrate(engine: Engine) -> list[str]:
    with (
        engine.connect().execution_options(isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        version = connection.scalar(text("select current_setting('server_version_num')::int"))
        if int(version or 0) < 150_000:
            raise TooOldServer(str(connection.scalar(text("show server_version"))))
        # Another `durable migrate` is waited for as long as it takes: nobody queues behind this.
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        connection.execute(text(f"set local lock_timeout = '{LOCK_TIMEOUT}'"))
        connection.execute(text(f"create schema if not exists {current_schema()}"))
        todo = pending(connection)
        if todo:
            command.upgrade(_config(connection), "head")
        return todo


def sql(start: str | None = None) -> str:
    """The SQL that `migrate` would run, for people who apply it themselves."""
    out = io.StringIO()
    config = _config()
    config.output_buffer = out
    with redirect_stdout(out):
        command.upgrade(config, f"{start}:head" if start else "head", sql=True)
    return f"create schema if not exists {current_schema()};\n\n{out.getvalue()}"


def check(connection: Connection) -> str:
    """
    The revision found, if this code may run on it. Raises SchemaBehind or SchemaAhead, each with what mends it.

    It may on those it lists, and on a newer one that says so itself.
    """
    at = found(connection)
    if at is None or (not _is_ahead(connection, at) and at not in SUPPORTED):
        raise SchemaBehind(current_schema(), at, newest())
    return at


def _is_ahead(connection: Connection, at: str | None) -> bool:
    """Whether the database is at a revision of newer code, on which this code may run. Raises SchemaAhead."""
    known = {revision.revision for revision in ScriptDirectory.from_config(_config()).walk_revisions()}
    if at is None or at in known:
        return False
    said = connection.scalar(text(in_schema("select obj_description(cast('durable.schema_version' as regclass))")))
    allowed = _SAYS.match(said or "")
    # The comment must be this revision's own: one that says nothing would else inherit the promise of another.
    if allowed is None or allowed[1] != at or int(newest()) < int(allowed[2]):
        raise SchemaAhead(current_schema(), at, newest())
    return True
