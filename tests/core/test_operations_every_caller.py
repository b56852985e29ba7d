"""An operation is started in whatever transaction its caller has open, and commits or vanishes with it."""

import pytest

from durable_core import IdempotencyConflict, OperationInFlight, UnsupportedTransaction
from tests.core.callers import CALLERS, caller


def started(by, kind, *args, **how):
    options = {"key": how.pop("key", None)}
    begin = kind.options(**options)
    call = begin.start if by._runner is None else begin.astart
    return by._run(call(by.tx, *args, by="dana", **how))


@pytest.mark.parametrize("name", CALLERS)
def test_it_commits_or_vanishes_with_the_callers_rows(engine, reset, operation_row, name):
    with caller(engine, name) as by:
        started(by, reset, "preview", key="k")
        by.rollback()
    with caller(engine, name) as by:
        by.write("mine")
        ref = started(by, reset, "preview", key="k")
        assert ref.created
        by.commit()
    assert operation_row(ref.id).arguments == {}, "preview is the default"
    with caller(engine, name) as by:
        assert started(by, reset, "preview", key="k").replayed
        with pytest.raises(IdempotencyConflict):
            started(by, reset, "main", key="k")
        with pytest.raises(OperationInFlight):
            started(by, reset, key="other")
        by.write("alive")
        by.commit()


@pytest.mark.parametrize("name", CALLERS)
def test_a_scheduled_start_is_skipped_in_every_transaction(engine, reset, start, name):
    ref = start(reset)
    with caller(engine, name) as by:
        assert started(by, reset, trigger="scheduled").id == ref.id
        assert started(by, reset, trigger="scheduled", auto="TRUE").id == ""
        by.commit()


def test_what_is_no_transaction_is_refused(engine, reset):
    with pytest.raises(UnsupportedTransaction):
        reset.start(engine, by="dana")


@pytest.mark.parametrize("name", ["Session", "psycopg"])
def test_a_slot_that_an_open_transaction_takes_is_not_waited_for(engine, other_engine, reset, name):
    with other_engine.begin() as tx:
        reset.start(tx, by="eve")
        with caller(engine, name) as by:
            with pytest.raises(OperationInFlight) as refused:
                started(by, reset)
            assert refused.value.row_id is None
            assert by.execute("select current_setting('lock_timeout')") == "0"
            by.write("alive")
            by.commit()


def test_hints_follow_the_commit(engine, carrier, reset):
    with caller(engine, "Session") as by:
        ref = started(by, reset)
        assert carrier.offered == []
        by.commit()
    assert [(hint.kind, hint.id, hint.first) for hint in carrier.offered] == [(reset.name, ref.id, True)]
