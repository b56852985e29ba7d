"""The `durable` command on the test database, in this process where it may be and in one of its own where it must."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine

from durable_core.cases import journal
from durable_core.cli.main import main
from durable_core.database.statements import DEFAULT_SCHEMA, use_schema
from tests.operations import declare_operation, look, operation_row, remote, reset, start  # noqa: F401  (fixtures)

# Compiled once, not in each of the many processes: importing from source takes seconds.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
DURABLE = (sys.executable, "-m", "durable_core.cli")


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DURABLE_DATABASE_URL", "DURABLE_REDIS_URL", "DURABLE_SCHEMA", "DURABLE_FLOWER_BASIC_AUTH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run() -> Iterator[Callable[..., Result]]:
    """`run("status", "--json")` in this process, with no database named."""

    def _run(*line: str) -> Result:
        return CliRunner().invoke(main, list(line), prog_name="durable")

    yield _run
    use_schema(DEFAULT_SCHEMA)
    journal.use_key(None)


@pytest.fixture
def durable(run: Callable[..., Result], engine: Engine) -> Callable[..., Result]:
    """The same on the test database."""
    url = engine.url.render_as_string(hide_password=False)
    return lambda *line: run("--database-url", url, *line)


def process(
    *line: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [*DURABLE, *line], cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, **how
    )


def value_of(result: Result) -> Any:
    """The one JSON value on stdout; anything else there fails the test."""
    return json.loads(result.stdout)


def error_of(result: Result) -> str:
    """The machine-readable reason of an error."""
    reason: str = value_of(result)["error"]["reason"]
    return reason
