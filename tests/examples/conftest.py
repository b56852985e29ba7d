"""A program shown in the documentation runs in a process of its own, on a database of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine

from durable_core.local import Addresses
from durable_core.testing import create_database, drop_database, migrated
from tests.examples.pages import EXAMPLES, ROOT
from tests.sinks import http_server, mail_server

SECONDS = 120


@dataclass(frozen=True)
class Programs:
    """Runs programs as a reader would, with the two variables that name the servers."""

    engine: Engine
    redis_url: str
    directory: Path
    mail_url: str
    web_url: str

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DURABLE_", "PYTEST_"))}
        return {
            **kept,
            "DURABLE_DATABASE_URL": self.engine.url.render_as_string(hide_password=False),
            "DURABLE_REDIS_URL": self.redis_url,
            "DURABLE_SMTP_URL": self.mail_url,
            "SHOP_WAREHOUSE_URL": self.web_url,
            "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *arguments: str) -> str:
        """What `python …` prints; fails the test with all of its output when it ends in an error."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.directory, env=self.environment, check=False,
            capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def programs(services: Addresses, worker_id: str, tmp_path: Path) -> Iterator[Programs]:
    name = f"durable_docs_{worker_id}"
    engine = migrated(create_database(services.database_url, name))
    try:
        with mail_server() as mailbox, http_server() as receiver:
            mail_url = f"smtp://127.0.0.1:{mailbox.port}?from=shop@shop.example"
            yield Programs(engine, services.redis_url, tmp_path, mail_url, receiver.url)
    finally:
        engine.dispose()
        drop_database(services.database_url, name)
