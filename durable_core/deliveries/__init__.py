"""
The outbox: deliveries enqueued in the caller's transaction, carried out at least once.

`enqueue_many`, `enqueue_by_name` (their async forms begin with an a), `get`, `page`, `redrive`,
`release`: each takes the caller's transaction first.
"""

from durable_core.claims.journal import read as journal
from durable_core.deliveries.enqueue import New, Ref, aenqueue_by_name, aenqueue_many, enqueue_by_name, enqueue_many
from durable_core.deliveries.operate import redrive, release
from durable_core.deliveries.read import Delivery, get, page, queues

__all__ = [
    "Delivery", "New", "Ref", "aenqueue_by_name", "aenqueue_many", "enqueue_by_name", "enqueue_many", "get",
    "journal", "page", "queues", "redrive", "release",
]  # fmt: skip
