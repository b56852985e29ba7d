"""A delta is one fixed text for one change, and applying it gives the new state exactly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable_core.cases.delta import BadPatch, applied, delta

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2).map(lambda x: x or 0.0)
    | st.text("ab~/", max_size=3)
)
documents = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "~", "/", "~1", ""]), inner),
    max_leaves=12,
)


def text(document):
    """Its exact text: True and 1, 1 and 1.0 are told apart, the order of keys is not."""
    return json.dumps(document, sort_keys=True)


@given(documents, documents)
def test_applying_a_delta_gives_the_new_state_exactly(old, new):
    before = text(old), text(new)
    patch = json.loads(json.dumps(delta(old, new)))
    assert text(applied(old, patch)) == text(new)
    assert (text(old), text(new)) == before


@given(documents)
def test_what_did_not_change_has_an_empty_delta(document):
    assert delta(document, json.loads(json.dumps(document))) == []


@given(documents, documents)
def test_a_delta_names_only_the_deepest_places_that_differ(old, new):
    """Nothing is replaced by something of its own kind that could have been entered."""
    for change in delta(old, new):
        assert set(change) == ({"op", "path"} if change["op"] == "remove" else {"op", "path", "value"})
        if change["op"] == "replace":
            there = old
            for part in change["path"].split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                there = there[int(part) if isinstance(there, list) else part]
            same_container = type(there) is type(change["value"]) and isinstance(there, dict | list)
            assert not same_container
            assert text(there) != text(change["value"])


@pytest.mark.spec("cases", 27)
@pytest.mark.parametrize(
    ("old", "new"), [(True, 1), (1, True), (False, 0), (0, False), (1, 1.0), (0.0, False), (None, 0)]
)
def test_values_that_are_equal_to_python_alone_differ(old, new):
    for before, after, at in ((old, new, ""), ({"a": [old]}, {"a": [new]}, "/a/0")):
        (change,) = delta(before, after)
        assert (change["op"], change["path"]) == ("replace", at)
        assert change["value"] is new or type(change["value"]) is type(new)


def test_an_object_loses_and_changes_in_its_old_order_and_gains_in_the_new_one():
    old = {"z": 1, "gone": 2, "kept": 3, "a": 4}
    new = {"new b": 5, "a": 40, "kept": 3, "new a": 6, "z": 10}
    assert delta(old, new) == [
        {"op": "replace", "path": "/z", "value": 10},
        {"op": "remove", "path": "/gone"},
        {"op": "replace", "path": "/a", "value": 40},
        {"op": "add", "path": "/new b", "value": 5},
        {"op": "add", "path": "/new a", "value": 6},
    ]


def test_a_list_changes_place_by_place_grows_at_its_end_and_shrinks_from_it():
    assert delta([1, {"a": 1}], [2, {"a": 2}, 3, 4]) == [
        {"op": "replace", "path": "/0", "value": 2},
        {"op": "replace", "path": "/1/a", "value": 2},
        {"op": "add", "path": "/-", "value": 3},
        {"op": "add", "path": "/-", "value": 4},
    ]
    assert delta([1, 2, 3, 4], [5]) == [
        {"op": "replace", "path": "/0", "value": 5},
        {"op": "remove", "path": "/3"},
        {"op": "remove", "path": "/2"},
        {"op": "remove", "path": "/1"},
    ]


def test_keys_are_escaped_the_tilde_first():
    assert delta({"a/b": 1, "m~n": 1, "~1": 1, "": 1}, {"a/b": 2, "m~n": 2, "~1": 2, "": 2}) == [
        {"op": "replace", "path": "/a~1b", "value": 2},
        {"op": "replace", "path": "/m~0n", "value": 2},
        {"op": "replace", "path": "/~01", "value": 2},
        {"op": "replace", "path": "/", "value": 2},
    ]


def test_another_kind_of_value_replaces_the_whole_at_its_place():
    assert delta({"a": {"b": 1}}, {"a": [1]}) == [{"op": "replace", "path": "/a", "value": [1]}]
    assert delta({"a": 1}, [1]) == [{"op": "replace", "path": "", "value": [1]}]


def test_a_delta_shares_nothing_with_the_states():
    new = {"list": [{"b": [1]}], "a": {"b": [1]}, "changed": {"b": [1]}}
    patch = delta({"list": [], "changed": 1}, new)
    made = applied({"list": [], "changed": 1}, patch)
    assert made == new
    for document in (new, made):
        for part in (document["list"][0], document["a"], document["changed"]):
            part["b"].append(2)
    assert [change["value"] for change in patch] == [{"b": [1]}] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"op": "remove", "path": ""}, {"op": "remove", "path": "/x"}, {"op": "replace", "path": "/x", "value": 1},
        {"op": "add", "path": "/list/9", "value": 1}, {"op": "remove", "path": "/list/-"},
        {"op": "remove", "path": "/list/-1"}, {"op": "remove", "path": "/list/00"},
        {"op": "add", "path": "x", "value": 1},
        {"op": "move", "path": "/list", "from": "/x"}, {"op": "add", "path": "/text/a", "value": 1}, {"op": "add"},
        {"op": "add", "path": "/x"},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_patch_that_does_not_fit_is_refused_and_changes_nothing(change):
    document = {"list": [1], "text": "t"}
    with pytest.raises(BadPatch, match="does not fit the document"):
        applied(document, [{"op": "add", "path": "/list/-", "value": 2}, change])
    assert document == {"list": [1], "text": "t"}
