"""What `deliveries show` says of a delivery that does not run now, to people and to programs."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine

from durable_core import deliveries
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import wait_for_handler
from durable_core.deliveries.declare import DeliveryKind
from durable_core.testing import Made, MovableClock
from tests.cli.conftest import value_of

Run = Callable[..., Result]


@pytest.fixture
def shown(durable: Run) -> Callable[[str], list[tuple[str, bool, str]]]:
    """What `show` says: each cause, whether it blocks, its sentence. For people each sentence has its own line."""

    def _shown(row_id: str) -> list[tuple[str, bool, str]]:
        seen = value_of(durable("deliveries", "show", row_id, "--json"))
        told = durable("deliveries", "show", row_id).stdout.splitlines()
        said = [one["says"] for one in seen["waits"]]
        assert [line.split(None, 1)[1] for line in told if line.startswith("why")] == said
        assert seen["why"] == " ".join(said)
        return [(one["cause"], one["blocks"], one["says"]) for one in seen["waits"]]

    return _shown


@pytest.fixture
def frozen(clock: MovableClock) -> MovableClock:
    clock.freeze()
    return clock


def test_a_pause_says_who_why_and_until_when(
    durable: Run, make: Callable[..., Made], shown: Callable[[str], Any], frozen: MovableClock
) -> None:
    made = make(queue="mail")
    who = ("--by", "dana", "--reason", "the printer is away")
    durable("pause", "--queue", "mail", "--for", "2h", *who)

    ((cause, blocks, says),) = shown(made.id)

    assert (cause, blocks) == ("paused", True)
    assert says.startswith("queue mail is paused by dana (the printer is away), until 20")
    assert says.endswith("Z, in 2h.")
    (wait,) = value_of(durable("deliveries", "show", made.id, "--json"))["waits"]
    assert (wait["pause"]["by"], wait["pause"]["reason"]) == ("dana", "the printer is away")
    assert wait["until"] == wait["pause"]["until"]
    assert datetime.fromisoformat(wait["until"]) == frozen.now() + timedelta(hours=2)

    durable("pause", "--queue", "mail", *who)
    ((_, _, says),) = shown(made.id)
    assert says.endswith("until somebody resumes it with `durable resume --queue mail`.")


@pytest.mark.parametrize(
    ("state", "says"),
    [("pending", "is pending."), ("processing", "is processing."), ("dead", "is dead: redrive or discard that one.")],
)
def test_the_one_ahead_is_named(
    declare: Callable[..., DeliveryKind[..., Any]], make: Callable[..., Made], shown: Callable[[str], Any],
    durable: Run, state: str, says: str,
) -> None:  # fmt: skip
    strict = declare(ordering="strict")
    first = make(strict, ordering_key="order:7", state=state)
    second = make(strict, ordering_key="order:7")
    assert shown(second.id) == [
        ("behind", True, f"behind delivery {first.id} of the same ordering key order:7, which {says}")
    ]
    (wait,) = value_of(durable("deliveries", "show", second.id, "--json"))["waits"]
    assert (wait["ahead"]["id"], wait["ahead"]["state"]) == (first.id, state)


def test_all_that_stands_in_the_way_is_said_a_line_each(
    engine: Engine, make: Callable[..., Made], shown: Callable[[str], Any], frozen: MovableClock
) -> None:
    first = make(ordering_key="line")
    made = make(ordering_key="line", queue="mail", countdown=90, expires=60)
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "mail", by="dana", reason="away")
    assert shown(made.id) == [
        ("paused", True, "queue mail is paused by dana (away), until somebody resumes it with "
            "`durable resume --queue mail`."),
        ("behind", True, f"behind delivery {first.id} of the same ordering key line, which is pending."),
        ("not_due", True, "it is not due before 1m 30s have passed."),
        ("expires_soon", False, "it expires in 1m, before it is due."),
    ]  # fmt: skip


def test_a_row_that_could_run_says_what_it_waits_for_and_when_it_expires(
    database: Database, kind: DeliveryKind[..., Any], make: Callable[..., Made], shown: Callable[[str], Any],
    frozen: MovableClock,
) -> None:  # fmt: skip
    made = make(expires=1200)
    frozen.advance(5)
    expires = ("expires_soon", False, "it expires in 19m 55s, unless a worker has begun it by then.")
    assert shown(made.id) == [
        ("worker", False, "due for 5s; it waits for a free worker that reads queue durable."), expires,
    ]  # fmt: skip
    assert wait_for_handler(database, kind.name, made.id)
    assert shown(made.id) == [
        ("handler", False, f"due for 5s; a worker that was told of it does not know kind {kind.name}: deploy its code "
            "there."),
        expires,
    ]  # fmt: skip
    frozen.advance(1200)
    assert shown(made.id)[0] == ("expired", True, "its time to be useful passed 5s ago: the next expire sweep ends it.")


def test_one_that_does_not_wait_says_where_it_is_and_waits_for_nothing(durable: Run, make: Callable[..., Made]) -> None:
    seen = value_of(durable("deliveries", "show", make(state="processing").id, "--json"))
    assert seen["waits"] == []
    assert seen["why"].startswith("running")
