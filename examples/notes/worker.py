"""The Celery app that carries suggestions; `durable up -A worker --web web:app` runs it beside the page."""

from celery import Celery
from notes import suggest

from durable_core.celery_binding import install
from durable_core.celery_binding.environment import broker_url_from_environment, engine_from_environment

app = Celery("notes", broker=broker_url_from_environment())
app.conf.durable_engine = engine_from_environment
install(app)

__all__ = ["app", "suggest"]
