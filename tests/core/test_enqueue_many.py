"""Many at once: in bounded memory, in the caller's transaction, all of them or none."""

import tracemalloc

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from durable_core import IdempotencyConflict, InvalidArguments, KeyInFlight, enqueue_many
from durable_core.deliveries import enqueue
from durable_core.deliveries.enqueue import BATCH
from tests.core.callers import CALLERS, caller, kept, written


def rows_of(kind, count, key=None, size=4000):
    """Made one by one, as they are asked for."""
    return (kind.options(key=key and f"{key}{n:06}").new("x" * size) for n in range(count))


def growth(act):
    """What `act` gave, the most memory that it had for a while, and what it still has: bytes."""
    tracemalloc.start()
    try:
        given = act()
        left, most = tracemalloc.get_traced_memory()
        return given, most - left, left
    finally:
        tracemalloc.stop()


@pytest.mark.full_size
@pytest.mark.field("R49")
def test_a_hundred_thousand_rows_take_the_memory_of_a_few_batches(engine, declare, sized):
    kind = declare(lambda step, value: None)
    count = sized(5_000, 100_000)
    with caller(engine, "psycopg") as tx:
        _, few, _ = growth(lambda: tx.many(rows_of(kind, 2 * BATCH)))
        refs, many, left = growth(lambda: tx.many(rows_of(kind, count)))
    assert len({ref.id for ref in refs}) == count
    assert many < 1.3 * few, "what it takes does not depend on how many they are"
    assert left < 1000 * count, "and nothing stays but the refs"


@pytest.mark.full_size
@pytest.mark.field("R49")
@pytest.mark.parametrize(
    ("name", "key"),
    [("Session", None), ("Connection", None), ("psycopg", None), ("psycopg", "k"), ("AsyncSession", None)],
)
def test_a_hundred_thousand_rows_commit_or_vanish_with_their_caller(engine, declare, name, key, sized):
    kind = declare(lambda step, value: None)
    count = sized(2_500, 100_000)
    with caller(engine, name) as tx:
        tx.many(rows_of(kind, count, key, size=10))
        tx.rollback()
        assert kept(engine) == []
        tx.write("own")
        refs = tx.many(rows_of(kind, count, key, size=10))
        assert kept(engine) == []
        tx.commit()
    assert kept(engine) == ([f"k{n:06}" for n in range(count)] if key else sorted(ref.id for ref in refs))
    assert written(engine) == ["own"]


@pytest.fixture
def batches_of_ten(monkeypatch):
    monkeypatch.setattr(enqueue, "BATCH", 10)


def refused_late(kind, how):
    """Rows of several batches, of which the last cannot be written."""
    yield from rows_of(kind, 24, key="k", size=10)
    if how == "arguments":
        yield kind.options(key="last").new(float("nan"))
    elif how == "twice":
        yield kind.options(key="k000000").new("other")
    elif how == "no row":
        yield kind
    elif how == "the caller's own error":
        raise LookupError
    else:
        yield kind.options(key=how).new("other")


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("level", [None, "AUTOCOMMIT"], ids=["in a transaction", "in autocommit"])
def test_a_refusal_at_the_last_row_leaves_none_of_them(engine, declare, name, level, batches_of_ten):
    """And the caller's transaction alive; in autocommit it is one transaction too."""
    kind = declare(lambda step, value: None)
    with Session(engine) as there:
        kind.options(key="there").enqueue(there, "first")
        there.commit()
        kind.options(key="in flight").enqueue(there, "first")
        with caller(engine, name, level) as tx:
            tx.write("before")
            for how, refusal in [
                ("arguments", InvalidArguments), ("twice", IdempotencyConflict), ("there", IdempotencyConflict),
                ("in flight", KeyInFlight), ("no row", InvalidArguments), ("the caller's own error", LookupError),
            ]:  # fmt: skip
                with pytest.raises(refusal) as refused:
                    tx.many(refused_late(kind, how))
                assert tx.execute("select count(*) from durable.deliveries") == 1, how
                if how == "twice":
                    assert refused.value.row_id is None, "no row has it: its first was taken back"
                if how == "there":
                    assert refused.value.row_id is not None
            assert tx.execute("show lock_timeout") == "0"
            tx.write("after")
            tx.commit()
    assert kept(engine) == ["there"]
    assert written(engine) == ["before", "after"]


@pytest.mark.parametrize("options", [{}, {"yield_per": 10}, {"stream_results": True, "max_row_buffer": 5}], ids=str)
def test_rows_may_be_streamed_from_the_transaction_they_are_written_in(engine, kind, options, batches_of_ten):
    """A fan-out over the caller's own table, whose connection was told to stream whatever it reads."""
    with engine.connect() as tx:
        tx.execute(text("insert into effects (row_id) select n::text from generate_series(1, 95) n"))
        mine = tx.execution_options(**options).execute(text("select row_id from effects order by id"))
        enqueue_many(tx, (kind.options(key=f"k{row.row_id}").new(int(row.row_id)) for row in mine))
        assert not kind.options(key="k1").enqueue(tx, 1).created
        tx.commit()
    assert len(kept(engine)) == 95


@pytest.mark.parametrize("options", [{"yield_per": 10}, {"stream_results": True}], ids=str)
def test_a_connection_in_autocommit_may_be_told_to_stream_too(engine, kind, options):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT", **options) as tx:
        kind.options(key="k").enqueue(tx, 1)
        assert not kind.options(key="k").enqueue(tx, 1).created
    assert kept(engine) == ["k"]


def test_hints_of_many_are_those_of_what_stands(engine, kind, declare, carrier, batches_of_ten):
    with Session(engine) as session:
        with pytest.raises(IdempotencyConflict):
            enqueue_many(session, refused_late(declare(lambda step, value: None), "twice"))
        ref = kind.enqueue(session, 1)
        session.commit()
    assert [hint.id for hint in carrier.offered] == [ref.id]
