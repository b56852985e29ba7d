"""The servers that tests run against: those the two variables name, or ones that live as long as the tests."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE
from durable_core.local.postgres import Postgres
from durable_core.local.server import Server
from durable_core.local.valkey import Valkey

QUICK_POSTGRES = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""For tests that kill no server: nothing here outlives a crash of Postgres."""


@contextmanager
def database_server() -> Iterator[str]:
    """The URL of a Postgres. Raises LocalServicesError where none is named and none can be started."""
    if named := os.environ.get(DATABASE_VARIABLE):
        yield named
        return
    with server_folder() as folder, _started(Postgres(folder, settings=QUICK_POSTGRES)) as url:
        yield url


@contextmanager
def redis_server() -> Iterator[str]:
    """
    The URL of a Valkey or Redis. Raises LocalServicesError as `database_server` does.

    On one that is named, each process of pytest-xdist has a database of its own: process `gw3` the third after the
    one named. A hint that reached another process's worker would be lost.
    """
    if named := os.environ.get(REDIS_VARIABLE):
        yield _own_database(named, os.environ.get("PYTEST_XDIST_WORKER", ""))
        return
    with server_folder() as folder, _started(Valkey(folder)) as url:
        yield url


@contextmanager
def server_folder() -> Iterator[Path]:
    """A folder for servers, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="durable-tests-"))
    folder.chmod(0o755)  # root's servers run as another account, which must reach their data
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(server: Server) -> Iterator[str]:
    try:
        yield server.start()
    finally:
        server.stop(remove=True)


def _own_database(url: str, process: str) -> str:
    place = re.fullmatch(r"gw(\d+)", process)
    if place is None:
        return url
    address, query = re.fullmatch(r"([^?]*)(.*)", url, re.DOTALL).groups()  # type: ignore[union-attr]  # fits any text
    found = re.fullmatch(r"(\w[\w+-]*://[^/]*)(?:/(\d*))?", address)
    if found is None:
        return url
    return f"{found[1]}/{int(found[2] or 0) + int(place[1])}{query}"
