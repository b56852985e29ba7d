"""
Two claims in one line and a third that moves its head, in every order of their acts.

Whatever the order: of a line at most one is carried out; a claim takes a row exactly if it is the first of what is
committed and nobody has it locked; and in the end all that is left comes through, in its order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import IllegalMove, RowBusy, deliveries
from durable_core.claims.claim import Holder
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.deliveries import attempt, report, sweep
from tests.races.interleaver import Patient, orders, sample

WHO = {"by": "dana", "reason": "a race"}
ROWS = """
    select cast(id as text) as id, state, attempts > 0 as begun, due_at <= durable.durable_now() as due,
        coalesce(expires_at <= durable.durable_now(), false) as over,
        ordering_strict and state in ('failed', 'dead') and discarded_at is null as holds
    from durable.deliveries where ordering_key = :line order by created_at, id"""
ENDED = ("sent", "failed", "dead", "canceled", "expired")


def next_of(rows):
    """Whose turn it is by the words of docs/daily.md, of rows that are in their order; None when it is nobody's."""
    if any(row.state == "processing" for row in rows):
        return None
    waiting = [row for row in rows if row.state == "pending"]
    first = next((row for row in waiting if row.begun), None) or next((row for row in waiting if row.due), None)
    if first is None or not first.due or first.over:
        return None
    return None if any(row.holds for row in rows[: rows.index(first)]) else first.id


@dataclass
class Line:
    """One line of deliveries, looked at from outside, and what became of the claims of it."""

    engine: object
    kind: object
    name: str
    head: str = ""
    second: str = ""
    came: Counter = field(default_factory=Counter)

    @property
    def rows(self):
        with self.engine.connect() as tx:
            rows = tx.execute(text(ROWS), {"line": self.name}).all()
        assert sum(row.state == "processing" for row in rows) <= 1, "one at a time"
        return rows

    def free(self, row_id):
        """Whether nobody has this row locked."""
        locked = text("select from durable.deliveries where id = :id for no key update skip locked")
        with self.engine.connect() as tx:
            return tx.execute(locked, {"id": row_id}).rowcount == 1

    def alter(self, what, row_id):
        with self.engine.begin() as tx:
            tx.execute(text(f"update durable.deliveries set {what} where id = :id"), {"id": row_id})


class Act:
    """Something that one connection does, and commits as an act of its own."""

    def __init__(self, connection, line):
        self.connection, self.line = connection, line

    def commit(self):
        self.connection.commit()
        assert self.line.rows

    def settle(self, claim):
        locked = next(iter(run(self.connection, attempt._statements.lock, **claim.naming, lock_timeout="20s")), None)
        if locked is not None:
            run(
                self.connection, attempt._statements.settle, **claim.naming, xid=locked["xid"], result=None,
                late=locked["state"] == "pending", interruptions_booked=0, shutdowns_booked=0,
            )  # fmt: skip

    def fail(self, claim):
        run(
            self.connection, report._statements.release, **claim.naming, lock_timeout="20s", to_state="pending",
            delay_seconds=60.0, counted="failure", move="retry", error_code="E", error_message="e", waiting_for=None,
        )  # fmt: skip


class Claimer(Act):
    """Claims a row by its hint, and then the head's attempt fails; or the first of its queue, and whichever fails."""

    def __init__(self, connection, line, row_id, by):
        super().__init__(connection, line)
        self.row_id, self.by, self.claims = row_id, by, []
        self.acts = [self.take, self.commit, self.end]

    def take(self):
        turn = next_of(self.line.rows)
        mine = turn is not None and (self.by == "batch" or turn == self.row_id) and self.line.free(turn)
        try:
            if self.by == "batch":
                self.claims = attempt.claim_due(self.connection, 10)
            else:
                claim = attempt.claim_one(self.connection, self.line.kind, self.row_id, Holder())
                self.claims = [] if claim is None else [claim]
        except DBAPIError as error:
            if not attempt._another_of_its_line(error):
                raise
            self.connection.rollback()
            self.line.came["beaten"] += 1
            assert mine, "it was the first of what it saw"
            assert self.line.rows[[row.id for row in self.line.rows].index(turn)].state == "pending"
            assert "processing" in {row.state for row in self.line.rows}, "another of the line has it"
            return
        assert [claim.id for claim in self.claims] == ([turn] if mine else [])
        self.line.came["taken" if mine else "nothing"] += 1

    def end(self):
        for claim in self.claims:
            if claim.id == self.line.head or self.by == "batch":
                self.fail(claim)
            else:
                self.settle(claim)
        self.commit()


class Rival(Act):
    """Somebody who moves the head of the line, as `HEADS` says, and commits."""

    def __init__(self, connection, line, act):
        super().__init__(connection, line)
        self.act = act
        self.acts = [self.do, self.commit]

    def do(self):
        try:
            self.act(self)
        except (RowBusy, IllegalMove):
            pass  # a claim came first, or has the row locked: a person is told so, and nothing was written


# How the head stands before, and what its rival does to it.


def waits(line, rival, make):
    """The head is pending and due, and its rival cancels it."""
    line.head = make().id
    return lambda it: deliveries.cancel(it.connection, line.head, **WHO)


def runs(line, rival, make):
    line.head = make(state="processing").id
    return lambda it: deliveries.cancel(it.connection, line.head, **WHO)


def is_put_off(line, rival, make):
    line.head = make().id
    return lambda it: deliveries.reschedule(it.connection, line.head, countdown=3600, **WHO)


def comes_due(line, rival, make):
    line.head = make(countdown=3600).id
    return lambda it: deliveries.reschedule(it.connection, line.head, countdown=0, **WHO)


def commits_late(line, rival, make):
    """It was written first; the transaction of its caller is still open when the second is there."""
    line.head = line.kind.options(ordering_key=line.name).enqueue(rival).id
    return lambda it: None


def is_sent(line, rival, make):
    made = make(state="processing")
    line.head = made.id
    return lambda it: it.settle(made.held)


def fails(line, rival, make):
    made = make(state="processing")
    line.head = made.id
    return lambda it: it.fail(made.held)


def _reaped(line):
    line.alter("lease_expires_at = durable.durable_now()", line.head)

    def reap(it):
        found = run(it.connection, sweep._statements.lapsed, limit=10, heartbeat_seconds=8.0)
        sweep._take_back(Database(it.line.engine), it.connection, found, sweep._FELL_SILENT, lambda: 0.5)

    return reap


def is_reaped(line, rival, make):
    line.head = make(state="processing").id
    return _reaped(line)


def is_reaped_for_the_last_time(line, rival, make):
    line.head = make(state="processing").id
    line.alter("max_interruptions = 0", line.head)
    return _reaped(line)


def expires(line, rival, make):
    line.head = make(expires=3600).id
    line.alter("expires_at = durable.durable_now()", line.head)

    def expire(it):
        found = run(it.connection, sweep._statements.overdue, limit=10)
        run(it.connection, sweep._statements.expire, ids=[row["id"] for row in found])

    return expire


def is_redriven(line, rival, make):
    line.head = make(state="dead").id
    return lambda it: deliveries.redrive(it.connection, line.head, **WHO)


def is_discarded(line, rival, make):
    line.head = make(state="dead").id
    return lambda it: deliveries.discard(it.connection, line.head, **WHO)


HEADS = (
    waits, runs, is_put_off, comes_due, commits_late, is_sent, fails, is_reaped, is_reaped_for_the_last_time, expires,
    is_redriven, is_discarded,
)  # fmt: skip
UNSEEN = {
    (ordering, head) for ordering in ("loose", "strict") for head in (comes_due, commits_late)
} | {("loose", is_redriven)}  # fmt: skip
"""Where a claim of the second cannot know of the head: what the index is for."""
HELD = {("loose", fails), ("strict", fails), ("strict", is_reaped_for_the_last_time)}
"""Where nothing may be taken while the orders are played: the head holds the line all the time."""

EVERY = orders(3, 3, 2)
ALWAYS = [
    (1, 2, 2, 0, 1, 0, 1, 0),  # the second is taken and not committed, when the head becomes one that may be taken
    (2, 0, 1, 2, 0, 1, 0, 1),  # both claims come while the rival's transaction is open
    (0, 0, 0, 2, 2, 1, 1, 1),  # one after the other
]


def drained(line, connection):
    """Carry out what is left, the first of it each time, by batches that could take more."""
    judge = Act(connection, line)
    for _ in range(10):
        with line.engine.begin() as tx:
            late = text("update durable.deliveries set due_at = durable.durable_now() where ordering_key = :line"
                        " and state = 'pending'")  # fmt: skip
            tx.execute(late, {"line": line.name})
        turn = next_of(line.rows)
        taken = attempt.claim_due(connection, 10)
        assert [claim.id for claim in taken] == ([] if turn is None else [turn])
        for claim in taken:
            judge.settle(claim)
        connection.commit()
        if turn is None:
            holding = next((row.id for row in line.rows if row.holds), None)
            over = [row.id for row in line.rows if row.state == "pending" and row.over]
            if holding is not None:
                deliveries.discard(connection, holding, **WHO)
            elif over:
                run(connection, sweep._statements.expire, ids=over)
            else:
                break
            connection.commit()
    assert {row.state for row in line.rows} <= set(ENDED), "all came through"


_lines = (f"line {number}" for number in count(1))


@pytest.mark.full_size
@pytest.mark.parametrize("ordering", ["loose", "strict"])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_of_a_line_one_at_a_time_and_the_first_that_is_committed_whoever_moves_its_head(
    engine, other_engine, declare, make, sized, seed, head, ordering
):
    kind = declare(ordering=ordering)
    came, waited = Counter(), 0
    with (
        Patient(engine, 3) as stage,
        other_engine.connect() as one, other_engine.connect() as two, other_engine.connect() as three,
    ):  # fmt: skip
        pids = [tx.connection.driver_connection.info.backend_pid for tx in (one, two, three)]
        for order in {*ALWAYS, *sample(EVERY, sized(7, 200), seed)}:
            for by in ("hint", "batch"):
                line = Line(engine, kind, next(_lines))
                act = head(line, three, lambda line=line, **how: make(kind, ordering_key=line.name, **how))
                line.second = make(kind, ordering_key=line.name).id
                actors = [
                    Claimer(one, line, line.head, by), Claimer(two, line, line.second, by), Rival(three, line, act),
                ]  # fmt: skip
                waited += stage.play(order, *((pid, actor.acts) for pid, actor in zip(pids, actors, strict=True)))
                drained(line, one)
                came += line.came
    assert (came["taken"] == 0) == ((ordering, head) in HELD), came
    assert (came["beaten"] > 0) == ((ordering, head) in UNSEEN), came
    if came["beaten"]:
        assert waited > 0
