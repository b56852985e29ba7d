"""What makes two events one: their key, or else what they say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable_core.cases.event import LONGEST, Event, payload_digest
from durable_core.errors import InvalidArguments

WORDS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def test_a_given_key_is_the_key():
    assert Event("signer", "envelope-1", "signed", {"a": 1}, event_id="e1", key="mine").idempotency_key == "mine"


def test_the_senders_id_makes_another_payload_the_same_event():
    first = Event("signer", "envelope-1", "signed", {"a": 1}, event_id="e1")
    again = Event("signer", "envelope-1", "signed", {"a": 2}, event_id="e1")
    assert first.idempotency_key == again.idempotency_key == "signer/envelope-1/signed/id:e1"


@pytest.mark.spec("cases", 31)
def test_without_an_id_the_payload_is_what_an_event_is_known_by():
    one = Event("signer", "envelope-1", "signed", {"a": 1, "b": {"c": [1, 2], "d": None}})
    same = Event("signer", "envelope-1", "signed", {"b": {"d": None, "c": [1, 2]}, "a": 1})
    other = Event("signer", "envelope-1", "signed", {"a": 1, "b": {"c": [2, 1], "d": None}})
    assert one.idempotency_key == same.idempotency_key != other.idempotency_key


@given(JSON.filter(lambda value: isinstance(value, dict)))
def test_the_order_of_keys_makes_no_difference(payload):
    assert payload_digest(payload) == payload_digest(dict(reversed(payload.items())))


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS, WORDS, WORDS))
def test_no_two_events_whose_parts_differ_have_one_key(one, other):
    keys = [Event(*parts[:3], event_id=parts[3]).idempotency_key for parts in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_a_slash_in_a_part_is_no_border():
    assert Event("a/b", "c", "t").idempotency_key != Event("a", "b/c", "t").idempotency_key


def test_a_digest_is_no_id():
    payload = {"a": 1}
    forged = f"sha256:{payload_digest(payload)}"
    assert Event("s", "x", "t", payload).idempotency_key != Event("s", "x", "t", event_id=forged).idempotency_key


def test_a_long_key_is_its_digest():
    long = Event("s", "x" * LONGEST["external_id"], "t", event_id="1")
    other = Event("s", "x" * LONGEST["external_id"], "t", event_id="2")
    assert len(long.idempotency_key) < 100
    assert long.idempotency_key != other.idempotency_key


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"system": "s", "external_id": "x"}, "type"),
        ({"system": "s", "external_id": "", "type": "t"}, "external_id"),
        ({"system": "s", "external_id": 7, "type": "t"}, "external_id"),
        ({"system": "s", "external_id": "x\x00", "type": "t"}, "external_id"),
        ({"system": "s", "external_id": "x", "type": "t", "step": "y" * 501}, "step"),
        ({"system": "s", "external_id": "x", "type": "t", "payload": float("nan")}, "payload"),
        ({"system": "s", "external_id": "x", "type": "t", "payload": {1: "one"}}, "payload"),
        ({"system": "s", "external_id": "x", "type": "t", "payload": object()}, "payload"),
        ({"system": "s", "external_id": "x", "type": "t", "payload": "x" * 5_000_000}, "payload"),
        ({"system": "s", "external_id": "x", "type": "t", "pyaload": 1}, "pyaload"),
        (["s", "x", "t"], "event"),
    ],
)
def test_what_is_no_event_is_refused_by_its_name(given, named):
    with pytest.raises(InvalidArguments) as refused:
        Event.of(given)
    assert refused.value.argument == named


def test_a_payload_that_holds_itself_is_refused():
    payload: list[object] = []
    payload.append(payload)
    with pytest.raises(InvalidArguments):
        Event("s", "x", "t", payload)


def test_an_event_is_kept_as_it_was_said():
    said = {"system": "s", "external_id": "x", "type": "t", "payload": {"b": "\x00\ud800é", "a": [1, 1.0, True]}}
    kept = Event.of(said).text()
    assert kept.isascii()
    assert json.loads(kept) == said
    assert list(json.loads(kept)["payload"]) == ["b", "a"]
