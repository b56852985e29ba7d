"""`durable up`: the whole stack on this machine without Docker, until Ctrl-C."""

from __future__ import annotations

import http.client
import importlib.machinery
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from sqlalchemy import URL, make_url

from durable_core import sweeps
from durable_core.cli import exits
from durable_core.cli.exits import CommandError
from durable_core.cli.output import Output, keep_secret, masked, note
from durable_core.cli.stack import LOOK_EVERY, Part, Stack
from durable_core.cli.web import LOOPBACK, Web, checked_name
from durable_core.cli.where import Where, address, load_app, options
from durable_core.database.connections import Database
from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE, SCHEMA_VARIABLE
from durable_core.database.migrate import migrate
from durable_core.database.statements import current_schema
from durable_core.deliveries import read
from durable_core.local import Addresses, Services
from durable_core.local.server import free_port

if TYPE_CHECKING:
    from durable_core.celery_binding import Durable

FLOWER_AUTH_VARIABLE = "DURABLE_FLOWER_BASIC_AUTH"
READY_SECONDS = 120.0
WEB_PORT = 8000
BEYOND_GRACE = 5.0
"""A worker's own grace is for its handlers; this much more is for the worker itself."""


class NotReady(CommandError):
    """The stack did not become ready in time."""

    reason = "NOT_READY"
    code = exits.TIMED_OUT


class PortTaken(CommandError):
    """Something else listens on the port of Flower, or of the web app."""

    reason = "PORT_TAKEN"


@click.command()
@options
@click.option(
    "--port", type=click.IntRange(0, 65535), default=5555, show_default=True,
    help="Flower's port on 127.0.0.1; 0 takes a free one.",
)  # fmt: skip
@click.option("--concurrency", type=click.IntRange(min=1), default=2, show_default=True, help="Children of the worker.")
@click.option(
    "--web", metavar="MODULE:APP", callback=checked_name, help="An ASGI app of this folder, to be served with uvicorn."
)
@click.option(
    "--web-port", type=click.IntRange(0, 65535),
    help=f"Its port on 127.0.0.1; 0 takes a free one. {WEB_PORT} if not given.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout, on one line, once all is ready.")
@click.pass_obj
def up(where: Where, port: int, concurrency: int, web: str | None, web_port: int | None, as_json: bool) -> int:
    """
    Postgres, Valkey, a worker, a control worker, beat and Flower on this machine, until Ctrl-C.

    The servers come from the [embedded] extra and keep their data in .durable/; DURABLE_DATABASE_URL and
    DURABLE_REDIS_URL name others. Without -A it runs the app `tasks` of this folder, or else a small one with the
    ready kinds alone. A process that ends by itself is named and ends the rest (exit 1): nothing is restarted.
    Flower is read-only and asks for a password if DURABLE_FLOWER_BASIC_AUTH (user:password) is set.
    --web serves your pages beside them (the [web] extra), with both variables set to these servers.
    """
    if web is None and web_port is not None:
        raise click.UsageError("--web-port is the port of an app that --web names: give both.")
    web_port = WEB_PORT if web_port is None else web_port
    if web is not None and port == web_port != 0:
        raise click.UsageError(f"Flower and the web app cannot both have port {port}: give another --web-port.")
    out = Output(as_json)
    interrupts = Interrupts()
    with interrupts.caught():
        try:
            _run(where, port, concurrency, None if web is None else Web(web, web_port), out, interrupts)
        except KeyboardInterrupt:
            note("stopped")
            return exits.INTERRUPTED
    return exits.OK


class Interrupts:
    """
    The first Ctrl-C (or TERM, or a closed terminal) raises KeyboardInterrupt; from the second on, haste is noted.

    So the end that the first one began is never itself broken off halfway.
    """

    def __init__(self) -> None:
        self.count = 0

    def hurried(self) -> bool:
        return self.count > 1

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            raise KeyboardInterrupt


def _run(where: Where, port: int, concurrency: int, web: Web | None, out: Output, interrupts: Interrupts) -> None:
    directory = Path(where.directory)
    named = [variable for variable in (DATABASE_VARIABLE, REDIS_VARIABLE) if os.environ.get(variable)]
    if where.database_url:
        # The children's engine is SQLAlchemy's, which wants the driver named.
        os.environ[DATABASE_VARIABLE] = address(where.database_url).render_as_string(hide_password=False)
    if where.schema:
        os.environ[SCHEMA_VARIABLE] = where.schema
    port = _free(port, "Flower", "--port")
    if web is not None:
        web = replace(web, port=_free(web.port, "the web app", "--web-port"))
    stack = Stack(directory / "up")
    stack.own()
    keep_logs = True
    try:
        with ExitStack() as ending:
            servers = Services(directory, keep=True)
            ending.callback(servers.stop)
            for variable in named:
                note(f"using the server that {variable} names; unset it to have one started here")
            ours = ((DATABASE_VARIABLE, "Postgres"), (REDIS_VARIABLE, "Valkey"))
            if starting := [what for variable, what in ours if not os.environ.get(variable)]:
                note(f"starting {' and '.join(starting)}")
            addresses = servers.start()
            app, durable = _app(where, addresses)
            if web is not None:
                web.check_loads()
            grace = durable.settings.shutdown_grace + BEYOND_GRACE
            ending.callback(_stop, stack, grace, interrupts)
            ending.callback(durable.database.engine.dispose)
            for revision in migrate(durable.database.engine):
                note(f'schema "{current_schema()}": ran {revision}')
            began = _now(durable.database)
            also = "" if web is None else f", and uvicorn for {web.name}"
            note(f"starting a worker, a control worker, beat and Flower{also}")
            for part in parts(app, port, concurrency, stack.folder):
                stack.start(part)
            if web is not None:
                stack.start(web.part())
            _wait_until_ready(stack, durable, port, web, began)
            _announce(out, app, addresses, durable, port, web, stack)
            while True:
                stack.check()
                time.sleep(LOOK_EVERY * 4)
    except KeyboardInterrupt:
        keep_logs = False
        raise
    finally:
        stack.close(keep_logs=keep_logs)


def _stop(stack: Stack, grace: float, interrupts: Interrupts) -> None:
    note("stopping; Ctrl-C again does not wait for what runs")
    # Whatever ended the wait, from here on a Ctrl-C means haste.
    interrupts.count = max(interrupts.count, 1)
    for name in stack.stop(grace, interrupts.hurried):
        note(f"{name} was ended by force; what it held is rescued by the next worker")


def _app(where: Where, addresses: Addresses) -> tuple[str, Durable]:
    """The app to run, told by its environment where this stack's servers are."""
    os.environ[DATABASE_VARIABLE] = addresses.database_url
    os.environ[REDIS_VARIABLE] = addresses.redis_url
    keep_secret(make_url(addresses.database_url).password)
    keep_secret(urlsplit(addresses.redis_url).password)
    keep_secret(os.environ.get(FLOWER_AUTH_VARIABLE))
    name = where.app
    if name is None and importlib.machinery.PathFinder.find_spec("tasks", [os.getcwd()]) is not None:
        name = "tasks"
    if name is None:
        from durable_core.cli.minimal import NAME

        name = NAME
        note("no -A and no `tasks` here: running the ready kinds alone; for your own app, durable -A proj up")
    app = load_app(name)
    durable = where.durable(app)
    for what, variable, theirs, ours in (
        ("database", DATABASE_VARIABLE, _shown(durable.database.engine.url), addresses.database_url),
        ("broker", REDIS_VARIABLE, str(app.conf.broker_url), addresses.redis_url),
    ):
        if _place(theirs) != _place(ours):
            note(
                f"app {name} uses a {what} of its own, {theirs}, not this stack's: "
                f"let it read {variable} to change that"
            )
    return name, durable


def _place(url: str) -> tuple[str | None, int | None, str]:
    """What two addresses must share to mean the same server. The driver and the transport may differ."""
    split = urlsplit(url)
    return split.hostname, split.port, split.path.strip("/") or "0"


def _shown(url: URL) -> str:
    return url.render_as_string()


def parts(app: str, port: int, concurrency: int, folder: Path) -> list[Part]:
    """What the stack runs beside its servers."""
    quiet = ("--without-gossip", "--without-mingle")
    auth = os.environ.get(FLOWER_AUTH_VARIABLE)
    return [
        Part(
            "worker",
            ("-A", app, "worker", "-n", "worker@%h", "-c", str(concurrency), "-E", "-l", "INFO", *quiet),
        ),
        Part(
            "control",
            (
                "-A", app, "worker", "-n", "control@%h", "-Q", sweeps.CONTROL_QUEUE, "-c", "1", "-E", "-l", "INFO",
                *quiet,
            ),
        ),
        Part(
            "beat",
            # The default scheduler keeps a file: in the run folder, which goes at the end, not in the user's.
            ("-A", app, "beat", "-l", "INFO", "--pidfile=", f"--schedule={folder / 'beat-schedule'}"),
        ),
        Part(
            "flower",
            (
                "-A", app, "flower", f"--conf={_flower_configuration()}", f"--address={LOOPBACK}", f"--port={port}",
                "--read_only=True", "--persistent=False",
            ),
            # In the environment, for every user of the machine can read a command line. The API stays shut
            # without a password whatever the caller's environment says: open, it runs tasks for any web page.
            (("FLOWER_UNAUTHENTICATED_API", "false"), *((("FLOWER_BASIC_AUTH", auth),) if auth else ())),
        ),
    ]  # fmt: skip


def _flower_configuration() -> str:
    """The caller's own, as Flower finds it, or else the one that comes with the package."""
    from durable_core.celery_binding.flower import CONFIGURATION

    named = os.environ.get("FLOWER_CONF")
    if named:
        return named
    own = Path("flowerconfig.py")
    return str(own.absolute() if own.exists() else CONFIGURATION)


def _free(port: int, whose: str, option: str) -> int:
    if port == 0:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise PortTaken(
                f"port {port} is not to be had for {whose} ({error.strerror}): give another {option}."
            ) from None
    return port


def _now(database: Database) -> datetime:
    with database.autocommit() as connection:
        return read.now(connection)


@dataclass
class _Readiness:
    """What is known to work so far. Each is asked for itself, so that a slow start can be named."""

    worker: bool = False
    sweeps: bool = False
    flower: bool = False
    web: bool = False

    def missing(self) -> list[str]:
        return [name for name, works in vars(self).items() if not works]


def _wait_until_ready(stack: Stack, durable: Durable, port: int, web: Web | None, began: datetime) -> None:
    """
    Until the worker answers, a sweep went from beat over the broker to the database, and Flower and the app serve.

    Raises ChildEnded or NotReady.
    """
    ready = _Readiness(web=web is None)
    until = time.monotonic() + READY_SECONDS
    while ready.missing():
        stack.check()
        if time.monotonic() > until:
            raise NotReady(
                f"not ready after {READY_SECONDS:.0f} s: {', '.join(ready.missing())}; the logs are in {stack.folder}."
            )
        ready.flower = ready.flower or _serves(port)
        ready.web = ready.web or (web is not None and web.listens())
        ready.sweeps = ready.sweeps or _dispatched_since(durable.database, began)
        # Last: it waits for answers, up to its timeout.
        ready.worker = ready.worker or _answers(durable.app)
        time.sleep(LOOK_EVERY)


def _serves(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2)
    try:
        connection.request("GET", "/healthcheck")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _dispatched_since(database: Database, began: datetime) -> bool:
    with database.autocommit() as connection:
        return any(row["name"] == "dispatch" and row["began_at"] >= began for row in sweeps.loops(connection))


def _answers(app: Any) -> bool:
    from celery.utils.nodenames import host_format

    name = host_format("worker@%h")
    answers = app.control.ping(destination=[name], timeout=1.0, limit=1)
    return any(name in answer for answer in answers or ())


def _announce(
    out: Output, app: str, addresses: Addresses, durable: Durable, port: int, web: Web | None, stack: Stack
) -> None:
    database = _shown(durable.database.engine.url)
    broker = masked(str(durable.app.conf.broker_url))
    flower = f"http://{LOOPBACK}:{port}"
    web_url = None if web is None else web.url
    if out.as_json:
        # Never spread over lines, terminal or not: a reader waits for this line.
        out.answer(
            {
                "app": app, "database_url": database, "broker_url": broker, "flower_url": flower,
                "web_url": web_url, "logs": str(stack.folder), "pid": os.getpid(),
            },
            one_line=True,
        )  # fmt: skip
        return
    out.facts(
        [
            ("app", app), ("database", database), ("broker", broker), ("Flower", flower),
            ("web", web_url), ("logs", f"{stack.folder}/*.log"),
        ]
    )  # fmt: skip
    note("ready; Ctrl-C ends all of it")
