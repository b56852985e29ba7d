"""No beat at all, and every slot in a long handler: the busy processes rescue beside their work, and it is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from durable_core.cli.main import main
from tests.celery.nodes import wait_until
from tests.faults.conftest import Stage


def status(stage: Stage) -> tuple[int, Any]:
    """The exit code and the answer of the probe."""
    address = stage.engine.url.render_as_string(hide_password=False)
    done = CliRunner().invoke(main, ["--database-url", address, "status", "--check", "--json"], prog_name="durable")
    return done.exit_code, json.loads(done.stdout)


def hinted(stage: Stage, row_id: str) -> bool:
    """Whether a dispatch has hinted this row since it was made due."""
    with stage.engine.connect() as connection:
        sql = "select hint_at > due_at from durable.deliveries where id = cast(:id as uuid)"
        return bool(connection.scalar(text(sql), {"id": row_id}))


@pytest.mark.full_size
def test_without_a_beat_busy_workers_dispatch_and_reap_and_status_names_what_is_missing(
    stage: Stage, sized: Callable[[str, str], str]
) -> None:
    """In `make test` the slots are processes, in `make test-long` threads of one."""
    kinds = stage.kinds
    doomed = stage.worker("-c", "1", name="doomed")
    lost = stage.commit(kinds.held, "calling")
    stage.held_at(lost)
    busy = stage.worker("--pool", sized("prefork", "threads"), "-c", "2", name="busy")
    long = [stage.commit(kinds.held, "calling") for _ in range(2)]
    for row in long:
        stage.held_at(row)

    due = stage.prepare(kinds.order)
    stage.make_due(due)
    doomed.process.kill()
    stage.journalled(lost, "reap")
    wait_until(lambda: hinted(stage, due), "a due row is hinted")

    wait_until(lambda: "sweeps_late_and_run_by_a_worker" in busy.logs(), "the worker says that no beat drives them")
    code, answer = status(stage)
    assert (code, answer["healthy"]) == (6, False)
    for sweep in ("dispatch", "reap"):
        assert (
            f"sweep {sweep} was last run by a worker: no beat drives it, or nobody reads durable.control"
            in (answer["problems"])
        )

    stage.beat()
    assert status(stage)[0] == 6, "a beat whose queue nobody reads helps nothing"
    stage.control_worker()
    wait_until(lambda: status(stage)[0] == 0, "a beat and a reader of its queue make it well")
    for row in (*long, lost):
        stage.open(row)
    rows = stage.accounted(*long, lost, due)
    assert [row.interruptions for row in rows] == [0, 0, 1, 0]
