"""Executions of one case that meet: claims, beats, takeovers and commits, on connections that really block."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from uuid_utils import uuid7

from durable_core.cases.cases import Cases
from durable_core.cases.clock import SystemClock
from durable_core.cases.declare import Attempts, CaseType
from durable_core.cases.journal import Draft, EntryKind, Head, Payload, Seal
from durable_core.cases.postgres import PostgresTransaction, _statements
from durable_core.cases.store import NewClaim, StateWrite
from durable_core.database.transactions import run
from durable_core.refusals import CaseBusy, CaseClaimLost, StepNotAvailable
from durable_core.testing import wait_until_somebody_blocks
from tests.races.interleaver import Patient, orders

PATIENCE = 30


class Crash(BaseException):
    """The process dies in the handler."""


def once(state, ctx):
    return {"n": state["n"] + 1}


@pytest.fixture
def kind():
    kind = CaseType("test.race", registered=False)
    kind.step("once", requires={"not yet": lambda state: state["n"] == 0})(once)
    kind.step("again")(once)

    @kind.step("crash")
    def crash(state, ctx):
        raise Crash

    return kind


@pytest.fixture
def cases(other_engine, kind):
    return Cases(other_engine, [kind])


@pytest.fixture
def case_id(engine, cases):
    with engine.begin() as tx:
        return cases.create(tx, "test.race", {"n": 0}).id


def entries(engine, cases, case_id):
    with engine.begin() as tx:
        assert cases.verify(tx, case_id).ok
        return cases.journal(tx, case_id)


def kinds(engine, cases, case_id):
    return [str(entry.entry) for entry in entries(engine, cases, case_id)]


def at_once(count, act):
    start = threading.Barrier(count)

    def one(number):
        start.wait(PATIENCE)
        try:
            return act(number)
        except (CaseBusy, StepNotAvailable) as refused:
            return refused

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.spec("cases", 6)
def test_of_six_at_once_one_executes_a_step_that_can_be_done_once(engine, cases, case_id):
    came = at_once(6, lambda _: cases.execute(case_id, "once"))
    done = [one for one in came if not isinstance(one, Exception)]
    assert len(done) == 1
    with engine.begin() as tx:
        case = cases.get(tx, case_id)
    assert (case.seq, case.state, case.claim) == (1, {"n": 1}, None)
    assert kinds(engine, cases, case_id) == ["claimed", "completed"]


@pytest.mark.spec("cases", 6)
def test_while_one_runs_the_others_are_busy_with_its_execution(engine, cases, kind, case_id):
    inside, leave = threading.Event(), threading.Event()

    @kind.step("wait")
    def wait(state, ctx):
        inside.set()
        assert leave.wait(PATIENCE)
        return state

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cases.execute, case_id, "wait")
        assert inside.wait(PATIENCE)
        came = at_once(5, lambda _: cases.execute(case_id, "once"))
        leave.set()
        done = running.result(PATIENCE)
    assert {one.execution_id for one in came if isinstance(one, CaseBusy)} == {done.execution_id}
    assert len(came) == 5


@pytest.mark.spec("cases", 7)
def test_of_two_contenders_for_a_lapsed_claim_one_takes_over(engine, cases, kind, case_id, clock):
    both_in, leave = threading.Event(), threading.Event()

    @kind.step("hold")
    def hold(state, ctx):
        both_in.set()
        assert leave.wait(PATIENCE)
        return {"n": state["n"] + 1}

    with pytest.raises(Crash):
        cases.execute(case_id, "crash")
    clock.advance(31)
    start = threading.Barrier(2)

    def contend(_):
        start.wait(PATIENCE)
        try:
            return cases.execute(case_id, "hold")
        except CaseBusy as busy:
            leave.set()  # the other one holds it
            return busy

    with ThreadPoolExecutor(2) as pool:
        came = list(pool.map(contend, range(2)))
    assert sorted(type(one).__name__ for one in came) == ["CaseBusy", "Executed"]
    assert kinds(engine, cases, case_id) == ["claimed", "expired", "claimed", "completed"]


@pytest.mark.spec("cases", 7)
def test_a_contender_that_waited_for_the_lock_sees_the_claim_that_was_taken_meanwhile(
    engine, other_engine, cases, case_id
):
    """The look comes after the lock, in a statement of its own: one that waited would see the case without a claim."""
    with other_engine.connect() as first:
        first.begin()
        winner = Takeover(first, case_id)
        winner.lock()
        winner.look()
        winner.take()
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(cases.execute, case_id, "once")
            wait_until_somebody_blocks(engine)
            first.commit()
            with pytest.raises(CaseBusy) as busy:
                late.result(PATIENCE)
    assert busy.value.execution_id == winner.execution_id


@pytest.mark.spec("cases", 38)
def test_while_a_handler_runs_the_case_can_be_locked_and_no_transaction_is_open(engine, cases, kind, case_id):
    seen = []

    @kind.step("look")
    def look(state, ctx):
        with engine.begin() as tx:
            tx.execute(text("set local lock_timeout = '1ms'"))
            seen.append(
                tx.execute(text("select id from durable.cases where id = :id for update"), {"id": case_id}).one()
            )
            open_ones = text(
                "select query from pg_stat_activity where datname = current_database() and xact_start is not null"
                " and pid <> pg_backend_pid() and backend_type = 'client backend'"
            )
            seen.append(tx.scalars(open_ones).all())
        return state

    cases.execute(case_id, "look")
    assert len(seen) == 2
    assert seen[1] == []


# --- every order -----------------------------------------------------------------------------------


def pid_of(connection):
    return connection.scalar(text("select pg_backend_pid()"))


class Actor:
    """One that acts on the case by the port, a statement at a time, in a transaction of its own."""

    def __init__(self, connection, case_id):
        self.connection, self.case_id = connection, case_id
        self.tx = PostgresTransaction(connection)
        self.execution_id = str(uuid7())

    def lock(self):
        self.case = self.tx.lock(self.case_id)

    def look(self):
        self.looked = self.tx.look(self.case_id)

    def commit(self):
        self.connection.commit()

    def sealed(self, kind, execution_id, head, **more):
        draft = Draft(
            id=str(uuid7()), execution_id=execution_id, request_id=None, entry=kind, attempt=1, step="crash",
            scope_key=None, **more,
        )  # fmt: skip
        return Seal().sealed(draft, self.case_id, head, self.looked.now)


class Takeover(Actor):
    """Takes a claim whose lease is over, or one that nobody has."""

    taken = False

    def take(self):
        head, claim = self.case.head, self.looked.claim
        if claim is not None:
            if not self.looked.lapsed:
                return
            expired = self.sealed(EntryKind.EXPIRED, claim.execution_id, head, payload=Payload(error="{}"))
            self.tx.lapse(claim, expired)
            head = Head(expired.number, expired.chain)
        payload = Payload(actor="null", guard="{}", state=self.case.state)
        entry = self.sealed(EntryKind.CLAIMED, self.execution_id, head, as_of=self.looked.now, payload=payload)
        new = NewClaim(
            case_id=self.case_id, execution_id=self.execution_id, step="crash", scope_key=None, request_id=None,
            lease_seconds=30,
        )  # fmt: skip
        self.tx.take(new, entry)
        self.taken = True


class Settler(Actor):
    """Commits the new state of an execution, if the claim is its own."""

    settled = False

    def settle(self):
        if not self.looked.held_by(self.execution_id):
            return
        payload = Payload(delta='[{"op": "replace", "path": "/n", "value": 1}]')
        entry = self.sealed(EntryKind.COMPLETED, self.execution_id, self.case.head, seq=1, payload=payload)
        write = StateWrite(case_id=self.case_id, state='{"n": 1}', seq=1, ended_at=None, at=self.looked.now)
        self.tx.settle(entry, write)
        self.settled = True


@pytest.fixture
def lapsed(engine, cases, case_id, clock):
    """A claim whose owner is silent, its lease over."""
    with pytest.raises(Crash):
        cases.execute(case_id, "crash")
    clock.freeze()
    clock.advance(31)
    with engine.begin() as tx:
        return cases.get(tx, case_id).claim


@pytest.mark.parametrize("order", orders(4, 4), ids=str)
def test_in_every_order_a_late_commit_and_a_takeover_do_not_both_land(
    engine, other_engine, cases, case_id, lapsed, order
):
    with other_engine.connect() as one, other_engine.connect() as two, Patient(engine, 2) as stage:
        pids = pid_of(one), pid_of(two)
        one.commit(), two.commit()
        owner, taker = Settler(one, case_id), Takeover(two, case_id)
        owner.execution_id = lapsed.execution_id
        stage.play(
            order, (pids[0], [owner.lock, owner.look, owner.settle, owner.commit]),
            (pids[1], [taker.lock, taker.look, taker.take, taker.commit]),
        )  # fmt: skip
    with engine.begin() as tx:
        case = cases.get(tx, case_id)
    told = kinds(engine, cases, case_id)
    assert taker.taken
    assert case.claim.execution_id == taker.execution_id
    if owner.settled:
        assert (told, case.seq) == (["claimed", "completed", "claimed"], 1)
    else:
        assert (told, case.seq, case.state) == (["claimed", "expired", "claimed"], 0, {"n": 0})


@pytest.mark.parametrize("order", orders(2, 4), ids=str)
def test_in_every_order_of_a_beat_and_a_takeover_no_lease_that_was_renewed_is_taken(
    engine, other_engine, cases, case_id, lapsed, order
):
    def beat():
        told = {"case_id": case_id, "execution_id": lapsed.execution_id, "lease_seconds": 30.0}
        run(one, _statements.keep, **told)
        expires = text("select expires_at from durable.case_claims where execution_id = :id")
        renewed.append(one.scalar(expires, {"id": lapsed.execution_id}) not in (None, lapsed.expires_at))

    renewed = []
    with other_engine.connect() as one, other_engine.connect() as two, Patient(engine, 2) as stage:
        pids = pid_of(one), pid_of(two)
        one.commit(), two.commit()
        taker = Takeover(two, case_id)
        stage.play(
            order, (pids[0], [beat, one.commit]),
            (pids[1], [taker.lock, taker.look, taker.take, taker.commit]),
        )  # fmt: skip
    with engine.begin() as tx:
        claim = cases.get(tx, case_id).claim
    if taker.taken:
        assert (claim.execution_id, renewed) == (taker.execution_id, [False])
        assert kinds(engine, cases, case_id) == ["claimed", "expired", "claimed"]
    else:
        assert (claim.execution_id, renewed) == (lapsed.execution_id, [True])
        assert claim.expires_at > taker.looked.now
        assert kinds(engine, cases, case_id) == ["claimed"]


@pytest.fixture
def live(engine, cases, case_id, clock):
    """A claim whose owner is at work, its lease not over."""
    with pytest.raises(Crash):
        cases.execute(case_id, "crash")
    clock.freeze()
    clock.advance(5)
    with engine.begin() as tx:
        return cases.get(tx, case_id).claim


def beat(connection, claim):
    """Renews it for 30 s from now; the lease it has then."""
    told = {"case_id": claim.case_id, "execution_id": claim.execution_id, "lease_seconds": 30.0}
    run(connection, _statements.keep, **told)
    return connection.scalar(
        text("select expires_at from durable.case_claims where execution_id = :id"), {"id": claim.execution_id}
    )


def test_who_finds_a_case_busy_costs_its_owner_no_beat(other_engine, case_id, live):
    with other_engine.connect() as one, other_engine.connect() as two:
        asks = Takeover(two, case_id)
        asks.lock()
        asks.look()
        assert (asks.looked.lapsed, asks.looked.held_by(live.execution_id)) == (False, True)
        one.execute(text("set lock_timeout = '1s'"))
        assert beat(one, live) > live.expires_at


def test_a_commit_waits_for_a_beat_under_way_and_stands(engine, other_engine, cases, case_id, live):
    with other_engine.connect() as one, other_engine.connect() as two:
        owner = Settler(two, case_id)
        owner.execution_id = live.execution_id
        assert beat(one, live) > live.expires_at
        owner.lock()
        owner.look()
        with ThreadPoolExecutor(1) as pool:
            settled = pool.submit(owner.settle)
            wait_until_somebody_blocks(engine)
            one.commit()
            settled.result(PATIENCE)
        owner.commit()
    with engine.begin() as tx:
        case = cases.get(tx, case_id)
    assert (case.claim, case.seq, kinds(engine, cases, case_id)) == (None, 1, ["claimed", "completed"])


@pytest.mark.spec("cases", 12)
def test_an_owner_that_was_dispossessed_between_two_attempts_stops(engine, cases, kind, case_id, clock):
    tried = []

    @kind.step("slow", retry=Attempts(3, 0))
    def slow(state, ctx):
        tried.append(ctx.attempt)
        clock.advance(31)
        with pytest.raises(Crash):
            cases.execute(case_id, "crash")
        raise ValueError

    with pytest.raises(CaseClaimLost):
        cases.execute(case_id, "slow")
    assert tried == [1]
    told = [(str(e.entry), e.step) for e in entries(engine, cases, case_id)]
    assert told == [
        ("claimed", "slow"), ("expired", "slow"), ("claimed", "crash"), ("attempt-failed", "slow"), ("failed", "slow"),
    ]  # fmt: skip
    with engine.begin() as tx:
        assert cases.get(tx, case_id).claim.step == "crash"


def test_a_heartbeat_of_real_time_keeps_a_lease_through_a_handler_that_takes_longer(
    engine, other_engine, kind, case_id
):
    cases = Cases(other_engine, [kind], lease=1, heartbeat=0.2)
    seen, renewed = threading.Event(), []

    @kind.step("long")
    def long(state, ctx):
        first = None
        while not seen.wait(0.05):
            with engine.begin() as tx:
                claim = cases.get(tx, case_id).claim
            first = first or claim
            renewed.append(claim.expires_at - claim.heartbeat_at)
            if (claim.expires_at - first.claimed_at).total_seconds() > 2:
                seen.set()
        return state

    assert cases.execute(case_id, "long").seq == 1
    assert {gap.total_seconds() for gap in renewed} == {1}


def test_one_thread_beats_for_all_and_an_act_that_ended_beats_no_more():
    clock, beats, enough = SystemClock(), {"a": 0, "b": 0}, threading.Event()

    def beat(name):
        beats[name] += 1
        if name == "b" and beats["b"] == 3:
            enough.set()
        if name == "a":
            raise OSError("swallowed")

    before = threading.active_count()
    end_a = clock.every(0.01, lambda: beat("a"))
    end_b = clock.every(0.01, lambda: beat("b"))
    assert threading.active_count() == before + 1
    assert enough.wait(PATIENCE)
    assert beats["a"] >= 2
    end_a()
    end_b()
    again = threading.Event()
    end = clock.every(0.01, again.set)
    assert again.wait(PATIENCE)
    counted = dict(beats)
    again.clear()
    assert again.wait(PATIENCE)
    end()
    assert beats == counted
