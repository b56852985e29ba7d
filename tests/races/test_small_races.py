"""Two connections at the statements of deliveries that decide little: a remark, a doubt, a pause, a discarded row."""

import threading

import pytest
from sqlalchemy import text

from durable_core import deliveries
from durable_core.claims.claim import Holder
from durable_core.database.transactions import run
from durable_core.deliveries import attempt, report, sweep
from durable_core.deliveries.attempt import claim_one
from durable_core.errors import NotFound, RowBusy
from durable_core.testing import wait_until_blocked
from tests.races.interleaver import Patient, orders

IMPATIENT = text("set local lock_timeout = '1ms'")
WHO = {"by": "dana", "reason": "test"}
AGES = 10**8


def remark(tx, kind, row_id):
    return run(tx, attempt._statements.wait_for_handler, id=row_id, kind=kind.name, delay_seconds=10.0)


@pytest.mark.parametrize("first", ["the remark", "the claim"])
def test_a_remark_and_a_claim_do_not_wait_for_each_other(engine, other_engine, kind, make, row, first):
    made = make(kind)
    acts = [lambda tx: remark(tx, kind, made.id), lambda tx: claim_one(tx, kind, made.id, Holder())]
    one, two = acts if first == "the remark" else reversed(acts)
    with other_engine.connect() as tx:
        assert one(tx)
        with engine.begin() as other:
            other.execute(IMPATIENT)
            assert not two(other), "skipped"
        tx.commit()
    with engine.begin() as tx:
        assert bool(two(tx)) is (first == "the remark"), "what runs is remarked on no more"
    assert (row(made.id).state, row(made.id).waiting_for) == ("processing", None)


@pytest.mark.parametrize("commits", [True, False])
def test_a_doubt_waits_for_the_commit_that_it_is_about(engine, other_engine, make, row, commits):
    made = make(state="processing")
    came = []

    def doubt():
        with other_engine.begin() as tx:
            pids.append(tx.scalar(text("select pg_backend_pid()")))
            asked.set()
            came.extend(run(tx, report._statements.resolve, id=made.id, lock_timeout="20s"))

    pids, asked = [], threading.Event()
    with engine.connect() as owner:
        (locked,) = run(owner, attempt._statements.lock, **made.held.naming, lock_timeout="5s")
        run(
            owner, attempt._statements.settle, **made.held.naming, xid=locked["xid"], result=None, late=False,
            interruptions_booked=0, shutdowns_booked=0,
        )  # fmt: skip
        thread = threading.Thread(target=doubt)
        thread.start()
        assert asked.wait(20)
        wait_until_blocked(engine, pids[0])
        owner.commit() if commits else owner.rollback()
        thread.join(20)
    (seen,) = came
    assert (seen["state"], seen["settled_fence"]) == (("sent", 1) if commits else ("processing", 0))
    assert row(made.id).state == seen["state"]


def test_of_two_pauses_at_once_one_is_in_force(engine, other_engine):
    _both(engine, other_engine, lambda tx: deliveries.pause(tx, "queue", "mail", **WHO))
    with engine.connect() as tx:
        assert [one.name for one in deliveries.pauses(tx)] == ["mail"]
        assert tx.scalar(text("select count(*) from durable.pauses where ended_at is null")) == 1


def test_of_two_resumes_at_once_one_ends_the_pause(engine, other_engine):
    came = []

    def begin():
        with engine.begin() as tx:
            deliveries.pause(tx, "queue", "mail", **WHO)

    def resume(tx):
        came.append(deliveries.resume(tx, "queue", "mail", by="dana"))

    _both(engine, other_engine, resume, begin)
    assert came.count(True) == came.count(False)


def _both(engine, other_engine, act, before=lambda: None):
    """The act on two connections, each in a transaction of its own, in every order."""
    with Patient(engine, 2) as stage, engine.connect() as one, other_engine.connect() as two:
        pids = [tx.scalar(text("select pg_backend_pid()")) for tx in (one, two)]
        one.rollback()
        two.rollback()
        for order in orders(2, 2):
            before()
            actors = [(pid, [lambda tx=tx: act(tx), tx.commit]) for pid, tx in zip(pids, (one, two), strict=True)]
            stage.play(order, *actors)


def test_a_redrive_and_the_prune_of_a_discarded_row_do_not_wait(engine, other_engine, make, row, clock):
    made = make(state="dead")
    with engine.begin() as tx:
        deliveries.discard(tx, made.id, **WHO)
    clock.advance(AGES)

    def old(tx):
        return run(tx, sweep._statements.discarded, retention_seconds=60.0, limit=10, since=None, without=[])

    with other_engine.connect() as redriving:
        deliveries.redrive(redriving, made.id, **WHO)
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            assert old(tx) == []
        redriving.rollback()
    with other_engine.connect() as pruning:
        assert [one["id"] for one in old(pruning)] == [made.id]
        run(pruning, sweep._statements.prune, ids=[made.id])
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            with pytest.raises(RowBusy):
                deliveries.redrive(tx, made.id, **WHO)
        pruning.commit()
    with engine.begin() as tx, pytest.raises(NotFound):
        deliveries.redrive(tx, made.id, **WHO)
