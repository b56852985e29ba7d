"""
External calls that are issued at most once, ever, and then polled until they ended.

`get`, `list`, `cancel`, `poll`, `release`, `live`, `journal`, `reasons`: each takes the caller's transaction first.
"""

from durable_core.claims.journal import read as journal
from durable_core.deliveries.why import Because
from durable_core.operations.operate import cancel, poll, release
from durable_core.operations.read import Live, Operation, get, live, page
from durable_core.operations.start import OperationRef
from durable_core.operations.statuses import ExternalStatus, Issued, Poll
from durable_core.operations.why import reasons

list = page
"""`operations.list(tx, ...)`: a page of operations, newest first."""

__all__ = [
    "Because", "ExternalStatus", "Issued", "Live", "Operation", "OperationRef", "Poll", "cancel", "get", "journal",
    "list", "live", "page", "poll", "reasons", "release",
]  # fmt: skip
