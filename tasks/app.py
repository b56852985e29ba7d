"""The Celery app, with a reason beside each setting. Declarations only: all work is in `durable_core`."""

from __future__ import annotations

import os
from functools import lru_cache

from celery import Celery
from sqlalchemy import Engine, create_engine

from beat_schedule import beat_schedule
from durable_core.celery_binding import install
from durable_core.celery_binding.transport import guarded
from durable_core.errors import NotInstalled


@lru_cache(maxsize=1)
def engine() -> Engine:
    """The database that holds the deliveries, made at first use: importing this module connects to nothing."""
    url = os.environ.get("DURABLE_DATABASE_URL")
    if not url:
        raise NotInstalled("set DURABLE_DATABASE_URL, for example postgresql+psycopg://app:…@db.internal/app")
    return create_engine(
        url,
        # A connection that died in the pool is replaced before a claim meets it.
        pool_pre_ping=True,
        # A database that does not answer must not hang a worker: connect within 5 s, and
        # notice a peer that is gone within about 30 s.
        connect_args={
            "connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
            "tcp_user_timeout": 30_000,
        },
    )  # fmt: skip


app = Celery("tasks", include=["tasks.email", "tasks.webhook"])
app.conf.update(
    # Guarded: one damaged message in Redis would stop a stock worker, and return to stop the next.
    broker_url=guarded(os.environ.get("DURABLE_REDIS_URL", "redis://127.0.0.1:6379/0")),
    # Where the rows live; see above.
    durable_engine=engine,
    durable_schema=os.environ.get("DURABLE_SCHEMA", "durable"),
    # The sweeps, spelled out.
    beat_schedule=beat_schedule,
    # One message at a time per child: a long handler must not sit on hints that an idle child could take.
    worker_prefetch_multiplier=1,
    # Results live in the rows. A result backend would be one more thing to lose.
    task_ignore_result=True,
    # JSON only: anything else from a broker is code.
    accept_content=["json"],
    task_serializer="json",
    # What Flower shows.
    worker_send_task_events=True,
    task_send_sent_event=True,
    # Start before the broker does, and come back when it does.
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # A peer that is gone without a word is noticed in seconds, not minutes; kombu's default is no time-out at all.
    broker_transport_options={
        "socket_timeout": 10, "socket_connect_timeout": 5, "health_check_interval": 5, "socket_keepalive": True,
    },
    timezone="UTC",
)  # fmt: skip
durable = install(app)
