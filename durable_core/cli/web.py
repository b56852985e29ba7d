"""The ASGI app that `durable up` serves beside its workers, with uvicorn."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import socket
from dataclasses import dataclass

import click

from durable_core.cli.exits import AppNotLoaded
from durable_core.cli.stack import Part
from durable_core.cli.where import find_modules_here
from durable_core.errors import NotInstalled

LOOPBACK = "127.0.0.1"
LAST_ANSWERS_SECONDS = 3
"""What open answers get at the end: a stream never ends by itself, and workers are given longer than this."""

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def checked_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """
    The name of an ASGI app that can be served here, looked at before anything is started for it.

    Raises BadParameter for what is not MODULE:APP, NotInstalled without uvicorn.
    """
    if value is None:
        return None
    if not _NAME.fullmatch(value):
        raise click.BadParameter("name a module and the ASGI app in it, such as web:app.", ctx, param)
    if importlib.util.find_spec("uvicorn") is None:
        raise NotInstalled("serving an ASGI app needs uvicorn, an extra: pip install 'durable-core[web]'.")
    return value


@dataclass(frozen=True)
class Web:
    """An ASGI app and the port of 127.0.0.1 that it is served on."""

    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def check_loads(self) -> None:
        """
        Import the app as uvicorn will, so that a wrong name is one sentence and not the end of a process.

        What fails only when the app starts, its lifespan say, still ends the process. Raises AppNotLoaded.
        """
        find_modules_here()
        try:
            app = pkgutil.resolve_name(self.name)
        except (Exception, SystemExit) as error:  # whatever the user's modules raise while they load
            said = f"{type(error).__name__}: {error}".rstrip(".: ")
            raise AppNotLoaded(f"cannot load the ASGI app {self.name!r}: {said}.") from error
        if not callable(app):
            raise AppNotLoaded(
                f"{self.name!r} names a {type(app).__name__}, not an ASGI app: name the app itself, such as web:app."
            )

    def part(self) -> Part:
        """The process that serves it, to this machine alone."""
        return Part(
            "web",
            (
                self.name, f"--host={LOOPBACK}", f"--port={self.port}",
                f"--timeout-graceful-shutdown={LAST_ANSWERS_SECONDS}",
            ),
            program="uvicorn",
        )  # fmt: skip

    def listens(self) -> bool:
        """True once the app has started, for uvicorn listens only then; a request might mean something to the app."""
        with socket.socket() as probe:
            probe.settimeout(2)
            return probe.connect_ex((LOOPBACK, self.port)) == 0
