"""
The outbox: deliveries enqueued in the caller's transaction, carried out at least once.

`enqueue_many`, `enqueue_by_name` (their async forms begin with an a), `get`, `page`, `waits`, `cancel`, `reschedule`,
`redrive`, `discard`, `release`, `pause`, `resume`, `pauses`: each takes the caller's transaction first.
"""

from durable_core.claims.journal import read as journal
from durable_core.deliveries.enqueue import aenqueue_by_name, aenqueue_many, enqueue_by_name, enqueue_many
from durable_core.deliveries.operate import cancel, discard, redrive, release, reschedule
from durable_core.deliveries.paused import Pause, pause, pauses, resume
from durable_core.deliveries.read import Delivery, get, page, queues
from durable_core.deliveries.rows import New, Ref
from durable_core.deliveries.waiting import Ahead, Cause, Wait, waits

__all__ = [
    "Ahead", "Cause", "Delivery", "New", "Pause", "Ref", "Wait", "aenqueue_by_name", "aenqueue_many", "cancel",
    "discard", "enqueue_by_name", "enqueue_many", "get", "journal", "page", "pause", "pauses", "queues", "redrive",
    "release", "reschedule", "resume", "waits",
]  # fmt: skip
