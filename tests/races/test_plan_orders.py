"""Two connections at one plan, act by act in every order: each pair of the statements that guard it."""

import pytest
from sqlalchemy import text

from durable_core import IllegalMove, NotFound, RowBusy, plans
from durable_core.claims.claim import Holder
from durable_core.claims.shares import Share, as_written
from durable_core.database.transactions import run
from durable_core.plans import attempt, heal, operate, sweep, unsettled
from tests.races.interleaver import Patient, orders

PID = 77


class Actor:
    """One connection that does one thing to one plan and commits; `won` is what came of it."""

    def __init__(self, connection, plan):
        self.connection, self.plan, self.won = connection, plan, False

    def run(self, statement, **parameters):
        return run(self.connection, statement, **parameters)

    def act(self):
        raise NotImplementedError

    def do(self):
        self.won = bool(self.act())

    @property
    def acts(self):
        return [self.do, self.connection.commit]


class TwoPhased(Actor):
    """Locks what it finds, and moves that in the same transaction."""

    found = False

    def find(self):
        raise NotImplementedError

    def look(self):
        self.found = self.plan.id in [row["id"] for row in self.find()]

    def move(self):
        if self.found:
            self.do()

    @property
    def acts(self):
        return [self.look, self.move, self.connection.commit]


# --- people --------------------------------------------------------------------------------------


class Approve(Actor):
    def act(self):
        (row,) = self.run(
            operate._statements.approve, id=self.plan.id, by="dana", digest=self.plan.digest, reason=None, origin=None
        )
        return row["done"]


class Reject(Actor):
    def act(self):
        return self.run(operate._statements.reject, id=self.plan.id, by="dana", reason=None, origin=None)[0]["done"]


class Release(Actor):
    def act(self):
        return self.run(operate._statements.release, id=self.plan.id, by="dana", reason="x", origin=None)[0]["done"]


class Compensate(Actor):
    def act(self):
        try:
            return plans.compensate(self.connection, self.plan.id, by="dana").plan
        except (IllegalMove, RowBusy, NotFound):
            return None


# --- workers -------------------------------------------------------------------------------------


class Take(Actor):
    def act(self):
        return self.run(
            attempt._statements.take, **Holder(owner=self.plan.id, pid=PID).parameters, id=self.plan.id,
            kinds=[step.kind for step in self.plan.steps], timeout_seconds=300.0,
        )  # fmt: skip


class Settle(Actor):
    """A step that is ok: its lock, its effect with its receipt, its commit."""

    outcome = "ok"
    locked = None

    @property
    def naming(self):
        return {"id": self.plan.id, "fence": 1}

    def lock(self):
        self.locked = next(iter(self.run(attempt._statements.lock, **self.naming, lock_timeout="5s")), None)

    def act(self):
        if not self.locked:
            return False
        if self.outcome == "ok":
            self.connection.execute(
                text("insert into effects (row_id, fence, note) values (:id, :fence, 'x')"), self.naming
            )
        code = None if self.outcome == "ok" else "NO"
        return self.run(
            attempt._statements.settle, **self.naming, xid=self.locked["xid"], kind="k", outcome=self.outcome,
            output=None, error_code=code, error_message=code,
        )  # fmt: skip

    @property
    def acts(self):
        return [self.lock, self.do, self.connection.commit]


class SettleFailed(Settle):
    outcome = "failed"


class Fail(Actor):
    """The end of a claim without a receipt."""

    to = "failed"

    def act(self):
        return self.run(
            unsettled._statements.release, id=self.plan.id, fence=1, lock_timeout="5s", to_state=self.to,
            error_code="X", error_message="x",
        )  # fmt: skip


class LetGo(Fail):
    to = "executing"


class Resolve(Actor):
    """Asks what a doubtful commit came to, and changes nothing."""

    def act(self):
        return self.run(unsettled._statements.resolve, id=self.plan.id, lock_timeout="5s")


class Keep(Actor):
    def act(self):
        (row,) = self.run(attempt._statements.keep, ids=[self.plan.id], fences=[1], lease_seconds=30.0)
        return row["kept"]


class RemarkStale(Actor):
    def act(self):
        before = self.lines()
        self.run(attempt._statements.remark_stale, id=self.plan.id, fence=1, reason="LATE_SUCCESS", reported="success")
        return self.lines() > before

    def lines(self):
        return self.connection.scalar(
            text("select count(*) from durable.journal where row_id = :id and move = 'refused'"), {"id": self.plan.id}
        )


class WaitForHandler(Actor):
    def act(self):
        return self.run(attempt._statements.wait_for_handler, id=self.plan.id, kind=self.plan.kind)


# --- sweeps --------------------------------------------------------------------------------------


class Expire(TwoPhased):
    def find(self):
        return self.run(heal.statements.overdue, id=self.plan.id, limit=10)

    def act(self):
        return self.run(heal.statements.expire, ids=[self.plan.id])


class Heal(TwoPhased):
    def find(self):
        return self.run(heal.statements.stale, id=self.plan.id, limit=10)

    def act(self):
        return self.run(heal.statements.heal, ids=[self.plan.id], move="heal")


class Hint(TwoPhased):
    """The dispatch; a step whose time is over is put off alone, and nobody is told of it."""

    idle = ()

    def find(self):
        shares = as_written({self.plan.queue: Share(500)})
        rows = self.run(sweep._statements.unhinted, shares=shares, window=500)
        self.idle = [row["id"] for row in rows if row["idle"]]
        return rows

    def act(self):
        self.run(
            sweep._statements.mark, ids=[self.plan.id], idle_seconds=sweep.IDLE_SECONDS, idle=self.idle, unsure=[]
        )  # fmt: skip
        return self.plan.id not in self.idle


class Hold(Actor):
    """What a sweep does to a row that it locked and failed on."""

    fence = 0

    def act(self):
        self.run(heal.statements.hold, id=self.plan.id, fence=self.fence, reason="a trigger of yours")
        return True


class HoldDue(Hold, Hint):
    """The dispatch holds a row."""


class HoldOverdue(Hold, Expire):
    """The expiry does."""


class HoldStale(Hold, Heal):
    """The reap does."""

    fence = 1


class GiveBack(TwoPhased):
    def find(self):
        return self.run(sweep._statements.owned, owner=self.plan.id, pids=[PID])

    def act(self):
        return self.run(sweep._statements.give_back, ids=[self.plan.id])


class EndOwned(GiveBack):
    """A worker's parent that saw its child die."""

    def act(self):
        return self.run(heal.statements.heal, ids=[self.plan.id], move="release")


class Prune(TwoPhased):
    def find(self):
        return self.run(sweep._statements.old, retention_seconds=0.0, limit=500, since=None, without=[])

    def act(self):
        self.run(sweep._statements.prune, ids=[self.plan.id])
        self.run(sweep._statements.prune_journal, ids=[self.plan.id])
        return True


# --- every order ---------------------------------------------------------------------------------

CLAIMED = [Approve, Take]
STATES = {
    "pending": [],
    "pending, over": [61],
    "approved": [Approve],
    "approved, due": [Approve, 11],
    "approved, over": [Approve, 61],
    "held": [Approve, 11, HoldDue],
    "held, over": [Approve, 61, HoldOverdue],
    "claimed": CLAIMED,
    "claimed, lapsed": [*CLAIMED, 121],
    "between": [*CLAIMED, Settle, 11],
    "between, over": [*CLAIMED, Settle, 61],
    "executed": [*CLAIMED, Settle],
    "failed": [*CLAIMED, SettleFailed],
}
"""How a plan of each state is made: by the statements themselves, and by seconds that pass."""


@pytest.fixture
def made(engine, shop, clock):
    kind = shop.step()
    kind.compensation(lambda arguments, output: kind.planned())

    def make(state):
        steps = [kind.planned()] * (2 if state.startswith("between") else 1)
        plan = shop.propose(*steps, expires=60)
        for step in STATES[state]:
            if isinstance(step, int):
                clock.advance(step)
                continue
            with engine.connect() as tx:
                actor = step(tx, plan)
                for act in actor.acts:
                    act()
                assert actor.won, (state, step)
        return plan

    return make


ONE = {1}
BOTH = {2}
ONE_OR_BOTH = {1, 2}
NONE_OR_ONE = {0, 1}
"""Of how many it was the turn: nobody's, where the one that may act no more stood in the way of the other."""
RACES = [
    ("pending", Approve, Approve, ONE, {"approved"}),
    ("pending", Approve, Reject, ONE, {"approved", "rejected"}),
    ("pending", Reject, Reject, ONE, {"rejected"}),
    ("pending", Approve, Take, ONE_OR_BOTH, {"approved", "executing"}),
    ("pending, over", Approve, Expire, NONE_OR_ONE, {"pending", "expired"}),
    ("pending, over", Reject, Expire, NONE_OR_ONE, {"pending", "expired"}),
    ("pending, over", Expire, Expire, ONE, {"expired"}),
    ("pending, over", HoldOverdue, Expire, ONE, {"pending", "expired"}),
    ("approved", Take, Take, ONE, {"executing"}),
    ("approved", Take, WaitForHandler, ONE_OR_BOTH, {"approved", "executing"}),
    ("approved", Approve, Take, NONE_OR_ONE, {"approved", "executing"}),
    ("approved", Reject, Take, NONE_OR_ONE, {"approved", "executing"}),
    ("approved, due", Take, Hint, ONE_OR_BOTH, {"approved", "executing"}),
    ("approved, due", Take, HoldDue, ONE, {"approved", "executing"}),
    ("approved, due", Hint, Hint, ONE, {"approved"}),
    ("approved, due", Hint, HoldDue, ONE, {"approved"}),
    ("approved, due", Hint, WaitForHandler, ONE_OR_BOTH, {"approved"}),
    ("approved, over", Take, Expire, NONE_OR_ONE, {"approved", "expired"}),
    ("approved, over", Hint, Expire, NONE_OR_ONE, {"approved", "expired"}),
    ("approved, over", Expire, Expire, ONE, {"expired"}),
    ("held", Release, Release, ONE, {"approved"}),
    ("held", Release, Take, ONE_OR_BOTH, {"approved", "executing"}),
    ("held", Release, Hint, ONE_OR_BOTH, {"approved"}),
    ("held, over", Release, Expire, ONE_OR_BOTH, {"approved", "expired"}),
    ("claimed", Take, Settle, ONE, {"executed"}),
    ("claimed", Settle, Settle, ONE, {"executed"}),
    ("claimed", Settle, SettleFailed, ONE, {"executed", "failed"}),
    ("claimed", Settle, Fail, ONE, {"executed", "failed"}),
    ("claimed", Settle, LetGo, ONE, {"executed", "executing"}),
    ("claimed", Settle, Resolve, BOTH, {"executed"}),
    ("claimed", Settle, Keep, ONE_OR_BOTH, {"executed"}),
    ("claimed", Settle, RemarkStale, BOTH, {"executed"}),
    ("claimed", Settle, GiveBack, ONE, {"executed", "executing"}),
    ("claimed", Settle, EndOwned, ONE, {"executed", "failed"}),
    ("claimed", Fail, Fail, ONE, {"failed"}),
    ("claimed", Fail, LetGo, ONE, {"failed", "executing"}),
    ("claimed", Fail, Keep, ONE_OR_BOTH, {"failed"}),
    ("claimed", Fail, GiveBack, ONE, {"failed", "executing"}),
    ("claimed", Fail, EndOwned, ONE, {"failed"}),
    ("claimed", LetGo, Take, ONE_OR_BOTH, {"executing"}),
    ("claimed", GiveBack, GiveBack, ONE, {"executing"}),
    ("claimed", GiveBack, EndOwned, ONE, {"executing", "failed"}),
    ("claimed", GiveBack, Keep, ONE_OR_BOTH, {"executing"}),
    ("claimed", GiveBack, Take, ONE_OR_BOTH, {"executing"}),
    ("claimed", Keep, Keep, ONE_OR_BOTH, {"executing"}),
    ("claimed, lapsed", Settle, Heal, ONE, {"executed", "failed"}),
    ("claimed, lapsed", SettleFailed, Heal, ONE, {"failed"}),
    ("claimed, lapsed", Fail, Heal, ONE, {"failed"}),
    ("claimed, lapsed", LetGo, Heal, ONE, {"failed", "executing"}),
    ("claimed, lapsed", Keep, Heal, ONE, {"failed", "executing"}),
    ("claimed, lapsed", Heal, Heal, ONE, {"failed"}),
    ("claimed, lapsed", GiveBack, Heal, ONE, {"failed", "executing"}),
    ("claimed, lapsed", EndOwned, Heal, ONE, {"failed"}),
    ("claimed, lapsed", Resolve, Heal, ONE_OR_BOTH, {"failed", "executing"}),
    ("claimed, lapsed", HoldStale, Heal, ONE, {"failed", "executing"}),
    ("claimed, lapsed", HoldStale, Settle, ONE_OR_BOTH, {"executed"}),
    ("claimed, lapsed", HoldStale, Keep, ONE_OR_BOTH, {"executing"}),
    ("between", Take, Take, ONE, {"executing"}),
    ("between", Take, Hint, ONE_OR_BOTH, {"executing"}),
    ("between", Take, WaitForHandler, ONE_OR_BOTH, {"executing"}),
    ("between, over", Take, Heal, NONE_OR_ONE, {"executing", "failed"}),
    ("between, over", Hint, Heal, NONE_OR_ONE, {"executing", "failed"}),
    ("between, over", Heal, Heal, ONE, {"failed"}),
    ("executed", Compensate, Compensate, ONE, {"executed"}),
    ("executed", Compensate, Prune, ONE_OR_BOTH, {"executed", None}),
    ("executed", Prune, Prune, ONE, {None}),
    ("executed", Prune, Resolve, ONE_OR_BOTH, {"executed", None}),
    ("failed", Prune, RemarkStale, ONE_OR_BOTH, {"failed", None}),
]
ENDED = {"executed", "failed", "rejected", "expired"}


@pytest.mark.parametrize(
    ("state", "one", "two", "who", "ends"), RACES,
    ids=[f"{state}: {one.__name__} and {two.__name__}" for state, one, two, _, _ in RACES],
)  # fmt: skip
def test_of_two_acts_at_once_each_is_whole_or_nothing(engine, other_engine, shop, made, state, one, two, who, ends):
    came = set()
    with Patient(engine, 2) as stage, engine.connect() as first, other_engine.connect() as second:
        pids = [connection.scalar(text("select pg_backend_pid()")) for connection in (first, second)]
        first.rollback()
        second.rollback()
        for order in orders(len(one(first, None).acts), len(two(second, None).acts)):
            plan = made(state)
            before = shop.raw(plan.id)
            a, b = one(first, plan), two(second, plan)
            stage.play(order, (pids[0], a.acts), (pids[1], b.acts))
            with engine.connect() as tx:
                row = tx.execute(text("select * from durable.plans where id = :id"), {"id": plan.id}).one_or_none()
                lines = tx.execute(
                    text("select move, from_state, to_state from durable.journal where row_id = :id"), {"id": plan.id}
                ).all()
            told = (order, a.won, b.won, row, lines)
            assert a.won + b.won in who, told
            came.add(None if row is None else row.state)
            if row is None:
                assert (lines, shop.receipts(plan.id)) == ([], []), told
                continue
            takes = sum(isinstance(actor, Take) and actor.won for actor in (a, b))
            assert row.fence == before.fence + takes, told
            assert row.settled_fence <= row.fence, told
            assert (row.owner is None) == (row.lease_expires_at is None) == (row.deadline_at is None), told
            receipts = [outcome for _, outcome in shop.receipts(plan.id)]
            assert len(receipts) == row.receipts, told
            assert receipts.count("ok") == len(shop.effects(plan.id)), told
            assert (row.state == "executed") == (receipts.count("ok") == len(plan.steps)), told
            ended = [line for line in lines if line.to_state in ENDED and line.from_state != line.to_state]
            assert len(ended) == (row.state in ENDED) == (row.finished_at is not None), told
            for move in ("approve", "reject", "expire"):
                assert [line.move for line in lines].count(move) <= 1, told
    assert came == ends
