"""Runs a program, then carries out whatever it enqueued or started; prints kind, state and error of each row."""

from __future__ import annotations

import os
import runpy
import sys

from sqlalchemy import create_engine

from durable_core import deliveries, kinds, operations
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker, perform_due
from durable_core.operations.attempt import perform

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
    started = operations.page(tx)
for operation in started:
    came = perform(worker, kinds.operations.get(operation.kind), operation.id)
    print("operation", operation.kind, came.outcome, came.error_code or "-", came.error_message or "-")
