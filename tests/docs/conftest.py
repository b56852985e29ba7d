"""A page whose blocks are files and command lines: laid out in a folder, and typed as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from durable_core.local import Addresses
from durable_core.testing import create_database, drop_database
from tests.examples import conftest as examples
from tests.examples.pages import Page

SECONDS = 120
FILES = ("python", "ini", "yaml")

programs = examples.programs


@dataclass(frozen=True)
class Followed:
    """A page in a folder of its own, on a database of its own that nothing was done to yet."""

    page: Page
    folder: Path
    engine: Engine
    environment: dict[str, str]

    def block(self, title: str) -> str:
        (found,) = (block.body for block in self.page.blocks if block.title == title)
        return found

    def sh(self, title: str) -> str:
        """What the lines of a block say; fails the test where one of them fails."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.block(title)], cwd=self.folder, env=self.environment, check=False,
            capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, title: str) -> Iterator[None]:
        """The one line of a block, while the test goes on; ended as a supervisor ends it."""
        log = self.folder / f"{title}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.block(title)}"], cwd=self.folder, env=self.environment, stdout=out,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                yield
            except BaseException:
                print(log.read_text())
                raise
            finally:
                process.terminate()
                try:
                    process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture
def follow(services: Addresses, worker_id: str, tmp_path: Path) -> Iterator[Callable[[Page], Followed]]:
    name = f"durable_followed_{worker_id}"
    url = create_database(services.database_url, name)
    engine = create_engine(url)

    def _follow(page: Page) -> Followed:
        for block in page.blocks:
            if block.title and block.tag in FILES:
                path = tmp_path / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.body, encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DURABLE_", "PYTEST_"))}
        environment = {
            **kept,
            "DURABLE_DATABASE_URL": url.render_as_string(hide_password=False),
            # A Redis database of its own: other tests of this process use the first.
            "DURABLE_REDIS_URL": services.redis_url.rsplit("/", 1)[0] + "/11",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return Followed(page, tmp_path, engine, environment)

    yield _follow
    engine.dispose()
    drop_database(services.database_url, name)
