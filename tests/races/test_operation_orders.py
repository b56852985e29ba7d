"""Two connections at one operation, act by act in every order: each pair of the statements that guard it."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import IdempotencyConflict, KeyInFlight, OperationInFlight, deliveries, operations
from durable_core.claims.claim import Holder
from durable_core.claims.shares import Share, as_written
from durable_core.database.transactions import run
from durable_core.errors import RowBusy
from durable_core.operations import attempt, operate, report, start, sweep
from tests.races.interleaver import Patient, orders


class Actor:
    """One connection that does one thing to one row and commits; `won` is what came of it."""

    def __init__(self, connection, kind, row_id):
        self.connection, self.kind, self.row_id, self.won = connection, kind, row_id, None

    def run(self, statement, **parameters):
        return run(self.connection, statement, **parameters)

    def act(self):
        raise NotImplementedError

    def do(self):
        self.won = bool(self.act())

    @property
    def acts(self):
        return [self.do, self.connection.commit]


class Take(Actor):
    def act(self):
        return self.run(
            attempt._statements.take, **Holder().parameters, id=self.row_id, kind=self.kind.name, finds=False,
            cancels=False, timeout_seconds=300.0, record_seconds=60.0,
        )  # fmt: skip


class Refuse(Actor):
    def act(self):
        return self.run(attempt._statements.refuse, id=self.row_id, error_code="NO", error_message="no")


class PutOff(Actor):
    def act(self):
        return self.run(
            attempt._statements.put_off, id=self.row_id, delay_seconds=10.0, waiting_for=None, error_code="X",
            error_message="x",
        )  # fmt: skip


class Expire(Actor):
    """Of a row whose time to be issued is over."""

    def act(self):
        overdue = self.run(sweep._statements.overdue, limit=10)
        return self.run(sweep._statements.expire, ids=[row["id"] for row in overdue])


class Cancel(Actor):
    def act(self):
        rows = self.run(operate._statements.cancel, ids=[self.row_id], by="dana", reason="no")
        return rows[0]["done"]


class AskForPoll(Actor):
    def act(self):
        return self.run(operate._statements.poll, ids=[self.row_id], by="dana", reason="now")[0]["done"]


class TakeAgain(Actor):
    def act(self):
        return self.run(
            attempt._statements.take_again, **Holder().parameters, id=self.row_id, kind=self.kind.name,
            timeout_seconds=300.0, outage_seconds=30.0, arrival_seconds=30.0,
        )  # fmt: skip


class TakeBack(Actor):
    def act(self):
        lapsed = self.run(sweep._statements.lapsed, limit=10)
        ids = [row["id"] for row in lapsed]
        return self.run(sweep._statements.take_back, ids=ids, move="reap", code="CLAIM_EXPIRED", outage_seconds=30.0)


class Settle(Actor):
    """The owner's report, of success."""

    fence = 1
    ids = '["op-1"]'
    to_state = "succeeded"

    def act(self):
        return self.run(
            report._statements.settle, id=self.row_id, fence=self.fence, lock_timeout="5s", to_state=self.to_state,
            external_ids=self.ids, external_statuses=None, answered=True, renews=True, backs_off=False,
            provider_seconds=0.0, longest_seconds=30.0, outage_seconds=30.0, asked_seconds=0.0, jitter=1.0,
            error_code=None, error_message=None, move="issued",
        )  # fmt: skip


class SettlePoll(Settle):
    fence = 2
    ids = None


class SettleStillRunning(SettlePoll):
    to_state = "running"


class Keep(Actor):
    """The owner's heartbeat: of a row that somebody else has it says so."""

    def act(self):
        (row,) = self.run(attempt._statements.keep, ids=[self.row_id], fences=[1], lease_seconds=30.0)
        return row["kept"]


class Hint(Actor):
    def act(self):
        for state in ("queued", "running"):
            found = self.run(
                sweep._statements.unhinted, state=state, shares=as_written({"durable": Share(10, empty=True)}),
                window=10, precheck_seconds=30.0,
            )  # fmt: skip
            if found:
                ids = [row["id"] for row in found]
                self.run(sweep._statements.mark, ids=ids, idle=[], unsure=[], idle_seconds=5.0)
                return True
        return False


class AskToCancel(Actor):
    def act(self):
        return self.run(
            attempt._statements.lock_canceled, id=self.row_id, kind=self.kind.name
        ) and self.run(attempt._statements.ask_to_cancel, id=self.row_id)  # fmt: skip


class BeginPrecheck(Actor):
    def act(self):
        self.run(attempt._statements.begin_precheck, id=self.row_id)
        return True


class WaitForHandler(Actor):
    """A worker that does not know the kind has taken its hint."""

    def act(self):
        return self.run(
            attempt._statements.wait_for_handler, id=self.row_id, kind=self.kind.name, delay_seconds=10.0
        )  # fmt: skip


class Release(Actor):
    def act(self):
        return self.run(operate._statements.release, ids=[self.row_id], by="dana", reason="mended")[0]["done"]


class Hold(Actor):
    """A sweep that failed on it; no answer says whether it was held."""

    fence = 0

    def act(self):
        self.run(sweep._statements.hold, id=self.row_id, fence=self.fence, reason="a trigger refused it")
        (reason,) = self.connection.scalars(
            text("select held_reason from durable.operations where id = :id"), {"id": self.row_id}
        )
        return reason is not None


class HoldIssued(Hold):
    fence = 1


class GiveBack(Actor):
    """The parent of its process, which has died."""

    def act(self):
        holder = Holder()
        owned = self.run(sweep._statements.owned, owner=holder.owner, pids=[holder.pid])
        ids = [row["id"] for row in owned]
        return self.run(sweep._statements.take_back, ids=ids, move="release", code="CHILD_LOST", outage_seconds=30.0)


class Resolve(Actor):
    """An owner in doubt about its COMMIT: it waits for whoever has the row."""

    def act(self):
        return self.run(report._statements.resolve, id=self.row_id, lock_timeout="5s")


class RemarkStale(Actor):
    def act(self):
        return self.run(report._statements.remark_stale, id=self.row_id, fence=1, reason="LATE_POLL")


class Prune(Actor):
    """Whatever has ended, however short ago."""

    def act(self):
        old = self.run(sweep._statements.old, retention_seconds=0.0, limit=10, without=[], since=None)
        ids = [row["id"] for row in old]
        if ids:
            self.run(sweep._statements.prune, ids=ids)
            self.run(sweep._statements.prune_journal, ids=ids)
        return ids


STATES = {
    "queued": [],
    "late": ["start_before = durable.durable_now() - interval '1 s'"],
    "issuing": [Take],
    "issuing, lapsed": [Take, "lease_expires_at = durable.durable_now()"],
    "running": [Take, "settle"],
    "polling": [Take, "settle", TakeAgain],
    "polling, lapsed": [Take, "settle", TakeAgain, "lease_expires_at = durable.durable_now()"],
    "silent": [Take, "settle", "patience_until = durable.durable_now()"],
    "canceled": [Take, "settle", Cancel],
    "held": [Take, "settle", "held_reason = 'a trigger refused it'"],
}


@pytest.fixture
def made(engine, reset, start):
    """A row in one of the states above, made by the statements themselves."""

    def make(state):
        ref = start(reset)
        for step in STATES[state]:
            with engine.begin() as tx:
                if step == "settle":
                    run(
                        tx, report._statements.settle, id=ref.id, fence=1, lock_timeout="5s", to_state="running",
                        external_ids='["op-1"]', external_statuses=None, answered=False, renews=True, backs_off=False,
                        provider_seconds=0.0, longest_seconds=30.0, outage_seconds=30.0, asked_seconds=0.0, jitter=1.0,
                        error_code=None, error_message=None, move=None,
                    )  # fmt: skip
                    tx.execute(
                        text("update durable.operations set due_at = durable.durable_now() where id = :id"),
                        {"id": ref.id},
                    )
                elif isinstance(step, str):
                    tx.execute(text(f"update durable.operations set {step} where id = :id"), {"id": ref.id})
                else:
                    actor = step(tx, reset, ref.id)
                    actor.do()
                    assert actor.won, (state, step)
        return ref.id

    return make


# One of two wins, whatever the order: the first to lock the row, and where they may follow each other, both.
ONE = "one"
EITHER_OR_BOTH = "one or both"
RACES = [
    ("queued", Take, Take, ONE, {"running"}),
    ("queued", Take, Refuse, ONE, {"running", "failed"}),
    ("queued", Take, Cancel, EITHER_OR_BOTH, {"canceled", "running"}),
    ("queued", Refuse, Cancel, ONE, {"failed", "canceled"}),
    ("queued", Refuse, Refuse, ONE, {"failed"}),
    ("queued", Take, PutOff, ONE, {"running", "queued"}),
    ("queued", Take, Hint, EITHER_OR_BOTH, {"running", "queued"}),
    ("queued", Cancel, Cancel, ONE, {"canceled"}),
    ("late", Expire, Expire, ONE, {"failed"}),
    ("late", Expire, Cancel, ONE, {"failed", "canceled"}),
    ("late", Expire, Refuse, ONE, {"failed"}),
    ("issuing", Settle, Settle, ONE, {"succeeded"}),
    ("issuing", Settle, Cancel, ONE, {"succeeded", "canceled"}),
    ("issuing", Keep, Cancel, EITHER_OR_BOTH, {"canceled", "running"}),
    ("issuing", Keep, Settle, EITHER_OR_BOTH, {"succeeded"}),
    ("issuing, lapsed", Settle, TakeBack, ONE, {"succeeded", "failed"}),
    ("issuing, lapsed", Keep, TakeBack, ONE, {"running", "failed"}),
    ("issuing, lapsed", TakeBack, TakeBack, ONE, {"failed"}),
    ("issuing, lapsed", TakeBack, Cancel, ONE, {"failed", "canceled"}),
    ("running", TakeAgain, TakeAgain, ONE, {"running"}),
    ("running", TakeAgain, Cancel, EITHER_OR_BOTH, {"canceled", "running"}),
    ("running", TakeAgain, AskForPoll, EITHER_OR_BOTH, {"running"}),
    ("running", TakeAgain, Hint, EITHER_OR_BOTH, {"running"}),
    ("running", Hint, Hint, EITHER_OR_BOTH, {"running"}),
    ("polling", SettlePoll, Cancel, ONE, {"succeeded", "canceled"}),
    ("polling", SettleStillRunning, SettlePoll, ONE, {"running", "succeeded"}),
    ("polling", SettlePoll, AskForPoll, ONE, {"succeeded"}),
    ("polling, lapsed", SettlePoll, TakeBack, EITHER_OR_BOTH, {"succeeded"}),
    ("polling, lapsed", TakeAgain, TakeBack, EITHER_OR_BOTH, {"running"}),
    ("silent", TakeBack, TakeAgain, ONE, {"failed"}),
    ("silent", TakeBack, TakeBack, ONE, {"failed"}),
    ("silent", TakeBack, Cancel, ONE, {"failed", "canceled"}),
    ("canceled", AskToCancel, AskToCancel, ONE, {"canceled"}),
    ("queued", BeginPrecheck, BeginPrecheck, EITHER_OR_BOTH, {"queued"}),
    ("queued", BeginPrecheck, Take, EITHER_OR_BOTH, {"running", "queued"}),
    ("queued", BeginPrecheck, Cancel, EITHER_OR_BOTH, {"canceled", "queued"}),
    ("queued", WaitForHandler, Take, EITHER_OR_BOTH, {"running", "queued"}),
    ("queued", WaitForHandler, Cancel, EITHER_OR_BOTH, {"canceled", "queued"}),
    ("queued", WaitForHandler, Hint, EITHER_OR_BOTH, {"queued"}),
    ("running", WaitForHandler, TakeAgain, EITHER_OR_BOTH, {"running"}),
    ("queued", PutOff, Cancel, EITHER_OR_BOTH, {"queued", "canceled"}),
    ("late", Hold, Expire, EITHER_OR_BOTH, {"queued", "failed"}),
    ("late", Hold, Cancel, EITHER_OR_BOTH, {"queued", "canceled"}),
    ("issuing", HoldIssued, Settle, EITHER_OR_BOTH, {"succeeded"}),
    ("silent", HoldIssued, TakeBack, EITHER_OR_BOTH, {"running", "failed"}),
    ("held", Release, Release, ONE, {"running"}),
    ("held", Release, Cancel, EITHER_OR_BOTH, {"running", "canceled"}),
    ("held", Release, TakeAgain, EITHER_OR_BOTH, {"running"}),
    ("held", Release, HoldIssued, EITHER_OR_BOTH, {"running"}),
    ("issuing", GiveBack, GiveBack, ONE, {"failed"}),
    ("issuing", GiveBack, Settle, ONE, {"failed", "succeeded"}),
    ("issuing", GiveBack, Keep, EITHER_OR_BOTH, {"failed", "running"}),
    ("issuing", GiveBack, Cancel, ONE, {"failed", "canceled"}),
    ("issuing, lapsed", GiveBack, TakeBack, ONE, {"failed"}),
    ("polling", GiveBack, SettlePoll, EITHER_OR_BOTH, {"succeeded"}),
    ("running", AskForPoll, AskForPoll, EITHER_OR_BOTH, {"running"}),
    ("running", AskForPoll, Cancel, EITHER_OR_BOTH, {"running", "canceled"}),
    ("issuing", Resolve, Settle, EITHER_OR_BOTH, {"succeeded"}),
    ("issuing, lapsed", Resolve, TakeBack, EITHER_OR_BOTH, {"running", "failed"}),
    ("canceled", Prune, Prune, ONE, {None}),
    ("canceled", Prune, AskToCancel, EITHER_OR_BOTH, {None, "canceled"}),
    ("canceled", Prune, RemarkStale, EITHER_OR_BOTH, {None, "canceled"}),
    ("canceled", Prune, Resolve, EITHER_OR_BOTH, {None, "canceled"}),
]


@pytest.mark.parametrize(
    ("state", "one", "two", "who", "ends"), RACES,
    ids=[f"{state}: {one.__name__} and {two.__name__}" for state, one, two, _, _ in RACES],
)  # fmt: skip
def test_of_two_acts_at_once_each_is_whole_or_nothing(
    engine, other_engine, reset, made, operation_row, lines, state, one, two, who, ends
):
    with Patient(engine, 2) as stage, engine.connect() as first, other_engine.connect() as second:
        pids = [connection.scalar(text("select pg_backend_pid()")) for connection in (first, second)]
        first.rollback()
        second.rollback()
        for order in orders(2, 2):
            row_id = made(state)
            before = operation_row(row_id)
            a, b = one(first, reset, row_id), two(second, reset, row_id)
            stage.play(order, (pids[0], a.acts), (pids[1], b.acts))
            with engine.connect() as tx:
                there = tx.scalar(text("select count(*) from durable.operations where id = :id"), {"id": row_id})
            row = operation_row(row_id) if there else None
            told = (order, a.won, b.won, row)
            assert (row and row.state) in ends, told
            assert a.won + b.won == 1 if who == ONE else a.won or b.won, told
            if row is None:
                assert not lines(row_id), "a line would outlive its row"
                continue
            assert before.fence <= row.fence <= before.fence + a.won + b.won, told
            assert row.settled_fence <= row.fence, told
            assert (row.finished_at is None) == (row.state in ("queued", "running")), told
            journal = [line.move for line in lines(row_id)]
            assert journal.count("take") <= 1, told
            assert len([line for line in lines(row_id) if line.to_state in ("succeeded", "failed", "canceled")
                        and line.from_state != line.to_state]) == (row.state not in ("queued", "running"))  # fmt: skip
            if row.state in ("queued", "running"):
                with engine.begin() as tx:
                    operations.cancel(tx, row_id, by="test", reason="the next")


class Start(Actor):
    key = None

    def act(self):
        try:
            return self.kind.options(key=self.key).start(self.connection, by="dana").created
        except (OperationInFlight, KeyInFlight):
            return False


class StartKeyed(Start):
    key = "one"


@pytest.mark.parametrize(("one", "two"), list(itertools.product([Start, StartKeyed], repeat=2)))
def test_of_two_starts_at_once_one_comes_to_be(engine, other_engine, reset, operation_row, one, two):
    assert start.KEY_WAIT == "50ms"
    with Patient(engine, 2) as stage, engine.connect() as first, other_engine.connect() as second:
        pids = [connection.scalar(text("select pg_backend_pid()")) for connection in (first, second)]
        first.rollback()
        second.rollback()
        for number, order in enumerate(orders(2, 2)):
            a, b = one(first, reset, None), two(second, reset, None)
            a.key = b.key = None if one.key is None else f"{one.key}-{number}"
            stage.play(order, (pids[0], a.acts), (pids[1], b.acts))
            assert a.won + b.won == 1, order
            with engine.begin() as tx:
                (row,) = operations.page(tx, state="queued")
                operations.cancel(tx, row.id, by="test", reason="the next")


@pytest.mark.parametrize(
    ("key", "trigger", "came"),
    [("one", "manual", KeyInFlight), ("two", "manual", OperationInFlight), (None, "manual", OperationInFlight),
     ("one", "scheduled", None), ("two", "scheduled", None)],
)  # fmt: skip
def test_a_start_beside_an_uncommitted_one_says_whether_the_key_or_the_slot_is_in_flight(
    engine, other_engine, reset, key, trigger, came
):
    with engine.connect() as first, other_engine.connect() as second:
        there = reset.options(key="one").start(first, by="dana")
        if came is None:
            assert reset.options(key=key).start(second, by="eve", trigger=trigger).skipped
        else:
            with pytest.raises(came) as refused:
                reset.options(key=key).start(second, by="eve", trigger=trigger)
            assert type(refused.value) is came
        assert second.scalar(text("select 1")) == 1, "the caller's transaction is alive"
        assert second.scalar(text("show lock_timeout")) == "0"
        assert not second.scalar(text("select exists (select from durable.operations)")), "nothing was written"
        first.commit()
        if key == "one":
            again = reset.options(key=key).start(second, by="eve", trigger=trigger)
            assert (again.id, again.replayed) == (there.id, True)


@pytest.mark.parametrize("branch", ["preview", "main"])
def test_a_key_whose_writer_commits_between_the_two_looks_is_given_back(
    engine, other_engine, reset, monkeypatch, branch
):
    """The first look waits and gives up; the second, for the key alone, finds it committed."""
    real = start.undone
    with engine.connect() as first, other_engine.connect() as second:
        there = reset.options(key="one").start(first, "preview", by="dana")

        def undone(*given):
            first.commit()
            return real(*given)

        monkeypatch.setattr(start, "undone", undone)
        starting = reset.options(key="one")
        if branch == "preview":
            again = starting.start(second, branch, by="eve")
            assert (again.id, again.created, again.replayed) == (there.id, False, True)
        else:
            with pytest.raises(IdempotencyConflict):
                starting.start(second, branch, by="eve")
        second.commit()
    with engine.connect() as tx:
        assert len(operations.page(tx)) == 1


@pytest.mark.parametrize("commits", [True, False])
def test_a_doubt_waits_for_the_report_that_it_is_about(engine, other_engine, reset, made, commits):
    row_id = made("issuing")
    with engine.connect() as owner, other_engine.connect() as doubting:
        reporting = Settle(owner, reset, row_id)
        reporting.do()
        assert reporting.won
        with pytest.raises(DBAPIError, match="lock timeout"):
            run(doubting, report._statements.resolve, id=row_id, lock_timeout="50ms")
        doubting.rollback()
        owner.commit() if commits else owner.rollback()
        (seen,) = run(doubting, report._statements.resolve, id=row_id, lock_timeout="5s")
        assert (seen["state"], seen["settled_fence"]) == (("succeeded", 1) if commits else ("running", 0))


def test_a_pause_that_comes_between_the_look_and_the_claim_holds_the_claim(engine, reset, made):
    row_id = made("queued")
    with engine.begin() as tx:
        assert run(tx, attempt._statements.look, id=row_id, kind=reset.name)[0]["may_be_issued"]
        deliveries.pause(tx, "queue", "durable", by="dana", reason="audit")
    with engine.begin() as tx:
        taking = Take(tx, reset, row_id)
        taking.do()
        assert not taking.won
        deliveries.resume(tx, "queue", "durable", by="dana")
        taking.do()
        assert taking.won


def test_one_that_became_too_late_between_the_look_and_the_claim_is_not_claimed(engine, reset, made):
    row_id = made("late")
    with engine.begin() as tx:
        taking = Take(tx, reset, row_id)
        taking.do()
        assert not taking.won


def test_an_act_on_a_row_that_is_being_written_does_not_wait(engine, other_engine, reset, made):
    row_id = made("running")
    with engine.connect() as first, other_engine.connect() as second:
        first.execute(text("select from durable.operations where id = :id for update"), {"id": row_id})
        with pytest.raises(RowBusy) as busy:
            operations.cancel(second, row_id, by="dana", reason="no")
        assert "operation" in str(busy.value)


def test_a_cancel_whose_snapshot_is_older_than_the_end_gives_the_ended_row_back(
    engine, other_engine, reset, made, monkeypatch
):
    """The end commits after the cancel's statement has begun, and before it locks the row."""
    row_id = made("polling")
    source = operate._statements.cancel.source
    gate = "where (select cast(pg_advisory_xact_lock(65) as text)) is not null and o.id ="
    slow = replace(operate._statements.cancel, source=source.replace("where o.id =", gate, 1))
    assert slow.source != source
    monkeypatch.setattr(operate, "CANCEL", replace(operate.CANCEL, statement=slow))

    def cancel():
        with other_engine.begin() as tx:
            return operations.cancel(tx, row_id, by="dana", reason="no")

    with engine.connect() as gatekeeper, ThreadPoolExecutor(1) as thread:
        gatekeeper.execute(text("select pg_advisory_xact_lock(65)"))
        canceled = thread.submit(cancel)
        waiting = text("select count(*) from pg_locks where locktype = 'advisory' and objid = 65 and not granted"
                       " and database = (select oid from pg_database where datname = current_database())")  # fmt: skip
        until = time.monotonic() + 30
        while not gatekeeper.scalar(waiting) and time.monotonic() < until:
            time.sleep(0.01)
        with engine.begin() as tx:
            ending = SettlePoll(tx, reset, row_id)
            ending.do()
            assert ending.won
        gatekeeper.rollback()
        assert canceled.result(30).state == "succeeded"
