"""The `durable` command: its options, its version, and what an error looks like from outside."""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import click

import durable_core
from durable_core.cli import exits
from durable_core.cli.cases import cases
from durable_core.cli.config import config
from durable_core.cli.cron import cron
from durable_core.cli.database import migrate
from durable_core.cli.deliveries import deliveries
from durable_core.cli.demo import demo
from durable_core.cli.doctor import doctor
from durable_core.cli.documents import documents
from durable_core.cli.environment import env
from durable_core.cli.errors import errors
from durable_core.cli.exporter import exporter
from durable_core.cli.find import find_, why_
from durable_core.cli.journal import journal
from durable_core.cli.operations import operations
from durable_core.cli.output import ANSWERED, Output, masked
from durable_core.cli.pauses import pause, pauses, resume
from durable_core.cli.plans import plans
from durable_core.cli.probe import probe
from durable_core.cli.queues import kinds, queues
from durable_core.cli.report import report
from durable_core.cli.status import status
from durable_core.cli.up import up
from durable_core.cli.where import options
from durable_core.database.migrate import SUPPORTED

LIBRARIES = ("celery", "kombu", "sqlalchemy", "psycopg")


class Commands(click.Group):
    """A group whose errors are a sentence on stderr, an exit code and, with --json, an object on stdout."""

    _answered = False

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> None:
        line = list(sys.argv[1:] if args is None else args)
        # A terminal or pipe that cannot show a letter shows its number; it must not end the command.
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")
        extra.pop("standalone_mode", None)
        sys.exit(self._run(line, prog_name, extra))

    def _run(self, line: list[str], prog_name: str | None, extra: dict[str, Any]) -> int:
        self._answered = False
        try:
            code = super().main(line, prog_name, standalone_mode=False, **extra)
            return code if isinstance(code, int) else exits.OK
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            return self._end(line, exits.Failure(exits.INTERRUPTED, "INTERRUPTED", "interrupted"))
        except OSError as error:
            if error.errno != errno.EPIPE:
                return self._unforeseen(line, error)
            # The reader has seen enough. What Python would still flush at its exit goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exits.ERROR
        except Exception as error:
            failure = exits.failure_of(error)
            if failure is None:
                return self._unforeseen(line, error)
            if isinstance(error, click.UsageError):
                error.show()
            else:
                click.echo(f"durable: {masked(failure.message)}", err=True)
            return self._end(line, failure)

    def _unforeseen(self, line: list[str], error: Exception) -> int:
        click.echo(masked("".join(traceback.format_exception(error))), err=True)
        return self._end(line, exits.Failure(exits.ERROR, "UNFORESEEN", f"{type(error).__name__}: {error}"))

    def _end(self, line: list[str], failure: exits.Failure) -> int:
        # What was asked for is read off the line itself: a line that does not parse asks for JSON too.
        if "--json" in line and not self._answered:
            error = {"reason": failure.reason, "message": masked(failure.message)}
            click.echo(json.dumps({"error": error}))
        return failure.code

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        finally:
            self._answered = bool(ctx.find_root().meta.get(ANSWERED))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@options
def main() -> None:
    """
    Durable work on Celery and Postgres: look at it, mend it, and run it on this machine.

    \b
    Exit codes: 0 ok, 1 error, 2 usage, 4 not found, 5 conflict or wrong state,
    6 unhealthy, 7 wait timed out, 130 interrupted.
    """


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
def version(as_json: bool) -> None:
    """The version of this package, the schema it needs, and what it runs on."""
    versions = {
        "durable_core": durable_core.__version__,
        "schema": SUPPORTED[-1],
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }
    out = Output(as_json)
    if as_json:
        out.answer(versions)
    else:
        out.facts(versions.items())


for command in (
    migrate, status, doctor, probe, deliveries, plans, operations, cases, documents, find_, why_, errors, queues, kinds,
    journal, cron, pause, resume, pauses, exporter, config, report, up, env, demo, version,
):  # fmt: skip
    main.add_command(command)
