"""
What a Celery app reads from its environment: the deployable `tasks`, and the app that `durable up` brings along.

Nothing here connects; an address that is not set is missed when it is first needed.
"""

from __future__ import annotations

import os
from functools import lru_cache

from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError

from durable_core.celery_binding.transport import guarded
from durable_core.database.connections import ping_rested_connections
from durable_core.database.environment import DATABASE_VARIABLE, FROM_UP, REDIS_VARIABLE, SCHEMA_VARIABLE
from durable_core.database.statements import DEFAULT_SCHEMA
from durable_core.errors import NotInstalled

DEFAULT_BROKER_URL = "redis://127.0.0.1:6379/0"

BROKER_TRANSPORT_OPTIONS = {
    # kombu waits for ever by default: connect within 5 s, and give up on an answer after 10 s.
    "socket_connect_timeout": 5,
    "socket_timeout": 10,
    # A peer that is gone without a word is noticed in seconds, not minutes.
    "health_check_interval": 5,
    "socket_keepalive": True,
}


def engine_from_environment() -> Engine:
    """
    The engine on the database that DURABLE_DATABASE_URL names, one per process; for `durable_engine`.

    Raises NotInstalled when the variable is not set, or holds no address of a Postgres for psycopg 3.
    """
    given = os.environ.get(DATABASE_VARIABLE)
    if not given:
        raise NotInstalled(
            f"set {DATABASE_VARIABLE}, for example postgresql+psycopg://app:…@db.internal/app; "
            f"while `durable up` runs in this folder, {FROM_UP} sets it."
        )
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):  # neither is shown: they may repeat a password
        raise NotInstalled(
            f"{DATABASE_VARIABLE} holds no database URL: write postgresql+psycopg://user:password@host:5432/name."
        ) from None
    if url.drivername not in _OURS:
        raise NotInstalled(
            f"{DATABASE_VARIABLE} names {url.drivername}; durable work needs PostgreSQL by psycopg 3: "
            "write postgresql+psycopg://…"
        )
    return _engine(url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False))


_OURS = ("postgresql+psycopg", "postgresql", "postgres")
"""The last two name no driver; hosters hand out both."""


@lru_cache(maxsize=1)
def _engine(url: str) -> Engine:
    engine = create_engine(
        url,
        connect_args={
            # A server that does not answer must not hang a worker.
            "connect_timeout": 5,
            # A peer that is gone is noticed within about 30 s, idle or in the middle of a statement.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 30_000,
        },
    )
    # A connection that died in the pool is replaced before a claim meets it.
    ping_rested_connections(engine)
    return engine


class AssumedUrl(str):
    """An address that is used because nobody gave one; `durable doctor` says so."""


def broker_url_from_environment() -> str:
    """
    The Redis that DURABLE_REDIS_URL names, or the one on this machine, which `durable doctor` tells; for `broker_url`.

    Guarded: one damaged message would stop a stock worker, and return to stop the next.
    """
    given = os.environ.get(REDIS_VARIABLE)
    return guarded(given) if given else AssumedUrl(guarded(DEFAULT_BROKER_URL))


def schema_from_environment() -> str:
    """The schema that DURABLE_SCHEMA names, or the usual one; for `durable_schema`."""
    return os.environ.get(SCHEMA_VARIABLE) or DEFAULT_SCHEMA
