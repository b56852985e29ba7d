"""What each exit code means, and which error ends with which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import click
import psycopg
from sqlalchemy.exc import DBAPIError, OperationalError

from durable_core.database.transactions import CANCELED, LOCK_TIMEOUT, sqlstate
from durable_core.document_refusals import (
    ContentTooLarge,
    InvalidContent,
    UnknownDocument,
    UnknownRevision,
    VersionConflict,
)
from durable_core.errors import (
    DurableError,
    IdempotencyConflict,
    IllegalMove,
    InvalidArguments,
    InvalidOption,
    KeyInFlight,
    KeyTaken,
    NotFound,
    NotInstalled,
    RowBusy,
)
from durable_core.refusals import (
    BadScopeKey,
    CaseBusy,
    CaseClaimLost,
    CaseNotFound,
    InvalidInput,
    OperationInFlight,
    PlanExpired,
    PlanRefused,
    SelfApproval,
    StalePlan,
    StepNotAvailable,
    UnknownCaseType,
    UnknownStep,
)

OK = 0
ERROR = 1
USAGE = 2
NOT_FOUND = 4
CONFLICT = 5
UNHEALTHY = 6
TIMED_OUT = 7
INTERRUPTED = 130


class CommandError(DurableError):
    """A command cannot do what it was asked; the message is one sentence that says what would help."""

    reason: ClassVar[str] = "COMMAND_ERROR"
    code: ClassVar[int] = ERROR


class NoDatabase(CommandError):
    """Nothing says where the database is."""

    reason = "NO_DATABASE"
    code = USAGE


class AppNotLoaded(CommandError):
    """The app named by -A cannot be loaded, or has no durable work."""

    reason = "APP_NOT_LOADED"
    code = USAGE


class TooSlow(CommandError):
    """A look was given up: the database did not answer within the time that any look gets."""

    reason = "STATEMENT_TIMEOUT"


class NoAnswer(CommandError):
    """A look was given up: the database took the connection, and then said nothing."""

    reason = "NO_ANSWER"


@dataclass(frozen=True)
class Failure:
    """How a command ends that did not work: `reason` for programs, `message` for people."""

    code: int
    reason: str
    message: str


def failure_of(error: Exception) -> Failure | None:
    """How to end on this error; None for one that nobody foresaw, which deserves its traceback."""
    match error:
        case click.UsageError():
            return Failure(USAGE, "USAGE", error.format_message())
        case click.ClickException():
            return Failure(error.exit_code, "ERROR", error.format_message())
        case CommandError():
            return Failure(error.code, error.reason, str(error))
        case NotFound():
            return Failure(NOT_FOUND, error.reason, str(error))
        case IllegalMove() | RowBusy() | IdempotencyConflict() | KeyInFlight() | KeyTaken() | OperationInFlight():
            return Failure(CONFLICT, error.reason, str(error))
        case StalePlan() | PlanExpired() | SelfApproval() | PlanRefused():
            return Failure(CONFLICT, error.reason, str(error))
        case CaseNotFound() | UnknownCaseType():
            return Failure(NOT_FOUND, error.reason, str(error))
        case CaseBusy() | CaseClaimLost() | StepNotAvailable() | UnknownStep() | BadScopeKey() | InvalidInput():
            return Failure(CONFLICT, error.reason, str(error))
        case UnknownDocument() | UnknownRevision():
            return Failure(NOT_FOUND, error.reason, str(error))
        case VersionConflict() | InvalidContent() | ContentTooLarge():
            return Failure(CONFLICT, error.reason, str(error))
        case InvalidOption() | NotInstalled() | InvalidArguments():
            return Failure(USAGE, error.reason, str(error))
        case DurableError():
            return Failure(ERROR, error.reason, str(error))
        case DBAPIError() | psycopg.Error():
            return _of_database(error)
        case _:
            return None


def _of_database(error: DBAPIError | psycopg.Error) -> Failure:
    # The first line alone: what follows is the statement and its parameters, payloads among them.
    said = str(error.orig if isinstance(error, DBAPIError) else error).strip().split("\n", 1)[0]
    state = sqlstate(error)
    if state == CANCELED:
        return Failure(ERROR, "STATEMENT_TIMEOUT", f"the database took too long to answer: {said}.")
    if state == LOCK_TIMEOUT:
        return Failure(
            ERROR, "LOCK_TIMEOUT", f"somebody holds a lock that this needs ({said}); nothing was changed, try again."
        )
    orig = error.orig if isinstance(error, DBAPIError) else error
    if state is None and isinstance(orig, psycopg.OperationalError | OperationalError):
        return Failure(ERROR, "DATABASE_UNREACHABLE", f"the database does not answer: {said}.")
    return Failure(ERROR, "DATABASE_ERROR", f"the database refused: {said}.")
