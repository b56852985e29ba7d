"""`durable operations`: the rows as people and programs read them, and what a person may do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core import OperationKind, operations
from tests.cli.conftest import value_of
from tests.operations import Provider

Run = Callable[..., Result]

ACT = ("--by", "dana", "--reason", "audit")


def test_the_list_and_a_page_of_it_have_a_count_and_no_id_of_the_other_side(
    durable: Run, declare_operation: Callable[..., OperationKind], start: Any, look: Any, remote: Provider
) -> None:
    kind = declare_operation(one_in_flight=False)
    refs = [start(kind, "preview", parts=2, key=f"k{n}") for n in range(3)]
    look(kind, refs[0].id)
    shown = durable("operations", "list")
    assert "2" in shown.stdout
    assert "dana" in shown.stdout
    answer = value_of(durable("operations", "list", "--json", "--limit", "2"))
    assert [row["id"] for row in answer["operations"]] == [refs[2].id, refs[1].id]
    rest = value_of(durable("operations", "list", "--json", "--after", answer["next_after"]))
    assert [row["id"] for row in rest["operations"]] == [refs[0].id]
    assert rest["operations"][0]["external_operations"] == 2
    for said in (shown.stdout, json.dumps(rest), durable("operations", "show", refs[0].id).stdout):
        assert not any(one in said for one in remote.ids())
    (one,) = value_of(durable("operations", "list", "--json", "--key", "k1", "--state", "queued"))["operations"]
    assert one["id"] == refs[1].id


def test_one_is_shown_with_why_and_its_history(durable: Run, reset: OperationKind, start: Any, look: Any) -> None:
    ref = start(reset)
    assert "waits for a worker to issue it" in durable("operations", "show", ref.id).stdout
    look(reset, ref.id)
    shown = value_of(durable("operations", "show", ref.id, "--json", "--arguments"))
    assert [line["move"] for line in shown["journal"]] == ["start", "take", "issued"]
    assert "next poll" in shown["why"]
    assert (shown["arguments"], shown["journal_complete"]) == ({}, True)
    assert "arguments" not in value_of(durable("operations", "show", ref.id, "--json"))
    assert durable("operations", "show", "0198").exit_code == 4


def test_acts_say_what_became_of_each(
    durable: Run, engine: Engine, declare_operation: Callable[..., OperationKind], start: Any, look: Any,
    operation_row: Any,
) -> None:  # fmt: skip
    kind = declare_operation(one_in_flight=False)
    queued, running, held = (start(kind).id for _ in range(3))
    look(kind, running)
    with engine.begin() as tx:
        tx.execute(text("update durable.operations set held_reason = 'x' where id = :id"), {"id": held})
    assert durable("operations", "cancel", queued, *ACT).exit_code == 2, "no terminal, so --yes is needed"
    dry = value_of(durable("operations", "cancel", queued, *ACT, "--dry-run", "--json"))
    assert dry["operations"][0]["outcome"] == "would be canceled"
    assert operation_row(queued).state == "queued"
    assert durable("operations", "poll", queued, *ACT, "--yes").exit_code == 5
    assert durable("operations", "poll", running, *ACT, "--yes").exit_code == 0
    assert durable("operations", "release", held, *ACT, "--yes").exit_code == 0
    assert operation_row(held).held_reason is None
    done = durable("operations", "cancel", queued, running, *ACT, "--yes", "--json")
    assert {one["outcome"] for one in value_of(done)["operations"]} == {"canceled"}
    assert (operation_row(running).canceled_by, operation_row(running).canceled_reason) == ("dana", "audit")
    again = durable("operations", "cancel", queued, *ACT, "--yes", "--json")
    assert (again.exit_code, value_of(again)["operations"][0]["outcome"]) == (0, "unchanged")
    assert durable("operations", "cancel", "0198", *ACT, "--yes").exit_code == 4


@pytest.mark.parametrize("by", ["id", "beginning", "step.key", "key"])
def test_it_is_found_by_whatever_names_it(durable: Run, reset: OperationKind, start: Any, by: str) -> None:
    ref = start(reset, key="reset-42")
    named = {"id": ref.id, "beginning": ref.id[:13], "step.key": f"{reset.name}:{ref.id}", "key": "reset-42"}[by]
    (found,) = value_of(durable("find", named, "--json"))["found"]
    assert (found["what"], found["id"], found["look"]) == ("operation", ref.id, f"durable operations show {ref.id}")
    assert by in found["by"]


def test_its_journal_is_found_and_says_its_kind(durable: Run, reset: OperationKind, start: Any, look: Any) -> None:
    ref = start(reset, key="reset-42")
    look(reset, ref.id)
    for named in (ref.id, "reset-42"):
        lines = value_of(durable("journal", named, "--json"))["lines"]
        assert [(line["kind"], line["move"]) for line in lines] == [
            (reset.name, "issued"), (reset.name, "take"), (reset.name, "start"),
        ]  # fmt: skip


def test_status_tells_what_is_overdue(
    durable: Run, engine: Engine, reset: OperationKind, start: Any, look: Any, clock: Any
) -> None:
    ref = start(reset)
    assert value_of(durable("status", "--json"))["operations"] == {"queued": 1, "running": 0, "overdue": 0}
    look(reset, ref.id)
    clock.advance(seconds=301)
    answer = durable("status", "--check", "--json")
    assert value_of(answer)["operations"] == {"queued": 0, "running": 1, "overdue": 1}
    assert "operations are overdue" in answer.stderr
    assert "1 running, 1 overdue" in durable("status").stdout
    with engine.begin() as tx:
        operations.cancel(tx, ref.id, by="dana", reason="over")
    assert "operations:" not in durable("status").stdout
