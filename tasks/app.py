"""The Celery app, with a reason beside each setting. Declarations only: all work is in `durable_core`."""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery

from beat_schedule import beat_schedule
from durable_core.celery_binding import install
from durable_core.celery_binding.environment import (
    BROKER_TRANSPORT_OPTIONS,
    broker_url_from_environment,
    engine_from_environment,
    schema_from_environment,
)

app = Celery("tasks", include=["tasks.email", "tasks.webhook", "tasks.notify"])
app.conf.update(
    # DURABLE_REDIS_URL, guarded: one damaged message in Redis would stop a stock worker, and return to stop the next.
    broker_url=broker_url_from_environment(),
    # A broker that is gone without a word is noticed in seconds.
    broker_transport_options=BROKER_TRANSPORT_OPTIONS,
    # Where the rows live: DURABLE_DATABASE_URL, read at first use, so that importing this module needs no server.
    durable_engine=engine_from_environment,
    durable_schema=schema_from_environment(),
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
    timezone="UTC",
)
durable = install(app)

# Where Flower finds its configuration, from whatever folder it is started; --conf wins.
os.environ.setdefault("FLOWER_CONF", str(Path(__file__).with_name("flowerconfig.py")))
