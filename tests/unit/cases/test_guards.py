"""What a guard answers: every condition is asked, none can break it, and who is told why not."""

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator

from durable_core.cases import passing
from durable_core.cases.declare import CaseType, Scope, Unmet, any_of
from durable_core.cases.guards import NOT_GIVEN, Evaluation, Result, address, affordances, evaluate, explain
from durable_core.errors import InvalidOption
from durable_core.refusals import BadScopeKey, UnknownStep

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def handler(state, ctx):
    raise AssertionError("a handler never runs when something is listed or explained")


def yes(state):
    return True


def no(state):
    return False


def closed(state):
    return Unmet("the sale is closed")


def is_seller(state, actor):
    return actor == "dana" or Unmet("only the seller may")


def a_type():
    return CaseType("sale", registered=False)


def step_of(**options):
    return a_type().step("sign", **options)(handler)


def asked(*, actor="dana", state=None, as_of=NOON, **options) -> Evaluation:
    return evaluate(step_of(**options), {} if state is None else state, actor=actor, as_of=as_of)


def answers(evaluation):
    return [(result.name, result.ok) for result in evaluation.conditions]


# --- guards --------------------------------------------------------------------------------------


def test_every_condition_and_every_arm_is_asked_in_the_order_in_which_they_are_declared():
    seen = []

    def noting(name, answer):
        def condition(state):
            seen.append(name)
            return answer

        return condition

    evaluation = asked(
        permits={"p": noting("p", True)},
        requires={
            "a": noting("a", False),
            "b": any_of({"x": noting("x", True), "y": noting("y", False)}),
            "c": noting("c", False),
        },
    )
    assert seen == ["a", "x", "y", "c", "p"]
    assert answers(evaluation) == [("a", False), ("b", True), ("c", False), ("p", True)]
    assert [(arm.name, arm.ok) for arm in evaluation.conditions[1].arms] == [("x", True), ("y", False)]


def test_a_step_without_conditions_can_be_done_by_anybody():
    evaluation = asked(actor=None)
    assert (evaluation.possible, evaluation.permitted, evaluation.available) == (True, True, True)


@pytest.mark.spec("cases", 21)
def test_what_is_not_permitted_may_be_possible_and_the_reverse():
    not_permitted = asked(requires={"open": yes}, permits={"is seller": is_seller}, actor="ben")
    assert (not_permitted.possible, not_permitted.permitted, not_permitted.available) == (True, False, False)
    not_possible = asked(requires={"open": closed}, permits={"is seller": is_seller})
    assert (not_possible.possible, not_possible.permitted, not_possible.available) == (False, True, False)


def test_what_does_not_hold_is_told_with_its_reasons():
    evaluation = asked(
        requires={"open": closed, "paid": no, "either": any_of({"a": no, "b": closed}), "fine": yes},
        permits={"is seller": is_seller},
        actor="ben",
    )
    assert [str(result) for result in evaluation.unmet] == [
        "open: the sale is closed",
        "paid",
        "either (none of: a; b: the sale is closed)",
        "is seller: only the seller may",
    ]


def test_a_reason_is_text_that_a_journal_can_hold():
    (result,) = asked(requires={"open": lambda state: Unmet("a\x00\ud800b" + "c" * 2000)}).conditions
    assert result.reason.startswith("a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}bccc")
    assert len(result.reason) == 1000


def test_one_arm_is_enough():
    assert asked(requires={"either": any_of({"a": no, "b": yes})}).possible
    assert not asked(requires={"either": any_of({"a": no, "b": no})}).possible


def test_without_an_actor_permits_are_not_asked():
    def refuse(state, actor):
        raise AssertionError("asked")

    step = step_of(requires={"open": yes}, permits={"is seller": refuse, "either": any_of({"a": refuse})})
    evaluation = evaluate(step, {}, as_of=NOON)
    assert (evaluation.possible, evaluation.permitted, evaluation.available) == (True, None, False)
    assert answers(evaluation) == [("open", True), ("is seller", None), ("either", None)]
    assert evaluation.unmet == ()


def test_nobody_in_particular_is_somebody_who_was_named():
    evaluation = asked(permits={"is nobody": lambda state, actor: actor is None}, actor=None)
    assert evaluation.permitted is True


def test_a_condition_is_given_the_words_that_it_names():
    seen = {}

    def condition(state, actor, key, *, as_of, element):
        seen.update(state=state, actor=actor, as_of=as_of, element=element, key=key)
        return True

    step = step_of(scope=Scope(lambda state: state["buyers"], str), permits={"all": condition})
    evaluate(step, {"buyers": ["ann"]}, actor="dana", element="ann", key="ann-key", as_of=NOON)
    assert seen == {"state": {"buyers": ["ann"]}, "actor": "dana", "as_of": NOON, "element": "ann", "key": "ann-key"}


@pytest.mark.spec("cases", 28)
def test_the_instant_is_in_utc_and_exact():
    elsewhere = datetime(2026, 7, 1, 2, 3, 4, 567891, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    assert asked(as_of=elsewhere).as_of == elsewhere
    assert asked(as_of=elsewhere).as_of.tzinfo is UTC
    assert asked(as_of=elsewhere).to_json()["as_of"] == "2026-06-30T20:33:04.567891+00:00"
    with pytest.raises(InvalidOption, match="with a time zone"):
        asked(as_of=datetime(2026, 1, 1))


# --- conditions that are no conditions -----------------------------------------------------------


async def answered_later():
    return True


class Loud:
    def __bool__(self):
        raise RuntimeError("it is never asked")


NOT_BOOLS = [1, 0, "yes", "", [], [1], None, {"ok": True}, 1.0, object(), Loud(), Unmet]


@pytest.mark.spec("cases", 27)
@pytest.mark.parametrize("answer", NOT_BOOLS, ids=lambda one: type(one).__name__)
def test_what_is_neither_true_nor_false_does_not_hold_and_says_so(answer):
    (result,) = asked(requires={"open": lambda state: answer}).conditions
    assert result.ok is False
    assert "neither True, False nor Unmet(reason)" in result.reason
    arms = asked(requires={"either": any_of({"open": lambda state: answer})}).conditions[0].arms
    assert arms[0].ok is False


@pytest.mark.spec("cases", 27)
@pytest.mark.filterwarnings("error")
def test_a_coroutine_does_not_hold_and_is_closed():
    import gc

    (result,) = asked(requires={"open": lambda state: answered_later()}).conditions
    gc.collect()  # what was never awaited would complain here
    assert result.ok is False
    assert "a value of type coroutine" in result.reason


def test_a_condition_that_raises_does_not_hold_and_the_others_are_asked():
    def broken(state):
        return state["secret 4711"]

    evaluation = asked(requires={"broken": broken, "open": yes}, permits={"either": any_of({"a": broken, "b": yes})})
    assert answers(evaluation) == [("broken", False), ("open", True), ("either", True)]
    assert evaluation.conditions[0].reason.startswith("the condition raised KeyError (test_guards.py, line ")
    assert "4711" not in str(evaluation.to_json())


def test_an_exception_that_cannot_be_told_is_told_by_its_class():
    class Untellable(Exception):
        def __str__(self):
            raise ValueError

    def broken(state):
        raise Untellable

    assert "raised Untellable" in asked(requires={"broken": broken}).conditions[0].reason


@pytest.mark.parametrize("control", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_passes(control):
    def ending(state):
        raise control

    with pytest.raises(control):
        asked(requires={"open": ending})


class TimeIsUp(Exception):
    """As Celery's soft time limit is one: an Exception that is no answer to anything."""


def out_of_time(*_):
    raise TimeIsUp


def out_of_time_within(_):
    yield {"id": "ann"}
    raise TimeIsUp


class OutOfTime(BaseModel):
    price: int

    @field_validator("price")
    @classmethod
    def looked_up(cls, price: int) -> int:
        raise TimeIsUp


OUT_OF_TIME = {
    "condition": lambda: asked(requires={"open": lambda state: out_of_time()}),
    "selector": lambda: affordances(scoped(select=out_of_time), TWO, None, NOON),
    "selection": lambda: affordances(scoped(select=lambda state: out_of_time_within(state)), TWO, None, NOON),
    "key": lambda: affordances(scoped(key=out_of_time), TWO, None, NOON),
    "model": lambda: CaseType("sale", state=OutOfTime, registered=False).load({"price": 1}),
}


@pytest.fixture
def limited():
    before = passing.passing()
    passing.use(TimeIsUp)
    yield
    passing.use(*before)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("where", OUT_OF_TIME)
def test_a_time_limit_of_the_task_passes_for_it_says_nothing_of_the_guard(where):
    """A request through Celery would be given up as refused, for ever."""
    with pytest.raises(TimeIsUp):
        OUT_OF_TIME[where]()


# --- JSON ----------------------------------------------------------------------------------------

words = st.text(min_size=1, max_size=8)
leaves = st.builds(
    Result, st.sampled_from(["requires", "permits"]), words, st.sampled_from([True, False, None]), st.none() | words
)
results = st.builds(
    Result, st.sampled_from(["requires", "permits"]), words, st.booleans(), st.none() | words,
    st.lists(leaves, max_size=3).map(tuple),
)  # fmt: skip
evaluations = st.builds(
    Evaluation, st.datetimes(timezones=st.just(UTC), min_value=datetime(1970, 1, 1)), st.booleans(),
    st.none() | st.booleans(), st.lists(results, max_size=4).map(tuple),
)  # fmt: skip


@pytest.mark.spec("cases", 28)
@given(evaluations)
def test_an_evaluation_comes_back_from_json_as_it_was(evaluation):
    assert Evaluation.from_json(json.loads(json.dumps(evaluation.to_json()))) == evaluation


# --- addresses -----------------------------------------------------------------------------------


def scoped(select=lambda state: state["buyers"], key=lambda buyer: buyer["id"], **options):
    case_type = a_type()
    case_type.step("close")(handler)
    case_type.step("sign", scope=Scope(select, key), **options)(handler)
    return case_type


TWO = {"buyers": [{"id": "ann", "signed": True}, {"id": "ben", "signed": False}]}


def test_an_address_is_a_step_and_for_a_scope_the_element_of_its_key():
    found = address(scoped(), TWO, "sign", "ben")
    assert (found.step.name, found.element, found.key) == ("sign", {"id": "ben", "signed": False}, "ben")
    assert address(scoped(), TWO, "close").element is None


@pytest.mark.parametrize(
    ("step", "key", "why"),
    [
        ("close", "ann", "it has no scope, so it takes no key"),
        ("sign", None, "so it takes a key; there is 'ann', 'ben'"),
        ("sign", "cleo", "nothing with key 'cleo' is selected now; there is 'ann', 'ben'"),
        ("sign", "", "nothing with key '' is selected now"),
        ("sign", 7, "a key is text"),
        ("sign", "x" * 5000, "nothing with key 'xxx"),
    ],
)
def test_an_address_that_names_nothing_is_refused_with_what_there_is(step, key, why):
    for ask in (lambda: address(scoped(), TWO, step, key), lambda: explain(scoped(), TWO, step, key, as_of=NOON)):
        with pytest.raises(BadScopeKey, match=why) as refused:
            ask()
        assert (refused.value.case_type, refused.value.step) == ("sale", step)
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", ["sing", "", None, 7])
def test_a_step_that_is_none_is_refused_with_those_there_are(name):
    for ask in (lambda: address(scoped(), {}, name), lambda: explain(scoped(), {}, name, as_of=NOON)):
        with pytest.raises(UnknownStep, match="there is 'close', 'sign'"):
            ask()


@pytest.mark.spec("cases", 22)
@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["ann", "ann"], "two elements have the key 'ann'"),
        (["ann", ""], "one of them is ''"),
        (["ann", "a\x00b"], "one of them is 'a"),
        (["ann", "\ud800"], "one of them is"),
        (["ann", "x" * 501], "one of them is 'xxx"),
        (["ann", None], "one of them is None"),
        (["ann", 7], "one of them is a value of type int"),
    ],
)
def test_keys_that_do_not_tell_elements_apart_are_told_to_everybody(keys, why):
    case_type = scoped(select=lambda state: keys, key=lambda key: key)
    for ask in (
        lambda: affordances(case_type, {}, None, NOON),
        lambda: explain(case_type, {}, "sign", "ann", as_of=NOON),
        lambda: address(case_type, {}, "sign", "ann"),
    ):
        with pytest.raises(BadScopeKey, match=f"its scope is defective: .*{why}"):
            ask()


@pytest.mark.parametrize("selected", ["ann", b"ann", {"ann": 1}, {"ann"}, frozenset(), None, 7, answered_later])
def test_a_selection_that_is_no_list_is_told_to_everybody(selected):
    case_type = scoped(select=lambda state: selected() if callable(selected) else selected, key=str)
    for ask in (
        lambda: affordances(case_type, {}, None, NOON),
        lambda: explain(case_type, {}, "sign", "ann", as_of=NOON),
        lambda: address(case_type, {}, "sign", "ann"),
    ):
        with pytest.raises(BadScopeKey, match="its scope is defective: it selects"):
            ask()


def test_a_selection_may_be_anything_that_has_an_order():
    state = {"buyers": {"ann": 1, "ben": 2}}
    for select in (lambda state: (key for key in state["buyers"]), lambda state: state["buyers"].keys()):
        listed = affordances(scoped(select=select, key=str), state, None, NOON)
        assert [one.scope_key for one in listed] == [None, "ann", "ben"]


def raising(state):
    raise ValueError("account 4711")


def raising_within(state):
    yield {"id": "ann"}
    raise ValueError("account 4711")


BROKEN_SCOPES = {
    "select": Scope(raising, str),
    "iteration": Scope(lambda state: raising_within(state), str),
    "key": Scope(lambda state: ["ann"], raising),
}


@pytest.mark.parametrize("scope", BROKEN_SCOPES.values(), ids=BROKEN_SCOPES)
def test_a_selector_that_raises_is_listed_as_blocked_answered_by_explain_and_told_to_an_executor(scope):
    case_type = a_type()
    case_type.step("sign", scope=scope)(handler)
    case_type.step("close")(handler)
    sign, close = affordances(case_type, {}, "dana", NOON)
    assert (sign.step, sign.scope_key, sign.available) == ("sign", None, False)
    assert close.available
    explained = explain(case_type, {}, "sign", "ann", actor="dana", as_of=NOON)
    assert explained == sign.evaluation
    assert explained.conditions[0].name == "$scope"
    assert "raised ValueError (test_guards.py, line" in explained.conditions[0].reason
    with pytest.raises(BadScopeKey, match="raised ValueError") as refused:
        address(case_type, {}, "sign", "ann")
    assert isinstance(refused.value.__cause__, ValueError)
    assert "4711" not in f"{refused.value} {explained.to_json()}"


# --- listings ------------------------------------------------------------------------------------


def listed(case_type, state=TWO, **options):
    return [(one.step, one.scope_key) for one in affordances(case_type, state, "dana", NOON, **options)]


def house():
    case_type = a_type()
    case_type.step("close", requires={"never": no})(handler)
    unsigned = {"not signed": lambda state, element: not element["signed"]}
    case_type.step("sign", title="Sign", scope=Scope(lambda s: s["buyers"], lambda b: b["id"]), requires=unsigned)(
        handler
    )
    case_type.step("archive")(handler)
    return case_type


def test_a_listing_has_what_can_be_done_and_on_demand_what_cannot():
    assert listed(house()) == [("sign", "ben"), ("archive", None)]
    assert listed(house(), blocked=True) == [("close", None), ("sign", "ann"), ("sign", "ben"), ("archive", None)]


def test_a_scope_without_elements_contributes_nothing():
    assert listed(house(), {"buyers": []}, blocked=True) == [("close", None), ("archive", None)]


def test_a_listing_tells_what_an_interface_shows():
    sign, _ = affordances(house(), TWO, "dana", NOON)
    told = json.loads(json.dumps(sign.to_json()))
    assert (told["step"], told["scope_key"], told["title"], told["available"]) == ("sign", "ben", "Sign", True)
    assert Evaluation.from_json(told["evaluation"]) == sign.evaluation


class User(BaseModel):
    name: str


def test_a_listing_and_an_explanation_show_an_actor_as_an_execution_does():
    case_type = CaseType("sale", actor=User, registered=False)
    case_type.step("sign", permits={"is dana": lambda state, actor: actor.name == "dana"})(handler)
    for actor in (User(name="dana"), {"name": "dana"}):
        assert [one.step for one in affordances(case_type, {}, actor, NOON)] == ["sign"]
        assert explain(case_type, {}, "sign", actor=actor, as_of=NOON).permitted
    assert explain(case_type, {}, "sign", actor=None, as_of=NOON).permitted is False
    assert explain(case_type, {}, "sign", as_of=NOON).permitted is None
    assert explain(case_type, {}, "sign", actor=NOT_GIVEN, as_of=NOON).permitted is None
