"""
`python -m tests.schema_fingerprint` writes `durable_core/doctor/schema.json` anew, from a schema migrated for it.

Run it whenever a migration changed; a test says when that was forgotten.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from sqlalchemy import create_engine, text

from durable_core.database import migrate
from durable_core.doctor import schema
from durable_core.testing import create_database, drop_database
from tests.elsewhere import quick_servers

DATABASE = "durable_fingerprint"


def objects_by_revision(server: str) -> dict[str, schema.Objects]:
    """What each revision that this code supports has, on the server of this URL."""
    found: dict[str, schema.Objects] = {}
    for revision in migrate.SUPPORTED:
        engine = create_engine(create_database(server, DATABASE))
        try:
            with engine.begin() as connection:
                connection.execute(text("create schema durable"))
                command.upgrade(migrate._config(connection), revision)
                found[revision] = schema.catalog(connection).objects
        finally:
            engine.dispose()
            drop_database(server, DATABASE)
    return found


def main(postgres_bin: Path | None = None) -> None:
    with quick_servers(postgres_bin) as addresses:
        schema.FINGERPRINT.write_text(schema.as_written(objects_by_revision(addresses.database_url)), encoding="utf-8")


if __name__ == "__main__":
    main()
