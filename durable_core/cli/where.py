"""Where the database is: the app's own engine, an address, or the servers of a running `durable up`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.exc import ArgumentError

from durable_core.cli.exits import AppNotLoaded, NoDatabase
from durable_core.cli.output import keep_secret
from durable_core.database.connections import Database
from durable_core.database.environment import DATABASE_VARIABLE, FROM_UP, REDIS_VARIABLE, SCHEMA_VARIABLE
from durable_core.database.statements import DEFAULT_SCHEMA, checked_schema, use_schema
from durable_core.errors import DefinitionError
from durable_core.local.postgres import Postgres

if TYPE_CHECKING:
    from celery import Celery

    from durable_core.celery_binding import Durable

F = TypeVar("F", bound=Callable[..., Any])

DIRECTORY = ".durable"
CONNECT_SECONDS = 5


@dataclass
class Where:
    """What the command line said about the place of the database; `given` names what stood on the line itself."""

    app: str | None = None
    database_url: str | None = None
    schema: str | None = None
    directory: str = DIRECTORY
    given: set[str] = field(default_factory=set)

    @contextmanager
    def database(self) -> Iterator[tuple[Database, Durable | None]]:
        """The database, and the app's durable work where -A named one; its connections end with the block."""
        durable = None
        if self.app is not None:
            durable = self.durable(load_app(self.app))
            database = durable.database
        else:
            use_schema(self.schema or DEFAULT_SCHEMA)
            database = Database(
                create_engine(
                    self._url(),
                    connect_args={
                        "connect_timeout": CONNECT_SECONDS,
                        "application_name": "durable",
                        # A command runs nothing often, and behind a pooler prepared statements may be mixed up.
                        "prepare_threshold": None,
                    },
                )
            )
        keep_secret(database.engine.url.password)
        try:
            yield database, durable
        finally:
            database.engine.dispose()

    def durable(self, app: Celery) -> Durable:
        """The durable work of a loaded app, in the schema that is to be used. Raises NotInstalled."""
        from durable_core.celery_binding import installed

        durable = installed(app)
        keep_secret(durable.database.engine.url.password)
        if "schema" in self.given and self.schema:
            # Named on the line, it wins over the app's own setting; the variable does not.
            use_schema(self.schema)
        return durable

    def place(self) -> str:
        """The address of the database without an app, its password left out. Raises NoDatabase and BadParameter."""
        return self._url().render_as_string(hide_password=True)

    def _url(self) -> URL:
        if self.database_url:
            return address(self.database_url)
        try:
            embedded = Postgres(Path(self.directory)).address_of_running()
        except OSError:
            embedded = None  # the files of another user's servers: not ours to use
        if embedded is None:
            raise NoDatabase(
                "nothing says where the database is: name your app (durable -A proj …), or give --database-url "
                f"or {DATABASE_VARIABLE}, or start one here with `durable up`."
            )
        return make_url(embedded)


def address(text: str) -> URL:
    """A Postgres address as SQLAlchemy wants it for psycopg 3. Raises BadParameter, without repeating the address."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise click.BadParameter(
            "that is no database URL; write postgresql://user:password@host:5432/name.", param_hint="--database-url"
        ) from None
    keep_secret(url.password)
    if url.drivername.split("+", 1)[0] not in ("postgresql", "postgres"):
        raise click.BadParameter(
            f"durable rows live in PostgreSQL; this address names {url.drivername}.", param_hint="--database-url"
        )
    return url.set(drivername="postgresql+psycopg")


def load_app(name: str) -> Celery:
    """The Celery app of that name, found as Celery's own -A finds it. Raises AppNotLoaded."""
    from celery.app.utils import find_app

    find_modules_here()
    try:
        app = find_app(name)
    except Exception as error:  # whatever the host's modules raise while they load
        said = f"{type(error).__name__}: {error}".rstrip(".")
        if isinstance(error, KeyError) and error.args and error.args[0] in (DATABASE_VARIABLE, REDIS_VARIABLE):
            said = f"it needs {error.args[0]}, which is not set; while `durable up` runs here, {FROM_UP} sets it"
        raise AppNotLoaded(f"cannot load the Celery app {name!r}: {said}.") from error
    if not hasattr(app, "conf"):
        module = name.partition(":")[0]
        raise AppNotLoaded(
            f"{name!r} names a {type(app).__name__}, not a Celery app: "
            f"name the Celery app itself, such as -A {module}:celery_app."
        )
    found: Celery = app
    return found


def find_modules_here() -> None:
    """From now on an import looks into this folder too, as `python -m celery` does in it."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def options(command: F) -> F:
    """
    The options that say where the database is, on the group and on each command alike.

    `durable -A proj status` and `durable status -A proj` mean the same; the later one wins.
    """
    for decorate in reversed(
        (
            click.option(
                "-A", "--app", callback=_remember, expose_value=False, metavar="APP",
                help="The Celery app, named as for `celery -A`; its own durable_engine says where the rows live.",
            ),
            click.option(
                "--database-url", envvar=DATABASE_VARIABLE, show_envvar=True, callback=_remember, expose_value=False,
                metavar="URL", help="Where Postgres is, if no app says so.",
            ),
            click.option(
                "--schema", envvar=SCHEMA_VARIABLE, show_envvar=True, callback=_remember, expose_value=False,
                metavar="NAME", help=f"The schema of the durable tables; {DEFAULT_SCHEMA!r} if nothing says otherwise.",
            ),
            click.option(
                "--directory", callback=_remember, expose_value=False, metavar="FOLDER",
                help=f"Where `durable up` keeps its servers; {DIRECTORY!r} if not given.",
            ),
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


def _remember(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    where = ctx.ensure_object(Where)
    name = str(param.name)
    if value is None:
        return
    if name == "schema":
        try:
            checked_schema(value)
        except DefinitionError as error:
            raise click.BadParameter(str(error)) from None
    if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        where.given.add(name)
    elif name in where.given:
        return  # on the line, before the command: it wins over a variable
    setattr(where, name, value)
