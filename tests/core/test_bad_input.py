"""
Bad input at every door: one table of what cannot be a delivery, tried at each way to enqueue.

Whatever is refused is refused with a stable reason, by name, before any statement of ours; so
nothing is written, and the caller's transaction goes on.
"""

import asyncio
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from types import SimpleNamespace

import pytest
from celery import Celery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import NullPool, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from durable_core import (
    DefinitionError,
    DurableError,
    InvalidArguments,
    InvalidOption,
    delivery,
    enqueue_by_name,
    enqueue_many,
)
from durable_core.celery_binding.publish import QUEUE_PREFIX, CeleryCarrier
from durable_core.deliveries import aenqueue_by_name, aenqueue_many
from durable_core.deliveries.attempt import perform_due
from durable_core.deliveries.declare import registry
from tests.unit.test_arguments import JSON, TEXT, Invoice, exact, nested


def itself():
    loop = []
    loop.append(loop)
    return loop


class NoOffset(tzinfo):
    """A zone that does not know its offset: to Python the datetime is naive all the same."""

    def utcoffset(self, dt):
        return None

    dst = tzname = utcoffset


VALUES = {
    "ORM object": Invoice(id=1),
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": -float("inf"),
    "1e400": float("1e400"),
    "NUL": "a\x00b",
    "lone surrogate": "\ud800",
    "set": {1, 2},
    "bytes": b"\xff",
    "Decimal": Decimal("1.5"),
    "datetime": datetime(2030, 1, 1, tzinfo=UTC),
    "naive datetime": datetime(2030, 1, 1),
    "2 MB": "x" * 2_000_000,
    "20 MB": "x" * 20_000_000,
    "256 kB and one byte": "x" * (256 * 1024 + 1 - len('{"value":""}')),
    "depth 32 in the arguments' own": nested(32),
    "depth 10,000": nested(10_000),
    "itself": itself(),
    "20,000 digits": 10**20_000,
    "65 bits": 2**63,
    "-65 bits": -(2**63) - 1,
    "int keys": {5: 1},
    "NUL in a key": {"a\x00": 1},
    "surrogate in a key": {"\ud800": 1},
    "tuple": (1, 2),
    "complex": 1j,
    "object": object(),
    "function": print,
    "NaN deep inside": {"lines": [1, {"price": float("nan")}]},
}
"""For an argument that takes any JSON."""

CALLS = {
    "a wrong name": ({"valeu": 1}, "valeu"),
    "one more": ({"value": 1, "copy": True}, "copy"),
    "none": ({}, "value"),
    "the step": ({"value": 1, "step": 1}, "step"),
    "self": ({"value": 1, "self": 1}, "self"),
    "a name of 1 MB": ({"x" * 1_000_000: 1}, "x" * 99 + "…"),
    "a name with a surrogate": ({"\ud800": 1}, "\N{REPLACEMENT CHARACTER}"),
}
"""Calls that do not fit `handler(step, value)`, and the argument to be named."""

OPTIONS = {
    "unknown": ({"delay": 5}, "delay"),
    "priorty": ({"priorty": 5}, "priorty"),
    "expires without a time zone": ({"expires": datetime(2030, 1, 1)}, "expires"),
    "expires before now": ({"expires": -1}, "expires"),
    "expires never": ({"expires": float("inf")}, "expires"),
    "an empty ordering key": ({"ordering_key": ""}, "ordering_key"),
    "an ordering key of two lines": ({"ordering_key": "a\nb"}, "ordering_key"),
    "a long ordering key": ({"ordering_key": "é" * 501}, "ordering_key"),
    "an ordering key that is a number": ({"ordering_key": 7}, "ordering_key"),
    "a policy without a key": ({"key_policy": "raise"}, "key_policy"),
    "an unknown policy": ({"key": "k", "key_policy": "newest"}, "key_policy"),
    "a debounce without a countdown": ({"key": "k", "key_policy": "debounce"}, "key_policy"),
    "negative countdown": ({"countdown": -1}, "countdown"),
    "negative timedelta": ({"countdown": timedelta(seconds=-1)}, "countdown"),
    "huge countdown": ({"countdown": 10**12}, "countdown"),
    "countdown of 20,000 digits": ({"countdown": 10**20_000}, "countdown"),
    "longest timedelta": ({"countdown": timedelta.max}, "countdown"),
    "countdown NaN": ({"countdown": float("nan")}, "countdown"),
    "countdown infinite": ({"countdown": float("inf")}, "countdown"),
    "countdown True": ({"countdown": True}, "countdown"),
    "countdown text": ({"countdown": "5"}, "countdown"),
    "naive eta": ({"eta": datetime(2030, 1, 1)}, "eta"),
    "eta without offset": ({"eta": datetime(2030, 1, 1, tzinfo=NoOffset())}, "eta"),
    "eta year 9999": ({"eta": datetime(9999, 12, 31, tzinfo=UTC)}, "eta"),
    "last eta of all": ({"eta": datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))}, "eta"),
    "first eta of all": ({"eta": datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))}, "eta"),
    "eta text": ({"eta": "2030-01-01T00:00:00Z"}, "eta"),
    "eta number": ({"eta": 1.0}, "eta"),
    "eta and countdown": ({"eta": datetime(2030, 1, 1, tzinfo=UTC), "countdown": 5}, "eta"),
    "key of 9 kB": ({"key": "k" * 9000}, "key"),
    "key of 1,001 bytes": ({"key": "ü" * 500 + "k"}, "key"),
    "empty key": ({"key": ""}, "key"),
    "key with NUL": ({"key": "a\x00b"}, "key"),
    "key with a surrogate": ({"key": "\udfff"}, "key"),
    "key with a line break": ({"key": "a\nb"}, "key"),
    "key number": ({"key": 5}, "key"),
    "key bytes": ({"key": b"k"}, "key"),
    "empty queue": ({"queue": ""}, "queue"),
    "queue with a blank": ({"queue": "a b"}, "queue"),
    "queue with a star": ({"queue": "mail*"}, "queue"),
    "queue with a line break": ({"queue": "mail\n"}, "queue"),
    "queue beyond ASCII": ({"queue": "é"}, "queue"),
    "queue of the sweeps": ({"queue": "control"}, "queue"),
    "queue number": ({"queue": 5}, "queue"),
    "priority 10": ({"priority": 10}, "priority"),
    "priority -1": ({"priority": -1}, "priority"),
    "priority True": ({"priority": True}, "priority"),
    "priority 1.0": ({"priority": 1.0}, "priority"),
    "priority text": ({"priority": "high"}, "priority"),
}


def enqueued(tx, kind, options, arguments):
    kind.options(**options).enqueue(tx, **arguments)


def in_a_row(tx, kind, options, arguments):
    enqueue_many(tx, [kind.options(**options).new(**arguments)])


def in_an_iterator(tx, kind, options, arguments):
    fine = [kind.options(key=f"fine {n}").new(n) for n in range(5)]
    enqueue_many(tx, (row() for row in [lambda: fine[0], lambda: kind.options(**options).new(**arguments)]))


def by_name(tx, kind, options, arguments):
    enqueue_by_name(tx, kind.name, arguments, **options)


def by_a_name_of_elsewhere(tx, kind, options, arguments):
    enqueue_by_name(tx, "elsewhere.kind", arguments, **options)


async def async_enqueued(tx, kind, options, arguments):
    await kind.options(**options).aenqueue(tx, **arguments)


async def async_in_a_row(tx, kind, options, arguments):
    await aenqueue_many(tx, (kind.options(**options).new(**arguments) for _ in range(1)))


async def async_by_name(tx, kind, options, arguments):
    await aenqueue_by_name(tx, kind.name, arguments, **options)


DOORS = {
    function.__name__: function
    for function in (enqueued, in_a_row, in_an_iterator, by_name, by_a_name_of_elsewhere)
}  # fmt: skip
ASYNC_DOORS = {function.__name__: function for function in (async_enqueued, async_in_a_row, async_by_name)}
ALL = [*DOORS, *ASYNC_DOORS]


@contextmanager
def statements(engine):
    """The statements that ran on this engine meanwhile."""
    seen = []

    def see(connection, cursor, statement, *rest):
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", see)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", see)


@pytest.fixture
def refused(engine, declare):
    """
    `refused(door, calls)`: what each call, a pair of options and arguments, is refused with, all in one transaction.

    After them the caller writes its own row and commits it.
    """
    kind = declare(lambda step, value: None)

    def _refused(door, calls):
        if door in DOORS:
            with engine.connect() as tx:
                tx.execute(text("insert into effects (row_id) values ('before')"))
                with statements(engine) as seen:
                    refusals = [refusal_of(DOORS[door], tx, kind, *call) for call in calls]
                tx.execute(text("insert into effects (row_id) values ('after')"))
                tx.commit()
        else:
            refusals, seen = asyncio.run(_async(door, calls))
        assert not seen, "refused before any statement"
        with engine.connect() as tx:
            assert tx.scalar(text("select count(*) from durable.deliveries")) == 0
            assert list(tx.scalars(text("select row_id from effects"))) == ["before", "after"]
        for refusal in refusals:
            assert len(str(refusal).encode()) < 1000
        return refusals

    async def _async(door, calls):
        asynchronous = create_async_engine(engine.url, poolclass=NullPool)
        async with asynchronous.connect() as tx:
            await tx.execute(text("insert into effects (row_id) values ('before')"))
            with statements(asynchronous.sync_engine) as seen:
                refusals = [await arefusal_of(ASYNC_DOORS[door], tx, kind, *call) for call in calls]
            await tx.execute(text("insert into effects (row_id) values ('after')"))
            await tx.commit()
        return refusals, seen

    return _refused


def refusal_of(door, tx, kind, options, arguments):
    try:
        door(tx, kind, options, arguments)
    except DurableError as refusal:
        return refusal


async def arefusal_of(door, tx, kind, options, arguments):
    try:
        await door(tx, kind, options, arguments)
    except DurableError as refusal:
        return refusal


@pytest.mark.field("R18")
@pytest.mark.field("R50")
@pytest.mark.parametrize("door", ALL)
def test_a_value_that_is_no_json_is_refused_by_the_name_of_its_argument(refused, door):
    # Where no signature says otherwise, a tuple is a list.
    bad = {name: value for name, value in VALUES.items() if (door, name) != ("by_a_name_of_elsewhere", "tuple")}

    refusals = refused(door, [({}, {"value": value}) for value in bad.values()])

    said = {name: (type(no), no.reason, no.argument) for name, no in zip(bad, refusals, strict=True) if no}
    assert said == dict.fromkeys(bad, (InvalidArguments, "INVALID_ARGUMENTS", "value"))


# A kind of elsewhere has no signature here.
@pytest.mark.parametrize("door", [door for door in ALL if door != "by_a_name_of_elsewhere"])
def test_a_call_that_does_not_fit_the_handler_is_refused_by_the_name_that_does_not(refused, door):
    refusals = refused(door, [({}, arguments) for arguments, _ in CALLS.values()])

    said = {name: (type(no), no.reason, no.argument) for name, no in zip(CALLS, refusals, strict=True) if no}
    assert said == {name: (InvalidArguments, "INVALID_ARGUMENTS", named) for name, (_, named) in CALLS.items()}


@pytest.mark.parametrize("door", ALL)
def test_an_option_that_cannot_work_is_refused_by_its_name(refused, door):
    refusals = refused(door, [(options, {"value": 1}) for options, _ in OPTIONS.values()])

    said = {name: (type(no), no.reason, no.option) for name, no in zip(OPTIONS, refusals, strict=True) if no}
    assert said == {name: (InvalidOption, "INVALID_OPTION", named) for name, (_, named) in OPTIONS.items()}


@pytest.mark.parametrize("door", ["by_name", "by_a_name_of_elsewhere", "async_by_name"])
def test_arguments_by_name_that_are_no_mapping_of_names_are_refused(refused, door):
    wrong = [None, 5, "value", [1], ["value"], {5: 1}, {None: 1}, {("a",): 1}]

    refusals = refused(door, [({}, arguments) for arguments in wrong])

    assert [type(refusal) for refusal in refusals] == [InvalidArguments] * len(wrong)


@pytest.mark.parametrize("name", ["", "durable.reap", "a b", "x" * 201, "ü", "a\n", "a\x00", 5, None, ["a"], "1st"])
@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_name_that_no_kind_can_have_is_refused(engine, name, form):
    async def act():
        asynchronous = create_async_engine(engine.url, poolclass=NullPool)
        async with asynchronous.connect() as tx:
            await aenqueue_by_name(tx, name, {})

    with engine.connect() as tx, pytest.raises(DefinitionError), statements(engine) as seen:
        enqueue_by_name(tx, name, {}) if form == "sync" else asyncio.run(act())
    assert not seen


@pytest.mark.parametrize("rows", ["a row", "a kind", "options", "a ref", "a dict", "nothing", "a number"])
def test_rows_that_are_no_rows_are_refused_with_the_way_to_make_them(engine, kind, rows):
    with engine.connect() as tx:
        fine = kind.options().new(1)
        given_ = {
            "a row": fine, "a kind": [fine, kind], "options": [fine, kind.options()], "a dict": [fine, {"n": 1}],
            "a ref": [fine, SimpleNamespace(id="x")], "nothing": None, "a number": 5,
        }[rows]  # fmt: skip
        with pytest.raises(InvalidArguments, match=r"made with kind\.options\(\.\.\.\)\.new\(") as refusal:
            enqueue_many(tx, given_)
        assert refusal.value.argument == "rows"
        assert tx.scalar(text("select count(*) from durable.deliveries")) == 0


@pytest.mark.parametrize("name", ["tx", "self", "step_", "kind", "args", "kwargs", "options", "key"])
def test_an_argument_may_have_the_name_of_a_parameter_of_ours(engine, declare, worker, name):
    seen = []
    space: dict[str, object] = {"seen": seen}
    exec(f"def handler(step, {name}=0): seen.append({name})", space)
    kind = declare(space["handler"])
    with engine.begin() as tx:
        kind.enqueue(tx, **{name: 1})
        enqueue_many(tx, [kind.options().new(**{name: 2})])
        enqueue_by_name(tx, kind.name, {name: 3})
    perform_due(worker, 3)
    kind(None, **{name: 4})
    assert sorted(seen) == [1, 2, 3, 4]


# --- declaring --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "terms",
    [
        {"queue": ""}, {"queue": "a b"}, {"queue": "control"}, {"queue": 5}, {"queue": "mail\n"},
        {"priority": 10}, {"priority": -1}, {"priority": True}, {"priority": 1.5}, {"priority": "high"},
        {"priority": None}, {"max_attempts": 0}, {"max_attempts": True}, {"max_attempts": 2.5}, {"max_attempts": "3"},
        {"max_attempts": 2**31}, {"max_attempts": 10**20_000}, {"max_attempts": float("inf")},
        {"max_interruptions": -1}, {"max_interruptions": 1.5}, {"max_interruptions": False},
        {"max_interruptions": 2**31},
        {"timeout": 0}, {"timeout": -1}, {"timeout": "5"}, {"timeout": True}, {"timeout": float("nan")},
        {"timeout": float("inf")}, {"timeout": timedelta(seconds=5)}, {"timeout": None}, {"timeout": 10**20_000},
        {"backoff": 5}, {"backoff": [1, 2]}, {"backoff": 0}, {"formerly": "a.b"}, {"formerly": 5}, {"formerly": (5,)},
        {"formerly": ("durable.reap",)}, {"formerly": ("a b",)},
    ],
    ids=lambda terms: f"{next(iter(terms))} {type(next(iter(terms.values()))).__name__}",
)  # fmt: skip
def test_terms_that_cannot_work_are_refused_at_the_declaration_and_not_at_an_enqueue(terms):
    with pytest.raises(DefinitionError) as refusal:
        delivery("test.refused", **terms)(lambda step: None)
    assert refusal.value.reason == "DEFINITION_ERROR"
    assert len(str(refusal.value)) < 1000
    assert "test.refused" not in registry


@pytest.mark.parametrize("name", ["", "durable.mine", "a b", "x" * 201, "ü", "a\n", "a\x00", "1st", 5, None], ids=repr)
def test_a_kind_whose_name_cannot_work_is_refused(name):
    with pytest.raises(DefinitionError):
        delivery(name)(lambda step: None)
    assert name not in registry


def test_a_kind_declared_twice_is_refused_and_the_first_stays(declare):
    def first(step):
        pass

    kind = declare(first)
    for names in ({"name": kind.name}, {"name": "test.other", "formerly": (kind.name,)}):
        with pytest.raises(DefinitionError, match="declared twice"):
            delivery(**names)(lambda step: None)
    assert registry.get(kind.name).handler is first
    assert "test.other" not in registry


@pytest.mark.parametrize("handler", [5, None, "text", print], ids=repr)
def test_a_handler_that_is_no_function_is_refused(handler):
    with pytest.raises(DefinitionError):
        delivery("test.refused")(handler)
    assert "test.refused" not in registry


# --- all values -------------------------------------------------------------------------------------

BAD_LEAVES = (
    st.sampled_from([float("nan"), float("inf"), "\x00", "\ud800", b"x", {1}, 1j, Decimal(1), object(), Invoice(id=1)])
    | st.datetimes()
    | st.integers(min_value=2**63)
    | st.integers(max_value=-(2**63) - 1)
)
ANYTHING = JSON | st.recursive(
    JSON | BAD_LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(TEXT | st.integers() | st.just("\x00"), inner, max_size=3)
    ),
    max_leaves=8,
)
LARGE = st.floats(min_value=1e15, allow_infinity=False) | st.floats(max_value=-1e15, allow_infinity=False)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ANYTHING | LARGE, min_size=1, max_size=6))
def test_every_value_is_refused_before_any_statement_or_reaches_the_handler_as_it_was(engine, declare, worker, values):
    """Through the database and back: what jsonb makes of numbers, keys and text is part of it."""
    arrived = {}

    def handler(step, value):
        arrived[step.id] = value

    kind = declare(handler)
    given_ = {}
    with engine.begin() as tx, statements(engine) as seen:
        for value in values:
            before = len(seen)
            try:
                ref = kind.enqueue(tx, value)
            except InvalidArguments:
                assert len(seen) == before
            else:
                given_[ref.id] = value
    perform_due(worker, len(values))
    assert {row_id: exact(value) for row_id, value in arrived.items()} == {
        row_id: exact(value) for row_id, value in given_.items()
    }


@pytest.mark.field("R18")
def test_the_message_to_a_worker_has_one_size_whatever_the_size_of_the_arguments(engine, services, declare, row):
    kind = declare(lambda step, value: None)
    app = Celery("sizes", broker=services.redis_url)
    sizes = []
    for size in (10, 250_000):
        queue = f"sizes_{size:06}"
        with engine.begin() as tx:
            new = kind.options(queue=queue, priority=0).new("x" * size)
            (ref,) = enqueue_many(tx, [new])
        assert row(ref.id).arguments == {"value": "x" * size}
        CeleryCarrier(app).publish([new.hint(ref.id)])
        with app.connection_for_read() as connection:
            (message,) = connection.default_channel.client.lrange(f"{QUEUE_PREFIX}{queue}", 0, -1)
        sizes.append(len(message))
    assert sizes[0] == sizes[1] < 2000
