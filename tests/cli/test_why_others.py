"""`durable why` of a plan and of an operation: the same command, whatever an id names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine

from durable_core import OperationKind, OperationRef, deliveries
from durable_core.deliveries.worker import Attempted
from durable_core.testing import MovableClock
from tests.cli.conftest import error_of, value_of
from tests.core.plan_shop import Shop

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def frozen(clock: MovableClock) -> MovableClock:
    clock.freeze()
    return clock


def told(durable: Run, text: str) -> dict[str, Any]:
    """The answer for programs, which begins with the one line that people get."""
    answer: dict[str, Any] = value_of(durable("why", text, "--json"))
    assert durable("why", text).stdout.splitlines() == [answer["why"]]
    return answer


def test_a_plan_is_asked_by_its_id_its_origin_or_the_key_of_a_step(durable: Run, shop: Shop) -> None:
    plan = shop.propose(shop.step().planned(), origin="chat:7")
    for text in (plan.id, "chat:7", f"{plan.id}:0"):
        answer = told(durable, text)
        assert (answer["what"], answer["id"], answer["state"]) == ("plan", plan.id, "pending")
        assert answer["why"].startswith("it waits for a person to approve or reject it")
        assert [(one["cause"], one["blocks"]) for one in answer["waits"]] == [("approval", True)]
        assert answer["waits"][0]["until"].endswith("Z")


def test_nothing_is_healed_by_the_question(durable: Run, shop: Shop, clock: MovableClock) -> None:
    plan = shop.propose(shop.step().planned(), expires=5)
    clock.advance(seconds=6)
    assert told(durable, plan.id)["why"].startswith("its time to be approved passed 1s ago")
    assert shop.raw(plan.id).state == "pending"


def test_an_operation_is_asked_by_its_id_or_its_key(
    durable: Run, start: Callable[..., OperationRef], reset: OperationKind, look: Callable[..., Attempted]
) -> None:
    ref = start(reset, key="reset:7")
    for text in (ref.id, "reset:7", f"{reset.name}:{ref.id}"):
        answer = told(durable, text)
        assert (answer["what"], answer["id"], answer["state"]) == ("operation", ref.id, "queued")
        assert answer["why"].startswith("it waits for a worker to issue it, one that reads queue durable")
        assert answer["readers"] is None, "no app was named, so nobody was asked"
    look(reset, ref.id)
    assert told(durable, ref.id)["why"].startswith("its next poll is due in 2s")


def test_more_than_one_reason_is_said_to_be_more(durable: Run, engine: Engine, shop: Shop) -> None:
    plan = shop.approved(shop.step(queue="letters").planned())
    with engine.begin() as tx:
        deliveries.pause(tx, "kind", plan.kind, by="dana", reason="away")
        deliveries.pause(tx, "queue", "letters", by="dana", reason="away")
    answer = told(durable, plan.id)
    assert (answer["why"][:5], len(answer["also"])) == ("kind ", 1)
    assert f"and more: `durable plans show {plan.id}`" in durable("why", plan.id).stderr


def test_one_that_ended_says_how(durable: Run, engine: Engine, shop: Shop) -> None:
    plan = shop.propose(shop.step().planned())
    assert durable("plans", "reject", plan.id, "--by", "dana", "--reason", "too dear").exit_code == 0
    answer = told(durable, plan.id)
    assert answer["why"].endswith("by dana (too dear): no step of it has run.")
    assert answer["state"] == "rejected"


def test_what_names_nothing_is_not_found(durable: Run) -> None:
    result = durable("why", "chat:7", "--json")
    assert (result.exit_code, error_of(result)) == (4, "NOT_FOUND")


def test_show_says_the_same(
    durable: Run, engine: Engine, shop: Shop, start: Callable[..., OperationRef], reset: OperationKind
) -> None:
    plan, ref = shop.approved(shop.step().planned()), start(reset)
    with engine.begin() as tx:
        for kind in (plan.kind, reset.name):
            deliveries.pause(tx, "kind", kind, by="dana", reason="away")
        deliveries.pause(tx, "queue", "durable", by="dana", reason="away")
    for row_id, command in ((plan.id, "plans"), (ref.id, "operations")):
        both = told(durable, row_id)
        seen = value_of(durable(command, "show", row_id, "--json"))
        assert [both["why"], *both["also"]] == (seen["why"] if command == "plans" else [seen["why"], *seen["also"]])
        shown = durable(command, "show", row_id).stdout
        assert "why " in shown
        assert both["why"] in shown
        assert both["also"][0] in shown
