"""`durable config`: every setting with its value and where that comes from, and names that nothing reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from durable_core.cli.exits import NoDatabase
from durable_core.cli.output import Output, note
from durable_core.cli.up import FLOWER_AUTH_VARIABLE
from durable_core.cli.where import Where, load_app, options
from durable_core.database import environment
from durable_core.database.environment import SCHEMA_VARIABLE
from durable_core.pulse import FOLDER_VARIABLE as PULSE_FOLDER_VARIABLE

if TYPE_CHECKING:
    from celery import Celery

PREFIX = "DURABLE_"
MASK = "***"

ADDRESSES = (environment.DATABASE_VARIABLE, environment.REDIS_VARIABLE)
PLAIN = (
    environment.SCHEMA_VARIABLE,
    environment.PRIVATE_TARGETS_VARIABLE,
    environment.EXPORTER_HOST_VARIABLE,
    environment.EXPORTER_PORT_VARIABLE,
    PULSE_FOLDER_VARIABLE,
)
"""Variables that hold no secret. Of an address the password is masked, and any other variable is masked whole."""

OWN = ("DURABLE_UP", "DURABLE_OWNER", "DURABLE_DEMO_")
"""What processes of ours tell their children; nobody sets these."""


@dataclass(frozen=True)
class Value:
    """One setting or variable. `source` is default, app, environment, flag, or `durable up` for its servers."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class Config:
    """All that is set, what is set and read by nothing, and what is wrong with it, if anything."""

    settings: list[Value]
    variables: list[Value]
    unknown: list[dict[str, str | None]]
    problems: list[str]
    app: str | None


@click.command()
@options
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
@click.pass_obj
def config(where: Where, as_json: bool) -> None:
    """
    Every durable_* setting and DURABLE_* variable: its value, and where it comes from. Asks no server.

    Without -A the settings are the defaults, for no app says otherwise. Passwords and secrets are masked. A name that
    begins like ours and is none is said, with the one that was perhaps meant: nothing reads it.
    """
    out = Output(as_json)
    found = configured(where)
    if as_json:
        shown = {"app": found.app, "settings": found.settings, "variables": found.variables}
        out.answer({**shown, "unknown": found.unknown, "problems": found.problems})
        return
    out.table(
        ("SETTING", "VALUE", "SOURCE"),
        [(one.name, _shown(one.value), one.source) for one in (*found.settings, *found.variables)],
    )
    for name in found.unknown:
        hint = f"; did you mean {name['nearest']}?" if name["nearest"] else ""
        note(f"nothing reads {name['name']}{hint}")
    for problem in found.problems:
        note(problem)


def configured(where: Where) -> Config:
    """What is set where. Raises AppNotLoaded and NotInstalled."""
    from durable_core.celery_binding.known import defaults, nearest, settings_of, unknown_in

    problems: list[str] = []
    unknown: list[dict[str, str | None]] = []
    if where.app is None:
        settings = [Value(name, value, "default") for name, value in defaults().items()]
        settings[0] = Value(settings[0].name, *_database(where))
    else:
        app = _app(where)
        found, problem = settings_of(app)
        settings = [Value(one.name, one.value, one.source) for one in found]
        problems += [problem] if problem else []
        unknown += [{"name": one.name, "nearest": one.nearest} for one in unknown_in(app)]
    settings = [_schema(where, one) for one in settings]
    known = variables()
    strangers = sorted(
        name for name in os.environ if name.startswith(PREFIX) and name not in known and not name.startswith(OWN)
    )
    unknown += [{"name": name, "nearest": nearest(name, known)} for name in strangers]
    return Config(settings, [_variable(name) for name in known if name in os.environ], unknown, problems, where.app)


def variables() -> list[str]:
    """The environment variables that anything here reads."""
    named = {value for name, value in vars(environment).items() if name.endswith("_VARIABLE")}
    return sorted({*named, FLOWER_AUTH_VARIABLE, PULSE_FOLDER_VARIABLE})


def _app(where: Where) -> Celery:
    assert where.app is not None
    app = load_app(where.app)
    from durable_core.celery_binding import installed

    installed(app)
    return app


def _database(where: Where) -> tuple[str | None, str]:
    """Where the rows are without an app, and what says so."""
    if where.database_url:
        return where.place(), "flag" if "database_url" in where.given else "environment"
    try:
        return where.place(), "durable up"
    except NoDatabase:
        return None, "default"


def _schema(where: Where, one: Value) -> Value:
    """The schema by the line, or by the variable where no app has a mind of its own or the app took it from there."""
    if one.name != "durable_schema" or not where.schema:
        return one
    if "schema" in where.given:
        return Value(one.name, where.schema, "flag")
    if where.app is None or one.value == os.environ.get(SCHEMA_VARIABLE):
        return Value(one.name, where.schema, "environment")
    return one


def _variable(name: str) -> Value:
    value = os.environ[name]
    return Value(name, value if name in (*ADDRESSES, *PLAIN) or not value else MASK, "environment")


def _shown(value: Any) -> str | None:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.15g}"
    return None if value is None or value == {} else str(value)
