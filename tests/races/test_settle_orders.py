"""An owner whose lease has lapsed settles while a reap takes its row and another settles it: in every order of acts."""

import pytest
from sqlalchemy import text

from durable_core.claims.claim import Holder, settle_alone
from durable_core.database.connections import Database, raw
from durable_core.database.transactions import run
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import _statements, claim_one
from tests.races.interleaver import Patient, orders


class Owner:
    """One settle, act by act, as the protocol does it; what follows a refused lock is nothing."""

    def __init__(self, connection, claim):
        self.connection, self.claim, self.locked = connection, claim, None

    def lock(self):
        if self.claim is None:
            return
        rows = run(self.connection, _statements.lock, **self.claim.naming, lock_timeout="5s")
        self.locked = next(iter(rows), None)

    def effect(self):
        if self.locked:
            self.connection.execute(text("insert into effects (row_id, fence) values (:id, :fence)"), self.claim.naming)

    def settle(self):
        self.effect()
        if self.locked:
            booked = int(self.locked["reaped_as"] == "CLAIM_EXPIRED")
            run(
                self.connection, _statements.settle, **self.claim.naming, xid=self.locked["xid"], result=None,
                late=self.locked["state"] == "pending", interruptions_booked=booked, shutdowns_booked=0,
            )  # fmt: skip

    def commit(self):
        self.connection.commit()

    @property
    def settles(self):
        return [self.lock, self.settle, self.commit]


class WithoutEffect(Owner):
    """The same where the handler wrote nothing: one statement, held open here for others to meet it."""

    def settle(self):
        if not self.connection.in_transaction():
            self.connection.begin()  # else its commit would not know of what the driver began
        self.locked = settle_alone(raw(self.connection), _statements, self.claim, {"result": None})

    @property
    def settles(self):
        return [self.settle, self.commit]


class Successor(Owner):
    """The reaper and then the next owner, on one connection."""

    def __init__(self, connection, kind, row_id):
        super().__init__(connection, None)
        self.kind, self.row_id, self.lapsed = kind, row_id, []

    def find(self):
        self.lapsed = run(self.connection, sweep._statements.lapsed, limit=10, heartbeat_seconds=8.0)

    def reap(self):
        sweep._take_back(
            Database(self.connection.engine), self.connection, self.lapsed, sweep._FELL_SILENT, lambda: 0.5
        )

    def take(self):
        self.claim = claim_one(self.connection, self.kind, self.row_id, Holder())

    def finish(self):
        self.settle()
        self.commit()

    @property
    def rescues(self):
        return [self.find, self.reap, self.commit, self.take, self.commit, self.lock, self.finish]


@pytest.mark.parametrize("owner", [Owner, WithoutEffect])
def test_whatever_the_order_one_owner_settles_with_one_effect_and_the_loss_is_counted_as_it_was(
    engine, other_engine, kind, make, row, owner
):
    ends = set()
    waits = 0
    with Patient(engine, 2) as stage, engine.connect() as one, other_engine.connect() as two:
        pids = [connection.scalar(text("select pg_backend_pid()")) for connection in (one, two)]
        one.rollback()
        two.rollback()
        for order in orders(len(owner(one, None).settles), 7):
            made = make(state="processing")
            with engine.begin() as tx:
                tx.execute(
                    text("update durable.deliveries set lease_expires_at = durable.durable_now() where id = :id"),
                    {"id": made.id},
                )
            old, new = owner(one, made.held), Successor(two, kind, made.id)
            waits += stage.play(order, (pids[0], old.settles), (pids[1], new.rescues))
            after = row(made.id)
            with engine.connect() as tx:
                effects = list(tx.scalars(text("select fence from effects where row_id = :id"), {"id": made.id}))
            taken_over = new.claim is not None
            told = (order, after.state, after.fence, after.settled_fence, effects, after.attempts, after.interruptions)
            assert after.state == "sent", told
            assert after.settled_fence == after.fence == (2 if taken_over else 1), told
            assert effects == ([after.fence] if taken_over or owner is Owner else []), told
            assert (after.attempts, after.interruptions) == ((2, 1) if taken_over else (1, 0)), told
            ends.add((taken_over, bool(old.locked), bool(new.lapsed)))
    assert waits, "some orders really block"
    assert ends == {(True, False, True), (False, True, True), (False, True, False)}, "each end was come to"
