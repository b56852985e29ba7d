"""What the workers and the beat of these tests import: `celery -A tests.celery.shop_app worker`."""

import json
import os
import time

from celery import Celery, signals

from durable_core.celery_binding import install
from durable_core.celery_binding.transport import guarded
from tests.celery import points, shop

kinds = shop.Shop(without=os.environ.get("SHOP_WITHOUT", "").split(","))
# Celery lets this variable win over the app's own setting, so the guard has to be in it.
os.environ["CELERY_BROKER_URL"] = guarded(os.environ["CELERY_BROKER_URL"])
app = Celery("shop")
shop.configure(app)
# What a test sets for one worker alone: '{"visibility_timeout": 5}'.
app.conf.broker_transport_options.update(json.loads(os.environ.get("SHOP_TRANSPORT", "{}")))
durable = install(app)
if "SHOP_PLANS" in os.environ:
    from tests.celery import plan_kinds

    plan_kinds.PlanKinds()
    plan_kinds.hold_at_claims()
if "SHOP_CASES" in os.environ:
    from tests.celery import case_types

    case_types.CaseTypes()
if "SHOP_POINTS" in os.environ:
    points.connect(shop.pause)
if "SHOP_BUSY_PARENT" in os.environ:
    points.keep_the_parent_busy(shop.engine())
if "SHOP_HANGS" in os.environ:

    @signals.worker_ready.connect(weak=False)
    def hang(**_: object) -> None:
        """The host's own code, in the main loop."""
        time.sleep(float(os.environ["SHOP_HANGS"]))
