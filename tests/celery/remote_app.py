"""What the workers of operations import."""

import os

from celery import Celery

from durable_core.celery_binding import install
from durable_core.celery_binding.transport import guarded
from tests.celery import remote, shop

kinds = remote.Remote()
os.environ["CELERY_BROKER_URL"] = guarded(os.environ["CELERY_BROKER_URL"])
app = Celery("remote")
shop.configure(app)
durable = install(app)
