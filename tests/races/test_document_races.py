"""Two connections and more at one document: one comes first, and the others are judged by what it left."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from durable_core import SaveIdReused, UnknownDocument, VersionConflict
from durable_core.database.transactions import run
from durable_core.documents import read
from durable_core.documents.read import Scope
from durable_core.testing import wait_until_blocked
from tests.races.interleaver import Patient, orders

SAVE_ID = "0198a4c4-0000-7000-8000-000000000000"


@pytest.mark.spec("documents", 19)
def test_of_twenty_saves_on_one_version_at_once_one_wins(desk, other_engine):
    made = desk.brief(saves=3)
    start, said = threading.Barrier(20), []

    def save(number):
        with other_engine.connect() as tx:
            start.wait()
            try:
                done = desk.briefs.save(tx, made.id, {"title": f"{number}"}, expected_version=3, by=f"person {number}")
                tx.commit()
                said.append((number, done.version))
            except VersionConflict as conflict:
                assert tx.scalar(text("select 1")) == 1
                tx.commit()
                said.append((None, conflict.current_version))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(save, range(20)))
    (winner,) = [number for number, _ in said if number is not None]
    assert [version for _, version in said] == [4] * 20
    assert (desk.raw(made.id).version, desk.raw(made.id).saved_by) == (4, f"person {winner}")
    assert [version for version, _, _ in desk.revisions(made.id)] == [0, 1, 2, 3]


class Actor:
    """One connection that does one thing to one document, in a transaction that it may roll back."""

    def __init__(self, connection, desk, made, ends):
        self.connection, self.desk, self.made = connection, desk, made
        self.came, self.ends = None, ends

    def act(self):
        raise NotImplementedError

    def do(self):
        try:
            self.act()
            self.came = "done"
        except (VersionConflict, UnknownDocument) as refused:
            self.came = type(refused).__name__
            assert self.connection.scalar(text("select 1")) == 1, "the transaction is alive"

    def end(self):
        self.connection.commit() if self.ends == "commit" else self.connection.rollback()

    @property
    def stands(self):
        return self.came == "done" and self.ends == "commit"


class Save(Actor):
    """By somebody who saw version 2."""

    expected, title, save_id = 2, "saved", None

    def act(self):
        content = {"title": self.title}
        self.desk.briefs.save(
            self.connection, self.made.id, content, expected_version=self.expected, save_id=self.save_id, by="a",
        )  # fmt: skip


class Next(Save):
    """By somebody who knows already what the other is just writing."""

    expected, title = 3, "next"


class Repeat(Save):
    """The same save as another, sent again before it was answered."""

    save_id = SAVE_ID


class Reuse(Save):
    save_id, title = SAVE_ID, "other"


class Delete(Actor):
    def act(self):
        self.desk.briefs.delete(self.connection, self.made.id, expected_version=2, by="a")


class Restore(Actor):
    def act(self):
        self.desk.briefs.restore(self.connection, self.made.id, 0, expected_version=2, by="a")


PAIRS = [
    (Save, Save), (Save, Delete), (Save, Restore), (Delete, Delete), (Delete, Restore), (Restore, Restore),
    (Save, Next), (Restore, Next), (Delete, Next), (Repeat, Repeat), (Repeat, Reuse), (Repeat, Delete),
]  # fmt: skip


def expected_of(first, second):
    """What comes to the second once the first has committed."""
    if isinstance(first, Delete):
        return "UnknownDocument"
    if isinstance(second, Next):
        return "done"
    if isinstance(first, Repeat) and not isinstance(first, Reuse):
        if isinstance(second, Reuse):
            return SaveIdReused.__name__
        if isinstance(second, Repeat):
            return "done"
    if isinstance(first, Reuse) and isinstance(second, Repeat):
        return SaveIdReused.__name__
    return "VersionConflict"


ENDS = [("commit", "commit"), ("rollback", "commit"), ("commit", "rollback")]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " x ".join(one.__name__ for one in pair))
def test_whoever_comes_second_is_judged_by_what_the_first_left(desk, engine, other_engine, pair):
    """In every order of their two acts, to write and to end, and with each of them rolling back."""
    with engine.connect() as one, other_engine.connect() as two, Patient(other_engine, 2) as stage:
        pids = [tx.scalar(text("select pg_backend_pid()")) for tx in (one, two)]
        one.rollback()
        two.rollback()
        for ends in ENDS:
            for order in orders(2, 2):
                made = desk.brief(saves=2)
                actors = [kind(tx, desk, made, end) for kind, tx, end in zip(pair, (one, two), ends, strict=True)]
                waits = stage.play(order, *[(pid, [a.do, a.end]) for pid, a in zip(pids, actors, strict=True)])
                assert waits == (order[0] != order[1])
                judged(desk, made, actors, order)


def judged(desk, made, actors, order):
    first, second = actors[order[0]], actors[1 - order[0]]
    if type(first) is Next:  # what it knows of has not happened yet, and its refusal lets its lock stay
        assert first.came == "VersionConflict"
    else:
        assert first.came == "done"
    if type(first) is Next or not first.stands:
        assert second.came == ("VersionConflict" if type(second) is Next else "done")
    else:
        assert second.came == expected_of(first, second)
    stood = [actor for actor in actors if actor.stands]
    row = desk.raw(made.id)
    deleted = any(isinstance(actor, Delete) for actor in stood)
    repeated = len(stood) == 2 and all(type(actor) is Repeat for actor in stood)
    assert row.version == 2 + len(stood) - deleted - repeated
    assert (row.deleted_at is not None) == deleted
    kept = [version for version, _, _ in desk.revisions(made.id)]
    assert kept == list(range(row.version + deleted)), "a revision for each version before, and no other"


def test_a_reader_waits_for_nobody_and_sees_what_was_committed(desk, engine, other_engine):
    made = desk.brief(saves=1)
    with engine.connect() as saving, other_engine.connect() as reading:
        desk.briefs.save(saving, made.id, {"title": "x"}, expected_version=1, by="eve")
        reading.execute(text("set local lock_timeout = '1ms'"))
        assert desk.briefs.get(reading, made.id) == made
        assert [one.version for one in desk.briefs.history(reading, made.id)] == [1, 0]
        saving.commit()
        assert [one.version for one in desk.briefs.history(reading, made.id)] == [2, 1, 0]


def test_a_history_during_which_somebody_saves_is_the_one_of_before(desk, engine):
    """It takes two statements, and each sees what is committed by then."""
    made = desk.brief(saves=2)
    steps = read.past(Scope("brief"), made.id, 50, None, contents=False)
    with engine.connect() as tx:
        statement, parameters = next(steps)
        rows = run(tx, statement, **parameters)
        desk.save(made.id, "meanwhile", 2)
        statement, parameters = steps.send(rows)
        with pytest.raises(StopIteration) as done:
            steps.send(run(tx, statement, **parameters))
    assert [(one.version, one.reason) for one in done.value.value] == [(2, None), (1, "overwrite"), (0, "overwrite")]


def test_a_save_does_not_hold_up_a_row_that_points_at_the_document(desk, engine, other_engine):
    made = desk.brief()
    with engine.begin() as tx:
        tx.execute(text("create table if not exists public.pins (of uuid references durable.documents (id))"))
    try:
        with engine.connect() as saving, other_engine.begin() as pinning:
            desk.briefs.save(saving, made.id, {"title": "x"}, expected_version=0, by="eve")
            pinning.execute(text("set local lock_timeout = '1ms'"))
            pinning.execute(text("insert into public.pins values (:id)"), {"id": made.id})
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop table public.pins"))


def test_a_caller_may_bound_how_long_it_waits(desk, engine, other_engine):
    made = desk.brief()
    with engine.connect() as saving, ThreadPoolExecutor(1) as pool:
        desk.briefs.save(saving, made.id, {"title": "x"}, expected_version=0, by="eve")
        with other_engine.connect() as waiting:
            pid = waiting.scalar(text("select pg_backend_pid()"))
            later = pool.submit(
                desk.briefs.save, waiting, made.id, {"title": "y"}, expected_version=1, by="dana"
            )  # fmt: skip
            wait_until_blocked(engine, pid)
            saving.commit()
            assert later.result(10).version == 2
            waiting.commit()
    assert [title for _, title, _ in desk.revisions(made.id)] == ["Q3", "x"]
