"""The transaction of one request, by the host's own sessionmaker, sync or async."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from durable_core.database.statements import beside
from durable_core.database.transactions import DEADLOCK, SERIALIZATION, run, sqlstate

_statements = beside(__file__)

T = TypeVar("T")

Sessions: TypeAlias = "Callable[[], Session] | async_sessionmaker[AsyncSession]"
"""A sessionmaker of SQLAlchemy, or whatever is called as one; or an async one."""

LOCK_WAIT = "5s"
"""How long a request waits for a document that somebody is changing."""
TRIES = 3


class Transactions:
    """
    Runs the work of a request in a transaction that is committed before it returns: in a thread where the sessionmaker
    is a sync one, so that the event loop waits for no database.

    One that the database undid for another's sake is run again, three times at most. A client that goes away stops
    nothing that is under way in a thread.
    """

    def __init__(self, sessionmaker: Sessions) -> None:
        self._sessionmaker = sessionmaker

    async def run(self, work: Callable[[Session], T]) -> T:
        """What the work returns, committed. Raises what it raises, then nothing was written, and database errors."""
        for left in reversed(range(TRIES)):
            try:
                return await self._once(work)
            except DBAPIError as error:
                if not left or sqlstate(error) not in (SERIALIZATION, DEADLOCK):
                    raise
        raise AssertionError("the last try returns or raises")

    async def _once(self, work: Callable[[Session], T]) -> T:
        if isinstance(self._sessionmaker, async_sessionmaker):
            async with self._sessionmaker() as session, session.begin():
                return await session.run_sync(lambda sync: _bounded(sync, work))
        return await run_in_threadpool(self._in_thread, self._sessionmaker, work)

    @staticmethod
    def _in_thread(sessionmaker: Callable[[], Session], work: Callable[[Session], T]) -> T:
        with sessionmaker() as session, session.begin():
            return _bounded(session, work)


def _bounded(session: Session, work: Callable[[Session], T]) -> T:
    run(session, _statements.bound, lock_timeout=LOCK_WAIT)
    return work(session)
