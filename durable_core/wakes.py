"""
Who is told after a commit. Knows no Celery: the binding brings the carrier.

A hint that is lost, doubled, early or about a row that never came to be costs at most
one claim that finds nothing; `durable.dispatch` is the guarantee.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, scoped_session

log = logging.getLogger("durable.wake")

MOST_REMEMBERED = 1000
"""Hints kept for one transaction, or for one thread until it calls `wake`. A newer one drives out the oldest, which is
left to dispatch: what nobody woke for must not keep out what was written just now."""

_SESSION_KEY = "durable_core.wakes"


@dataclass(frozen=True)
class Hint:
    """What a message carries: a kind and an id, never a payload. `first` marks the one that may use the row's id."""

    kind: str
    id: str
    queue: str
    priority: int
    attempt: int = 1
    first: bool = True


class Carrier(Protocol):
    """
    Takes hints to workers.

    `offer` is called in the wake of a commit: it neither raises nor waits for the broker. `publish`
    and `depths` are for the sweeps: they raise what the broker raises, within bounded time.
    """

    def offer(self, hints: Iterable[Hint]) -> None:
        """Take hints to be published soon; drop them when there is no room."""

    def publish(self, hints: Iterable[Hint]) -> int:
        """Publish now; how many went out. After an exception any number of them may have."""
        ...

    def depths(self, queues: Iterable[str]) -> Mapping[str, int]:
        """How many hints lie in each queue."""
        ...


_carrier: Carrier | None = None
_unsent: ContextVar[deque[Hint] | None] = ContextVar("durable_core.unsent", default=None)


def use_carrier(carrier: Carrier | None) -> None:
    """Name the carrier of this process; None leaves every hint to dispatch elsewhere."""
    global _carrier
    _carrier = carrier


def carrier() -> Carrier | None:
    return _carrier


def after_commit(
    tx: Session | scoped_session[Session] | Connection | psycopg.Connection[Any] | None, hints: Iterable[Hint]
) -> None:
    """
    Publish these hints once the caller's root transaction has committed.

    A Session tells us. A Connection's commit event comes before COMMIT and psycopg has
    none, so there the hints wait for `wake()`, or are left to dispatch.
    """
    if _carrier is None:
        return
    if isinstance(tx, scoped_session):
        tx = tx()
    if isinstance(tx, Session):
        _remembered_by(tx).extend(hints)
        return
    waiting = _unsent.get()
    if waiting is None:
        waiting = deque(maxlen=MOST_REMEMBERED)
        _unsent.set(waiting)
    waiting.extend(hints)


def wake() -> int:
    """
    Publish the hints of deliveries enqueued on plain connections in this thread or task; how many.

    Call it after the commit. Called too early, or after a rollback, it costs claims that
    find nothing. Never raises and never waits for the broker.
    """
    waiting = _unsent.get()
    if not waiting:
        return 0
    hints = list(waiting)
    waiting.clear()
    offer(hints)
    return len(hints)


def _remembered_by(session: Session) -> deque[Hint]:
    remembered: deque[Hint] | None = session.info.get(_SESSION_KEY)
    if remembered is None:
        remembered = session.info[_SESSION_KEY] = deque(maxlen=MOST_REMEMBERED)
        event.listen(session, "after_commit", _session_committed)
        event.listen(session, "after_rollback", _session_rolled_back)
    return remembered


def _session_committed(session: Session) -> None:
    """Fires on a released SAVEPOINT and for a joined session too: only the root commit is one."""
    remembered: deque[Hint] | None = session.info.get(_SESSION_KEY)  # the host may have cleared its info
    if not remembered or session.in_nested_transaction():
        return
    hints = list(remembered)
    remembered.clear()
    joined = session.bind if isinstance(session.bind, Connection) else None
    if joined is not None and joined.in_transaction():
        return  # an outer transaction, still undecided, holds the rows: dispatch finds them
    offer(hints)


def _session_rolled_back(session: Session) -> None:
    """Fires for a SAVEPOINT too: then hints of rows that stand are kept, and one of a row that went costs a claim."""
    if not session.in_nested_transaction():
        session.info.get(_SESSION_KEY, deque()).clear()


def offer(hints: list[Hint]) -> None:
    """Publish these hints soon, of rows that are committed. Never raises and never waits for the broker."""
    if _carrier is None:
        return
    try:
        _carrier.offer(hints)
    except Exception:
        # The rows are committed: an exception here would tell the caller that they are not.
        log.warning("wake_publish_failed", exc_info=True)
