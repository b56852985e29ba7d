"""The `durable_*` settings of a Celery app, read when they are first needed and checked then."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from celery import Celery
from sqlalchemy import Engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from durable_core.claims.claim import Holder
from durable_core.database.connections import Database
from durable_core.database.statements import DEFAULT_SCHEMA, checked_schema
from durable_core.deliveries.sweep import HINTS_PER_QUEUE, RETENTION_SECONDS
from durable_core.errors import DefinitionError, NotInstalled
from durable_core.sweeps import SWEEPS, Bounds, Sweep
from durable_core.tracing import Mode, checked_mode

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Settings:
    """What `install` works with. Each has a default but the database; durations in seconds."""

    schema: str = DEFAULT_SCHEMA
    lease_seconds: float = 30.0
    heartbeat_seconds: float = 8.0
    shutdown_grace: float = 25.0
    hints_per_queue: int = HINTS_PER_QUEUE
    retention_seconds: float = RETENTION_SECONDS
    beat: bool = True
    sweep_intervals: Mapping[str, float] | None = None
    flower_payload: bool = False
    trace: Mode = Mode.LINK
    journal_key: str | None = field(default=None, repr=False)

    @staticmethod
    def of(app: Celery) -> Settings:
        """Raises DefinitionError, naming the setting."""
        conf = app.conf
        defaults = Settings()
        intervals = conf.get("durable_sweep_intervals") or {}
        unknown = set(intervals) - {sweep.name for sweep in SWEEPS}
        if unknown:
            raise DefinitionError(f"durable_sweep_intervals names no sweep: {', '.join(sorted(unknown))}.")
        settings = Settings(
            schema=checked_schema(conf.get("durable_schema") or defaults.schema),
            lease_seconds=_positive(conf, "durable_lease_seconds", defaults.lease_seconds),
            heartbeat_seconds=_positive(conf, "durable_heartbeat_seconds", defaults.heartbeat_seconds),
            shutdown_grace=_positive(conf, "durable_shutdown_grace", defaults.shutdown_grace),
            hints_per_queue=_whole(conf, "durable_hints_per_queue", defaults.hints_per_queue),
            retention_seconds=_positive(conf, "durable_retention_days", defaults.retention_seconds / DAY) * DAY,
            beat=bool(conf.get("durable_beat", True)),
            sweep_intervals={name: _number(f"durable_sweep_intervals[{name!r}]", v) for name, v in intervals.items()},
            flower_payload=_switch(conf, "durable_flower_payload", defaults.flower_payload),
            trace=checked_mode(conf.get("durable_trace") or defaults.trace),
            journal_key=_key(conf, "durable_journal_key"),
        )
        settings.holder()  # a lease and a heartbeat that do not fit are told at the start, not by every task
        return settings

    def holder(self) -> Holder:
        """This process as a holder of claims; made anew in every process, for it carries the pid."""
        return Holder(lease_seconds=self.lease_seconds, heartbeat_seconds=self.heartbeat_seconds)

    def bounds(self) -> Bounds:
        return Bounds(self.lease_seconds, self.heartbeat_seconds, self.hints_per_queue, self.retention_seconds)

    def sweeps(self) -> tuple[Sweep, ...]:
        """The sweeps, with the host's own intervals where it has a mind about them."""
        intervals = self.sweep_intervals or {}
        return tuple(
            replace(sweep, interval=(own := intervals[sweep.name]), offered=min(sweep.every, own))
            if sweep.name in intervals
            else sweep
            for sweep in SWEEPS
        )

    def interval(self, name: str) -> float:
        """How often a sweep runs, in seconds."""
        return next(sweep.interval for sweep in self.sweeps() if sweep.name == name)


def _positive(conf: Any, name: str, default: float) -> float:
    value = conf.get(name)
    return default if value is None else _number(name, value)


def _whole(conf: Any, name: str, default: int) -> int:
    value = conf.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise DefinitionError(f"{name}={value!r}: give a whole number from 1.")
    return default if value is None else value


def _switch(conf: Any, name: str, default: bool) -> bool:
    value = conf.get(name)
    if value is not None and not isinstance(value, bool):
        # The text "false" is true to Python.
        raise DefinitionError(f"{name}={value!r}: give True or False.")
    return default if value is None else value


def _key(conf: Any, name: str) -> str | None:
    value = conf.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        # What was given is not repeated: it may be the key all the same.
        raise DefinitionError(f"{name}: give a text that is not empty, or nothing for no key.")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10**9:
        raise DefinitionError(f"{name}={value!r}: give a number greater than 0.")
    return value


def database_of(app: Celery) -> Database:
    """
    The database named by `durable_sessionmaker` or `durable_engine`: an object, `"module:name"`, or a callable.

    Raises NotInstalled when neither is set.
    """
    sessions = _resolved(app.conf.get("durable_sessionmaker"), keep=(sessionmaker, scoped_session))
    engine = _resolved(app.conf.get("durable_engine"), keep=(Engine,))
    if isinstance(sessions, scoped_session):
        sessions = sessions.session_factory
    if sessions is None and engine is None:
        raise NotInstalled(
            "this Celery app does not say where its durable rows live: set durable_sessionmaker or durable_engine "
            "(an object, or a text such as 'proj.db:SessionLocal')."
        )
    if sessions is not None and not isinstance(sessions, sessionmaker):
        raise DefinitionError(f"durable_sessionmaker is a {type(sessions).__name__}, not a sessionmaker.")
    if engine is not None and not isinstance(engine, Engine):
        raise DefinitionError(f"durable_engine is a {type(engine).__name__}, not a SQLAlchemy Engine.")
    maker: sessionmaker[Session] | None = sessions
    return Database(engine, sessions=maker)


def _resolved(value: Any, keep: tuple[type, ...]) -> Any:
    if isinstance(value, str):
        module, _, name = value.partition(":")
        if not (module and name):
            raise DefinitionError(f"cannot import {value!r}: write it as 'module:name'.")
        try:
            value = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise DefinitionError(
                f"cannot import {value!r} ({error}): the module must import here, and have that name."
            ) from error
    if value is not None and not isinstance(value, keep) and callable(value):
        value = value()
    return value
