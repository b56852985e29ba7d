"""Wrong clocks: of a process, by libfaketime in its environment, and of a whole Postgres, movable while it runs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from durable_core.local.postgres import Postgres
from tests.faults.servers import Cluster

HOUR = 3600


def faketime() -> Path | None:
    """The library of the wheel: distributions build it so that Python's own timers stop. None where there is none."""
    found = importlib.util.find_spec("libfaketime")
    for location in (found.submodule_search_locations or ()) if found else ():
        for library in Path(location).glob("vendor/libfaketime/src/libfaketime.so.1"):
            return library
    return None


def wrong_by(seconds: int) -> dict[str, str]:
    """The environment of a process whose clock is wrong by so much. Its timers go on as they do on a real machine."""
    return {"LD_PRELOAD": str(faketime()), "FAKETIME": f"{seconds:+d}s", "DONT_FAKE_MONOTONIC": "1"}


class ClockedPostgres(Postgres):
    """A Postgres that reads its clock's error from a file, at every look."""

    def _spawn(self, command: list[str], *arguments: Any, **how: Any) -> subprocess.Popen[bytes]:
        if Path(command[0]).name == "postgres":
            found = faketime()
            assert found is not None
            # Where its account can read it: the wheel may lie below a closed folder.
            library = self.folder.parent / found.name
            shutil.copyfile(found, library)
            library.chmod(0o755)
            command = [
                "/usr/bin/env", f"LD_PRELOAD={library}", f"FAKETIME_TIMESTAMP_FILE={self.clock}",
                "FAKETIME_NO_CACHE=1", "DONT_FAKE_MONOTONIC=1", *command,
            ]  # fmt: skip
        return super()._spawn(command, *arguments, **how)

    @property
    def clock(self) -> Path:
        return self.folder.parent / "clock"

    def jump_to(self, seconds: int) -> None:
        """Its clock is wrong by so much from now on."""
        new = self.clock.with_suffix(".new")
        new.write_text(f"{seconds:+d}s\n")
        new.chmod(0o644)
        new.replace(self.clock)


class ClockedCluster(Cluster):
    """A cluster whose clock jumps."""

    _server: ClockedPostgres

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="durable-clocks-"))
        self._folder.chmod(0o755)  # root's servers run as another account, which must reach their data
        self._server = ClockedPostgres(self._folder)
        self._server.jump_to(0)
        self.url = self._server.start()
        record = self._server._record
        assert record is not None
        self.port, self.pid = record.port, record.pid

    def jump_to(self, seconds: int) -> None:
        """Its clock is wrong by so much from now on, for sessions and the server's own processes alike."""
        self._server.jump_to(seconds)
