"""
What an examination finds: one finding a fact, with its reason for programs and its mend for people.

A check changes nothing and is bounded in time. One that fails to look is a finding of its own, and so never hides
what the others found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from durable_core.database.transactions import said

CHECK_SECONDS = 8.0
"""No check is waited for longer: a server that takes connections and says nothing has no other bound."""


class Status(StrEnum):
    """
    `fail`: something does not work now, or a promise is not kept. `warn`: a risk, or it waits for a person. `note`:
    most likely as it is meant, and never unhealthy.
    """

    PASS = "pass"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


class Reason(StrEnum):
    """Why a finding is what it is; stable, and meant for programs. `docs/doctor.md` tells what each means."""

    OK = "OK"
    COULD_NOT_LOOK = "COULD_NOT_LOOK"

    DATABASE_UNREACHABLE = "DATABASE_UNREACHABLE"
    SERVER_TOO_OLD = "SERVER_TOO_OLD"
    ON_A_REPLICA = "ON_A_REPLICA"
    READ_ONLY = "READ_ONLY"
    ROLE_LACKS_RIGHTS = "ROLE_LACKS_RIGHTS"
    ROLE_SUPERUSER = "ROLE_SUPERUSER"
    ROLE_OWNS_TABLES = "ROLE_OWNS_TABLES"
    GUARDS_OFF = "GUARDS_OFF"
    CLOCK_SKEW = "CLOCK_SKEW"
    SYNCHRONOUS_COMMIT_OFF = "SYNCHRONOUS_COMMIT_OFF"
    FSYNC_OFF = "FSYNC_OFF"
    POOLER_UNSAFE = "POOLER_UNSAFE"
    LONG_TRANSACTION = "LONG_TRANSACTION"
    IDLE_IN_TRANSACTION = "IDLE_IN_TRANSACTION"
    PREPARED_TRANSACTION = "PREPARED_TRANSACTION"
    STUCK_IN_COMMIT = "STUCK_IN_COMMIT"
    COMMIT_WAITS_FOR_STANDBY = "COMMIT_WAITS_FOR_STANDBY"
    AUTOVACUUM_OFF = "AUTOVACUUM_OFF"
    VACUUM_BEHIND = "VACUUM_BEHIND"

    SCHEMA_BEHIND = "SCHEMA_BEHIND"
    SCHEMA_AHEAD = "SCHEMA_AHEAD"
    SCHEMA_NEWER = "SCHEMA_NEWER"
    SCHEMA_MISSING = "SCHEMA_MISSING"
    SCHEMA_DIFFERS = "SCHEMA_DIFFERS"
    SCHEMA_UNVERIFIED = "SCHEMA_UNVERIFIED"
    SCHEMA_EXTRA = "SCHEMA_EXTRA"
    TABLE_OPTIONS_DIFFER = "TABLE_OPTIONS_DIFFER"
    INDEX_INVALID = "INDEX_INVALID"
    TRIGGER_DISABLED = "TRIGGER_DISABLED"

    SWEEP_LATE = "SWEEP_LATE"
    SWEEP_FAILED = "SWEEP_FAILED"
    SWEEP_BY_A_WORKER = "SWEEP_BY_A_WORKER"
    SWEEP_HELD_BACK = "SWEEP_HELD_BACK"
    KIND_UNDECLARED = "KIND_UNDECLARED"
    WAITING_FOR_HANDLER = "WAITING_FOR_HANDLER"
    WAITING_FOR_ARGUMENTS = "WAITING_FOR_ARGUMENTS"
    HELD_ROWS = "HELD_ROWS"
    PLAN_OVERDUE = "PLAN_OVERDUE"
    OPERATION_OVERDUE = "OPERATION_OVERDUE"
    POLL_LATE = "POLL_LATE"
    DEAD_DELIVERIES = "DEAD_DELIVERIES"
    FAILED_DELIVERIES = "FAILED_DELIVERIES"
    PAUSED = "PAUSED"
    TIMEZONE_UNKNOWN = "TIMEZONE_UNKNOWN"
    SCHEDULE_UNDECLARED = "SCHEDULE_UNDECLARED"
    SCHEDULE_LATE = "SCHEDULE_LATE"
    SCHEDULE_PAUSED = "SCHEDULE_PAUSED"

    SETTINGS_INVALID = "SETTINGS_INVALID"
    MODULES_NOT_LOADED = "MODULES_NOT_LOADED"
    BEAT_ENTRY_MISSING = "BEAT_ENTRY_MISSING"
    BEAT_ENTRY_ELSEWHERE = "BEAT_ENTRY_ELSEWHERE"
    PREFETCH_HOARDS = "PREFETCH_HOARDS"
    LATE_ACKS = "LATE_ACKS"
    VISIBILITY_SHORT = "VISIBILITY_SHORT"
    ACCEPTS_PICKLE = "ACCEPTS_PICKLE"
    BROKER_UNBOUNDED = "BROKER_UNBOUNDED"
    BROKER_UNGUARDED = "BROKER_UNGUARDED"
    BROKER_NOT_REDIS = "BROKER_NOT_REDIS"
    BROKER_ASSUMED = "BROKER_ASSUMED"
    BROKER_UNREACHABLE = "BROKER_UNREACHABLE"
    BROKER_IS_REPLICA = "BROKER_IS_REPLICA"
    BROKER_EVICTS = "BROKER_EVICTS"
    BROKER_NEARLY_FULL = "BROKER_NEARLY_FULL"
    NO_WORKER_ANSWERS = "NO_WORKER_ANSWERS"
    CONTROL_UNREAD = "CONTROL_UNREAD"
    QUEUE_UNREAD = "QUEUE_UNREAD"
    QUEUE_UNREAD_IDLE = "QUEUE_UNREAD_IDLE"
    RUNS_AS_ROOT = "RUNS_AS_ROOT"
    C_FORCE_ROOT = "C_FORCE_ROOT"


FAILS = frozenset(
    {
        Reason.DATABASE_UNREACHABLE, Reason.SERVER_TOO_OLD, Reason.ON_A_REPLICA, Reason.READ_ONLY,
        Reason.ROLE_LACKS_RIGHTS, Reason.GUARDS_OFF, Reason.POOLER_UNSAFE, Reason.STUCK_IN_COMMIT,
        Reason.COMMIT_WAITS_FOR_STANDBY, Reason.SCHEMA_BEHIND, Reason.SCHEMA_AHEAD, Reason.SCHEMA_MISSING,
        Reason.SCHEMA_DIFFERS, Reason.INDEX_INVALID, Reason.TRIGGER_DISABLED, Reason.SWEEP_LATE, Reason.SWEEP_FAILED,
        Reason.COULD_NOT_LOOK, Reason.WAITING_FOR_HANDLER, Reason.WAITING_FOR_ARGUMENTS, Reason.TIMEZONE_UNKNOWN,
        Reason.SETTINGS_INVALID, Reason.MODULES_NOT_LOADED, Reason.BEAT_ENTRY_MISSING, Reason.BROKER_UNREACHABLE,
        Reason.BROKER_IS_REPLICA, Reason.NO_WORKER_ANSWERS, Reason.CONTROL_UNREAD, Reason.QUEUE_UNREAD,
    }
)  # fmt: skip
"""The reasons that fail; all others warn, but for OK and those below."""

NOTES = frozenset({Reason.KIND_UNDECLARED, Reason.SCHEDULE_UNDECLARED})
"""The reasons that are only told: two apps that share a schema do not know each other's kinds."""


@dataclass(frozen=True)
class Finding:
    """
    One fact. `fix` is one line that mends it; empty for what is well. `assumed` is what it was judged by because nobody
    could be asked, empty where that was nothing; `observed` ends with it.
    """

    check: str
    status: Status
    reason: Reason
    observed: str
    fix: str = ""
    assumed: str = ""


def found(check: str, reason: Reason, observed: str, fix: str, *, assumed: str = "") -> Finding:
    """Something to mend, or to know. Whether it fails, warns or is a note is the reason's."""
    status = Status.FAIL if reason in FAILS else Status.NOTE if reason in NOTES else Status.WARN
    return Finding(check, status, reason, _with(observed, assumed), fix, assumed)


def well(check: str, observed: str, *, assumed: str = "") -> Finding:
    return Finding(check, Status.PASS, Reason.OK, _with(observed, assumed), assumed=assumed)


def _with(observed: str, assumed: str) -> str:
    return f"{observed}; {assumed}" if assumed else observed


def or_well(findings: Iterable[Finding], check: str, observed: str) -> list[Finding]:
    """What was found; where that is nothing, that all is well."""
    return list(findings) or [well(check, observed)]


@dataclass(frozen=True)
class Check:
    """
    One look. Checks of one room share what they look at: when a `gate` fails, or nobody answers, the rest of its room
    would only meet the same again, and is not looked at.
    """

    name: str
    room: str
    look: Callable[[], Iterable[Finding]]
    gate: bool = False


@dataclass
class Examination:
    """The findings in the order of the checks; and the checks that were not made, each with why."""

    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def of(self, status: Status) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is status]

    def unhealthy(self, *, strict: bool = False) -> bool:
        return bool(self.of(Status.FAIL) or (strict and self.of(Status.WARN)))


class NotLookedAt(Exception):
    """Raised by a look that another finding has made senseless; its text is why."""


class NoAnswer(Exception):
    """A check had its time and is left to itself."""


def within(seconds: float, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What the look finds, on a thread of its own. Raises NoAnswer, and what the look raises."""
    answer: list[list[Finding] | BaseException] = []

    def ask() -> None:
        try:
            answer.append(list(look()))
        except BaseException as error:
            answer.append(error)

    # A daemon: what never answers must not keep the command from ending.
    thread = threading.Thread(target=ask, name="durable-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer:
        raise NoAnswer(f"no answer within {seconds:g} s")
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return answer[0]


def examine(checks: Sequence[Check], *, seconds: float = CHECK_SECONDS) -> Examination:
    """Make every check, one after the other. What a check raises is its finding."""
    made = Examination()
    closed: dict[str, str] = {}
    for check in checks:
        if why := closed.get(check.room):
            made.skipped[check.name] = why
            continue
        try:
            findings = within(seconds, check.look)
        except NotLookedAt as error:
            made.skipped[check.name] = str(error)
            continue
        except NoAnswer as error:
            findings = [_could_not_look(check.name, str(error))]
            closed[check.room] = f"{check.name} had no answer"
        except Exception as error:
            findings = [_could_not_look(check.name, said(error))]
            if check.gate:
                closed[check.room] = f"{check.name} could not look"
        if check.gate and any(finding.status is Status.FAIL for finding in findings):
            closed.setdefault(check.room, f"{check.name} failed")
        made.findings.extend(findings)
    return made


def _could_not_look(check: str, why: str) -> Finding:
    return found(check, Reason.COULD_NOT_LOOK, f"could not look: {why}", "mend what the text names, then ask again")
