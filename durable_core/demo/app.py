"""`celery -A durable_core.demo.app`: the shop's workers, control worker and beat, as the demo starts them."""

import os
import sys
from typing import Any

from celery import signals

from durable_core.demo import lifeline, logs, plan, shop, supplier

lifeline.hold()
_place = shop.Place.of(os.environ)
shop.declare(_place)
plan.declare()
supplier.declare(_place.supplier_port, shop.WEBHOOK_QUEUE)
app = shop.celery_app(_place)


@signals.setup_logging.connect(weak=False)
def _json_lines(**_: Any) -> None:
    logs.configure(sys.stderr)
