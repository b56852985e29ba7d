"""`durable migrate`, and the check that code and schema fit. Forward only."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from durable_core.database.connections import raw
from durable_core.database.statements import current_schema, in_schema
from durable_core.errors import SchemaAhead, SchemaBehind, TooOldServer

MIGRATIONS = Path(__file__).parent / "migrations"
SUPPORTED = ("0001",)
"""Revisions this code runs on. The last is the newest; an older one listed here still works during a rolling deploy."""

LOCK_TIMEOUT = "5s"
"""A migration waits this long for a table lock and then gives up, so that it never queues the application behind it."""

MIGRATION_LOCK = 0x6475_7261_626C_65
"""Key of the transaction's advisory lock: two `durable migrate` at once run one after the other."""


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
    """The revisions `migrate` would run, oldest first, each with its title. Raises SchemaAhead."""
    at = found(connection)
    _refuse_ahead(at)
    script = ScriptDirectory.from_config(_config())
    revisions = list(script.iterate_revisions("head", at or "base"))
    return [f"{revision.revision}: {revision.doc}" for revision in reversed(revisions)]


def migrate(engine: Engine) -> list[str]:
    """
    Bring the schema to the newest revision, in one transaction; the revisions it ran. Safe to call twice at once.

    Raises TooOldServer and SchemaAhead, with nothing changed.
    """
    with (
        engine.connect().execution_options(isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        version = connection.scalar(text("select current_setting('server_version_num')::int"))
        if int(version or 0) < 150_000:
            raise TooOldServer(str(connection.scalar(text("show server_version"))))
        connection.execute(text(f"set local lock_timeout = '{LOCK_TIMEOUT}'"))
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        connection.execute(text(f"create schema if not exists {current_schema()}"))
        todo = pending(connection)
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
    """The revision found, if this code supports it. Raises SchemaBehind or SchemaAhead, each with what mends it."""
    at = found(connection)
    _refuse_ahead(at)
    if at is None or at not in SUPPORTED:
        raise SchemaBehind(current_schema(), at, newest())
    return at


def _refuse_ahead(at: str | None) -> None:
    known = {revision.revision for revision in ScriptDirectory.from_config(_config()).walk_revisions()}
    if at is not None and at not in known:
        raise SchemaAhead(current_schema(), at, newest())


def unreachable(error: BaseException) -> bool:
    """Whether a check failed because the database did not answer, which says nothing about its schema."""
    return isinstance(error, OperationalError)
