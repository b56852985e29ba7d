"""Enqueue: in the caller's transaction, whatever that is; it commits or vanishes with the caller's rows."""

import contextlib
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import durable_core
from durable_core import (
    DefinitionError,
    IdempotencyConflict,
    InvalidArguments,
    InvalidOption,
    SchemaBehind,
    UnsupportedTransaction,
    deliveries,
    enqueue_by_name,
    enqueue_many,
    wakes,
)
from durable_core.database.transactions import sqlstate
from durable_core.testing import create_database, drop_database

DOORS = ["Session", "scoped_session", "Connection", "psycopg"]


@pytest.fixture
def door(engine):
    """`with door("Session") as (tx, commit, rollback)`: a caller's transaction of each sort."""

    @contextmanager
    def _door(name):
        if name in ("Session", "scoped_session"):
            tx = Session(engine) if name == "Session" else scoped_session(sessionmaker(engine))
            try:
                yield tx, tx.commit, tx.rollback
            finally:
                tx.close()
        elif name == "Connection":
            with engine.connect() as tx:
                yield tx, tx.commit, tx.rollback
        else:
            url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
            with psycopg.connect(url) as tx:
                yield tx, tx.commit, tx.rollback

    return _door


def execute(tx, sql):
    return tx.execute(sql if isinstance(tx, psycopg.Connection) else text(sql))


def first(tx, sql):
    return execute(tx, sql).fetchone()[0]


def count(engine):
    with engine.connect() as tx:
        return tx.scalar(text("select count(*) from durable.deliveries"))


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("key", [None, "order:1"])
def test_a_delivery_commits_with_the_rows_of_its_caller(engine, kind, door, row, name, key):
    with door(name) as (tx, commit, _):
        execute(tx, "insert into effects (row_id) values ('of the caller')")
        ref = kind.options(key=key).enqueue(tx, 3)
        assert count(engine) == 0, "nothing is committed behind the caller's back"
        commit()
    assert (ref.created, ref.state, ref.kind) == (True, "pending", kind.name)
    kept = row(ref.id)
    assert (kept.arguments, kept.key, kept.state, kept.attempts) == ({"n": 3}, key, "pending", 0)
    assert kept.due_at == kept.created_at


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("key", [None, "order:1"])
def test_a_delivery_vanishes_with_the_rows_of_its_caller(engine, kind, door, name, key):
    with door(name) as (tx, _, rollback):
        execute(tx, "insert into effects (row_id) values ('of the caller')")
        kind.options(key=key).enqueue(tx, 3)
        rollback()
    assert count(engine) == 0


@pytest.mark.parametrize("name", DOORS)
def test_a_savepoint_of_the_caller_takes_its_deliveries_along(engine, kind, door, row, name):
    with door(name) as (tx, commit, _):
        kept = kind.enqueue(tx, 1)
        execute(tx, "savepoint mine")
        kind.enqueue(tx, 2)
        kind.options(key="undone").enqueue(tx, 3)
        execute(tx, "rollback to savepoint mine")
        again = kind.options(key="undone").enqueue(tx, 4)
        commit()
    assert again.created
    assert count(engine) == 2
    assert row(kept.id).arguments == {"n": 1}


@pytest.mark.parametrize("name", DOORS)
def test_a_duplicate_key_gives_the_first_row_back_and_poisons_nothing(engine, kind, door, name):
    with door(name) as (tx, commit, _):
        one = kind.options(key="k").enqueue(tx, 1)
        two = kind.options(key="k").enqueue(tx, 1)
        with pytest.raises(IdempotencyConflict) as conflict:
            kind.options(key="k").enqueue(tx, 2)
        assert first(tx, "select 42") == 42, "the caller's transaction is alive"
        execute(tx, "insert into effects (row_id) values ('after the conflict')")
        commit()
    assert (two.id, two.created) == (one.id, False)
    assert conflict.value.row_id == one.id
    assert count(engine) == 1
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from effects")) == 1


@pytest.mark.parametrize("name", DOORS)
def test_a_refused_key_leaves_no_savepoint_behind(engine, kind, door, name):
    with door(name) as (tx, _, rollback):
        kind.options(key="k").enqueue(tx, 1)
        with pytest.raises(IdempotencyConflict):
            kind.options(key="k").enqueue(tx, 2)
        with pytest.raises((DBAPIError, psycopg.Error)) as missing:
            execute(tx, "release savepoint durable_enqueue")
        assert sqlstate(missing.value) == "3B001"
        rollback()


@pytest.mark.parametrize("key", [None, "k"])
def test_arguments_are_stored_as_the_json_they_are(engine, declare, row, key):
    value = {"quoted": 'a"b\\c', "lines": "1\n2", "far": "\N{GRINNING FACE}", "n": [1, 1.0, -0.5, None, True], "": {}}
    kind = declare(lambda step, value: None)
    with engine.begin() as tx:
        ref = kind.options(key=key).enqueue(tx, value)
    assert row(ref.id).arguments == {"value": value}


@pytest.mark.parametrize("name", DOORS)
def test_the_callers_lock_timeout_is_what_it_was_after_a_keyed_enqueue(engine, kind, door, name):
    with door(name) as (tx, commit, _):
        kind.options(key="default").enqueue(tx, 1)
        assert first(tx, "show lock_timeout") == "0"
        execute(tx, "set local lock_timeout = '777ms'")
        kind.options(key="k").enqueue(tx, 1)
        assert first(tx, "show lock_timeout") == "777ms"
        kind.options(key="k").enqueue(tx, 1)
        with pytest.raises(IdempotencyConflict):
            kind.options(key="k").enqueue(tx, 2)
        assert first(tx, "show lock_timeout") == "777ms"
        commit()
        assert first(tx, "show lock_timeout") == "0"


@pytest.mark.parametrize("name", DOORS)
def test_refused_arguments_and_options_write_nothing_and_leave_the_transaction_alive(engine, kind, door, name):
    with door(name) as (tx, commit, _):
        with pytest.raises(InvalidArguments):
            kind.enqueue(tx, "seven")
        with pytest.raises(InvalidOption):
            kind.options(countdown=-1).enqueue(tx, 7)
        assert first(tx, "select 42") == 42
        commit()
    assert count(engine) == 0


def test_the_key_is_remembered_as_long_as_its_row_and_per_kind(engine, kind, declare, make):
    other = declare()
    done = make(state="sent", key="k")
    with engine.begin() as tx:
        again = kind.options(key="k").enqueue(tx)
        elsewhere = other.options(key="k").enqueue(tx)
    assert (again.id, again.created, again.state) == (done.id, False, "sent")
    assert elsewhere.created


def test_equal_arguments_written_differently_are_the_same_intention(engine, declare):
    def handler(step, a: int, b: int = 2, *, c: dict[str, int] | None = None):
        pass

    kind = declare(handler)
    with engine.begin() as tx:
        refs = [
            kind.options(key="k").enqueue(tx, 1),
            kind.options(key="k").enqueue(tx, a=1, b=2),
            kind.options(key="k").enqueue(tx, 1, 2, c=None),
        ]
    assert [ref.created for ref in refs] == [True, False, False]
    with engine.begin() as tx:
        one = kind.options(key="d").enqueue(tx, 1, c={"x": 1, "y": 2})
        two = kind.options(key="d").enqueue(tx, 1, c={"y": 2, "x": 1})
    assert one.id == two.id


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
def test_a_session_joined_to_an_outer_transaction_decides_no_more_than_its_mode_says(engine, kind, carrier, mode):
    with engine.connect() as outer:
        transaction = outer.begin()
        session = Session(outer, join_transaction_mode=mode)
        kind.enqueue(session, 1)
        kind.options(key="k").enqueue(session, 2)
        session.commit()
        session.close()
        if mode == "control_fully":
            assert count(engine) == 2
            assert len(carrier.offered) == 2
            return
        assert carrier.offered == [], "the outer transaction has not decided"
        transaction.rollback()
    assert count(engine) == 0
    assert carrier.offered == []


# --- many -------------------------------------------------------------------------------------------


@pytest.mark.spec("deliveries", 1)
@pytest.mark.parametrize("rows", [[], iter(())])
def test_enqueueing_nothing_writes_nothing_and_gives_nothing(engine, rows):
    with engine.begin() as tx:
        assert enqueue_many(tx, rows) == []
    assert count(engine) == 0


def test_many_deliveries_come_back_in_the_order_given(engine, kind, declare, row):
    other = declare(queue="mail")
    news = []
    for n in range(30):
        key = None if n % 3 else f"k{29 - n:02}"
        news.append((other if n % 2 else kind).options(key=key).new(n))
    with engine.begin() as tx:
        refs = enqueue_many(tx, iter(news))
    assert [row(ref.id).arguments.get("n", 0) for ref in refs] == list(range(30))
    assert all(ref.created for ref in refs)


def test_a_key_twice_in_one_call_is_one_row(engine, kind):
    with engine.begin() as tx:
        refs = enqueue_many(tx, [kind.options(key="k").new(1), kind.options(key="k").new(1)])
    assert [ref.created for ref in refs] == [True, False]
    assert refs[0].id == refs[1].id
    with engine.begin() as tx, pytest.raises(IdempotencyConflict, match="'q' is given twice in this call") as conflict:
        enqueue_many(tx, [kind.options(key="q").new(1), kind.options(key="q").new(2)])
    assert conflict.value.row_id is None, "no row has it"
    assert count(engine) == 1


def test_many_rows_go_in_several_statements_and_one_transaction(engine, kind):
    with engine.connect() as tx:
        refs = enqueue_many(tx, (kind.options().new(n) for n in range(2500)))
        assert len({ref.id for ref in refs}) == 2500
        assert count(engine) == 0
        tx.commit()
    assert count(engine) == 2500


def test_ids_are_time_ordered(engine, kind):
    with engine.begin() as tx:
        ids = [kind.enqueue(tx, n).id for n in range(20)]
    assert ids == sorted(ids)
    assert {row_id[14] for row_id in ids} == {"7"}


# --- by name, options, refusals --------------------------------------------------------------------


def test_a_producer_without_the_code_enqueues_by_name(engine, row):
    with engine.begin() as tx:
        ref = enqueue_by_name(tx, "billing.invoice", {"id": 7, "deep": [{"a": None}]}, queue="mail", key="k")
        again = enqueue_by_name(tx, "billing.invoice", {"deep": [{"a": None}], "id": 7}, key="k")
    assert again.id == ref.id
    kept = row(ref.id)
    assert (kept.queue, kept.arguments) == ("mail", {"id": 7, "deep": [{"a": None}]})
    assert (kept.max_attempts, kept.max_interruptions, kept.priority) == (5, 20, 5)


def test_by_name_follows_the_declaration_where_it_is_known(engine, declare, row):
    kind = declare(queue="mail", max_attempts=2, priority=1)
    with engine.begin() as tx:
        ref = enqueue_by_name(tx, kind.name, {"n": 3})
        with pytest.raises(InvalidArguments):
            enqueue_by_name(tx, kind.name, {"m": 3})
    assert (row(ref.id).queue, row(ref.id).max_attempts, row(ref.id).priority) == ("mail", 2, 1)


@pytest.mark.parametrize(
    "kind", ["", "durable.reap", "a b", "x" * 201, "ü", "a\n", 5, "1st"], ids=lambda k: repr(k)[:12]
)
def test_a_name_that_is_no_kind_is_refused(engine, kind):
    with engine.begin() as tx, pytest.raises(DefinitionError):
        enqueue_by_name(tx, kind, {})
    assert count(engine) == 0


@pytest.mark.parametrize(
    "arguments", [{"a": float("nan")}, {"a": {1}}, {"a": "\x00"}, {"a": "x" * 300_000}, {"a\x00": 1}, {5: 1}]
)
def test_by_name_refuses_what_is_no_strict_json(engine, arguments):
    with engine.begin() as tx, pytest.raises(InvalidArguments):
        enqueue_by_name(tx, "billing.invoice", arguments)
    assert count(engine) == 0


def test_options_decide_queue_priority_and_due_time(engine, kind, row, clock):
    clock.freeze()
    eta = datetime(2031, 2, 3, 4, 5, tzinfo=UTC)
    with engine.begin() as tx:
        a = kind.options(queue="mail", priority=0, countdown=timedelta(minutes=2)).enqueue(tx)
        b = kind.options(eta=eta).enqueue(tx)
    assert (row(a.id).queue, row(a.id).priority) == ("mail", 0)
    assert row(a.id).due_at - clock.now() == timedelta(minutes=2)
    assert row(b.id).due_at == eta


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"delay": 5}, "delay"), ({"countdown": -1}, "countdown"), ({"countdown": float("nan")}, "countdown"),
        ({"countdown": float("inf")}, "countdown"), ({"countdown": "5"}, "countdown"),
        ({"countdown": True}, "countdown"),
        ({"countdown": 10**10}, "countdown"), ({"eta": datetime(2030, 1, 1)}, "eta"), ({"eta": "tomorrow"}, "eta"),
        ({"eta": datetime(9500, 1, 1, tzinfo=UTC)}, "eta"),
        ({"eta": datetime(2030, 1, 1, tzinfo=UTC), "countdown": 1}, "eta"),
        ({"priority": 10}, "priority"), ({"priority": -1}, "priority"), ({"priority": True}, "priority"),
        ({"priority": 1.0}, "priority"), ({"queue": ""}, "queue"), ({"queue": "a b"}, "queue"),
        ({"queue": "é"}, "queue"), ({"queue": "q" * 101}, "queue"),
        ({"queue": "control"}, "queue"), ({"key": ""}, "key"), ({"key": 5}, "key"),
        ({"key": "a\x00b"}, "key"), ({"key": "\ud800"}, "key"), ({"key": "k" * 1001}, "key"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_an_option_that_cannot_work_is_refused_by_name(kind, options, named):
    with pytest.raises(InvalidOption) as refused:
        kind.options(**options)
    assert refused.value.option == named


@pytest.mark.parametrize("given", [None, "tx", object(), 5])
def test_what_is_no_transaction_is_refused(kind, given):
    with pytest.raises(UnsupportedTransaction):
        kind.enqueue(given, 1)
    with pytest.raises(UnsupportedTransaction):
        deliveries.get(given, "x")


def test_an_engine_is_no_transaction(kind, engine):
    with pytest.raises(UnsupportedTransaction):
        kind.enqueue(engine, 1)


# --- hints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Session", "scoped_session"])
def test_hints_go_out_after_the_root_commit_of_a_session(kind, door, carrier, name):
    with door(name) as (tx, commit, _):
        ref = kind.enqueue(tx, 1)
        with tx.begin_nested():
            inner = kind.options(queue="mail", priority=2).enqueue(tx, 2)
        kind.options(countdown=60).enqueue(tx, 3)
        assert carrier.offered == [], "a released savepoint is no commit"
        commit()
        offered = [(h.id, h.kind, h.queue, h.priority, h.first) for h in carrier.offered]
        assert offered == [
            (ref.id, kind.name, "durable", 5, True), (inner.id, kind.name, "mail", 2, True),
        ]  # fmt: skip
        kind.enqueue(tx, 4)
        commit()
        assert len(carrier.offered) == 3


def test_a_savepoint_rolled_back_keeps_the_hints_of_what_stands(kind, engine, carrier):
    with Session(engine) as session, session.begin():
        kept = kind.enqueue(session, 1)
        with contextlib.suppress(LookupError), session.begin_nested():
            raise LookupError
    assert [hint.id for hint in carrier.offered] == [kept.id]


def test_savepoints_in_savepoints_are_no_commit_either(kind, engine, carrier):
    with Session(engine) as session:
        with session.begin_nested(), session.begin_nested():
            kind.enqueue(session, 1)
        assert carrier.offered == []
        session.commit()
    assert len(carrier.offered) == 1


@pytest.mark.parametrize("name", ["Session", "scoped_session"])
def test_a_rolled_back_session_hints_nothing(kind, door, carrier, name):
    with door(name) as (tx, commit, rollback):
        kind.enqueue(tx, 1)
        rollback()
        commit()
        execute(tx, "select 1")
        commit()
    assert carrier.offered == []


@pytest.mark.parametrize("name", ["Connection", "psycopg"])
def test_on_a_bare_connection_hints_wait_for_wake(kind, door, carrier, name):
    with door(name) as (tx, commit, _):
        ref = kind.enqueue(tx, 1)
        commit()
        assert carrier.offered == []
        assert durable_core.wake() == 1
        assert [hint.id for hint in carrier.offered] == [ref.id]
        assert durable_core.wake() == 0


def test_a_duplicate_key_hints_nothing(kind, engine, carrier):
    with Session(engine) as session:
        kind.options(key="k").enqueue(session, 1)
        session.commit()
        kind.options(key="k").enqueue(session, 1)
        session.commit()
    assert len(carrier.offered) == 1


@pytest.mark.parametrize("name", DOORS)
def test_a_carrier_that_raises_never_reaches_the_caller(kind, door, carrier, engine, name):
    carrier.refuses = ConnectionError("broker down")
    with door(name) as (tx, commit, _):
        kind.enqueue(tx, 1)
        commit()
        durable_core.wake()
    assert count(engine) == 1


def test_without_a_carrier_nothing_is_remembered(kind, engine, carrier):
    wakes.use_carrier(None)  # the fixture puts back what was there
    with Session(engine) as session:
        kind.enqueue(session, 1)
        assert not session.info
        session.commit()
    assert durable_core.wake() == 0


def test_many_hints_of_one_transaction_are_kept_within_bounds(kind, engine, carrier):
    with Session(engine) as session:
        refs = enqueue_many(session, (kind.options().new(n) for n in range(1500)))
        session.commit()
    assert [hint.id for hint in carrier.offered] == [ref.id for ref in refs[500:]], "the newest"


def test_hints_that_nobody_woke_for_do_not_keep_out_the_newest(kind, engine, carrier):
    with engine.connect() as tx:
        enqueue_many(tx, (kind.options().new(n) for n in range(1000)))
        tx.rollback()
        ref = kind.enqueue(tx, 1)
        tx.commit()
    durable_core.wake()
    assert carrier.offered[-1].id == ref.id


# --- reading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_id", ["", "x", None, 5, "0198", "00000000-0000-7000-8000-000000000000"])
def test_what_is_no_row_is_not_found(engine, row_id):
    with engine.connect() as tx, pytest.raises(durable_core.NotFound):
        deliveries.get(tx, row_id)


def test_a_handler_called_as_a_function_is_plain_python(declare):
    kind = declare(lambda step, n: n + 1)
    assert kind(None, 1) == 2


def test_a_caller_at_repeatable_read_meets_a_key_committed_after_its_snapshot_as_40001(engine, kind):
    strict = create_engine(engine.url, isolation_level="REPEATABLE READ")
    try:
        with strict.connect() as tx:
            tx.execute(text("select 1 from effects"))
            with engine.begin() as other:
                kind.options(key="k").enqueue(other, 1)
            with pytest.raises(Exception) as refused:  # noqa: PT011
                kind.options(key="k").enqueue(tx, 1)
            assert refused.value.orig.sqlstate == "40001"
            assert tx.scalar(text("select 42")) == 42, "the savepoint kept the caller's transaction alive"
    finally:
        strict.dispose()


@pytest.mark.parametrize(
    "eta",
    [
        datetime(8999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12))),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
        datetime(1969, 12, 31, tzinfo=UTC),
    ],
)
def test_an_eta_is_judged_in_utc_and_refused_before_it_can_poison_the_transaction(engine, kind, eta):
    with pytest.raises(InvalidOption, match="eta"):
        kind.options(eta=eta)


def test_a_session_whose_info_was_cleared_commits_as_ever(engine, kind, carrier):
    with Session(engine) as session:
        kind.enqueue(session, 1)
        session.info.clear()
        session.commit()
        kind.enqueue(session, 2)
        session.info.clear()
        session.rollback()


def test_a_forgotten_session_is_told_as_such(kind):
    with pytest.raises(UnsupportedTransaction, match="hand over a SQLAlchemy Session"):
        kind.enqueue(1)


def test_a_session_on_another_database_is_refused_before_anything_is_written(kind):
    """As in a test of one's own that runs on SQLite: our row must lie where the caller's rows do."""
    with Session(create_engine("sqlite://")) as session, pytest.raises(UnsupportedTransaction) as refused:
        kind.enqueue(session, 1)
    assert "a Session on sqlite is not a transaction this package can join" in str(refused.value)
    with create_engine("sqlite://").begin() as connection, pytest.raises(UnsupportedTransaction, match="on sqlite"):
        deliveries.get(connection, "01a227e1-8921-7001-a2c4-ace8f4971791")


def test_a_forgotten_migrate_is_told_with_the_command(services, kind):
    url = create_database(services.database_url, "durable_nothing_installed")
    bare = create_engine(url)
    try:
        with Session(bare) as session, pytest.raises(SchemaBehind, match="run `durable migrate`"):
            kind.enqueue(session, 1)
    finally:
        bare.dispose()
        drop_database(url, "durable_nothing_installed")


def test_a_decorator_without_its_name_is_a_definition_error():
    with pytest.raises(DefinitionError, match="in parentheses"):
        durable_core.delivery(lambda step: None)
