"""What user code gets of the attempt's transaction: a session it may work in and may not end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import psycopg
from psycopg.errors import DivisionByZero
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from durable_core.claims import claim as protocol
from durable_core.claims.claim import Claim, Locked
from durable_core.database.commits import CommitUnknown, answer_lost
from durable_core.database.connections import Database, raw
from durable_core.database.statements import Statements
from durable_core.database.transactions import DATABASE_ERRORS, run_raw
from durable_core.errors import ClaimLost, EffectEscaped, StepTransactionOwned

log = logging.getLogger("durable.run")

OPEN_TOO_LONG_SECONDS = 5.0
"""A step's transaction that was open longer is warned of: it held a row lock and the vacuum horizon; open it last."""

Effect = Callable[[Session], object]
"""Written inside the commit. Must be re-runnable: a commit that is tried again runs it again."""


EXIT_OF_A_COPY = 70
"""With this a forked copy ends, unless it asked for an exit code of its own."""


def leave_if_forked(pid: int) -> None:
    """
    End this process here if it is a copy that user code forked: called wherever such code comes back to us.

    The claim, the connections and the pool's pipes are its parent's. A copy that went on would report on
    the row over the parent's socket, and take messages from the parent's pipe.
    """
    if os.getpid() == pid:
        return
    leaving = sys.exc_info()[1]
    log.warning("forked_copy_ended", extra={"parent_pid": pid, "left_by": type(leaving).__name__})
    asked = (leaving.code or 0) if isinstance(leaving, SystemExit) else EXIT_OF_A_COPY
    os._exit(asked if isinstance(asked, int) else EXIT_OF_A_COPY)


class _Guarded:
    """Mixed into the host's Session class: the calls that would end the attempt's transaction raise."""

    def commit(self) -> NoReturn:
        raise StepTransactionOwned("commit")

    def rollback(self) -> NoReturn:
        raise StepTransactionOwned("rollback")

    def close(self) -> NoReturn:
        raise StepTransactionOwned("close")

    def reset(self) -> NoReturn:
        raise StepTransactionOwned("reset")

    def invalidate(self) -> NoReturn:
        raise StepTransactionOwned("invalidate")

    def prepare(self) -> NoReturn:
        raise StepTransactionOwned("prepare")


_guarded_classes: dict[type[Session], type[Session]] = {}


def _guarded(base: type[Session]) -> type[Session]:
    if base not in _guarded_classes:
        _guarded_classes[base] = type("StepSession", (_Guarded, base), {})
    return _guarded_classes[base]


def joined_session(maker: sessionmaker[Session], connection: Connection) -> Session:
    """A session for user code on a transaction of ours, of the host's own class; its commit and its like raise."""
    options: dict[str, Any] = {
        **maker.kw,
        "bind": connection,
        "join_transaction_mode": "control_fully",
    }
    for competing in ("binds", "twophase", "autobegin"):
        options.pop(competing, None)
    session = _guarded(maker.class_)(**options)
    # A session that never asked for its connection has nothing to commit, and would leave the receipt uncommitted.
    session.connection()
    return session


class LockRefused(Exception):
    """The row's lock was not to be had in time, or at all just now: the machine room's fault, and no attempt's."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the row could not be locked: {type(cause).__name__}")


class StepTransaction:
    """
    The one transaction in which an attempt's effects and its receipt commit: all of it or none of it.

    It opens when it is first needed, by locking the row on its fence; a claim that is
    lost by then raises ClaimLost and nothing can be written. From there on nobody can
    take the row, however long it lasts.
    """

    def __init__(self, database: Database, statements: Statements, claim: Claim, answer_seconds: float) -> None:
        self._database, self._statements, self._claim = database, statements, claim
        self._answer_seconds = answer_seconds
        self._connection: Connection | None = None
        self._locked: Locked | None = None
        self._session: Session | None = None
        self._opened_at = 0.0
        self._pid = os.getpid()
        self._opening = threading.RLock()  # a handler's threads may be the first to ask, all at once

    @property
    def database(self) -> Database:
        return self._database

    @property
    def used(self) -> bool:
        """Whether user code was given the session: then its work goes with the transaction, and cannot be replayed."""
        return self._session is not None

    @property
    def broken(self) -> bool:
        """Whether the database has ended or aborted the transaction."""
        if self._connection is None:
            return False
        if self._connection.invalidated or self._connection.closed:
            return True
        driver = raw(self._connection)
        return driver.closed or driver.info.transaction_status in (
            TransactionStatus.INERROR, TransactionStatus.UNKNOWN,
        )  # fmt: skip

    def session(self) -> Session:
        """The session for user code, under the host's own class and time-outs. Raises ClaimLost."""
        if os.getpid() != self._pid:
            raise RuntimeError("step.session belongs to the process that claimed the row, not to one that it forked")
        with self._opening:
            return self._session or self._new_session()

    def _new_session(self) -> Session:
        connection, locked = self._open()
        # Our bound on lock waits was for our own statement; user code waits as its host decided.
        run_raw(raw(connection), self._statements.unbound, {"was": locked.lock_timeout_was})
        session = joined_session(self._database.sessions, connection)
        self._session = session
        self._opened_at = time.monotonic()
        return session

    def commit(self, receipt: Mapping[str, object], effects: tuple[Effect, ...]) -> None:
        """
        Write the effects and the receipt and COMMIT.

        Raises ClaimLost with nothing written, CommitUnknown when the answer to COMMIT was
        lost, EffectEscaped when the handler ended the transaction itself, and whatever an
        effect raises.
        """
        if self._session is None and not effects:
            self.discard()
            return self._commit_alone(receipt)
        connection, locked = self._open()
        driver = raw(connection)
        try:
            try:
                for effect in effects:
                    effect(self.session())
            finally:
                leave_if_forked(self._pid)
        except BaseException:
            # Before anyone reports this: our own lock would make the report wait for us.
            self.discard()
            raise
        try:
            # The receipt's answer is read before COMMIT is sent: SQLAlchemy's own commit events
            # run in between, and what they write must be inside the fence as well.
            session = self.session()
            session.flush()
            protocol.settle(connection, self._statements, self._claim, locked, receipt)
            try:
                with self._acknowledged(connection):
                    Session.commit(session)
            except Exception as error:
                if driver.closed or answer_lost(error):
                    raise CommitUnknown from error
                raise
        except DivisionByZero as unsettled:
            raise EffectEscaped(self._claim.id, self._claim.what) from unsettled
        finally:
            self.discard()

    def _commit_alone(self, receipt: Mapping[str, object]) -> None:
        """The same where there is no effect: one statement, which is the whole transaction."""
        driver: psycopg.Connection[Any] | None = None
        landed, fence = False, None
        try:
            with self._database.bounded(self._answer_seconds).driver() as driver:
                landed = protocol.settle_alone(driver, self._statements, self._claim, receipt)
                if not landed:
                    fence = _current_fence(driver, self._statements, self._claim)
        except DATABASE_ERRORS as error:
            if driver is None:
                raise LockRefused(error) from error
            if driver.closed or answer_lost(error):
                raise CommitUnknown from error
            raise
        if not landed:
            raise ClaimLost(self._claim.id, self._claim.fence, fence, self._claim.what)

    @contextmanager
    def _acknowledged(self, connection: Connection) -> Iterator[None]:
        """COMMIT inside, watched from when it is sent: the host's own events around it may take their time."""
        with self._database.watch.over(raw(connection), self._answer_seconds, begun=False) as begin:
            event.listen(connection, "commit", lambda _: begin())
            yield

    def discard(self) -> None:
        """End the transaction without committing what is uncommitted, and give the connection back."""
        session, self._session = self._session, None
        if session is not None and (open_for := time.monotonic() - self._opened_at) > OPEN_TOO_LONG_SECONDS:
            log.warning(
                "step_session_open_long",
                extra={"row_id": self._claim.id, "kind": self._claim.kind, "duration_s": round(open_for, 1)},
            )
        connection, self._connection = self._connection, None
        self._locked = None
        try:
            if session is not None:
                Session.close(session)
        except (psycopg.Error, SQLAlchemyError):
            # The connection is gone. Raised here, it would hide what the caller is about to say of its COMMIT.
            log.debug("step_session_close_failed", exc_info=True)
        finally:
            if connection is not None:
                ended(connection)

    def _open(self) -> tuple[Connection, Locked]:
        if self._connection is not None and self._locked is not None:
            return self._connection, self._locked
        try:
            connection = self._database.connect()
        except DATABASE_ERRORS as error:
            raise LockRefused(error) from error
        try:
            try:
                locked = protocol.lock(connection, self._statements, self._claim)
            except DATABASE_ERRORS as error:
                raise LockRefused(error) from error
            if locked is None:
                current = _current_fence(raw(connection), self._statements, self._claim)
                raise ClaimLost(self._claim.id, self._claim.fence, current, self._claim.what)
        except BaseException:
            ended(connection)
            raise
        self._connection, self._locked = connection, locked
        return connection, locked


def _current_fence(driver: psycopg.Connection[Any], statements: Statements, claim: Claim) -> int | None:
    """The fence that refused us, for the sentence; None when there is no such row."""
    rows = run_raw(driver, statements.current, {"id": claim.id})
    return int(rows[0]["fence"]) if rows else None


def ended(connection: Connection) -> None:
    """Roll back and give back; a connection that cannot even do that is thrown away."""
    try:
        if not connection.invalidated and not (driver := raw(connection)).closed:
            driver.rollback()
        connection.rollback()
    except (psycopg.Error, SQLAlchemyError):
        with suppress(psycopg.Error, SQLAlchemyError):  # a handler may have closed it already
            connection.invalidate()
    finally:
        connection.close()
