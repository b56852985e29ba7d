"""
Two callers of one key, in every order of their acts, at every isolation level.

Whatever the order: never two rows of the key; a caller that commits has been told the truth; it is refused
in three ways only; and two of these leave it alive, with its own write to commit.
"""

import time
from collections import Counter

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from durable_core import IdempotencyConflict, KeyInFlight
from durable_core.database.transactions import SERIALIZATION, sqlstate
from tests.core.callers import LEVELS
from tests.races.interleaver import Interleaver, orders, sample


class Player:
    """One caller: begin, enqueue the key, write a row of its own, end."""

    def __init__(self, engine, level, name, kind, n, ends):
        self.connection = engine.connect()
        self.pid = self.connection.connection.driver_connection.info.backend_pid
        self.level, self.name, self.kind, self.n, self.ends = level, name, kind, n, ends
        self.ref, self.answer, self.waited = None, None, 0.0
        self.gone = self.stands = False
        self.acts = [self.begin, self.enqueue, self.write, self.end]

    def begin(self):
        self.connection.execute(text("select 1"))  # where there is one snapshot for all, it is taken here

    def enqueue(self):
        began = time.monotonic()
        try:
            self.ref = self.kind.options(key="k").enqueue(self.connection, self.n)
            self.answer = "created" if self.ref.created else "found"
        except IdempotencyConflict:
            self.answer = "conflict"
        except KeyInFlight:
            self.answer, self.waited = "in flight", time.monotonic() - began
        except DBAPIError as error:
            self.refused_by_postgres(error)
            self.answer = "40001"

    def write(self):
        try:
            if not self.gone:
                self.connection.execute(text("insert into effects (row_id) values (:name)"), {"name": self.name})
        except DBAPIError as error:
            self.refused_by_postgres(error)

    def end(self):
        try:
            if not self.gone and self.ends == "commit":
                self.connection.commit()
                self.stands = True
        except DBAPIError as error:
            self.refused_by_postgres(error)
        self.connection.rollback()

    def refused_by_postgres(self, error):
        if sqlstate(error) != SERIALIZATION or self.level == "READ COMMITTED":
            raise error
        self.gone = True


def judge(engine, players):
    """The rows as they are, against what the callers were told; then the table is empty again."""
    with engine.begin() as tx:
        rows = tx.execute(text("select id::text, arguments ->> 'n' as n from durable.deliveries")).all()
        notes = list(tx.scalars(text("select row_id from effects order by row_id")))
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text("delete from durable.deliveries"))
        tx.execute(text("delete from effects"))
    assert len(rows) <= 1, "never two rows of one key"
    assert notes == sorted(player.name for player in players if player.stands), "an own write commits with its caller"
    for player in players:
        if player.stands and player.ref is not None:
            assert [(row.id, row.n) for row in rows] == [(player.ref.id, str(player.n))], "told the truth"
        if player.ends == "commit" and player.level != "SERIALIZABLE" and player.answer != "40001":
            assert player.stands, f"alive after {player.answer}"
    creators = [player for player in players if player.answer == "created" and player.stands]
    assert len(creators) == len(rows), "a row is there exactly if the caller that created it committed"


ANSWERS = {"created", "found", "conflict", "in flight"}
ENDS = [("commit", "commit"), ("commit", "rollback"), ("rollback", "commit"), ("rollback", "rollback")]
ALWAYS = [
    (0, 0, 0, 0, 1, 1, 1, 1),  # one after the other
    (1, 1, 1, 1, 0, 0, 0, 0),
    (1, 0, 0, 0, 0, 1, 1, 1),  # the first wholly after the snapshot of the second
    (0, 0, 1, 1, 1, 1, 0, 0),  # the second waits, and the first does not end
]


@pytest.mark.full_size
@pytest.mark.parametrize("arguments", ["the same arguments", "other arguments"])
@pytest.mark.parametrize("level", LEVELS)
def test_two_callers_of_one_key_in_every_order(engine, kind, level, arguments, sized, seed):
    own = create_engine(engine.url, isolation_level=level, pool_size=2)
    second = 1 if arguments == "the same arguments" else 2
    every = orders(4, 4)
    told = Counter()
    waits, quickest = 0, 60.0
    with Interleaver(engine, 2) as stage:
        for n, (first_ends, second_ends) in enumerate(ENDS):
            for order in {*ALWAYS, *sample(every, sized(4, len(every)), seed + n)}:
                players = (
                    Player(own, level, "first", kind, 1, first_ends),
                    Player(own, level, "second", kind, second, second_ends),
                )
                waits += stage.play(order, *((player.pid, player.acts) for player in players))
                for player in players:
                    player.connection.close()
                    told[player.answer] += 1
                    if player.answer == "in flight":
                        quickest = min(quickest, player.waited)
                judge(engine, players)
    own.dispose()
    assert waits > 0
    possible = ANSWERS - {"conflict" if second == 1 else "found"} | ({"40001"} if level != "READ COMMITTED" else set())
    assert set(told) == possible, told
    assert quickest < 3 * 0.05, "the wait is bounded; of many on a busy machine the quickest tells"
