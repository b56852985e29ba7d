"""`durable journal`: of one row and of all, a page at a time."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from durable_core.testing import Made, MovableClock
from tests.cli.conftest import value_of

Run = Callable[..., Result]
SAID = ("--by", "dana", "--reason", "the printer is back", "--yes")


@pytest.fixture
def acted(durable: Run, make: Callable[..., Made], clock: MovableClock) -> list[str]:
    """Three deliveries: the first redriven two hours ago, the second canceled an hour ago, the third canceled now."""
    made = [make(state="dead"), make(), make()]
    for name, one in zip(("redrive", "cancel", "cancel"), made, strict=True):
        assert durable("deliveries", name, one.id, *SAID).exit_code == 0
        clock.advance(seconds=3600)
    return [one.id for one in made]


def lines(durable: Run, *line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = value_of(durable("journal", *line, "--json"))["lines"]
    return found


def test_the_newest_line_comes_first_and_says_of_what_by_whom_and_why(durable: Run, acted: list[str]) -> None:
    seen = lines(durable)
    assert [one["row_id"] for one in seen] == acted[::-1]
    assert [one["move"] for one in seen] == ["cancel", "cancel", "redrive"]
    last = seen[0]
    assert (last["from_state"], last["to_state"], last["by"]) == ("pending", "canceled", "dana")
    assert (last["reason"], last["contract"]) == ("the printer is back", "delivery")
    assert last["at"].endswith("Z")

    told = durable("journal").stdout.splitlines()
    assert told[0].split() == ["LINE", "AGO", "KIND", "ID", "MOVE", "FROM", "TO", "ATTEMPT", "BY", "REASON"]
    assert told[1].split()[1] == "1h"
    assert acted[2] in told[1]


def test_of_one_row_since_when_and_which_move(durable: Run, acted: list[str]) -> None:
    assert [one["row_id"] for one in lines(durable, acted[0])] == [acted[0]]
    assert [one["row_id"] for one in lines(durable, acted[0][:35])] == [acted[0]]
    assert [one["row_id"] for one in lines(durable, "--since", "90m")] == [acted[2]]
    assert [one["row_id"] for one in lines(durable, "--since", "150m")] == acted[:0:-1]
    assert [one["row_id"] for one in lines(durable, "--move", "redrive")] == [acted[0]]
    assert lines(durable, acted[0], "--move", "cancel") == []
    assert lines(durable, acted[0], "--since", "1m") == []
    assert durable("journal", "--since", "soon").exit_code == 2


def test_a_page_goes_on_after_the_last_line_of_the_one_before(durable: Run, acted: list[str]) -> None:
    first = value_of(durable("journal", "--limit", "2", "--json"))
    assert [one["row_id"] for one in first["lines"]] == acted[:0:-1]
    second = value_of(durable("journal", "--limit", "2", "--after", str(first["next_after"]), "--json"))
    assert [one["row_id"] for one in second["lines"]] == acted[:1]
    assert second["next_after"] is None
    assert f"--after {first['next_after']}" in durable("journal", "--limit", "2").stderr


def test_a_rare_move_is_found_over_pages_each_of_which_reads_so_many_lines(
    durable: Run, acted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable_core.deliveries.history.LOOKED_AT", 2)
    first = value_of(durable("journal", "--move", "redrive", "--json"))
    assert (first["lines"], first["looked_at"]) == ([], 2)
    second = value_of(durable("journal", "--move", "redrive", "--after", str(first["next_after"]), "--json"))
    assert [one["row_id"] for one in second["lines"]] == acted[:1]
    assert second["next_after"] is None
    # What is older than asked for need not be looked at.
    assert value_of(durable("journal", "--move", "redrive", "--since", "90m", "--json"))["next_after"] is None


def test_a_table_shows_no_error_text(durable: Run, acted: list[str]) -> None:
    """The facts of a redrive hold the error that was; they are in the JSON, which is complete, and there alone."""
    assert "error_code" in lines(durable, "--move", "redrive")[0]["facts"]
    assert "error_code" not in durable("journal").stdout
