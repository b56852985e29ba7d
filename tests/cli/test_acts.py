"""Acts on all that filters choose, and pauses, as commands."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core.claims.journal import Line
from durable_core.database.connections import Database
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.sweep import IDLE_SECONDS, dispatch
from durable_core.testing import Made, MovableClock
from tests.cli.conftest import value_of
from tests.conftest import Recorded

Run = Callable[..., Result]
WHO = ("--by", "dana", "--reason", "they are back")


def test_a_filter_moves_what_it_chooses_and_nothing_else(
    durable: Run, make: Callable[..., Made], row: Callable[[str], Delivery], lines: Callable[[str], list[Line]]
) -> None:
    chosen = [make(state="dead", queue="mail").id for _ in range(3)]
    others = [make(state="dead").id, make(state="failed", queue="mail").id]
    line = ("deliveries", "redrive", "--queue", "mail", "--state", "dead", *WHO)

    foreseen = value_of(durable(*line, "--dry-run", "--json"))
    assert (foreseen["dry_run"], foreseen["chosen"], foreseen["done"]) == (True, 3, 0)
    assert foreseen["sample"] == chosen
    assert {row(row_id).state for row_id in chosen} == {"dead"}

    done = value_of(durable(*line, "--rate", "1000/s", "--yes", "--json"))
    assert (done["done"], done["moved_on"], done["busy"]) == (3, 0, 0)
    assert {row(row_id).state for row_id in chosen} == {"pending"}
    assert {row(row_id).state for row_id in others} == {"dead", "failed"}
    assert [(line.by, line.reason) for line in lines(chosen[0])] == [("dana", "they are back")]


@pytest.fixture
def hinted(database: Database, carrier: Recorded) -> Callable[[], set[str]]:
    """The ids that a dispatch run at this instant hints; the queues of the broker are empty."""

    def _hinted() -> set[str]:
        carrier.published.clear()
        carrier.lying.clear()
        dispatch(database)
        return {hint.id for hint in carrier.published}

    return _hinted


@pytest.mark.parametrize("by_ids", [True, False], ids=["ids", "filter"])
@pytest.mark.parametrize("act", ["redrive", "reschedule", "release"])
def test_what_an_act_makes_due_is_hinted_by_the_very_next_dispatch(
    durable: Run, engine: Engine, make: Callable[..., Made], hinted: Callable[[], set[str]], clock: MovableClock,
    act: str, by_ids: bool,
) -> None:  # fmt: skip
    """The command hints nothing, and the clock stands still: neither another sweep nor any waiting is needed."""
    clock.freeze()
    stopped: dict[str, dict[str, Any]] = {
        "redrive": {"state": "dead"},
        "reschedule": {"countdown": 7200},
        "release": {},
    }
    made = {make(queue="mail", **stopped[act]).id for _ in range(3)}
    if act == "release":
        with engine.begin() as tx:
            tx.execute(text("update durable.deliveries set held_reason = 'P0001: stumbled'"))
    assert hinted() == set()

    which = sorted(made) if by_ids else ("--queue", "mail")
    when = ("--in", "0") if act == "reschedule" else ()
    assert durable("deliveries", act, *which, *when, *WHO, "--yes").exit_code == 0

    assert hinted() == made


@pytest.mark.parametrize("act", ["cancel", "discard"])
def test_the_next_of_a_line_that_an_act_frees_is_hinted_once_it_is_looked_at_again(
    durable: Run, declare: Callable[..., Any], make: Callable[..., Made], hinted: Callable[[], set[str]],
    clock: MovableClock, act: str,
) -> None:  # fmt: skip
    clock.freeze()
    strict = declare(ordering="strict")
    first = make(strict, ordering_key="line", state={"cancel": "processing", "discard": "dead"}[act])
    second = make(strict, ordering_key="line")
    assert hinted() == set()  # it has just been found to be behind

    assert durable("deliveries", act, first.id, *WHO, "--yes").exit_code == 0

    clock.advance(IDLE_SECONDS)
    assert hinted() == {second.id}


def test_older_than_counts_from_when_it_was_enqueued(
    durable: Run, make: Callable[..., Made], row: Callable[[str], Delivery], clock: MovableClock
) -> None:
    old = make()
    clock.advance(7200)
    new = make()
    assert durable("deliveries", "cancel", "--older-than", "1h", *WHO, "--yes").exit_code == 0
    assert (row(old.id).state, row(new.id).state) == ("canceled", "pending")


def test_a_reschedule_takes_a_duration_or_an_instant(
    durable: Run, make: Callable[..., Made], row: Callable[[str], Delivery], clock: MovableClock
) -> None:
    clock.freeze()
    made = make()
    act = ("deliveries", "reschedule", made.id, *WHO, "--yes")
    assert durable(*act, "--in", "15m").exit_code == 0
    assert (row(made.id).due_at - clock.now()).total_seconds() == 900
    assert durable(*act, "--at", "2100-01-01T08:00:00+01:00").exit_code == 0
    assert row(made.id).due_at.isoformat().startswith("2100-01-01")


@pytest.mark.parametrize(
    "line",
    [
        (), ("ID", "--queue", "mail"), ("--queue", "mail", "--rate", "0/s"), ("--older-than", "soon"),
        ("--state", "sent"),
    ],
)  # fmt: skip
def test_a_line_that_chooses_nothing_or_both_or_cannot_be_is_a_usage_error(
    durable: Run, make: Callable[..., Made], row: Callable[[str], Delivery], line: tuple[str, ...]
) -> None:
    made = make(state="dead", queue="mail")
    given = [made.id if word == "ID" else word for word in line]
    assert durable("deliveries", "redrive", *given, *WHO, "--yes").exit_code == 2
    assert row(made.id).state == "dead"


@pytest.mark.parametrize("when", [(), ("--in", "1h", "--at", "2100-01-01T08:00:00Z"), ("--at", "tomorrow")])
def test_a_reschedule_needs_one_time(durable: Run, make: Callable[..., Made], when: tuple[str, ...]) -> None:
    assert durable("deliveries", "reschedule", make().id, *when, *WHO, "--yes").exit_code == 2


def test_a_queue_and_a_kind_are_paused_listed_and_resumed(durable: Run, kind: Any) -> None:
    for one in (("--queue", "mail"), ("--kind", kind.name)):
        assert durable("pause", *one, "--for", "2h", *WHO).exit_code == 0
        (listed,) = value_of(durable("pauses", "--json"))["pauses"]
        assert (listed["name"], listed["by"], listed["reason"]) == (one[1], "dana", "they are back")
        assert listed["until"] is not None
        assert durable("resume", *one, "--by", "dana").exit_code == 0
        assert durable("resume", *one, "--by", "dana").exit_code == 4
        assert value_of(durable("pauses", "--json"))["pauses"] == []
    assert durable("pause", *WHO).exit_code == 2
    assert durable("pause", "--queue", "mail", "--kind", kind.name, *WHO).exit_code == 2
