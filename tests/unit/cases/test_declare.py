"""What cannot work is refused where it is declared, with a sentence that says what is meant."""

import functools
import gc
import math
import operator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretBytes,
    SecretStr,
    field_serializer,
    field_validator,
)

from durable_core import kinds
from durable_core.cases.declare import Attempts, CaseType, Scope, Step, Unmet, any_of
from durable_core.errors import DefinitionError
from durable_core.refusals import InvalidInput, InvalidState


class Sale(BaseModel):
    price: int = 0
    buyers: list[str] = []


class Offer(BaseModel):
    amount: int
    note: str = "none"


def sale(**options):
    return CaseType("sale", state=Sale, registered=False, **options)


def handler(state, ctx):
    return state


def yes(state):
    return True


def declared(**options) -> Step:
    return sale().step("sign", **options)(handler)


EACH_BUYER = Scope(select=lambda state: state.buyers, key=str)


# --- types and steps -----------------------------------------------------------------------------


def test_a_type_keeps_its_steps_in_the_order_in_which_they_are_declared():
    case_type = sale()
    for name in ("sign", "pay", "archive"):
        case_type.step(name)(handler)
    assert list(case_type.steps) == ["sign", "pay", "archive"]
    with pytest.raises(TypeError):
        case_type.steps["new"] = case_type.steps["pay"]


def test_a_declared_step_is_still_a_function():
    @sale().step("sign")
    def sign(state, ctx):
        """Sign it."""
        return state

    assert sign({"a": 1}, None) == {"a": 1}
    assert (sign.__doc__, sign.__name__, sign.__module__) == ("Sign it.", "sign", __name__)


def test_a_step_declared_twice_is_refused():
    case_type = sale()
    case_type.step("sign")(handler)
    with pytest.raises(DefinitionError, match="step 'sign' is declared twice"):
        case_type.step("sign")(handler)


def test_a_type_is_known_by_name_once_and_one_for_a_single_run_is_not():
    first = CaseType("unit.sale", state=Sale)
    try:
        assert kinds.case_types.find("unit.sale") is first
        with pytest.raises(DefinitionError, match="declared twice"):
            CaseType("unit.sale")
        CaseType("unit.sale", registered=False)
        assert kinds.case_types.find("unit.sale") is first
    finally:
        kinds.case_types.remove("unit.sale")


def test_a_type_with_one_step_more_leaves_the_type_as_it_is():
    case_type = sale()
    case_type.step("sign")(handler)
    more = case_type.with_step(Step("sale", "migrate:prices", handler, retry=1))
    assert list(more.steps) == ["sign", "migrate:prices"]
    assert list(case_type.steps) == ["sign"]
    assert more.load({"price": 3}) == Sale(price=3)


@pytest.mark.parametrize("name", ["", "a b", 7, "durable.sale", "x" * 196])
def test_a_name_that_cannot_name_a_type_is_refused(name):
    with pytest.raises(DefinitionError):
        CaseType(name, registered=False)


@pytest.mark.parametrize("name", ["", " ", "a\nb", 7, "x" * 201])
def test_a_name_that_cannot_name_a_step_is_refused(name):
    with pytest.raises(DefinitionError, match="the name of a step"):
        sale().step(name)(handler)


def test_a_step_that_is_named_as_a_migration_is_refused():
    with pytest.raises(DefinitionError, match="are migrations"):
        sale().step("migrate:prices")


def test_a_queue_that_is_none_is_refused():
    assert sale().queue == "durable"
    assert sale(queue="slow").queue == "slow"
    with pytest.raises(DefinitionError, match="a queue is named"):
        sale(queue="a b")


class NoSchema:
    pass


@pytest.mark.parametrize("model", [NoSchema, "Later", 7, object()])
def test_what_is_no_schema_is_refused(model):
    with pytest.raises(DefinitionError, match="its state is a pydantic model"):
        CaseType("sale", state=model, registered=False)
    with pytest.raises(DefinitionError, match="its actor is a pydantic model"):
        sale(actor=model)
    with pytest.raises(DefinitionError, match="its input is a pydantic model"):
        declared(input=model)


class WithSecret(BaseModel):
    token: SecretStr | None = None


class Nested(BaseModel):
    parts: list[WithSecret] = []


class Named(BaseModel):
    writeOnly: bool = False


class Crossed(BaseModel):
    name: str = Field(alias="title")
    title: str = Field(alias="heading")


class Chosen(BaseModel):
    name: str = Field(validation_alias=AliasChoices("called", AliasPath("title", 0)))
    title: str


class Around(BaseModel):
    crossed: dict[str, list[Crossed | None]]
    again: "Around | None" = None


@pytest.mark.parametrize("model", [Crossed, Chosen, Around, list[Crossed]])
def test_an_alias_that_is_the_name_of_another_field_is_refused_where_it_is_declared(model):
    with pytest.raises(DefinitionError, match="the alias 'title', which is the name of another field"):
        CaseType("test.crossed", state=model, registered=False)


def test_an_alias_of_its_own_is_read_and_its_name_is_stored():
    class Titled(BaseModel):
        name: str = Field(alias="title")
        heading: str = Field(alias="heading")

    kind = CaseType("test.titled", state=Titled, registered=False)
    assert kind.dump(kind.load({"title": "N", "heading": "H"})) == {"name": "N", "heading": "H"}


@pytest.mark.parametrize("model", [WithSecret, Nested, SecretBytes])
def test_a_secret_that_would_be_stored_as_stars_is_refused_where_it_is_declared(model):
    for declare in (
        lambda: CaseType("sale", state=model, registered=False),
        lambda: sale(actor=model),
        lambda: declared(input=model),
    ):
        with pytest.raises(DefinitionError, match="has a field of a secret type"):
            declare()
    assert CaseType("sale", state=Named, registered=False).dump({"writeOnly": True}) == {"writeOnly": True}


class Tagged(BaseModel):
    tags: set[str] = set()


class Ordered(BaseModel):
    tags: Annotated[set[str], PlainSerializer(sorted, return_type=list[str])] = set()


@pytest.mark.parametrize("model", [Tagged, list[Tagged], dict[str, frozenset[int]]])
def test_a_set_which_each_process_would_write_in_another_order_is_refused_unless_it_has_one(model):
    for declare in (
        lambda: CaseType("sale", state=model, registered=False),
        lambda: sale(actor=model),
        lambda: declared(input=model),
    ):
        with pytest.raises(DefinitionError, match="has a set: each process would write its items in another order"):
            declare()
    assert CaseType("sale", state=Ordered, registered=False).dump({"tags": ["b", "a"]}) == {"tags": ["a", "b"]}


# --- handlers ------------------------------------------------------------------------------------


async def later(state, ctx):
    return state


async def later_in_parts(state, ctx):
    yield state


def in_parts(state, ctx):
    yield state


class Later:
    async def __call__(self, state, ctx):
        return state


HANDLERS = [
    None,
    "sign",
    lambda: 1,
    lambda state: 1,
    lambda state, ctx, more: 1,
    later,
    in_parts,
    later_in_parts,
    Later(),
]


def named(one):
    """A name without an address in it: every process of a run collects the same tests."""
    return getattr(one, "__name__", one if isinstance(one, str) else type(one).__name__)


@pytest.mark.parametrize("bad", HANDLERS, ids=named)
def test_a_handler_that_could_not_be_called_is_refused(bad):
    with pytest.raises(DefinitionError, match="step 'sign': a handler"):
        sale().step("sign")(bad)


@pytest.mark.parametrize("good", [lambda state, ctx, more=1: 1, lambda *both: 1, functools.partial(handler)])
def test_a_handler_that_can_be_called_with_two_is_taken(good):
    assert sale().step("sign")(good).handler is good


# --- conditions ----------------------------------------------------------------------------------


async def ok_later(state):
    return True


def ok_in_parts(state):
    yield True


BAD_CONDITIONS = [
    (None, "a function is wanted"),
    (True, "a function is wanted"),
    (ok_later, "async"),
    (functools.partial(ok_later), "async"),
    (Later(), "async"),
    (ok_in_parts, "yields"),
    (lambda: True, "takes the state as its first parameter"),
    (lambda *all: True, "takes the state as its first parameter"),
    (lambda *, state: True, "takes the state as its first parameter"),
    (lambda state, **rest: True, "it takes 'rest'"),
    (lambda state, *rest: True, "it takes 'rest'"),
    (lambda state, as_of, /: True, "it takes 'as_of'"),
    (lambda state, limit=3: True, "it takes 'limit'"),
    (lambda state, element: True, "only a step with a scope has elements"),
    (lambda state, key: True, "only a step with a scope has elements"),
    (lambda element: True, r"write \(state, element\)"),
    (bool, "that Python can describe"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_CONDITIONS, ids=named)
@pytest.mark.parametrize("section", ["requires", "permits"])
def test_a_condition_that_could_not_be_asked_is_refused(section, bad, why):
    with pytest.raises(DefinitionError, match=why) as refused:
        declared(**{section: {"is open": bad}})
    assert f"sale: step 'sign': {section}: 'is open'" in str(refused.value)
    with pytest.raises(DefinitionError, match=why):
        declared(**{section: {"one of": any_of({"fine": yes, "is open": bad})}})


@pytest.mark.spec("cases", 27)
def test_an_async_condition_is_refused_where_it_is_declared():
    with pytest.raises(DefinitionError, match="an async function does not answer at once"):
        declared(requires={"is open": ok_later})
    with pytest.raises(DefinitionError, match="an async function does not answer at once"):
        declared(permits={"one of": any_of({"is open": ok_later})})


def test_who_acts_is_asked_under_permits_alone():
    with pytest.raises(DefinitionError, match="who acts is asked under permits"):
        declared(requires={"is seller": lambda state, actor: True})
    assert declared(permits={"is seller": lambda state, actor: True}).permits[0].takes == {"actor"}


def test_a_condition_says_by_its_parameters_what_it_is_given():
    def all_of_it(state, as_of, *, element, key, actor):
        return True

    step = declared(scope=EACH_BUYER, permits={"all": all_of_it})
    assert step.permits[0].takes == {"as_of", "element", "key", "actor"}
    assert declared(requires={"due": lambda state, as_of: True}).requires[0].takes == {"as_of"}
    bound = functools.partial(lambda state, limit: True, limit=3)
    assert declared(requires={"cheap": bound}).requires[0].takes == frozenset()


def test_conditions_keep_their_order():
    step = declared(requires={"b": yes, "a": any_of({"z": yes, "y": yes}), "c": yes})
    assert [condition.name for condition in step.requires] == ["b", "a", "c"]
    assert [arm.name for arm in step.requires[1].arms] == ["z", "y"]


@pytest.mark.parametrize("given", [yes, [yes], "open", {"open"}])
def test_conditions_without_names_are_refused(given):
    with pytest.raises(DefinitionError, match="takes conditions by name"):
        declared(requires=given)


@pytest.mark.parametrize("name", ["", " ", "$scope", 7, "a\x00b", "x" * 201])
def test_a_name_that_cannot_name_a_condition_is_refused(name):
    with pytest.raises(DefinitionError, match="the name of a condition"):
        declared(permits={name: yes})
    with pytest.raises(DefinitionError, match="the name of a condition"):
        declared(permits={"one of": any_of({name: yes})})


def test_any_of_is_one_level_deep_and_has_arms():
    with pytest.raises(DefinitionError, match="any_of within any_of"):
        any_of({"a": any_of({"b": yes})})
    for nothing in ({}, [yes], None, yes):
        with pytest.raises(DefinitionError, match="by name, at least one"):
            any_of(nothing)


def test_unmet_has_a_reason_and_is_false():
    assert not Unmet("it is closed")
    for nothing in ("", "  ", None, 3):
        with pytest.raises(TypeError, match="the reason"):
            Unmet(nothing)


# --- scopes --------------------------------------------------------------------------------------


def all_(state):
    return []


SCOPES = [
    (None, str), (all_, None), (all_, "id"), (lambda: [], str), (all_, lambda one, two: ""), (ok_later, str),
    (all_, ok_later), (ok_in_parts, str),
]  # fmt: skip


@pytest.mark.parametrize(("select", "key"), SCOPES)
def test_a_scope_that_could_not_be_asked_is_refused(select, key):
    with pytest.raises(DefinitionError, match="Scope: "):
        Scope(select=select, key=key)


def test_a_scope_may_be_made_of_functions_of_c():
    assert Scope(select=operator.attrgetter("buyers"), key=operator.itemgetter("id"))


@pytest.mark.parametrize("given", [all_, "buyers", (all_, str)])
def test_what_is_no_scope_is_refused(given):
    with pytest.raises(DefinitionError, match=r"a scope is Scope\(select=..., key=...\)"):
        declared(scope=given)


# --- attempts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "3", None, 1001])
def test_a_limit_of_attempts_that_is_none_is_refused(limit):
    with pytest.raises(DefinitionError, match="the limit is a whole number"):
        Attempts(limit)


@pytest.mark.parametrize("delay", [-1, math.nan, math.inf, True, "1", 10**400, 3601])
def test_a_delay_that_is_none_is_refused(delay):
    with pytest.raises(DefinitionError, match="a delay is seconds"):
        Attempts(3, delay)
    with pytest.raises(DefinitionError, match="the delay after attempt 1"):
        Attempts(3, lambda failed: delay)


def test_a_delay_that_raises_is_refused():
    with pytest.raises(DefinitionError, match="the delay raised ZeroDivisionError"):
        Attempts(3, lambda failed: 1 / 0)


def test_the_default_is_three_attempts_and_doubles_its_wait_up_to_five_seconds():
    assert Attempts().limit == 3
    assert [Attempts().seconds(k) for k in (1, 2, 3, 6, 7, 2000)] == [0.1, 0.2, 0.4, 3.2, 5.0, 5.0]


def test_a_delay_is_a_number_or_asked_of_a_function():
    assert [Attempts(3, 2).seconds(k) for k in (1, 2)] == [2.0, 2.0]
    assert [Attempts(3, lambda failed: failed * 10).seconds(k) for k in (1, 2)] == [10.0, 20.0]
    assert Attempts(3, 0).seconds(1) == 0.0


@pytest.mark.parametrize("delay", [lambda failed: 1 / (2 - failed), lambda failed: 1 if failed == 1 else -1])
def test_a_delay_that_fails_later_does_not_end_the_execution(delay):
    assert Attempts(3, delay).seconds(2) == Attempts().seconds(2)


def test_a_step_takes_a_policy_or_a_number():
    assert declared().retry == Attempts()
    assert declared(retry=1).retry == Attempts(1)
    assert declared(retry=Attempts(2, 1.0)).retry == Attempts(2, 1.0)
    assert Attempts.of(Attempts(2)) == Attempts(2)
    for bad in ("3", 1.5, {"limit": 3}):
        with pytest.raises(DefinitionError, match="retry is Attempts"):
            declared(retry=bad)
    with pytest.raises(DefinitionError, match="the limit"):
        declared(retry=0)


# --- state ---------------------------------------------------------------------------------------


def test_a_state_is_loaded_and_written_through_its_model():
    assert sale().load({"price": 3}) == Sale(price=3)
    assert sale().dump(Sale(price=3)) == {"price": 3, "buyers": []}
    assert sale().dump({"price": "3"}) == {"price": 3, "buyers": []}


def test_a_state_that_was_changed_in_place_is_validated_before_it_is_stored():
    state = Sale()
    state.price = ["not a price"]
    with pytest.raises(InvalidState, match="price: Input should be a valid integer"):
        sale().dump(state)


def test_each_load_is_a_state_of_its_own():
    stored = {"buyers": ["ann"]}
    plain = CaseType("plain", registered=False)
    for case_type in (sale(), plain):
        loaded = case_type.load(stored)
        (loaded["buyers"] if case_type is plain else loaded.buyers).append("ben")
    assert stored == {"buyers": ["ann"]}


@pytest.mark.parametrize("lost", [None, 7, "state", [1]])
def test_what_is_no_state_is_refused(lost):
    with pytest.raises(InvalidState):
        sale().dump(lost)


def test_a_handler_that_forgot_to_return_does_not_empty_a_plain_state():
    with pytest.raises(InvalidState, match="a handler returns the state"):
        CaseType("plain", registered=False).dump(None)


@pytest.mark.filterwarnings("error")
def test_a_coroutine_is_no_state_and_is_closed():
    for case_type in (sale(), CaseType("plain", registered=False)):
        with pytest.raises(InvalidState):
            case_type.dump(later({}, None))
        gc.collect()  # what was never awaited would complain here


def cyclic():
    state: dict[str, object] = {}
    state["self"] = state
    return state


UNFIT = [
    {1: "a"}, {"a": object()}, {"a": math.nan}, {"a": {1, 2}}, {"a": 2**64}, {"a": "\x00"}, {"a": "\ud800"}, cyclic(),
    {"a": datetime(2026, 1, 1, tzinfo=UTC)},
]  # fmt: skip


@pytest.mark.parametrize(
    "unfit", UNFIT, ids=lambda one: next(iter(one)) if isinstance(one, str) else type(one).__name__
)
def test_a_plain_state_is_strict_json(unfit):
    with pytest.raises(InvalidState):
        CaseType("plain", registered=False).dump(unfit)


class Phase(StrEnum):
    OPEN = "open"


@pytest.mark.spec("cases", 28)
def test_a_plain_state_is_stored_as_it_will_come_back():
    stored = CaseType("plain", registered=False).dump(
        {"pair": (1, (2,)), "phase": Phase.OPEN, "zero": -0.0, "one": True}
    )
    assert stored == {"pair": [1, [2]], "phase": "open", "zero": 0.0, "one": True}
    assert type(stored["phase"]) is str
    assert math.copysign(1, stored["zero"]) == 1
    assert stored["one"] is True


class Renamed(BaseModel):
    model_config = ConfigDict(populate_by_name=False)
    price: int = Field(alias="thePrice")


def test_a_field_with_an_alias_is_taken_by_both_names_and_stored_under_its_own():
    case_type = CaseType("renamed", state=Renamed, registered=False)
    stored = case_type.dump({"thePrice": 3})
    assert stored == {"price": 3}
    assert case_type.load(stored).price == case_type.load({"thePrice": 3}).price == 3


class OneWay(BaseModel):
    price: int

    @field_serializer("price")
    def written(self, price: int) -> str:
        return f"{price} euro" if price > 1 else str(price)

    @field_validator("price")
    @classmethod
    def doubled(cls, price: int) -> int:
        return price * 2


def test_a_state_that_could_be_written_and_not_read_again_is_refused():
    """Its case could never be loaded again."""
    with pytest.raises(InvalidState, match="price"):
        CaseType("one_way", state=OneWay, registered=False).dump({"price": 1})


class Broken(BaseModel):
    price: int

    @field_validator("price")
    @classmethod
    def looked_up(cls, price: int) -> int:
        return {}[price]


def test_a_model_whose_own_code_raises_is_told_as_a_state_that_does_not_fit():
    with pytest.raises(InvalidState, match="its model raised KeyError"):
        CaseType("broken", state=Broken, registered=False).load({"price": 1})


def test_the_faults_of_a_document_are_told_by_place_and_without_its_values():
    with pytest.raises(InvalidState) as refused:
        sale().load({"price": "secret", "buyers": [1]})
    assert [issue.at for issue in refused.value.issues] == ["price", "buyers.0"]
    assert "secret" not in str(refused.value)


# --- input ---------------------------------------------------------------------------------------


def test_an_input_gets_its_defaults():
    step = declared(input=Offer)
    assert step.load_input({"amount": 3}) == Offer(amount=3, note="none")
    assert step.load_input(Offer(amount=3)) == Offer(amount=3)
    assert step.dump_input(step.load_input({"amount": 3})) == {"amount": 3, "note": "none"}


class Reminder(BaseModel):
    days: int = 7


def test_no_input_is_enough_where_all_of_it_has_defaults():
    assert declared(input=Reminder).load_input(None) == Reminder(days=7)
    assert declared(input=Reminder | None).load_input(None) is None
    with pytest.raises(InvalidInput, match="amount: Field required"):
        declared(input=Offer).load_input(None)


def test_a_step_without_an_input_takes_none():
    assert declared().load_input(None) is None
    assert declared().dump_input(None) is None
    for given in ({}, 0, "", Offer(amount=1)):
        with pytest.raises(InvalidInput, match="takes no input"):
            declared().load_input(given)


@pytest.mark.parametrize("given", [{}, {"amount": "many"}, [], 7, cyclic(), object()])
def test_an_input_that_does_not_fit_is_refused_with_its_faults(given):
    with pytest.raises(InvalidInput) as refused:
        declared(input=Offer).load_input(given)
    assert refused.value.issues
    assert (refused.value.case_type, refused.value.step) == ("sale", "sign")


# --- who acts ------------------------------------------------------------------------------------


class User(BaseModel):
    name: str
    roles: tuple[str, ...] = ()


def test_a_guard_sees_an_actor_as_the_journal_keeps_it():
    """Else a condition that reads attributes would hold now, and fail at the replay."""
    seen = sale().actor_of(User(name="dana", roles=("seller",)))
    assert seen.value == seen.json == {"name": "dana", "roles": ["seller"]}
    with_model = sale(actor=User)
    for given in (User(name="dana"), {"name": "dana"}):
        assert with_model.actor_of(given).value == User(name="dana")
        assert with_model.actor_of(given).json == {"name": "dana", "roles": []}
    assert with_model.actor_of(with_model.actor_of(User(name="dana")).json).value == User(name="dana")


def test_an_actor_that_does_not_fit_the_model_stays_plain():
    assert sale(actor=User).actor_of({"system": "signatures"}).value == {"system": "signatures"}
    assert sale(actor=User).actor_of(None).value is None


@pytest.mark.spec("cases", 40)
@pytest.mark.parametrize("actor", [cyclic(), object(), {"a": object()}, "\x00"])
def test_an_actor_that_is_no_json_is_seen_as_it_is_and_leaves_a_marker(actor):
    seen = sale().actor_of(actor)
    assert seen.value is actor
    assert not seen.whole
    assert seen.json["durable"] == "not stored"


def test_what_a_handler_does_to_its_actor_stays_out_of_the_journal():
    seen = sale().actor_of({"roles": ["seller"]})
    seen.value["roles"].append("admin")
    assert seen.json == {"roles": ["seller"]}


def test_an_actor_with_an_instant_is_kept_as_text():
    assert sale().actor_of({"since": datetime(2026, 1, 1, tzinfo=UTC)}).value == {"since": "2026-01-01T00:00:00Z"}


# --- what people and tools see -------------------------------------------------------------------


def test_a_step_tells_its_words_and_the_schema_of_its_input():
    step = declared(
        title="Sign",
        scope=EACH_BUYER,
        input=Reminder,
        requires={"open": yes},
        permits={"one": any_of({"a": yes})},
        retry=1,
    )
    told = step.to_json()
    assert (told["name"], told["title"], told["scoped"], told["attempts"]) == ("sign", "Sign", True, 1)
    assert (told["requires"], told["permits"]) == (["open"], [{"one": ["a"]}])
    assert told["input"]["properties"]["days"]["default"] == 7


class Opaque(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: NoSchema | None = None


def test_an_input_without_a_json_schema_is_told_without_one():
    assert declared(input=Opaque).to_json()["input"] is None
    assert declared().to_json()["input"] is None


class Unwritable(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    count: int = Field(default_factory=int)
    odd: complex = 1j
    thing: int = NoSchema()


@pytest.mark.filterwarnings("error")
def test_a_default_that_has_no_json_is_declared_without_a_warning():
    assert "count" in declared(input=Unwritable).to_json()["input"]["properties"]


def test_words_for_people_are_text():
    for option in ("title", "description"):
        with pytest.raises(DefinitionError, match=f"its {option} is text"):
            declared(**{option: 7})
