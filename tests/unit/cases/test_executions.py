"""Executions are folded from entries, whatever part of a journal was read."""

import pytest

from durable_core.cases.executions import ExecutionStatus, fold
from tests.unit.cases.entries import NOON, Journal, erased


def a_journal():
    """One that completed at its third attempt, one that failed, one that expired and came back, one that runs."""
    journal = Journal()
    journal.add("claimed", "e1", as_of=NOON, actor="dana", input={"n": 1}, guard={}, state={}, request_id="r1")
    for attempt in (1, 2):
        journal.add(
            "attempt-failed", "e1", attempt=attempt, actor="dana", error={"name": "OSError", "message": f"no {attempt}"}
        )
    journal.add(
        "completed", "e1", attempt=3, seq=1, delta=[{"op": "remove", "path": "/a"}], dormancy="ended", actor="dana"
    )
    journal.add("claimed", "e2", scope_key="ann", step="pay", as_of=NOON, guard={}, state={}, actor=None)
    journal.add(
        "failed", "e2", scope_key="ann", step="pay", actor=None, error={"name": "ValueError", "message": "never"}
    )
    journal.add("claimed", "e3", as_of=NOON, guard={}, state={}, actor="ben")
    journal.add("expired", "e3", error={"name": "LeaseExpired", "message": ""})
    journal.add("claimed", "e4", as_of=NOON, guard={}, state={}, actor="cleo")
    journal.add("failed", "e3", actor="ben", error={"name": "CaseClaimLost", "message": "lost"})
    return journal


def test_an_execution_is_what_its_entries_say():
    completed, failed, expired, running = fold(a_journal().entries)
    assert [one.execution_id for one in (completed, failed, expired, running)] == ["e1", "e2", "e3", "e4"]
    assert (completed.status, completed.attempts, completed.seq) == (ExecutionStatus.COMPLETED, 3, 1)
    assert (completed.actor, completed.input, completed.dormancy) == ("dana", {"n": 1}, "ended")
    assert (completed.request_id, completed.as_of) == ("r1", NOON)
    assert completed.delta == [{"op": "remove", "path": "/a"}]
    assert [(one.attempt, one.name, one.message) for one in completed.errors] == [
        (1, "OSError", "no 1"), (2, "OSError", "no 2"),
    ]  # fmt: skip
    assert (completed.first_entry, completed.last_entry) == (1, 4)
    assert ((completed.ended_at - completed.claimed_at).total_seconds(), completed.claimed_at) == (3, NOON)
    assert (failed.status, failed.step, failed.scope_key, failed.attempts) == (ExecutionStatus.FAILED, "pay", "ann", 1)
    assert (running.status, running.ended_at, running.errors) == (ExecutionStatus.IN_PROGRESS, None, ())


def test_a_worker_that_comes_back_after_its_lease_adds_its_error_and_no_more():
    expired = fold(a_journal().entries)[2]
    assert expired.status is ExecutionStatus.EXPIRED
    assert (expired.ended_at - expired.claimed_at).total_seconds() == 1
    assert [one.name for one in expired.errors] == ["LeaseExpired", "CaseClaimLost"]
    assert (expired.actor, expired.last_entry) == ("ben", 10)
    before = fold(a_journal().entries[:8])[2]
    assert (before.actor, before.status) == ("ben", ExecutionStatus.EXPIRED)


def test_a_part_of_a_journal_tells_what_it_can():
    (late,) = fold(a_journal().entries[2:4])
    assert (late.status, late.attempts, late.claimed_at, late.input) == (ExecutionStatus.COMPLETED, 3, None, None)
    assert fold([]) == []


@pytest.mark.parametrize("count", range(11))
def test_every_beginning_of_a_journal_can_be_folded(count):
    entries = a_journal().entries[:count]
    assert {one.execution_id for one in fold(entries)} == {entry.execution_id for entry in entries}


def test_what_was_erased_is_missing_and_the_rest_is_told():
    completed = fold([erased(entry) for entry in a_journal().entries])[0]
    assert (completed.status, completed.attempts, completed.seq) == (ExecutionStatus.COMPLETED, 3, 1)
    assert (completed.actor, completed.input, completed.delta) == (None, None, None)
    assert [(one.attempt, one.name) for one in completed.errors] == [(1, None), (2, None)]
