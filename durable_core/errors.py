"""What can be refused, and what a handler may say. One root; catch by what you should do about it."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import ClassVar


class DurableError(Exception):
    """Root of everything this package refuses. `reason` is stable and meant for programs."""

    reason: ClassVar[str] = "DURABLE_ERROR"


# --- fix the code -------------------------------------------------------------------------------


class DefinitionError(DurableError):
    """A kind, option or setting is declared in a way that cannot work; raised when it is declared."""

    reason = "DEFINITION_ERROR"


class UnsupportedTransaction(DurableError):
    """The first argument is nothing we can run a statement in."""

    reason = "UNSUPPORTED_TRANSACTION"

    def __init__(self, given: str) -> None:
        super().__init__(given)
        self.given = given

    def __str__(self) -> str:
        return (
            f"{self.given} is not a transaction this package can join: hand over a SQLAlchemy Session, "
            "scoped_session or Connection on Postgres, or a psycopg Connection; to `aenqueue` and its kin, an "
            "AsyncSession, an AsyncConnection or a psycopg AsyncConnection. Nothing was written."
        )


# --- fix the call -------------------------------------------------------------------------------


class NotATask(DurableError, AttributeError):
    """A kind was sent as a Celery task is; nothing was written, and nothing was sent."""

    reason = "NOT_A_TASK"

    def __init__(self, kind: str, method: str) -> None:
        super().__init__(kind, method)
        self.kind, self.method = kind, method

    def __str__(self) -> str:
        return (
            f"{self.kind}: a kind is no Celery task and has no {self.method}(): write .enqueue(tx, ...) with the "
            "transaction that its row is to commit with; countdown, eta, queue and the like go before it, "
            ".options(countdown=...).enqueue(tx, ...). Nothing was written or sent."
        )


class InvalidArguments(DurableError):
    """
    An argument was refused at the door; nothing was written and the transaction is alive.

    Where it is about all of them, such as too many, `argument` is `arguments`, and no argument is named.
    """

    reason = "INVALID_ARGUMENTS"

    def __init__(self, kind: str, argument: str, problem: str, of_all: bool = False) -> None:
        super().__init__(kind, argument, problem, of_all)
        self.kind, self.argument, self.problem, self.of_all = kind, argument, problem, of_all

    @property
    def what(self) -> str:
        """What is wrong, with the argument that it is wrong with."""
        return self.problem if self.of_all else f"argument {self.argument!r}: {self.problem}"

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}. Nothing was written."


class InvalidOption(DurableError):
    """An option of the delivery was refused; nothing was written and the transaction is alive."""

    reason = "INVALID_OPTION"

    def __init__(self, kind: str, option: str, problem: str) -> None:
        super().__init__(kind, option, problem)
        self.kind, self.option, self.problem = kind, option, problem

    def __str__(self) -> str:
        return f"{self.kind}: option {self.option!r}: {self.problem}. Nothing was written."


class IdempotencyConflict(DurableError):
    """
    The key is taken by a row with other arguments; nothing was written.

    `row_id` is that row's; None when the key was given twice in one call.
    """

    reason = "IDEMPOTENCY_CONFLICT"

    def __init__(self, kind: str, key: str, row_id: str | None, what: str = "delivery") -> None:
        super().__init__(kind, key, row_id, what)
        self.kind, self.key, self.row_id, self.what = kind, key, row_id, what

    def __str__(self) -> str:
        taken = f"already names {self.what} {self.row_id}" if self.row_id else "is given twice in this call,"
        return (
            f"{self.kind}: key {self.key!r} {taken} with other arguments. "
            "Use another key for another intention. Nothing was written."
        )


class KeyTaken(DurableError):
    """
    The key is taken, and `key_policy="raise"` wanted it free; nothing was written.

    `row_id` is the delivery that has it; None when the key was given twice in one call.
    """

    reason = "KEY_TAKEN"

    def __init__(self, kind: str, key: str, row_id: str | None) -> None:
        super().__init__(kind, key, row_id)
        self.kind, self.key, self.row_id = kind, key, row_id

    def __str__(self) -> str:
        taken = f"already names delivery {self.row_id}" if self.row_id else "is given twice in this call"
        return f"{self.kind}: key {self.key!r} {taken}. Nothing was written."


class KeyInFlight(DurableError):
    """
    Another transaction, still open, is writing the same key; nothing was written. Call again.

    The database does not say which key it waited for: `key` is it only where `among`, the
    number of keys it was one of, is 1.
    """

    reason = "KEY_IN_FLIGHT"

    def __init__(self, kind: str, key: str, among: int = 1) -> None:
        super().__init__(kind, key, among)
        self.kind, self.key, self.among = kind, key, among

    def __str__(self) -> str:
        which = f"{self.kind}: key {self.key!r}"
        if self.among > 1:
            which = f"one of these {self.among} keys, for example {which},"
        return (
            f"{which} is being written by another transaction that is still open. "
            "Try again once it has ended. Nothing was written."
        )


class UnknownHandler(DurableError):
    """No kind of this name is declared in this process."""

    reason = "UNKNOWN_HANDLER"

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    def __str__(self) -> str:
        return f"no handler for kind {self.kind!r} is declared in this process; import the module that declares it."


class NotFound(DurableError):
    """There is no such row (any more: finished rows are pruned after their retention)."""

    reason = "NOT_FOUND"

    def __init__(self, what: str, row_id: str) -> None:
        super().__init__(what, row_id)
        self.what, self.row_id = what, row_id

    def __str__(self) -> str:
        return f"there is no {self.what} {self.row_id}; it never existed or was pruned after its retention."


class IllegalMove(DurableError):
    """The row is in a state that this act does not leave; nothing was written."""

    reason = "ILLEGAL_MOVE"

    def __init__(self, act: str, row_id: str, state: str, needed: str, what: str = "delivery") -> None:
        super().__init__(act, row_id, state, needed, what)
        self.act, self.row_id, self.state, self.needed, self.what = act, row_id, state, needed, what

    def __str__(self) -> str:
        return (
            f"cannot {self.act} {self.what} {self.row_id}: it is {self.state}, not {self.needed}. Nothing was written."
        )


class RowBusy(DurableError):
    """Somebody is at work on the row in a transaction that is still open; nothing was written. Try again."""

    reason = "ROW_BUSY"

    def __init__(self, act: str, row_id: str, what: str = "delivery") -> None:
        super().__init__(act, row_id, what)
        self.act, self.row_id, self.what = act, row_id, what

    def __str__(self) -> str:
        return (
            f"cannot {self.act} {self.what} {self.row_id} just now: somebody is at work on it. Try again. "
            "Nothing was written."
        )


class ClaimLost(DurableError):
    """Somebody else has the row now. Stop: whatever this attempt wrote is gone with its transaction."""

    reason = "CLAIM_LOST"

    def __init__(self, row_id: str, held: int, current: int | None, what: str = "delivery") -> None:
        super().__init__(row_id, held, current, what)
        self.row_id, self.held, self.current, self.what = row_id, held, current, what

    def __str__(self) -> str:
        now = "the row is gone" if self.current is None else f"current is {self.current}"
        return f"{self.what} {self.row_id}: fence {self.held} is stale or settled, {now}. Stop: nothing was written."


class StepTransactionOwned(DurableError):
    """A handler tried to end the transaction that belongs to its attempt."""

    reason = "STEP_TRANSACTION_OWNED"

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.call = call

    def __str__(self) -> str:
        return (
            f"step.session.{self.call}() is not yours to call: the attempt commits your work together with its "
            "receipt when the handler returns, and rolls it back when it raises."
        )


class EffectEscaped(DurableError):
    """The handler ended the attempt's transaction behind our back, so its effect may stand without a receipt."""

    reason = "EFFECT_ESCAPED"

    def __init__(self, row_id: str, what: str = "delivery") -> None:
        super().__init__(row_id, what)
        self.row_id, self.what = row_id, what

    def __str__(self) -> str:
        if self.what == "case":
            return (
                f"case {self.row_id}: a write of ctx.in_commit committed or rolled back its transaction itself. The "
                "database refused it, so nothing of the case changed; what it did after a ROLLBACK of its own may "
                "stand. Remove the COMMIT or ROLLBACK from it."
            )
        return (
            f"{self.what} {self.row_id}: the handler committed or rolled back step.session's transaction itself, so "
            "its effect may already stand and may be repeated. Remove the COMMIT or ROLLBACK from the handler."
        )


# --- fix the deployment --------------------------------------------------------------------------


class SchemaBehind(DurableError):
    """The database's schema is older than this code supports, or not installed."""

    reason = "SCHEMA_BEHIND"

    def __init__(self, schema: str, found: str | None, needed: str) -> None:
        super().__init__(schema, found, needed)
        self.schema, self.found, self.needed = schema, found, needed

    def __str__(self) -> str:
        found = "is not installed" if self.found is None else f"is at revision {self.found}"
        return f'schema "{self.schema}" {found} and this code needs {self.needed}: run `durable migrate`.'


class SchemaAhead(DurableError):
    """The database was migrated by a newer version of this package, which this code does not know."""

    reason = "SCHEMA_AHEAD"

    def __init__(self, schema: str, found: str, newest: str) -> None:
        super().__init__(schema, found, newest)
        self.schema, self.found, self.newest = schema, found, newest

    def __str__(self) -> str:
        return (
            f'schema "{self.schema}" is at revision {self.found}, which this code does not know (its newest is '
            f"{self.newest}): deploy the version of durable-core that migrated it, or a newer one."
        )


class TooOldServer(DurableError):
    """The database server is older than any this package works on; nothing was changed."""

    reason = "SERVER_TOO_OLD"

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found

    def __str__(self) -> str:
        return f"this is PostgreSQL {self.found}; durable work needs PostgreSQL 15 or newer."


class UnsafePooler(DurableError):
    """The database is reached through a pooler that would mix up the prepared statements of its clients."""

    reason = "POOLER_UNSAFE"

    def __str__(self) -> str:
        return (
            "between this process and the database is a pooler in transaction mode (PgBouncer?) that mixes up prepared "
            'statements: make the engine with connect_args={"prepare_threshold": None}.'
        )


class NotInstalled(DurableError):
    """Something this process needs was never set: database, carrier, install, SMTP, or an extra."""

    reason = "NOT_INSTALLED"


# --- what a handler may raise: words of the contract, not failures of the package -----------------


class Retry(Exception):
    """
    End this attempt as failed and try again later; costs one attempt of the budget.

    `after` is a duration in seconds or a timedelta, a day at most; without it the kind's back-off decides.
    At the last attempt of the budget the delivery ends dead all the same.
    """

    def __init__(self, message: str = "", *, after: float | timedelta | None = None, code: str = "RETRY_ASKED") -> None:
        super().__init__(message)
        self.message, self.code = str(message), str(code)
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if seconds is not None and not (isinstance(seconds, int | float) and math.isfinite(seconds)):
            raise ValueError(f"Retry(after={after!r}): give seconds or a timedelta")
        self.after = seconds


class Snooze(Exception):
    """
    End this attempt and run it again later, as often as is asked for: it costs nothing of any budget.

    For work that is not ready, not for work that failed. `after` is a duration in seconds or a timedelta.
    """

    def __init__(self, after: float | timedelta, message: str = "", *, code: str = "SNOOZED") -> None:
        super().__init__(message or f"not before {after} s")
        self.message, self.code = str(message) or "the handler asked to be run later", str(code)
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"Snooze({after!r}): give seconds or a timedelta, not below 0")
        self.after = float(seconds)


class GiveUp(Exception):
    """End the delivery as failed, whatever budget remains: it can never work."""

    def __init__(self, message: str = "", *, code: str = "GAVE_UP") -> None:
        super().__init__(message)
        self.message, self.code = str(message), str(code)
