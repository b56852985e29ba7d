"""What the workers of the rough kinds import. The environment says how they shut down, and what their parent does."""

import logging
import os
import threading
import time
from contextlib import suppress
from typing import Any

from celery import Celery, signals
from sqlalchemy import text
from sqlalchemy.orm import Session

import durable_core
from durable_core.celery_binding import install
from durable_core.celery_binding.transport import guarded
from tests.celery import rough, shop

kinds = rough.Rough()
os.environ["CELERY_BROKER_URL"] = guarded(os.environ["CELERY_BROKER_URL"])
app = Celery("rough")
shop.configure(app)
app.conf.update(
    durable_shutdown_grace=float(os.environ.get("ROUGH_GRACE", "25")),
    worker_soft_shutdown_timeout=float(os.environ.get("ROUGH_SOFT_SHUTDOWN", "0")),
)
durable = install(app)

if "ROUGH_ENGINE_AT_IMPORT" in os.environ:
    # As apps do that read their settings from the database: the pool has a connection before any child is forked.
    with shop.engine().connect() as _connection:
        _connection.execute(text("select 1"))


def _busy() -> None:
    """Take and leave, in the parent, every lock that a child may inherit: the pool's, the hints', the logs'."""
    log = logging.getLogger("rough.parent")
    while True:
        with suppress(Exception), Session(shop.engine()) as session:
            kinds.plain.options(queue="nobody").enqueue(session)
            session.rollback()
            kinds.plain.options(queue="nobody", key="the parent's").enqueue(session)
            session.commit()
        durable_core.wake()
        log.info("the parent is busy")
        time.sleep(0.01)


@signals.worker_init.connect(weak=False)
def _begin_to_be_busy(**_: Any) -> None:
    if "ROUGH_BUSY_PARENT" in os.environ:
        threading.Thread(target=_busy, daemon=True).start()
