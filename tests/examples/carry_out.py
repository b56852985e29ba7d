"""Runs a program, then carries out whatever it enqueued; prints kind, state and error of each delivery."""

from __future__ import annotations

import os
import runpy
import sys

from sqlalchemy import create_engine

from durable_core import deliveries
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker, perform_due

runpy.run_path(sys.argv[1], run_name="shown")
database = Database(create_engine(os.environ["DURABLE_DATABASE_URL"]))
worker = Worker(database)
with database.transaction() as tx:
    waiting = [line.queue for line in deliveries.queues(tx)]
for queue in waiting:
    while perform_due(worker, 20, queue=queue):
        pass
with database.transaction() as tx:
    for row in deliveries.page(tx):
        print("delivery", row.kind, row.state, row.error_code or "-", (row.error_message or "-").splitlines()[0])
