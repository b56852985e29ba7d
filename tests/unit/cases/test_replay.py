"""A claim is asked again by today's definition: it matches, it drifted and says where, or it says why it cannot be."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from durable_core.cases.declare import CaseType, Scope, Unmet, any_of
from durable_core.cases.journal import Payload
from durable_core.cases.replay import Drift, Unasked, replayed
from tests.unit.cases.entries import NOON, Journal, erased

EACH_BUYER = Scope(select=lambda state: state["buyers"], key=lambda buyer: buyer["id"])


def is_open(state):
    return state["open"]


def is_seller(state, actor):
    return actor["name"] == "dana" or Unmet("only the seller may")


def before_noon(state, as_of):
    return as_of <= NOON


OPEN = {"open": True, "buyers": [{"id": "ann"}, {"id": "ben"}]}
DANA = {"name": "dana"}


def of(**options):
    case_type = CaseType("sale", registered=False)
    case_type.step("sign", **options)(lambda state, ctx: state)
    return case_type


GUARD = {
    "requires": {"open": is_open, "in time": before_noon, "either": any_of({"a": is_open, "b": before_noon})},
    "permits": {"is seller": is_seller},
}


def claimed(state=None, *, actor=DANA, scope_key=None, **options):
    return Journal().claim(of(**(options or GUARD)), OPEN if state is None else state, actor=actor, scope_key=scope_key)


@pytest.mark.spec("cases", 25)
def test_a_claim_matches_under_the_definition_that_it_was_made_by():
    asked = replayed(of(**GUARD), claimed())
    assert asked.matches
    assert asked.recorded == asked.reproduced
    assert (asked.number, asked.step, asked.as_of, asked.drift, asked.unasked) == (1, "sign", NOON, (), None)


@pytest.mark.spec("cases", 25)
def test_a_guard_that_was_tightened_is_named_by_its_condition():
    tightened = GUARD | {"requires": GUARD["requires"] | {"open": lambda state: False}}
    asked = replayed(of(**tightened), claimed())
    assert not asked.matches
    assert asked.drift == (Drift("requires", "open", None, True, False),)
    assert str(asked.drift[0]) == "open was met and is unmet"
    assert not asked.reproduced.available
    assert asked.recorded.available


def test_conditions_that_came_or_went_or_were_renamed_are_drift():
    changed = {
        "requires": {"in time": before_noon, "is open": is_open, "either": any_of({"a": is_open, "c": before_noon})},
        "permits": {"is seller": is_seller},
    }
    assert [str(drift) for drift in replayed(of(**changed), claimed()).drift] == [
        "open was met and is absent",
        "either / b was met and is absent",
        "either / c was absent and is met",
        "is open was absent and is met",
    ]


def test_an_arm_is_drift_also_where_the_whole_still_holds():
    changed = GUARD | {"requires": GUARD["requires"] | {"either": any_of({"a": is_open, "b": lambda state: False})}}
    asked = replayed(of(**changed), claimed())
    assert asked.drift == (Drift("requires", "either", "b", True, False),)
    assert asked.reproduced.available


def test_a_condition_that_moved_to_the_other_section_is_drift():
    moved = {"requires": GUARD["requires"] | {"is seller": is_open}}
    assert {(drift.section, drift.now) for drift in replayed(of(**moved), claimed()).drift} == {
        ("requires", True), ("permits", None),
    }  # fmt: skip


def test_other_words_for_a_reason_are_no_drift():
    def why(reason):
        return {"requires": {"either": any_of({"a": is_open, "b": lambda state: Unmet(reason)})}}

    entry = claimed(**why("too late"))
    assert entry.guard["conditions"][0]["arms"][1]["reason"] == "too late"
    assert replayed(of(**why("come earlier")), entry).matches


def test_the_instant_is_that_of_the_claim_and_not_of_today():
    late = {"requires": {"late": lambda state, as_of: as_of > NOON}}
    assert not replayed(
        of(requires={"late": before_noon}), Journal().claim(of(**late), OPEN, as_of=NOON.replace(hour=13))
    ).matches
    assert replayed(of(**late), Journal().claim(of(**late), OPEN, as_of=NOON.replace(hour=13))).matches


@pytest.mark.spec("cases", 25)
def test_what_todays_definitions_cannot_address_is_told_and_the_sweep_goes_on():
    scoped = {"scope": EACH_BUYER, "requires": {"open": is_open}}
    journal = Journal()
    for key in ("ann", "ben"):
        journal.claim(of(**scoped), OPEN, scope_key=key)
    only_ben = Scope(select=lambda state: state["buyers"][1:], key=lambda buyer: buyer["id"])
    ann, ben = (replayed(of(**scoped | {"scope": only_ben}), entry) for entry in journal.entries)
    assert (ann.unasked, ann.matches) == (Unasked.NO_ELEMENT, False)
    assert "nothing with key 'ann' is selected now" in ann.problem
    assert ben.matches
    removed = replayed(CaseType("sale", registered=False), journal.entries[0])
    assert (removed.unasked, removed.problem) == (Unasked.NO_STEP, "there is no step 'sign' any more")
    assert removed.recorded.available


def raising(state):
    raise ValueError


class Strict(BaseModel):
    sold: int


UNASKED = {
    Unasked.UNKNOWN_TYPE: lambda: replayed(None, claimed()),
    Unasked.ERASED: lambda: replayed(of(**GUARD), erased(claimed())),
    Unasked.NOT_A_CLAIM: lambda: replayed(of(**GUARD), Journal().add("completed", seq=1, delta=[])),
    Unasked.INVALID_STATE: lambda: replayed(CaseType("sale", state=Strict, registered=False), claimed()),
    Unasked.NO_STEP: lambda: replayed(CaseType("sale", registered=False), claimed()),
    Unasked.NO_ELEMENT: lambda: replayed(of(scope=Scope(raising, str)), claimed(scope=EACH_BUYER, scope_key="ann")),
    Unasked.ACTOR_NOT_STORED: lambda: replayed(of(), claimed(actor=object(), retry=1)),
    Unasked.UNREADABLE: lambda: replayed(of(), replace(claimed(), payload=Payload(guard="[]"))),
}


@pytest.mark.parametrize("why", list(Unasked))
def test_what_cannot_be_asked_again_says_why_and_raises_nothing(why):
    asked = UNASKED[why]()
    assert (asked.unasked, asked.matches, asked.reproduced, asked.drift) == (why, False, None, ())
    assert asked.problem
    assert why.value not in asked.problem


@pytest.mark.parametrize(
    "guard", ["null", "7", '"x"', "{}", '{"as_of": "never", "possible": true, "permitted": true, "conditions": []}']
)
def test_a_guard_that_was_meddled_with_is_told(guard):
    entry = claimed()
    meddled = replace(entry, payload=entry.payload._replace(guard=guard))
    assert replayed(of(**GUARD), meddled).unasked is Unasked.UNREADABLE


def test_a_scope_that_became_none_is_told():
    assert replayed(of(), claimed(scope=EACH_BUYER, scope_key="ann")).unasked is Unasked.NO_ELEMENT
    assert replayed(of(scope=EACH_BUYER), claimed(requires={"open": is_open})).unasked is Unasked.NO_ELEMENT


def test_a_migration_has_no_guard_then_as_now():
    entry = Journal().add(
        "claimed", step="migrate:prices", as_of=NOON, actor={"migration": "prices"}, state=OPEN,
        guard={"as_of": NOON.isoformat(), "possible": True, "permitted": True, "conditions": []},
    )  # fmt: skip
    assert replayed(of(**GUARD), entry).matches


class User(BaseModel):
    name: str
    since: datetime
    tags: tuple[str, ...] = ()


class Sale(BaseModel):
    due: datetime
    marks: tuple[int, ...]
    rate: float


def exact(state, actor, as_of):
    return as_of <= state.due and isinstance(state.marks, tuple) and actor.since <= as_of and len(actor.tags) == 2


@pytest.mark.spec("cases", 28)
@given(
    st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(8999, 1, 1), timezones=st.timezones()),
    st.floats(-1e9, 1e9),
)
def test_a_claim_at_the_very_instant_still_matches_after_the_way_through_json(instant, rate):
    """One microsecond more or less would turn each of its comparisons."""
    case_type = CaseType("sale", state=Sale, actor=User, registered=False)
    case_type.step("sign", permits={"exact": exact})(lambda state, ctx: state)
    at = instant.astimezone(UTC)
    actor = User(name="dana", since=at, tags=("a", "b"))
    entry = Journal().claim(case_type, Sale(due=at, marks=(1, 2), rate=rate), actor=actor, as_of=instant)
    assert entry.guard["available"]
    asked = replayed(case_type, entry)
    assert asked.matches
    assert asked.recorded == asked.reproduced


@pytest.mark.spec("cases", 28)
def test_tuples_become_lists_before_the_guard_is_asked_so_it_matches_ever_after():
    listed = {
        "requires": {"list": lambda state: state["pair"] == [1, 2]},
        "permits": {"tags": lambda state, actor: actor == ["a"]},
    }
    entry = claimed({"pair": (1, 2)}, actor=("a",), **listed)
    assert entry.guard["available"]
    assert replayed(of(**listed), entry).matches
