"""
The app that `durable up` runs where there is none of your own: the sweeps and the ready kinds, nothing else.

It finds its servers in DURABLE_DATABASE_URL and DURABLE_REDIS_URL, its schema in DURABLE_SCHEMA, where
`email.send` hands over its mail in DURABLE_SMTP_URL, the targets of `notify.send` in DURABLE_NOTIFY_TARGETS, and
how webhooks are posted in the DURABLE_WEBHOOK_ variables. Those may reach this machine only if one of them says so.
"""

from __future__ import annotations

from celery import Celery

from durable_core.celery_binding import install
from durable_core.celery_binding.environment import (
    BROKER_TRANSPORT_OPTIONS,
    broker_url_from_environment,
    engine_from_environment,
    schema_from_environment,
)
from durable_core.celery_binding.publish import broker_queue
from durable_core.deliveries.options import DEFAULT_QUEUE
from durable_core.ready import email, notify, webhook
from durable_core.ready.environment import (
    smtp_from_environment,
    targets_from_environment,
    webhooks_from_environment,
)

NAME = __name__

app = Celery("durable")
app.conf.update(
    broker_url=broker_url_from_environment(),
    broker_transport_options=BROKER_TRANSPORT_OPTIONS,
    # Made at first use, so that importing this module connects to nothing.
    durable_engine=engine_from_environment,
    durable_schema=schema_from_environment(),
    # Not `celery`: a worker without -Q reads it, and would throw away the plain tasks of an app on the same broker.
    task_default_queue=broker_queue(DEFAULT_QUEUE).name,
    # One message at a time per child: a long handler must not sit on hints that an idle child could take.
    worker_prefetch_multiplier=1,
    # Results live in the rows.
    task_ignore_result=True,
    # JSON only: anything else from a broker is code.
    accept_content=["json"],
    # Wait for a broker that starts later than this, and come back when it does.
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    timezone="UTC",
)
email.declare(smtp_from_environment)
webhook.declare(webhooks_from_environment)
if notify.is_installed():
    notify.declare(targets_from_environment)
install(app)
