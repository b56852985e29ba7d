"""
For tests of durable work on a real Postgres: a migrated database, a clock to move, work carried out in this thread, a
look at what was enqueued, and a worker to kill. `durable_core.testing.plugin` has the fixtures.
"""

from durable_core.testing.databases import (
    MovableClock,
    clear,
    cloned_database,
    create_database,
    drop_database,
    empty,
    fresh_database,
    migrated,
)
from durable_core.testing.deliveries import Made, make_delivery, wait_for
from durable_core.testing.drain import drain, run_one
from durable_core.testing.enqueued import assert_enqueued, refute_enqueued
from durable_core.testing.locks import wait_until_blocked, wait_until_somebody_blocks
from durable_core.testing.worker import WorkerProcess, frozen_worker, killed_worker

__all__ = [
    "Made", "MovableClock", "WorkerProcess", "assert_enqueued", "clear", "cloned_database", "create_database", "drain",
    "drop_database", "empty", "fresh_database", "frozen_worker", "killed_worker", "make_delivery", "migrated",
    "refute_enqueued", "run_one", "wait_for", "wait_until_blocked", "wait_until_somebody_blocks",
]  # fmt: skip
