"""The stage of these tests itself: work flows through it, and its Postgres comes back with what it had."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.conftest import Stage


@pytest.mark.full_size
def test_work_flows_and_a_restarted_postgres_has_kept_it(stage: Stage, sized: Callable[[int, int], int]) -> None:
    stage.beat()
    stage.worker("-c", "2")
    stage.accounted(*stage.commit_many(stage.kinds.order, sized(20, 2000)))
    kept = stage.commit(stage.kinds.order, countdown=3600)
    for how in ("fast", "immediate", "killed"):
        stage.cluster.end(how)
        stage.cluster.start_again()
        assert stage.row(kept).state == "pending"
    stage.make_due(kept)
    stage.accounted(kept)
