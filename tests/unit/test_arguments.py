"""Arguments and results: what is accepted comes back equal, what would not is refused by name."""

import dataclasses
import inspect
import json
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal
from uuid import UUID

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from durable_core.arguments import MAX_BYTES, Signature, Unfit, by_name, canonical, clean_text, digest, result_text
from durable_core.errors import DefinitionError, InvalidArguments

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0)  # jsonb knows no -0.0
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def signature(handler):
    return Signature("test.kind", handler)


def any_json(step, value):
    pass


def exact(value):
    """Equality that tells True from 1 and 1 from 1.0."""
    return json.dumps(value, sort_keys=True)


@given(JSON)
def test_any_json_comes_back_as_it_went_in(value):
    packed = signature(any_json).pack((value,), {})
    assert exact(signature(any_json).unpack(packed)["value"]) == exact(value)


@given(st.dictionaries(TEXT, JSON, max_size=6), st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order_of_keys(value, random):
    keys = list(value)
    random.shuffle(keys)
    shuffled = {key: value[key] for key in keys}
    assert digest(canonical(value)) == digest(canonical(shuffled))


@given(JSON, JSON)
def test_different_values_have_different_digests(one, two):
    if exact(one) != exact(two):
        assert digest(canonical(one)) != digest(canonical(two))


class Colour(Enum):
    RED = "red"


class Address(pydantic.BaseModel):
    street: str
    since: date


@dataclasses.dataclass
class Point:
    x: int
    y: int


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 2**63 - 1), (float, 1.5), (bool, True), (str, "ü\n😀"), (list[int], [1, 2]), (dict[str, int], {"a": 1}),
        (datetime, datetime(2030, 1, 2, 3, 4, 5, 6, UTC)), (date, date(2030, 1, 2)), (time, time(1, 2, tzinfo=UTC)),
        (timedelta, timedelta(days=1, microseconds=5)), (UUID, UUID(int=5)), (Decimal, Decimal("1.10")),
        (Colour, Colour.RED), (Address, Address(street="Elm", since=date(2030, 1, 2))), (Point, Point(1, 2)),
        (int | None, None), (Literal["a", "b"], "b"), (tuple[int, str], (1, "a")),
        (Annotated[int, pydantic.Field(gt=0)], 5), (bytes, b"raw"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_annotated_types_come_back_as_themselves(annotation, value):
    def handler(step, value):
        pass

    handler.__annotations__["value"] = annotation
    packed = signature(handler).pack((value,), {})
    back = signature(handler).unpack(packed)["value"]
    assert (type(back), back) == (type(value), value)


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        Invoice(id=1), object(), float("nan"), float("inf"), -float("inf"), "a\x00b", "\ud800", {1, 2}, b"\xff",
        "x" * 2_000_000, nested(40), nested(10_000), 10**20_000, 2**63, -(2**63) - 1, {5: 1}, {"\x00": 1},
        {"\ud800": 1}, (1, 2), Decimal("1"), datetime(2030, 1, 1, tzinfo=UTC),
        [1, {"a": float("nan")}], {"a": {"b": {1}}},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_json_would_lose_change_or_choke_on_is_refused_naming_the_argument(value):
    with pytest.raises(InvalidArguments) as refused:
        signature(any_json).pack((), {"value": value})
    assert refused.value.argument == "value"
    assert refused.value.kind == "test.kind"
    assert len(str(refused.value)) < 1000


def test_the_depth_allowed_includes_the_arguments_themselves():
    assert signature(any_json).pack((nested(31),), {})
    with pytest.raises(InvalidArguments, match="deeper than 32"):
        signature(any_json).pack((nested(32),), {})


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, "7"), (int, True), (int, 7.0), (str, 7), (bool, 1), (list[int], ["1"]), (datetime, datetime(2030, 1, 1)),
        (time, time(1, 2)), (datetime, "2030-01-01T00:00:00Z"), (Literal["a"], "b"), (Point, {"x": 1, "y": 2}),
        (Annotated[int, pydantic.Field(gt=0)], 0), (list[datetime], [datetime(2030, 1, 1)]),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_and_not_converted(annotation, value):
    def handler(step, value):
        pass

    handler.__annotations__["value"] = annotation
    with pytest.raises(InvalidArguments) as refused:
        signature(handler).pack((value,), {})
    assert refused.value.argument == "value"


def test_a_wrong_name_a_missing_one_and_one_too_many_are_named():
    def handler(step, invoice_id: int, *, copy: bool = False):
        pass

    for args, kwargs, named in [
        ((1,), {"copi": True}, "copi"),
        ((), {}, "invoice_id"),
        ((1,), {"invoice_id": 2}, "invoice_id"),
        ((1, True), {}, "arguments"),
        ((1,), {"step": 1}, "step"),
    ]:
        with pytest.raises(InvalidArguments) as refused:
            signature(handler).pack(args, kwargs)
        assert refused.value.argument == named


def test_too_many_arguments_are_said_without_a_name_that_no_argument_has():
    def handler(step, invoice_id: int, size: int = 1, *, copy: bool = False):
        pass

    with pytest.raises(InvalidArguments) as refused:
        signature(handler).pack((1, 2, True), {})
    assert str(refused.value) == (
        f"{refused.value.kind}: 3 arguments by position are too many; it takes 2 at most: invoice_id, size. "
        "Nothing was written."
    )
    with pytest.raises(InvalidArguments, match="1 arguments by position are too many; it takes none"):
        signature(lambda step, *, copy=False: None).pack((1,), {})


def test_an_argument_that_is_called_arguments_is_named_as_any_other():
    def handler(step, arguments: int):
        pass

    for args in ((), ("x",)):
        with pytest.raises(InvalidArguments) as refused:
            signature(handler).pack(args, {})
        assert "argument 'arguments': " in str(refused.value)


def test_what_is_no_mapping_of_arguments_is_said_without_a_name():
    with pytest.raises(InvalidArguments) as refused:
        by_name("invoice.send", [1])
    assert str(refused.value) == (
        "invoice.send: arguments are a mapping of names to values; got list. Nothing was written."
    )


@pytest.mark.parametrize("name", ["copy", "json", "schema", "_id", "model_config", "model_fields", "validate", "a"])
def test_an_argument_may_have_any_name(name, recwarn):
    def handler(step, _):
        pass

    parameters = list(inspect.signature(handler).parameters.values())
    parameters[1] = parameters[1].replace(name=name)
    handler.__signature__ = inspect.Signature(parameters)
    packed = signature(handler).pack((5,), {})
    assert json.loads(packed) == {name: 5}
    assert signature(handler).unpack(packed) == {name: 5}
    assert not recwarn.list


def test_arguments_equal_to_their_defaults_are_left_out():
    def handler(step, a: int, b: int = 2, c: list[int] | None = None):
        pass

    assert signature(handler).pack((1,), {}) == signature(handler).pack((1, 2), {"c": None}) == '{"a":1}'
    assert signature(handler).unpack('{"a":1}') == {"a": 1, "b": 2, "c": None}


@pytest.mark.parametrize(("default", "given_"), [(1, True), (1, 1.0), (0, False), (object(), 5)])
def test_only_the_very_value_of_a_default_is_left_out(default, given_):
    def handler(step, value=default):
        pass

    packed = signature(handler).pack((given_,), {})
    assert exact(signature(handler).unpack(packed)["value"]) == exact(given_)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e16, "10000000000000000.0"), (-1.5e17, "-150000000000000000.0"), (1e22, "10000000000000000000000.0"),
        (1.7976931348623157e308, f"17976931348623157{'0' * 292}.0"), (1e15, "1000000000000000.0"), (5e-324, "5e-324"),
        (-0.0, "0.0"), ([{"a": -0.0, "b": "e+", "c": True}], '[{"a":0.0,"b":"e+","c":true}]'), ("1e+16", '"1e+16"'),
        ({"b": (1e16,), "a": None}, '{"a":null,"b":[10000000000000000.0]}'),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_float_is_written_so_that_jsonb_keeps_it_a_float(value, text):
    """jsonb writes 1e+16 as an integer, and has no negative zero."""
    assert canonical(value) == text
    assert exact(json.loads(text)) == exact(json.loads(canonical(json.loads(text))))


def test_negative_zero_is_zero_as_it_is_to_jsonb():
    assert signature(any_json).pack((-0.0,), {}) == signature(any_json).pack((0.0,), {})


def test_a_default_is_brought_to_text_once_and_not_at_every_call():
    seen = []

    def noted(value):
        seen.append(value)
        return value

    def handler(step, n: Annotated[int, pydantic.AfterValidator(noted)] = 3):
        pass

    packing = signature(handler)
    assert [packing.pack((given_,), {}) for given_ in (3, 4, 3, 5)] == ["{}", '{"n":4}', "{}", '{"n":5}']
    there_and_back = 2
    assert seen.count(3) == (2 + 1) * there_and_back, "twice given, once as the default"


@given(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT)
def test_a_plain_value_has_the_same_text_whatever_its_annotation(value):
    texts = set()
    for annotation in (
        type(value),
        type(value) | None,
        bool | int | float | str | None,
        Annotated[type(value), "noted"],
    ):

        def handler(step, value):
            pass

        handler.__annotations__["value"] = annotation
        try:
            texts.add(signature(handler).pack((value,), {}))
        except InvalidArguments:
            texts.add("refused")
    assert len(texts) == 1


def test_a_union_in_which_one_member_changes_the_value_stores_the_changed_one():
    def handler(step, name: Annotated[str, pydantic.AfterValidator(str.upper)] | str):
        pass

    assert signature(handler).pack(("a",), {}) == '{"name":"A"}'


def test_an_order_of_keys_that_the_stored_text_does_not_keep_is_refused():
    def handler(step, value: OrderedDict[str, int]):
        pass

    assert signature(handler).pack((OrderedDict(a=1, b=2),), {}) == '{"value":{"a":1,"b":2}}'
    with pytest.raises(InvalidArguments, match="another value"):
        signature(handler).pack((OrderedDict(b=2, a=1),), {})


def test_of_two_arguments_that_do_not_fit_the_first_is_named():
    def handler(step, z: int, a: int):
        pass

    with pytest.raises(InvalidArguments) as refused:
        signature(handler).pack((), {"a": "1", "z": "2"})
    assert refused.value.argument == "z"


def test_a_default_of_another_type_than_annotated_refuses_nothing():
    def handler(step, n: int = None):  # noqa: RUF013
        pass

    assert signature(handler).pack((5,), {}) == '{"n":5}'
    assert signature(handler).unpack("{}") == {"n": None}


def test_a_call_too_big_in_sum_names_its_largest_argument():
    def handler(step, a: str, b: str):
        pass

    with pytest.raises(InvalidArguments) as refused:
        signature(handler).pack(("x" * (MAX_BYTES // 3), "y" * MAX_BYTES), {})
    assert refused.value.argument == "b"


def test_the_size_is_in_bytes_and_not_in_characters():
    assert signature(any_json).pack(("x" * 200_000,), {})
    with pytest.raises(InvalidArguments):
        signature(any_json).pack(("ü" * 200_000,), {})


@pytest.mark.parametrize("text", ['{"other":1}', "{}", '{"n":"1"}', "[]", '{"n":1,"m":2}', "not json"])
def test_stored_arguments_that_do_not_fit_are_refused(text):
    def handler(step, n: int):
        pass

    with pytest.raises(InvalidArguments):
        signature(handler).unpack(text)


def test_a_handler_that_cannot_be_stored_by_name_is_a_definition_error():
    for handler in [
        lambda: None,
        lambda *args: None,
        lambda **kwargs: None,
        lambda step, *args: None,
        lambda step, **kwargs: None,
        lambda *, step: None,
    ]:
        with pytest.raises(DefinitionError):
            signature(handler)

    def positional(step, n, /):
        pass

    with pytest.raises(DefinitionError):
        signature(positional)


@pytest.mark.parametrize("annotation", [int, "str", dict[str, int], UUID, datetime])
def test_a_handler_whose_step_was_forgotten_is_refused_where_it_is_declared(annotation):
    """As a Celery task is written; at enqueue it would be one argument too many."""

    def handler(order_id, by=None):
        pass

    handler.__annotations__["order_id"] = annotation
    with pytest.raises(DefinitionError, match=r"'order_id' is annotated as an argument: write \(step: Step, order_id"):
        signature(handler)


@pytest.mark.parametrize(
    "value",
    [{1}, float("nan"), "\ud800", "a\x00", object(), nested(10_000), "x" * 300_000, {1: 2}, 10**20_000],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_is_no_json_becomes_a_marker_with_a_warning(value):
    text, warning = result_text(value)
    assert json.loads(text)["durable"] == "not stored"
    assert warning
    assert len(text) < 1000


def test_a_result_that_contains_itself_becomes_a_marker():
    loop = []
    loop.append(loop)
    assert json.loads(result_text(loop)[0])["durable"] == "not stored"


@given(st.text())
def test_cleaned_text_can_be_stored_anywhere(text):
    cleaned = clean_text(text, 50)
    cleaned.encode()
    assert "\x00" not in cleaned
    assert len(cleaned) <= 50


def test_refusing_a_value_names_the_place_inside_it():
    with pytest.raises(Unfit, match=r"lines\[1\]\.price"):
        canonical({"lines": [{}, {"price": float("nan")}]})
