"""
External calls that are issued at most once, ever, and then polled until they ended.

`get`, `page`, `cancel`, `poll`, `release`, `live`, `journal`: each takes the caller's transaction first.
"""

from durable_core.claims.journal import read as journal
from durable_core.operations.operate import cancel, poll, release
from durable_core.operations.read import Live, Operation, get, live, page
from durable_core.operations.start import OperationRef
from durable_core.operations.statuses import ExternalStatus, Issued, Poll

__all__ = [
    "ExternalStatus", "Issued", "Live", "Operation", "OperationRef", "Poll", "cancel", "get", "journal", "live",
    "page", "poll", "release",
]  # fmt: skip
