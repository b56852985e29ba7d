"""Guards, deltas and replays as they are stored: the same on Postgres and in memory."""

import json
import math
from datetime import datetime, timedelta, timezone
from functools import partial

import pytest
from pydantic import BaseModel

from durable_core.cases.declare import Attempts, CaseType, Scope, Unmet, any_of
from durable_core.cases.delta import applied
from durable_core.cases.executions import ExecutionStatus
from durable_core.cases.guards import Evaluation
from durable_core.cases.replay import Unasked
from durable_core.refusals import BadScopeKey, ExecutionFailed, StepNotAvailable
from tests.core.cases.worlds import Crash

both = pytest.mark.spec("cases", 39)

LATE = datetime(2031, 5, 6, 7, 8, 9, 123457, tzinfo=timezone(timedelta(hours=-3, minutes=-30)))


def unchanged(state, ctx):
    return state


def again(kind: CaseType) -> CaseType:
    """Another definition of the same name, as a later deployment brings it; its steps are to be declared."""
    return CaseType(kind.name, state=kind.state.model, actor=kind.actor.model, registered=False)


def replay(world, cases, case_id, **how):
    with world.begin() as tx:
        return cases.replay(tx, case_id, **how)


def exact(document):
    return json.dumps(document, sort_keys=True)


# --- what is asked now ---------------------------------------------------------------------------


@both
@pytest.mark.spec("cases", 20)
def test_a_refusal_carries_the_guard_that_an_explanation_tells(world):
    kind = world.type()
    guard = {
        "open": lambda state: state["open"] or Unmet("it is closed"),
        "either": any_of({"early": lambda state, as_of: as_of < LATE, "paid": lambda state: Unmet("not paid")}),
        "fine": lambda state: True,
    }
    kind.step("go", requires=guard, permits={"ann": lambda state, actor: actor == "ann" or Unmet("ann may")})(unchanged)
    kind.step("close")(lambda state, ctx: {"open": False})
    cases = world.cases(kind)
    case_id = world.create(cases, {"open": True})
    cases.execute(case_id, "close")
    before = world.everything()
    with pytest.raises(StepNotAvailable) as refused:
        cases.execute(case_id, "go", actor="ben", as_of=LATE)
    with world.begin() as tx:
        told = cases.explain(tx, case_id, "go", actor="ben", as_of=LATE)
    assert refused.value.evaluation == told
    assert [str(result) for result in refused.value.unmet] == [
        "open: it is closed", "either (none of: early; paid: not paid)", "ann: ann may",
    ]  # fmt: skip
    assert world.everything() == before


@both
@pytest.mark.spec("cases", 21)
def test_an_explanation_without_an_actor_asks_what_is_possible_alone(world):
    kind = world.type()
    kind.step("go", requires={"yes": lambda state: True}, permits={"ann": lambda state, actor: actor == "ann"})(
        unchanged
    )
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with world.begin() as tx:
        nobody, no_one = cases.explain(tx, case_id, "go"), cases.explain(tx, case_id, "go", actor=None)
        ann = cases.explain(tx, case_id, "go", actor="ann")
    assert (nobody.possible, nobody.permitted, nobody.available) == (True, None, False)
    assert (no_one.possible, no_one.permitted) == (True, False)
    assert (ann.possible, ann.permitted, ann.available) == (True, True, True)


@both
@pytest.mark.spec("cases", 22)
def test_a_selector_that_raises_is_listed_explained_and_told_to_an_executor(world):
    kind = world.type()
    kind.step("sign", scope=Scope(lambda state: state["missing"], str))(unchanged)
    kind.step("close")(unchanged)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with world.begin() as tx:
        sign, close = cases.affordances(tx, case_id, actor=None)
        told = cases.explain(tx, case_id, "sign", "ann")
    assert (sign.available, close.available) == (False, True)
    assert told.unmet[0].name == "$scope"
    before = world.everything()
    with pytest.raises(BadScopeKey, match="raised KeyError"):
        cases.execute(case_id, "sign", scope_key="ann")
    assert world.everything() == before


async def later():
    return True


@both
@pytest.mark.spec("cases", 27)
@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("answer", [lambda: 1, lambda: "yes", lambda: [], later, lambda: 1 / 0], ids=range(5))
def test_a_condition_that_answers_no_truth_refuses_the_step_and_says_what_it_did(world, answer):
    kind = world.type()
    kind.step("go", requires={"odd": lambda state: answer()})(unchanged)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    before = world.everything()
    with pytest.raises(StepNotAvailable) as refused:
        cases.execute(case_id, "go")
    (odd,) = refused.value.unmet
    assert odd.reason.startswith(("the condition returned a value of type", "the condition raised ZeroDivisionError"))
    assert world.everything() == before


@both
def test_a_reason_that_no_journal_could_hold_fails_no_execution(world):
    """It is told by an arm that does not hold, of a guard that does."""
    kind = world.type()
    arms = any_of({"odd": lambda state: Unmet("a\x00b\ud800"), "fine": lambda state: True})
    kind.step("go", requires={"either": arms}, scope=Scope(lambda state: ["x" * 500, "é" * 500], str))(unchanged)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    for key in ("x" * 500, "é" * 500):
        cases.execute(case_id, "go", scope_key=key)
        assert len(world.journal(cases, case_id, scope_key=key)) == 2
    claimed = world.journal(cases, case_id)[0]
    assert claimed.guard["conditions"][0]["arms"][0]["reason"] == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


# --- what is stored ------------------------------------------------------------------------------


@both
@pytest.mark.spec("cases", 27)
def test_true_becoming_one_is_a_change_and_stays_one(world):
    kind = world.type()
    kind.step("count")(lambda state, ctx: {"flag": 1, "one": 1.0, "kept": True})
    cases = world.cases(kind)
    case_id = world.create(cases, {"flag": True, "one": 1, "kept": True})
    done = cases.execute(case_id, "count")
    assert {change["path"]: exact(change["value"]) for change in done.delta} == {"/flag": "1", "/one": "1.0"}
    assert exact(world.get(cases, case_id).state) == '{"flag": 1, "kept": true, "one": 1.0}'
    claimed, completed = world.journal(cases, case_id)
    assert exact(claimed.state) == '{"flag": true, "kept": true, "one": 1}'
    assert exact(applied(claimed.state, completed.delta)) == exact(done.state)


NUMBERS = [0.1 + 0.2, 1e16, 1e-7, 5e-324, 1.7e308, -0.0, 2**53 + 1, -(2**63), 2**63 - 1, 1e22, 100.0, 3]
TEXTS = ["", "é\u2028\U0001f3e0", 'a"b\\c', "~/", " "]
DOCUMENTS = [
    {"n": NUMBERS, "t": TEXTS},
    {"t": {text: index for index, text in enumerate(TEXTS)}, "n": NUMBERS[::-1]},
    {"n": [[], {}, [[]], None, True, False], "zz": 1, "a": {"deep": {"deeper": [1, [2, [3]]]}}},
    {"n": [True, False, None], "a": {"deep": {"deeper": [1, [2, [3, 4]]], "new": 1}}},
    {},
    {"only": [1e16, 10**16]},
    {"only": [10**16, 1e16]},
]


@both
@pytest.mark.spec("cases", 28)
def test_every_state_is_the_one_before_with_the_delta_of_its_commit(world):
    """Exactly: as texts, number for number, through the database's own idea of numbers and keys."""
    kind = world.type()
    kind.step("become")(lambda state, ctx: DOCUMENTS[state.get("next", 0)] | {"next": state.get("next", 0) + 1})
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    for _ in DOCUMENTS:
        cases.execute(case_id, "become")
    entries = world.journal(cases, case_id)
    claims, commits = entries[0::2], entries[1::2]
    state = claims[0].state
    for claimed, completed in zip(claims, commits, strict=True):
        assert exact(claimed.state) == exact(state)
        state = applied(state, completed.delta)
    assert exact(state) == exact(world.get(cases, case_id).state)
    for claimed, document in zip(claims[1:], DOCUMENTS, strict=False):
        expected = [value or 0.0 if isinstance(value, float) else value for value in document.get("n", [])]
        assert exact(claimed.state.get("n", [])) == exact(expected)
    assert all(one.matches for one in replay(world, cases, case_id))


# --- what is asked again -------------------------------------------------------------------------


class Buyer(BaseModel):
    id: str
    signed: bool = False


class Sale(BaseModel):
    buyers: tuple[Buyer, ...] = ()
    limit: int = 10
    due: datetime


class User(BaseModel):
    name: str
    since: datetime
    tags: tuple[str, ...] = ()


EACH_BUYER = Scope(select=lambda state: state.buyers, key=lambda buyer: buyer.id)


def old_hand(state, actor, as_of):
    """True at one instant alone: a microsecond lost anywhere would turn it."""
    return actor.since <= as_of <= state.due and actor.tags == ("a",)


def a_sale(world, **how):
    kind = world.type(Sale, actor=User)
    return declared(kind, **how)


def declared(kind, *, within=lambda state: state.limit > 0, scope=EACH_BUYER, steps=("sign", "lower")):
    if "sign" in steps:

        def sign(state, ctx):
            ctx.element.signed = True
            return state

        guard = {
            "requires": {"within": within, "unsigned": lambda state, element, key: not element.signed and bool(key)},
            "permits": {
                "old hand": lambda state, actor, as_of: actor.since <= as_of <= state.due and actor.tags == ("a",)
            },
        }
        kind.step("sign", scope=scope, **guard)(sign)
    if "lower" in steps:
        kind.step("lower")(lambda state, ctx: state.model_copy(update={"limit": state.limit - 10}))
    return kind


@pytest.fixture
def sold(world):
    """Two signatures and two more commits, claimed at the last microsecond that the guard lets through."""
    kind = a_sale(world)
    cases = world.cases(kind)
    case_id = world.create(cases, Sale(buyers=(Buyer(id="ann"), Buyer(id="ben")), due=LATE))
    actor = User(name="dana", since=LATE, tags=("a",))
    for step, key in (("sign", "ann"), ("lower", None)):
        cases.execute(case_id, step, scope_key=key, actor=actor, as_of=LATE)
    with pytest.raises(StepNotAvailable):
        cases.execute(case_id, "sign", scope_key="ben", actor=actor, as_of=LATE)
    return kind, cases, case_id


@both
@pytest.mark.spec("cases", 25, 28)
def test_every_claim_matches_under_the_definition_it_was_made_by_also_after_later_commits(world, sold):
    _, cases, case_id = sold
    asked = replay(world, cases, case_id)
    assert [(one.number, one.step, one.scope_key, one.matches) for one in asked] == [
        (1, "sign", "ann", True), (3, "lower", None, True),
    ]  # fmt: skip
    for one in asked:
        assert one.recorded == one.reproduced
        assert one.as_of == one.recorded.as_of == LATE
        assert one.as_of.utcoffset() == timedelta(0)
        assert one.as_of.microsecond == 123457
    claimed = world.journal(cases, case_id)[0]
    assert claimed.as_of == LATE
    assert Evaluation.from_json(claimed.guard) == asked[0].recorded
    assert claimed.actor["tags"] == ["a"]


@both
@pytest.mark.spec("cases", 28)
def test_an_actor_is_seen_now_as_it_will_be_in_a_replay(world):
    """A model without a declared one is seen as JSON, and JSON with one as the model."""
    seen = []
    kinds = [world.type(), world.type(actor=User)]
    reads = [lambda actor: actor["name"], lambda actor: actor.name]
    for kind, name_of in zip(kinds, reads, strict=True):
        permits = {"dana": partial(lambda state, actor, name_of: name_of(actor) == "dana", name_of=name_of)}
        kind.step("go", permits=permits)(lambda state, ctx: seen.append(ctx.actor) or state)
    cases = world.cases(*kinds)
    model = User(name="dana", since=LATE, tags=("a",))
    for kind in kinds:
        case_id = world.create(cases, {}, kind)
        for actor in (model, model.model_dump(mode="json")):
            cases.execute(case_id, "go", actor=actor)
        assert [one.matches for one in replay(world, cases, case_id)] == [True, True]
        assert len({exact(entry.actor) for entry in world.journal(cases, case_id)}) == 1
    assert seen == [model.model_dump(mode="json")] * 2 + [model] * 2


@both
@pytest.mark.spec("cases", 25)
def test_a_tightened_guard_is_drift_that_names_its_condition_and_is_no_error(world, sold):
    kind, _, case_id = sold
    tightened = world.cases(declared(again(kind), within=lambda state: state.limit > 10))
    sign, lower = replay(world, tightened, case_id)
    assert [str(drift) for drift in sign.drift] == ["within was met and is unmet"]
    assert (sign.matches, sign.unasked, lower.matches) == (False, None, True)


@both
@pytest.mark.spec("cases", 25)
def test_a_step_that_is_gone_and_an_element_that_is_not_selected_are_reported_and_the_rest_is_asked(world, sold):
    kind, _, case_id = sold
    gone = world.cases(declared(again(kind), steps=("lower",)))
    unselected = world.cases(
        declared(again(kind), scope=Scope(lambda state: state.buyers[1:], lambda buyer: buyer.id))
    )  # fmt: skip
    for cases, why in ((gone, Unasked.NO_STEP), (unselected, Unasked.NO_ELEMENT)):
        sign, lower = replay(world, cases, case_id)
        assert (sign.unasked, sign.matches, sign.reproduced) == (why, False, None)
        assert sign.problem
        assert lower.matches


@both
@pytest.mark.spec("cases", 25)
def test_a_claim_whose_data_was_erased_says_so(world, sold):
    _, cases, case_id = sold
    with world.begin() as tx:
        cases.erase(tx, case_id, by="dana", numbers=[1])
    sign, lower = replay(world, cases, case_id)
    assert (sign.unasked, lower.matches) == (Unasked.ERASED, True)


@both
def test_a_replay_reads_and_writes_nothing(world, sold):
    _, cases, case_id = sold
    before = world.everything()
    assert replay(world, cases, case_id)
    assert world.everything() == before


@both
def test_executions_are_told_as_their_journal_has_them(world):
    kind = world.type()

    def stubborn(state, ctx):
        raise ValueError("never")

    def dying(state, ctx):
        raise Crash

    kind.step("fail", retry=Attempts(2, 0))(stubborn)
    kind.step("crash")(dying)
    kind.step("go")(lambda state, ctx: {"n": state.get("n", 0) + 1})
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    done = cases.execute(case_id, "go", actor="ann")
    with pytest.raises(ExecutionFailed):
        cases.execute(case_id, "fail")
    with pytest.raises(Crash):
        cases.execute(case_id, "crash")
    world.clock.advance(31)
    cases.execute(case_id, "go")
    with pytest.raises(Crash):
        cases.execute(case_id, "crash")
    with world.begin() as tx:
        found = cases.executions(tx, case_id)
    assert [(one.step, one.status, one.attempts) for one in found] == [
        ("go", ExecutionStatus.COMPLETED, 1), ("fail", ExecutionStatus.FAILED, 2),
        ("crash", ExecutionStatus.EXPIRED, 1), ("go", ExecutionStatus.COMPLETED, 1),
        ("crash", ExecutionStatus.IN_PROGRESS, 1),
    ]  # fmt: skip
    assert (found[0].execution_id, found[0].seq, found[0].actor) == (done.execution_id, 1, "ann")
    assert (found[0].claimed_at, found[0].ended_at) == (done.claimed_at, done.committed_at)
    assert [error.message for error in found[1].errors] == ["never", "never"]
    assert math.isclose((found[2].ended_at - found[2].claimed_at).total_seconds(), 31)
