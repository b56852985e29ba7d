"""For tests of durable work: a migrated database, a clock to move, rows in a wanted state, and waits for locks."""

from durable_core.testing.databases import (
    MovableClock,
    clear,
    cloned_database,
    create_database,
    drop_database,
    migrated,
)
from durable_core.testing.deliveries import Made, make_delivery
from durable_core.testing.locks import wait_until_blocked, wait_until_somebody_blocks

__all__ = [
    "Made", "MovableClock", "clear", "cloned_database", "create_database", "drop_database", "make_delivery",
    "migrated", "wait_until_blocked", "wait_until_somebody_blocks",
]  # fmt: skip
