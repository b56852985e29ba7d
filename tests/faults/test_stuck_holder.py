"""A host suspended inside a commit keeps its row locked; past the deadline and a lease others get on with it."""

from __future__ import annotations

import os
import signal

from tests.celery.nodes import wait_until
from tests.faults.conftest import Stage


def test_a_host_suspended_inside_its_commit_loses_the_row_past_its_deadline_and_writes_nothing(stage: Stage) -> None:
    stage.beat()
    stage.control_worker()
    suspended = stage.worker("-Q", "durable.suspended", "-c", "1", name="suspended")
    row_id = stage.prepare(stage.kinds.brief, "in commit", queue="suspended")
    with stage.commit_held(row_id) as holder:
        stage.make_due(row_id)
        stage.held_in_commit(holder)
        os.killpg(suspended.process.pid, signal.SIGSTOP)
        try:
            stage.worker("-Q", "durable.suspended", "-c", "1")
            (row,) = stage.accounted(row_id)
        finally:
            os.killpg(suspended.process.pid, signal.SIGCONT)
    assert [line.move for line in stage.lines(row_id)][:2] == ["cut off", "reap"]
    assert [effect.fence for effect in stage.effects(row_id)] == [2]
    # It wakes beyond its time limit, without its connection: whichever it notices first, it says so and goes on.
    endings = ("stale_write_refused", "attempt_not_made")
    wait_until(lambda: any(ending in suspended.logs() for ending in endings), "the one that was suspended has ended")
    assert stage.row(row_id) == row
