"""A schema one revision newer than this code: what a rolling deploy shows to the workers that are still old."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from durable_core.database import migrate as migrations

NEXT = "9001"

REVISION = '''"""A nullable column and an index, as a later version might add them."""

from alembic import op

from durable_core.database.migrate import runs_with_code_from
from durable_core.database.statements import in_schema

revision = "{next}"
down_revision = "{newest}"


def upgrade() -> None:
    op.execute(in_schema("alter table durable.deliveries add column added_later text"))
    op.execute(in_schema("create index deliveries_added_later on durable.deliveries (added_later)"))
    runs_with_code_from("{oldest}", revision)
'''


@contextmanager
def newer_code(folder: Path, *, oldest: str | None = None, also: tuple[str, ...] = ()) -> Iterator[None]:
    """
    While this lasts, this process is the newer code: its `migrate` goes on to NEXT.

    `oldest` is the oldest code that NEXT says it runs with; by default the code as it is. `also` are the older
    revisions that the newer code supports.
    """
    newest = migrations.newest()
    copy = folder / "migrations"
    shutil.copytree(migrations.MIGRATIONS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    said = REVISION.format(next=NEXT, newest=newest, oldest=oldest or newest)
    (copy / "versions" / f"r{NEXT}_later.py").write_text(said)
    with pytest.MonkeyPatch.context() as code:
        code.setattr(migrations, "MIGRATIONS", copy)
        code.setattr(migrations, "SUPPORTED", (*also, NEXT))
        yield
    shutil.rmtree(copy)
