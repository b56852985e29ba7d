"""`durable env`: how programs of one's own reach the stack that `durable up` started here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from durable_core.cli.exits import CommandError
from durable_core.cli.where import DIRECTORY
from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE


class NothingRuns(CommandError):
    """No stack answers in this folder."""

    reason = "NOTHING_RUNS"


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
def env(as_json: bool) -> None:
    """
    Print the addresses of the running `durable up`, passwords included, as lines for a shell.

    `eval "$(durable env)"` in a second terminal, and your app and its clients reach the same servers.
    """
    from durable_core.local.services import running

    found = running(Path(DIRECTORY))
    if found is None:
        raise NothingRuns(
            f"no `durable up` runs in this folder: start one, or set {DATABASE_VARIABLE} and {REDIS_VARIABLE}."
        )
    values = {DATABASE_VARIABLE: found.database_url, REDIS_VARIABLE: found.redis_url}
    # Straight to stdout: whatever goes through Output has its passwords masked, and these are asked for.
    if as_json:
        click.echo(json.dumps(values))
        return
    for name, value in values.items():
        click.echo(f"export {name}={shlex.quote(value)}")
