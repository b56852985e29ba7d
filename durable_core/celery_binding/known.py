"""Every `durable_*` setting: what it is, where its value comes from, and names that are none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from celery import Celery
from sqlalchemy import Engine
from sqlalchemy.orm import scoped_session, sessionmaker

from durable_core.celery_binding.environment import engine_from_environment
from durable_core.celery_binding.settings import DAY, Settings
from durable_core.errors import DefinitionError
from durable_core.secrets import MASK

PREFIX = "durable_"

DATABASES = ("durable_engine", "durable_sessionmaker")
"""They say where the rows are, and have no default."""

SECRET = ("durable_journal_key",)
"""Shown masked, also where they are refused."""

_SPELLED = {"retention_seconds": ("durable_retention_days", DAY)}
"""Settings whose name and unit differ from the field that they become."""


@dataclass(frozen=True)
class Setting:
    """One setting, as the app has it. `source` is default, app or environment."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class Unknown:
    """A name that begins like ours and is none; `nearest` is the one that was perhaps meant."""

    name: str
    nearest: str | None


def defaults() -> dict[str, Any]:
    """Every setting with its default; None for those that say where the rows are."""
    return {**dict.fromkeys(DATABASES), **_values(Settings())}


def settings_of(app: Celery) -> tuple[list[Setting], str | None]:
    """
    Every setting of an app, and what is wrong with them where Settings refuses them: then they are as they were given.

    A database is named by what the app was given, and neither made nor asked.
    """
    own = app.conf  # Celery itself has no default of ours, so what is there was given
    problem = None
    values = defaults()
    try:
        values.update(_values(Settings.of(app)))
    except DefinitionError as refused:
        problem = str(refused)
        values.update({name: own[name] for name in values if own.get(name) is not None})
    found = []
    for name, value in values.items():
        given = own.get(name)
        source = "default" if given is None else "app"
        if name in DATABASES:
            value = _place(given)
            source = "environment" if given is engine_from_environment else source
        elif name in SECRET and value is not None:
            value = MASK
        elif not isinstance(value, str | int | float | Mapping | None):
            value = repr(value)  # refused, or nothing that JSON has a word for
        found.append(Setting(name, value, source))
    return found, problem


def unknown_in(app: Celery) -> list[Unknown]:
    """The names in an app's configuration that begin like ours and are none: nothing ever reads them."""
    own = app.conf
    own.get("broker_url")  # the first key that is read has Celery load what was set before
    prefix = getattr(own, "prefix", None) or ""
    found = set()
    for key in list(own):
        name = str(key).removeprefix(prefix).lower()
        value = own.get(name)
        # A module that is the configuration brings all of its names, those that it imports too.
        if name.startswith(PREFIX) and not (inspect.ismodule(value) or inspect.isclass(value)):
            found.add(name)
    return [Unknown(name, nearest(name, defaults())) for name in sorted(found - set(defaults()))]


def nearest(name: str, known: Any) -> str | None:
    """The known name that this is most like; None where it is like none. That all begin alike says nothing."""
    ends = {one[len(PREFIX) :]: one for one in known}
    close = get_close_matches(name[len(PREFIX) :], list(ends), n=1, cutoff=0.6)
    return ends[close[0]] if close else None


def _values(settings: Settings) -> dict[str, Any]:
    found = {}
    for field in fields(settings):
        name, unit = _SPELLED.get(field.name, (f"{PREFIX}{field.name}", None))
        value = getattr(settings, field.name)
        found[name] = value if unit is None else value / unit
    return found


def _place(given: Any) -> str | None:
    """Where the rows are, as far as it was said; the password is left out."""
    if isinstance(given, scoped_session):
        given = given.session_factory
    if isinstance(given, sessionmaker):
        given = given.kw.get("bind")
    if isinstance(given, Engine):
        return given.url.render_as_string(hide_password=True)
    if given is None or isinstance(given, str):
        return given
    return getattr(given, "__qualname__", type(given).__name__)
