"""
The app that `durable up` runs where there is none of your own: the sweeps and the ready kinds, nothing else.

It finds its servers in DURABLE_DATABASE_URL and DURABLE_REDIS_URL, its schema in DURABLE_SCHEMA, and where
`email.send` hands over its mail in DURABLE_SMTP_URL.
"""

from __future__ import annotations

import os

from celery import Celery
from sqlalchemy import Engine, create_engine

from durable_core.celery_binding import install
from durable_core.celery_binding.transport import guarded
from durable_core.errors import NotInstalled
from durable_core.ready import email, webhook

NAME = __name__


def engine() -> Engine:
    """Made at first use, so that importing this module connects to nothing."""
    return create_engine(os.environ["DURABLE_DATABASE_URL"], pool_pre_ping=True, connect_args={"connect_timeout": 5})


def smtp() -> email.Smtp:
    """Read at each attempt: whoever only posts webhooks needs no mail server."""
    url = os.environ.get("DURABLE_SMTP_URL")
    if not url:
        raise NotInstalled("set DURABLE_SMTP_URL, for example smtp://127.0.0.1:1025?from=shop@example.com")
    return email.Smtp.from_url(url)


app = Celery("durable")
app.conf.update(
    # The guard drops damaged and forged messages, one of which would stop a stock worker.
    broker_url=guarded(os.environ.get("DURABLE_REDIS_URL", "redis://127.0.0.1:6379/0")),
    durable_engine=engine,
    durable_schema=os.environ.get("DURABLE_SCHEMA", "durable"),
    # One message at a time per child: a long handler must not sit on hints that an idle child could take.
    worker_prefetch_multiplier=1,
    # Results live in the rows.
    task_ignore_result=True,
    # JSON only: anything else from a broker is code.
    accept_content=["json"],
    broker_connection_retry_on_startup=True,
    timezone="UTC",
)
email.declare(smtp)
webhook.declare()
install(app)
