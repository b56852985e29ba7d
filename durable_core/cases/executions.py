"""Executions, folded from the entries of a journal: nothing else keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from durable_core.cases.journal import Entry, EntryKind


class ExecutionStatus(StrEnum):
    """How an execution stands, by its journal. One in progress may have lost its worker: its claim says until when."""

    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"


ENDS = {
    EntryKind.COMPLETED: ExecutionStatus.COMPLETED,
    EntryKind.FAILED: ExecutionStatus.FAILED,
    EntryKind.EXPIRED: ExecutionStatus.EXPIRED,
}


@dataclass(frozen=True)
class AttemptError:
    """What ended one attempt, or the execution. Name and text are None where they were erased."""

    attempt: int
    name: str | None
    message: str | None = field(repr=False)
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Execution:
    """
    One execution, as far as the entries tell that were folded; what was erased of them is None.

    The first entry that ends it decides: a worker that comes back after its lease was taken adds an error and no more.
    """

    execution_id: str
    case_id: str
    step: str
    scope_key: str | None
    request_id: str | None
    status: ExecutionStatus = ExecutionStatus.IN_PROGRESS
    attempts: int
    actor: Any = field(default=None, repr=False)
    input: Any = field(default=None, repr=False)
    as_of: datetime | None = None
    claimed_at: datetime | None = None
    ended_at: datetime | None = None
    seq: int | None = None
    delta: list[dict[str, Any]] | None = field(default=None, repr=False)
    dormancy: str | None = None
    errors: tuple[AttemptError, ...] = ()
    first_entry: int
    last_entry: int


def fold(entries: Iterable[Entry]) -> list[Execution]:
    """The executions of these entries, in the order in which they begin. Entries come in the order of their numbers."""
    found: dict[str, Execution] = {}
    for entry in entries:
        before = found.get(entry.execution_id) or Execution(
            execution_id=entry.execution_id, case_id=entry.case_id, step=entry.step, scope_key=entry.scope_key,
            request_id=entry.request_id, attempts=entry.attempt, first_entry=entry.number, last_entry=entry.number,
        )  # fmt: skip
        found[entry.execution_id] = _with(before, entry)
    return list(found.values())


def _with(execution: Execution, entry: Entry) -> Execution:
    execution = replace(
        execution, attempts=max(execution.attempts, entry.attempt), last_entry=entry.number,
        actor=execution.actor if entry.actor is None else entry.actor,
    )  # fmt: skip
    if entry.entry == EntryKind.CLAIMED:
        execution = replace(execution, input=entry.input, as_of=entry.as_of, claimed_at=entry.recorded_at)
    elif entry.entry != EntryKind.COMPLETED:
        told = entry.error or {}
        error = AttemptError(entry.attempt, told.get("name"), told.get("message"), entry.recorded_at)
        execution = replace(execution, errors=(*execution.errors, error))
    if entry.entry in ENDS and execution.status is ExecutionStatus.IN_PROGRESS:
        execution = replace(execution, status=ENDS[entry.entry], ended_at=entry.recorded_at)
    if entry.entry == EntryKind.COMPLETED:
        execution = replace(execution, seq=entry.seq, delta=entry.delta, dormancy=entry.dormancy)
    return execution
