"""
A caller with newer arguments for a waiting row, beside a claim of it, in every order of their acts.

Whatever the order: what is settled was carried out with the arguments that its row has; the newest are carried out
last, by a claim that came after their call; and the caller was told which delivery has them.
"""

import json
from collections import Counter

import pytest
from sqlalchemy import text

from durable_core import KeyInFlight
from durable_core.claims.claim import Holder
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.deliveries import attempt, sweep
from tests.races.interleaver import Patient, orders


class Owner:
    """Claims the row, loses it to a reap if `lapses`, and settles what it still holds."""

    def __init__(self, connection, kind, row_id, lapses, came):
        self.connection, self.kind, self.row_id, self.came = connection, kind, row_id, came
        self.claim = self.did = None
        self.acts = [self.take, self.commit, *([self.reap] if lapses else []), self.settle, self.commit]

    def take(self):
        self.claim = attempt.claim_one(self.connection, self.kind, self.row_id, Holder())
        self.came += ["claimed"] if self.claim else []

    def commit(self):
        self.connection.commit()

    def reap(self):
        """Its lease is over, and the row goes back; it does not know of that."""
        lapsed = text(
            "update durable.deliveries set lease_expires_at = durable.durable_now() where state = 'processing'"
        )
        self.connection.execute(lapsed)
        self.commit()
        sweep.reap(Database(self.connection.engine))

    def settle(self):
        if self.claim is None:
            return
        for locked in run(self.connection, attempt._statements.lock, **self.claim.naming, lock_timeout="20s"):
            run(
                self.connection, attempt._statements.settle, **self.claim.naming, xid=locked["xid"], result=None,
                late=locked["state"] == "pending", interruptions_booked=int(locked["reaped_as"] is not None),
                shutdowns_booked=0,
            )  # fmt: skip
            self.did = json.loads(self.claim.arguments)["n"]


class Caller:
    def __init__(self, connection, options, came):
        self.connection, self.options, self.came = connection, options, came
        self.ref, self.answer = None, "in flight"
        self.acts = [self.enqueue, connection.commit]

    def enqueue(self):
        try:
            self.ref = self.options.enqueue(self.connection, 2)
        except KeyInFlight:
            return
        self.answer = "replaced" if self.ref.replaced else "created"
        self.came.append(self.answer)


@pytest.mark.parametrize("arguments", ["other arguments", "the same arguments"])
@pytest.mark.parametrize("lapses", [False, True], ids=["its owner lives", "its lease is over"])
@pytest.mark.parametrize("policy", ["replace", "debounce"])
def test_a_claim_carries_out_what_its_row_says_and_the_newest_arguments_come_last(
    engine, other_engine, worker, kind, make, row, policy, lapses, arguments
):
    told = Counter()
    waits = 0
    with Patient(engine, 2) as stage, other_engine.connect() as one, other_engine.connect() as two:
        pids = [tx.connection.driver_connection.info.backend_pid for tx in (one, two)]
        for number, order in enumerate(orders(5 if lapses else 4, 2)):
            made = make(arguments={"n": 1 if arguments == "other arguments" else 2}, key=f"key {number}")
            options = kind.options(key=f"key {number}", key_policy=policy, countdown=0.001)
            came = []
            owner, caller = Owner(one, kind, made.id, lapses, came), Caller(two, options, came)
            waits += stage.play(order, (pids[0], owner.acts), (pids[1], caller.acts))
            told[caller.answer] += 1
            if caller.ref is None:
                with other_engine.begin() as tx:
                    caller.ref = options.enqueue(tx, 2)
            case = (order, caller.answer, row(made.id))
            if owner.did is not None:
                assert row(made.id).state == "sent", case
                assert row(made.id).arguments == {"n": owner.did}, case
            with engine.begin() as tx:
                tx.execute(text("update durable.deliveries set due_at = durable.durable_now() where state = 'pending'"))
            attempt.perform(worker, kind, caller.ref.id)
            last = row(caller.ref.id)
            assert (last.state, last.key, last.arguments) == ("sent", f"key {number}", {"n": 2}), case
            if came == ["claimed", "replaced"]:
                assert owner.did is None, case
    assert waits > 0
    assert set(told) - {"in flight"} == {"replaced", "created"}, "in flight is for those who wait too long"
