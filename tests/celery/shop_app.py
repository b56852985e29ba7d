"""What the workers and the beat of these tests import: `celery -A tests.celery.shop_app worker`."""

import os

from celery import Celery

from durable_core.celery_binding import install
from durable_core.celery_binding.transport import guarded
from tests.celery import shop

kinds = shop.Shop(without=os.environ.get("SHOP_WITHOUT", "").split(","))
# Celery lets this variable win over the app's own setting, so the guard has to be in it.
os.environ["CELERY_BROKER_URL"] = guarded(os.environ["CELERY_BROKER_URL"])
app = Celery("shop")
shop.configure(app)
durable = install(app)
