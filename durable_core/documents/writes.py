"""How often one user may write: a moving window, counted where all who serve the documents can see it."""

from __future__ import annotations

import logging
import math
import time

from limits import RateLimitItem, parse
from limits.storage import MemoryStorage, Storage
from limits.strategies import MovingWindowRateLimiter
from starlette.concurrency import run_in_threadpool

from durable_core.documents.problems import Problem
from durable_core.errors import DefinitionError

log = logging.getLogger("durable.documents")

MOST_WRITES = "120/minute"


class Writes:
    """
    Counts the writes of each user, those too that are refused afterwards, and refuses those past the limit.

    The hole: without a `storage` that the processes share, each counts for itself, so a user has the limit once per
    process. One that cannot be asked limits nobody: the documents are worth more than the count of them.

    Raises DefinitionError.
    """

    def __init__(self, collection: str, most: str, storage: Storage | None = None) -> None:
        self._collection = collection
        try:
            self._item: RateLimitItem = parse(most)
        except ValueError:
            told = f"documents {collection!r}: writes={most!r} is no rate, as '120/minute' is."
            raise DefinitionError(told) from None
        self._storage = storage if storage is not None else MemoryStorage()
        self._limiter = MovingWindowRateLimiter(self._storage)

    async def count(self, user: str) -> None:
        """One more write of this user. Raises Problem where that is one too many."""
        if isinstance(self._storage, MemoryStorage):
            wait = self._wait(user)
        else:
            wait = await run_in_threadpool(self._wait, user)
        if wait is not None:
            raise Problem(
                "too-many-writes",
                f"{self._item.amount} writes in {self._item.get_expiry()} s are the most: again in {wait} s. "
                "Nothing was written.",
                headers={"Retry-After": str(wait)},
                retry_after=wait,
            )

    def _wait(self, user: str) -> int | None:
        """Seconds until the next write may come; None where this one may."""
        try:
            if self._limiter.hit(self._item, self._collection, user):
                return None
            reset = self._limiter.get_window_stats(self._item, self._collection, user).reset_time
        except Exception as down:  # a storage of any make, with errors of its own
            log.warning("document_writes_not_counted", extra={"error": type(down).__name__})
            return None
        return max(1, math.ceil(reset - time.time()))
