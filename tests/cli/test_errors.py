"""`durable errors`: what fails, by what it has in common, and a group sent round again."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core import GiveUp, Retry, Snooze
from durable_core.claims.claim import Holder
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker, perform
from durable_core.deliveries.declare import DeliveryKind, Step
from durable_core.deliveries.groups import LONGEST_SHAPE, fingerprint, shape
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.sweep import give_back, reap
from durable_core.testing import Made, MovableClock
from tests.cli.conftest import error_of, value_of

Run = Callable[..., Result]
SAID = ("--by", "dana", "--reason", "the printer is back")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("OSError: printer 7 is on fire", "OSError: printer 12 is on fire"),
        ("KeyError: 'anna'", "KeyError: 'ben'"),
        ('no "a \\"quoted\\" name" here', 'no "name" here'),
        ("gone: 0198f2a1-0000-7000-8000-00000000000a", "gone: 0198F2B2-1111-7000-8000-00000000000b"),
        ("no mail to anna@example.com", "no mail to ben.b@mail.example.org"),
        ("GET https://a.example/x?token=s3cret failed", "GET http://b.example:80/ failed"),
        ("object at 0x7f00aa", "object at 0x7f00ab"),
        ("took 1.5 s\nTraceback 1", "took 30 s\nTraceback 2"),
        ("digest 9f86d081884c7d65", "digest 2c26b46b68ffc68f"),
    ],
)
def test_what_differs_each_time_is_no_part_of_the_shape(one: str, other: str) -> None:
    assert shape(one) == shape(other)


def test_what_a_failure_is_stays_in_the_shape() -> None:
    assert shape("ValueError: can't print, won't print") == "ValueError: can't print, won't print"
    assert shape("added a facade") == "added a facade"
    assert shape("OSError: fire") != shape("OSError: water")
    assert shape(None) == shape("") == ""
    assert len(shape("x " * 1000)) <= LONGEST_SHAPE


def test_a_fingerprint_is_the_same_for_ever() -> None:
    """It stands in tickets and in scripts."""
    assert fingerprint("invoice.send", "WORKER_ERROR", "OSError: printer <n> is on fire") == "f18d6eb619f2"
    assert fingerprint("a", "b", "c") != fingerprint("a", "bc", "")


@pytest.fixture
def failing(
    declare: Callable[..., Any], make: Callable[..., Made], worker: Worker, clock: MovableClock
) -> dict[str, list[str]]:
    """Three of one error (two dead, one failed), two of another that is tried again; and some that did not fail."""
    clock.freeze()

    def prints(step: Step, n: int) -> None:
        raise OSError(f"printer {n} is on fire")

    def gives_up(step: Step, n: int) -> None:
        raise GiveUp(f"no paper in tray {n}")

    def retries(step: Step, n: int) -> None:
        raise Retry(f"busy with '{n}'")

    def snoozes(step: Step, n: int) -> None:
        raise Snooze(60, f"not ready: {n}")

    kinds = {
        "dead": declare(prints, name="invoice.print", max_attempts=1),
        "failed": declare(gives_up, name="invoice.fold"),
        "retrying": declare(retries, name="invoice.send"),
        "snoozed": declare(snoozes, name="invoice.wait"),
    }
    made: dict[str, list[str]] = {}
    for what, count in {"dead": 3, "failed": 1, "retrying": 2, "snoozed": 1}.items():
        for n in range(count):
            one = make(kinds[what], arguments={"n": n})
            perform(worker, kinds[what], one.id)
            made.setdefault(what, []).append(one.id)
            clock.advance(seconds=10)
    make(state="sent")
    make()
    return made


def groups(durable: Run, *line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = value_of(durable("errors", *line, "--json"))["errors"]
    return found


def test_deliveries_of_one_error_are_one_line_the_largest_first(durable: Run, failing: dict[str, list[str]]) -> None:
    dead, retrying, failed = groups(durable)
    assert (dead["kind"], dead["error_code"], dead["shape"]) == (
        "invoice.print", "WORKER_ERROR", "OSError: printer <n> is on fire",
    )  # fmt: skip
    assert (dead["count"], dead["dead"], dead["failed"], dead["retrying"]) == (3, 3, 0, 0)
    assert dead["sample"] == failing["dead"][-1]
    assert (retrying["count"], retrying["retrying"]) == (2, 2)
    assert (failed["count"], failed["failed"], failed["error_code"]) == (1, 1, "GAVE_UP")
    assert dead["first_seen_at"].endswith("Z")
    assert dead["first_seen_at"] < dead["last_seen_at"] < failed["first_seen_at"]

    told = durable("errors").stdout.splitlines()
    assert len(told) == 4
    assert told[1].split()[:4] == [dead["fingerprint"], "3", "3", "0"]
    assert durable("errors", "list").stdout == durable("errors").stdout
    assert groups(durable, "--kind", "invoice.fold") == [failed]


def test_groups_page_by_their_fingerprint(durable: Run, failing: dict[str, list[str]]) -> None:
    every = [group["fingerprint"] for group in groups(durable)]
    first = value_of(durable("errors", "list", "--limit", "2", "--json"))
    assert [group["fingerprint"] for group in first["errors"]] == every[:2]
    assert first["next_after"] == every[1]
    second = value_of(durable("errors", "list", "--limit", "2", "--after", every[1], "--json"))
    assert [group["fingerprint"] for group in second["errors"]] == every[2:]
    assert second["next_after"] is None
    assert f"--after {every[1]}" in durable("errors", "--limit", "2").stderr
    assert durable("errors", "--after", "0000").exit_code == 4


def test_show_lists_the_deliveries_of_a_group(durable: Run, failing: dict[str, list[str]]) -> None:
    dead, retrying, _ = groups(durable)
    seen = value_of(durable("errors", "show", dead["fingerprint"], "--json"))
    assert seen["error"] == dead
    assert [row["id"] for row in seen["deliveries"]] == failing["dead"][::-1]
    assert {row["due_at"] for row in seen["deliveries"]} == {None}
    page = value_of(durable("errors", "show", dead["fingerprint"][:6], "--limit", "1", "--json"))
    assert page["next_after"] == failing["dead"][2]
    rest = value_of(durable("errors", "show", dead["fingerprint"], "--after", page["next_after"], "--json"))
    assert [row["id"] for row in rest["deliveries"]] == failing["dead"][1::-1]
    waiting = value_of(durable("errors", "show", retrying["fingerprint"], "--json"))["deliveries"]
    assert all(row["state"] == "pending" and row["due_at"] for row in waiting)
    assert "OSError: printer <n> is on fire" in durable("errors", "show", dead["fingerprint"]).stdout


def test_a_group_is_redriven_by_its_fingerprint_and_what_is_tried_again_is_left_to_it(
    durable: Run, failing: dict[str, list[str]], row: Callable[[str], Delivery]
) -> None:
    dead, retrying, failed = (group["fingerprint"] for group in groups(durable))

    dry = value_of(durable("errors", "redrive", dead, *SAID, "--dry-run", "--json"))
    assert (dry["chosen"], dry["sample"], dry["done"]) == (3, failing["dead"], 0)
    assert durable("errors", "redrive", dead, *SAID).exit_code == 2
    assert row(failing["dead"][0]).state == "dead"

    done = value_of(durable("errors", "redrive", dead, *SAID, "--yes", "--rate", "1000/s", "--json"))
    assert (done["chosen"], done["done"]) == (3, 3)
    assert {row(one).state for one in failing["dead"]} == {"pending"}
    assert row(failing["failed"][0]).state == "failed"
    assert durable("errors", "redrive", dead, *SAID, "--yes").exit_code == 4

    nothing = value_of(durable("errors", "redrive", retrying, *SAID, "--yes", "--json"))
    assert nothing["chosen"] == 0
    assert durable("errors", "discard", failed, *SAID, "--yes").exit_code == 0
    assert [group["fingerprint"] for group in groups(durable)] == [retrying]


def test_a_delivery_that_failed_in_another_way_meanwhile_is_not_taken(
    durable: Run, failing: dict[str, list[str]], engine: Engine, row: Callable[[str], Delivery],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from durable_core.cli import errors as room

    real = room.act_on_chosen

    def later(*given: Any) -> int:
        with engine.begin() as tx:
            tx.execute(
                text("update durable.deliveries set error_code = 'TIMEOUT' where id = cast(:id as uuid)"),
                {"id": failing["dead"][0]},
            )
        return real(*given)

    monkeypatch.setattr(room, "act_on_chosen", later)
    done = value_of(durable("errors", "redrive", groups(durable)[0]["fingerprint"], *SAID, "--yes", "--json"))
    assert done["done"] == 2
    assert row(failing["dead"][0]).state == "dead"


@pytest.fixture
def twice(declare: Callable[..., Any]) -> DeliveryKind[..., Any]:
    """A kind that fails, and dies at its second failure."""

    def fails(step: Step, n: int) -> None:
        raise OSError("water" if n == 9 else "fire")

    return declare(fails, name="invoice.pack", max_attempts=2)  # type: ignore[no-any-return]


def failed(make: Callable[..., Made], worker: Worker, clock: MovableClock, kind: Any, n: int, times: int) -> str:
    """A delivery of this kind after so many failures."""
    made = make(kind, arguments={"n": n})
    for _ in range(times):
        perform(worker, kind, made.id)
        clock.advance(3600)
    return made.id


def test_an_act_takes_those_that_waited_for_a_person_when_they_were_seen_and_no_others(
    durable: Run, twice: DeliveryKind[..., Any], make: Callable[..., Made], worker: Worker, clock: MovableClock,
    row: Callable[[str], Delivery], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Not one of another message; and not one that died while the act was being asked for."""
    from durable_core.cli import errors as room

    clock.freeze()
    dead, other = (failed(make, worker, clock, twice, n, 2) for n in (1, 9))
    retrying = failed(make, worker, clock, twice, 2, 1)
    (group,) = (one for one in groups(durable) if one["shape"] == "OSError: fire")
    assert (group["dead"], group["retrying"], group["count"]) == (1, 1, 2)
    real = room.act_on_chosen

    def later(*given: Any) -> int:
        perform(worker, twice, retrying)
        return real(*given)

    monkeypatch.setattr(room, "act_on_chosen", later)
    assert durable("errors", "redrive", group["fingerprint"], *SAID, "--yes").exit_code == 0
    assert [row(one).state for one in (dead, other, retrying)] == ["pending", "dead", "dead"]


def test_what_was_put_off_canceled_or_given_back_is_no_error_of_now(
    durable: Run, declare: Callable[..., Any], twice: DeliveryKind[..., Any], make: Callable[..., Made],
    worker: Worker, clock: MovableClock, database: Database,
) -> None:  # fmt: skip
    clock.freeze()
    canceled = failed(make, worker, clock, twice, 1, 1)
    assert durable("deliveries", "cancel", canceled, *SAID, "--yes").exit_code == 0

    outcomes = iter([OSError("fire"), Snooze(60)])

    def fails_then_waits(step: Step) -> None:
        raise next(outcomes)

    waits = declare(fails_then_waits)
    made = make(waits)
    perform(worker, waits, made.id)
    assert [group["sample"] for group in groups(durable)] == [made.id]
    clock.advance(3600)
    perform(worker, waits, made.id)
    assert groups(durable) == []

    holder = Holder()
    make(state="processing", holder=holder)
    assert give_back(database, holder.owner, [holder.pid], shutdown=True) == 1
    assert groups(durable) == []


@pytest.mark.parametrize("line", [("show", "0" * 12), ("redrive", "0" * 12, *SAID, "--yes")])
def test_an_unknown_fingerprint_is_not_found(
    durable: Run, failing: dict[str, list[str]], line: tuple[str, ...]
) -> None:
    result = durable("errors", *line, "--json")
    assert (result.exit_code, error_of(result)) == (4, "NOT_FOUND")


def test_a_beginning_that_several_have_is_refused(durable: Run, failing: dict[str, list[str]]) -> None:
    result = durable("errors", "show", "", "--json")
    assert (result.exit_code, error_of(result)) == (2, "USAGE")


def test_of_more_than_are_read_the_bound_is_said(
    durable: Run, failing: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value_of(durable("errors", "--json"))["complete"] is True
    assert durable("errors").stderr == ""
    monkeypatch.setattr("durable_core.deliveries.groups.LOOKED_AT", 3)
    seen = value_of(durable("errors", "--json"))
    assert seen["complete"] is False
    assert sum(group["dead"] + group["failed"] for group in seen["errors"]) == 3
    assert "there are more" in durable("errors").stderr


def test_one_whose_worker_was_lost_retries_until_it_is_done(
    durable: Run, make: Callable[..., Made], worker: Worker, kind: DeliveryKind[..., Any], clock: MovableClock,
    database: Database,
) -> None:  # fmt: skip
    lost = make(state="processing")
    clock.advance(seconds=40)
    assert reap(database, heartbeat_seconds=8.0) == 1
    (group,) = groups(durable)
    assert (group["error_code"], group["retrying"], group["sample"]) == ("CLAIM_EXPIRED", 1, lost.id)
    perform(worker, kind, lost.id)
    assert groups(durable) == []
    assert "nothing failed" in durable("errors").stdout


def test_help_is_the_groups_own(durable: Run) -> None:
    for line in (("errors", "--help"), ("errors", "-h")):
        assert "redrive" in durable(*line).stdout
