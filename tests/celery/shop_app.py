"""What the workers and the beat of these tests import: `celery -A tests.celery.shop_app worker`."""

import os

from celery import Celery

from durable_core.celery_binding import install
from tests.celery import shop

kinds = shop.Shop(without=os.environ.get("SHOP_WITHOUT", "").split(","))
app = Celery("shop", broker=os.environ["CELERY_BROKER_URL"])
shop.configure(app)
durable = install(app)
