"""Two connections at every guarded statement of plans: one decides, the other finds that it was decided."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import IllegalMove, PlanExpired, RowBusy, kinds, plans
from durable_core.claims.claim import Holder
from durable_core.claims.shares import Share
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.deliveries.worker import Outcome
from durable_core.plans import attempt, heal, sweep, unsettled
from durable_core.plans.attempt import claim_step
from durable_core.testing import wait_until_blocked, wait_until_somebody_blocks
from tests.core.plan_shop import note
from tests.races.interleaver import Patient, orders

IMPATIENT = text("set local lock_timeout = '1ms'")


def pid_of(connection):
    pid = connection.scalar(text("select pg_backend_pid()"))
    return pid


def kind_of(plan, index=0):
    return kinds.plan_steps.get(plan.steps[index].kind)


def approve(tx, plan, by="dana"):
    plans.approve(tx, plan.id, by=by, digest=plan.digest)


# --- approvals -------------------------------------------------------------------------------------


@pytest.mark.spec("plans", 4)
def test_of_ten_approvals_at_once_one_starts_the_plan_and_its_steps_run_once(shop, other_engine, make_worker, engine):
    kind = shop.step()
    plan = shop.propose(kind.planned(1), kind.planned(2))
    start, said = threading.Barrier(10), []
    worker = make_worker(on=Database(other_engine))

    def decide(number):
        with other_engine.connect() as tx:
            start.wait()
            try:
                approve(tx, plan, by=f"person {number}")
                tx.commit()
                said.append(number)
            except (IllegalMove, RowBusy):
                tx.rollback()
        for _ in range(3):
            attempt.perform(worker, kind, plan.id)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(decide, range(10)))
    attempt.perform(worker, kind, plan.id)
    attempt.perform(worker, kind, plan.id)
    assert len(said) == 1
    assert shop.get(plan.id).approved_by == f"person {said[0]}"
    assert shop.effects(plan.id) == ["0:1", "1:2"]
    assert shop.get(plan.id).state == "executed"
    assert [line[0] for line in shop.lines(plan.id)].count("approve") == 1


@pytest.mark.parametrize("first", ["approve", "reject", "expire"])
@pytest.mark.parametrize("commits", [True, False])
def test_nobody_waits_for_another_decision_and_what_it_comes_to_stands(
    shop, engine, other_engine, clock, first, commits
):
    plan = shop.propose(shop.step().planned(1), expires=60)
    with other_engine.connect() as deciding:
        if first == "expire":
            clock.advance(61)
            rows = run(deciding, heal.statements.overdue, limit=10)
            run(deciding, heal.statements.expire, ids=[row["id"] for row in rows])
        elif first == "approve":
            approve(deciding, plan, by="eve")
        else:
            plans.reject(deciding, plan.id, by="eve")
        for act in (lambda tx: approve(tx, plan), lambda tx: plans.reject(tx, plan.id, by="dana")):
            with engine.begin() as tx:
                tx.execute(IMPATIENT)
                with pytest.raises(RowBusy):
                    act(tx)
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            assert run(tx, heal.statements.overdue, limit=10) == []
            assert claim_step(tx, kind_of(plan), plan.id, Holder()) is None
        deciding.commit() if commits else deciding.rollback()
    now = {"approve": "approved", "reject": "rejected", "expire": "expired"}[first] if commits else "pending"
    assert shop.raw(plan.id).state == now
    if not commits and first != "expire":
        with engine.begin() as tx:
            approve(tx, plan)
        assert shop.raw(plan.id).approved_by == "dana"
    elif commits:
        with pytest.raises(PlanExpired if first == "expire" else IllegalMove), engine.begin() as tx:
            approve(tx, plan)


def test_an_approval_that_began_in_time_and_decides_too_late_is_refused(shop, engine, clock):
    """Its transaction is old; the clock is asked once the row is locked."""
    plan = shop.propose(shop.step().planned(1), expires=60)
    with engine.begin() as tx:
        assert tx.scalar(text("select state from durable.plans")) == "pending"
        clock.advance(61)
        with pytest.raises(PlanExpired):
            approve(tx, plan)


def test_a_caller_at_repeatable_read_to_whom_another_decision_came_after_its_snapshot_is_told(shop, engine):
    plan = shop.propose(shop.step().planned(1))
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as tx, tx.begin():
        assert tx.scalar(text("select state from durable.plans")) == "pending"
        with engine.begin() as other:
            approve(other, plan, by="eve")
        with pytest.raises(Exception, match="could not serialize"):
            approve(tx, plan)
    assert shop.raw(plan.id).approved_by == "eve"


# --- claims ----------------------------------------------------------------------------------------


def test_twenty_hints_at_once_run_a_step_once(shop, other_engine, make_worker):
    kind = shop.step()
    plan = shop.approved(kind.planned(1))
    worker, start = make_worker(on=Database(other_engine)), threading.Barrier(20)

    def hinted(_):
        start.wait()
        return attempt.perform(worker, kind, plan.id).outcome

    with ThreadPoolExecutor(20) as pool:
        outcomes = list(pool.map(hinted, range(20)))
    assert sorted(outcomes).count(Outcome.DONE) == 1
    assert outcomes.count(Outcome.NOTHING_TO_DO) == 19
    assert shop.effects(plan.id) == ["0:1"]


@pytest.mark.parametrize("commits", [True, False])
def test_a_claim_meets_another_claim(shop, engine, other_engine, commits):
    plan = shop.approved(shop.step().planned(1))
    with other_engine.connect() as claiming:
        assert claim_step(claiming, kind_of(plan), plan.id, Holder()).fence == 1
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            assert claim_step(tx, kind_of(plan), plan.id, Holder()) is None
        claiming.commit() if commits else claiming.rollback()
    with engine.begin() as tx:
        second = claim_step(tx, kind_of(plan), plan.id, Holder())
    assert (second is None) is commits


def test_an_approved_plan_is_claimed_or_expired_and_never_both(shop, engine, other_engine, clock):
    kind = shop.step()
    claimed, expired = shop.approved(kind.planned(1), expires=60), shop.approved(kind.planned(2), expires=60)
    clock.advance(59)
    with other_engine.connect() as claiming:
        assert claim_step(claiming, kind, claimed.id, Holder()) is not None
        clock.advance(2)
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            rows = run(tx, heal.statements.overdue, limit=10)
            assert [row["id"] for row in rows] == [expired.id]
            run(tx, heal.statements.expire, ids=[expired.id])
        claiming.commit()
    assert (shop.raw(claimed.id).state, shop.raw(expired.id).state) == ("executing", "expired")


def test_a_beat_skips_a_row_that_somebody_has_and_renews_the_others(shop, engine, other_engine, clock):
    kind = shop.step()
    made = [shop.approved(kind.planned(n)) for n in range(3)]
    claims = [shop.claim(plan) for plan in made]
    clock.advance(60)
    with other_engine.begin() as step:
        run(step, attempt._statements.lock, **claims[1].naming, lock_timeout="5s")
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            rows = run(
                tx, attempt._statements.keep, ids=[c.id for c in claims], fences=[c.fence for c in claims],
                lease_seconds=30.0,
            )  # fmt: skip
    kept = {str(row["id"]): (row["kept"], row["still_ours"]) for row in rows}
    assert [kept[plan.id] for plan in made] == [(True, True), (False, True), (True, True)]


# --- a step and those who would end it -------------------------------------------------------------


def test_a_commit_that_waits_for_the_heal_is_refused_and_leaves_nothing(shop, engine, other_engine, make_worker, clock):
    kind = shop.step()
    plan = shop.approved(kind.planned(1))
    claim = shop.claim(plan)
    clock.advance(121)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as healing:
        rows = run(healing, heal.statements.stale, limit=10)
        run(healing, heal.statements.heal, ids=[row["id"] for row in rows], move="heal")
        old = pool.submit(attempt.carry_out, make_worker(), kind, claim)
        wait_until_blocked(engine, wait_until_somebody_blocks(engine), by=pid_of(healing))
        healing.commit()
        assert old.result(30).outcome is Outcome.CLAIM_LOST
    assert shop.effects(plan.id) == []
    assert shop.receipts(plan.id) == []
    assert shop.raw(plan.id).state == "failed"


def test_a_commit_that_waits_for_a_heal_that_rolls_back_lands(shop, engine, other_engine, make_worker, clock):
    kind = shop.step()
    plan = shop.approved(kind.planned(1))
    claim = shop.claim(plan)
    clock.advance(121)
    with ThreadPoolExecutor(1) as pool, other_engine.connect() as healing:
        rows = run(healing, heal.statements.stale, limit=10)
        run(healing, heal.statements.heal, ids=[row["id"] for row in rows], move="heal")
        old = pool.submit(attempt.carry_out, make_worker(), kind, claim)
        wait_until_blocked(engine, wait_until_somebody_blocks(engine), by=pid_of(healing))
        healing.rollback()
        assert old.result(30).outcome is Outcome.DONE
    assert shop.effects(plan.id) == ["0:1"]
    assert shop.raw(plan.id).state == "executed"


@pytest.mark.parametrize("to", ["executing", "failed"])
def test_a_release_meets_a_heal(shop, engine, other_engine, clock, to):
    """Whoever is first decides; the other finds no row."""
    first, second = shop.approved(shop.step().planned(1)), shop.approved(shop.step().planned(1))
    claims = shop.claim(first), shop.claim(second)
    clock.advance(121)
    report = {"lock_timeout": "5s", "to_state": to, "error_code": "INTERRUPTED", "error_message": "m"}
    with other_engine.connect() as releasing, engine.connect() as healing:
        assert run(releasing, unsettled._statements.release, **claims[0].naming, **report)
        rows = run(healing, heal.statements.stale, limit=10)
        assert [row["id"] for row in rows] == [second.id]
        run(healing, heal.statements.heal, ids=[second.id], move="heal")
        releasing.commit()
        healing.commit()
    with engine.begin() as tx:
        assert not run(tx, unsettled._statements.release, **claims[1].naming, **report)
        assert not run(tx, unsettled._statements.release, **claims[0].naming, **report), "it reports once"
    assert shop.raw(first.id).state == to
    assert shop.raw(second.id).state == "failed"


def test_two_heals_at_once_move_a_row_once(shop, engine, other_engine, clock):
    plan = shop.approved(shop.step().planned(1))
    shop.claim(plan)
    clock.advance(121)
    with other_engine.connect() as one, engine.begin() as two:
        rows = run(one, heal.statements.stale, limit=10)
        run(one, heal.statements.heal, ids=[row["id"] for row in rows], move="heal")
        two.execute(IMPATIENT)
        assert run(two, heal.statements.stale, limit=10) == []
        one.commit()
    assert [line[0] for line in shop.lines(plan.id)].count("heal") == 1


def test_a_read_heals_beside_a_sweep_that_has_the_row_without_waiting(shop, engine, other_engine, clock):
    plan = shop.approved(shop.step().planned(1))
    shop.claim(plan)
    clock.advance(121)
    with other_engine.connect() as one, engine.begin() as two:
        run(one, heal.statements.stale, limit=10)
        two.execute(IMPATIENT)
        assert plans.get(two, plan.id).state == "executing"
        one.rollback()
    assert shop.get(plan.id).state == "failed"


def test_a_read_expires_beside_a_sweep_that_has_the_row_without_waiting(shop, engine, other_engine, clock):
    plan = shop.propose(shop.step().planned(1))
    clock.advance(901)
    with other_engine.connect() as one, engine.begin() as two:
        run(one, heal.statements.overdue, limit=10)
        two.execute(IMPATIENT)
        assert plans.get(two, plan.id).state == "pending"
        one.rollback()
    assert shop.get(plan.id).state == "expired"


def test_two_dispatches_at_once_hint_each_step_once(shop, engine, other_engine, clock):
    kind = shop.step()
    made = {shop.approved(kind.planned(n)).id for n in range(6)}
    clock.advance(11)
    with other_engine.connect() as one, engine.begin() as two:
        first = [hint.id for hint in sweep.pick(one, {"durable": Share(9)})]
        two.execute(IMPATIENT)
        second = [hint.id for hint in sweep.pick(two, {"durable": Share(9)})]
        one.commit()
    assert sorted([*first, *second]) == sorted(made)


def test_a_claim_does_not_wait_for_the_dispatch_that_marks_its_row(shop, engine, other_engine, clock):
    plan = shop.approved(shop.step().planned(1))
    clock.advance(11)
    with other_engine.connect() as dispatching:
        assert [hint.id for hint in sweep.pick(dispatching, {"durable": Share(9)})] == [plan.id]
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            assert claim_step(tx, kind_of(plan), plan.id, Holder()) is None
        dispatching.commit()
    assert shop.claim(plan) is not None


def test_two_compensations_of_one_plan_at_once_are_one(shop, engine, other_engine, worker):
    kind = shop.step()
    kind.compensation(lambda arguments, output: kind.planned(output))
    plan = shop.approved(kind.planned(1))
    shop.run(worker, plan)
    with other_engine.connect() as one:
        made = plans.compensate(one, plan.id, by="eve")
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            with pytest.raises(RowBusy):
                plans.compensate(tx, plan.id, by="dana")
        one.commit()
    with pytest.raises(IllegalMove, match=made.plan.id), engine.begin() as tx:
        plans.compensate(tx, plan.id, by="dana")


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "AUTOCOMMIT"])
def test_two_that_look_before_either_writes_propose_one_compensation(shop, engine, other_engine, worker, level):
    """In the function of the first, after its look, the other compensates the plan and commits."""
    kind = shop.step()

    def make_up(arguments, output):
        kind.compensate = lambda arguments, output: kind.planned(output)
        if level == "AUTOCOMMIT":  # the lock is gone with the statement
            with engine.begin() as tx:
                made.append(plans.compensate(tx, plan.id, by="dana").plan.id)
        return kind.planned(output)

    made = []
    kind.compensation(make_up)
    plan = shop.approved(kind.planned(1))
    shop.run(worker, plan)
    with other_engine.connect().execution_options(isolation_level=level) as one:
        if level == "REPEATABLE READ":
            one.execute(text("select 1 from durable.loops"))
        if level != "AUTOCOMMIT":
            kind.compensate = lambda arguments, output: kind.planned(output)
            with engine.begin() as tx:
                made.append(plans.compensate(tx, plan.id, by="dana").plan.id)
        with pytest.raises((IllegalMove, DBAPIError)) as refused:
            plans.compensate(one, plan.id, by="eve")
    if isinstance(refused.value, DBAPIError):
        assert (level, refused.value.orig.sqlstate) == ("REPEATABLE READ", "40001")
    with engine.begin() as tx:
        found = tx.execute(text("select cast(id as text) from durable.plans where compensates = :of"), {"of": plan.id})
        assert found.scalars().all() == made


def test_a_release_by_an_operator_meets_a_sweep(shop, engine, other_engine):
    plan = shop.approved(shop.step().planned(1))
    with engine.begin() as tx:
        run(tx, heal.statements.hold, id=plan.id, fence=0, reason="test")
    with other_engine.connect() as one:
        plans.release(one, plan.id, by="eve", reason="mended")
        with engine.begin() as tx:
            tx.execute(IMPATIENT)
            with pytest.raises(RowBusy):
                plans.release(tx, plan.id, by="dana", reason="mended")
        one.commit()
    with pytest.raises(IllegalMove), engine.begin() as tx:
        plans.release(tx, plan.id, by="dana", reason="mended")


# --- every order -----------------------------------------------------------------------------------


class Owner:
    """One step, act by act, as the protocol does it; what follows a refused lock is nothing."""

    def __init__(self, connection, claim):
        self.connection, self.claim, self.locked = connection, claim, None

    def lock(self):
        if self.claim is not None:
            rows = run(self.connection, attempt._statements.lock, **self.claim.naming, lock_timeout="5s")
            self.locked = next(iter(rows), None)

    def settle(self):
        if self.locked:
            self.connection.execute(
                text("insert into effects (row_id, fence, note) values (:id, :fence, '0:1')"), self.claim.naming
            )
            run(
                self.connection, attempt._statements.settle, **self.claim.naming, xid=self.locked["xid"], kind="k",
                outcome="ok", output=None, error_code=None, error_message=None,
            )  # fmt: skip

    def commit(self):
        self.connection.commit()

    @property
    def acts(self):
        return [self.lock, self.settle, self.commit]


class Healer:
    def __init__(self, connection):
        self.connection, self.rows = connection, []

    def find(self):
        self.rows = run(self.connection, heal.statements.stale, limit=10)

    def heal(self):
        if self.rows:
            run(self.connection, heal.statements.heal, ids=[row["id"] for row in self.rows], move="heal")

    @property
    def acts(self):
        return [self.find, self.heal, self.connection.commit]


class Rescuer(Owner):
    """The parent that gives back at a shutdown, and then the next owner."""

    def __init__(self, connection, kind, plan):
        super().__init__(connection, None)
        self.kind, self.plan, self.rows = kind, plan, []

    def find(self):
        self.rows = run(self.connection, sweep._statements.owned, owner="nonce", pids=[77])

    def give(self):
        if self.rows:
            run(self.connection, sweep._statements.give_back, ids=[row["id"] for row in self.rows])

    def take(self):
        self.claim = claim_step(self.connection, self.kind, self.plan.id, Holder())

    def finish(self):
        self.settle()
        self.commit()

    @property
    def acts(self):
        return [self.find, self.give, self.commit, self.take, self.commit, self.lock, self.finish]


def test_whatever_the_order_of_a_step_and_a_heal_one_of_them_decides(shop, engine, other_engine):
    kind, ends, waits = shop.step(), set(), 0
    with Patient(engine, 2) as stage, engine.connect() as one, other_engine.connect() as two:
        pids = [pid_of(connection) for connection in (one, two)]
        one.rollback()
        two.rollback()
        for order in orders(3, 3):
            plan = shop.approved(kind.planned(1))
            owner = Owner(one, shop.claim(plan))
            with engine.begin() as tx:
                tx.execute(
                    text("update durable.plans set lease_expires_at = durable.durable_now() where id = :id"),
                    {"id": plan.id},
                )
            healer = Healer(two)
            waits += stage.play(order, (pids[0], owner.acts), (pids[1], healer.acts))
            after = shop.raw(plan.id)
            done = owner.locked is not None
            assert after.state == ("executed" if done else "failed"), order
            assert shop.effects(plan.id) == (["0:1"] if done else []), order
            assert shop.receipts(plan.id) == ([(0, "ok")] if done else []), order
            ends.add(done)
    assert waits, "some orders really block"
    assert ends == {True, False}


def test_whatever_the_order_of_a_step_a_shutdown_and_the_next_owner_the_effect_is_there_once(
    shop, engine, other_engine
):
    kind, ends, waits = shop.step(), set(), 0
    with Patient(engine, 2) as stage, engine.connect() as one, other_engine.connect() as two:
        pids = [pid_of(connection) for connection in (one, two)]
        one.rollback()
        two.rollback()
        for order in orders(3, 7):
            plan = shop.approved(kind.planned(1))
            owner, next_one = Owner(one, shop.claim(plan, Holder(owner="nonce", pid=77))), Rescuer(two, kind, plan)
            waits += stage.play(order, (pids[0], owner.acts), (pids[1], next_one.acts))
            came_to = (owner.locked is not None, next_one.claim is not None)
            if came_to == (False, False):
                # A lock that is refused keeps the row until its transaction ends: the claim skipped it and comes again.
                next_one.take()
                next_one.commit()
                next_one.lock()
                next_one.finish()
            after = shop.raw(plan.id)
            told = (order, after)
            assert after.state == "executed", told
            assert after.settled_fence == after.fence == (1 if owner.locked else 2), told
            assert shop.effects(plan.id) == ["0:1"], told
            assert shop.receipts(plan.id) == [(0, "ok")], told
            ends.add(came_to)
    assert waits, "some orders really block"
    assert ends == {(True, False), (False, True), (False, False)}


def test_note_is_what_the_owners_here_write(shop, worker):
    """The hand-made steps above and the real one leave the same trace."""
    plan = shop.approved(shop.step(note).planned(1))
    shop.run(worker, plan)
    assert shop.effects(plan.id) == ["0:1"]
