import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Connection, Engine, text

from durable_core import Retry, Snooze, deliveries
from durable_core.cli import status as status_room
from durable_core.cli.status import counted
from durable_core.database import migrate
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker, perform, wait_for_handler
from durable_core.deliveries.declare import DeliveryKind, Step
from durable_core.deliveries.read import COUNT_LIMIT
from durable_core.deliveries.sweep import expire
from durable_core.sweeps import is_late
from durable_core.testing import Made, MovableClock
from tests.cli.conftest import value_of

Run = Callable[..., Result]


@pytest.fixture
def swept(engine: Engine) -> Callable[[str, float], None]:
    """Say that a sweep began so many seconds ago, by the database's clock."""

    def _swept(name: str, seconds: float) -> None:
        with engine.begin() as connection:
            connection.execute(
                text(
                    "insert into durable.loops (name, began_at, moved)"
                    " values (:name, durable.durable_now() - make_interval(secs => :seconds), 3)"
                ),
                {"name": name, "seconds": seconds},
            )

    return _swept


@pytest.fixture
def all_swept(swept: Callable[[str, float], None]) -> None:
    swept("dispatch", 0)
    swept("reap", 1)
    swept("cron", 0)
    swept("poll", 0)
    swept("expire", 5)
    swept("ingest", 5)
    swept("prune", 60)


def test_the_queue_whose_oldest_row_waits_longest_comes_first(
    durable: Run, make: Callable[..., Made], clock: MovableClock
) -> None:
    make(queue="slow")
    clock.advance(seconds=100)
    make(queue="fast")
    make(queue="fast", countdown=600)
    make(queue="busy", state="processing")
    clock.freeze()
    clock.advance(seconds=60)

    queues = value_of(durable("status", "--json"))["queues"]

    assert [line["queue"] for line in queues] == ["slow", "fast", "busy"]
    assert queues[0]["oldest_due_age_seconds"] == pytest.approx(160, abs=20)
    assert queues[1]["oldest_due_age_seconds"] == pytest.approx(60, abs=20)
    assert (queues[1]["due"], queues[1]["later"], queues[2]["processing"]) == (1, 1, 1)
    assert queues[2]["oldest_due_age_seconds"] is None

    lines = durable("status").stdout.splitlines()
    assert lines[0].startswith("QUEUE  OLDEST DUE")
    assert lines[1].split()[:2] == ["slow", "2m"]


def test_what_died_and_failed_is_counted(durable: Run, make: Callable[..., Made]) -> None:
    for state in ("dead", "dead", "failed", "sent"):
        make(state=state)
    seen = value_of(durable("status", "--json"))
    assert (seen["dead"], seen["failed"]) == (2, 1)
    assert "dead 2, failed 1" in durable("status").stdout


def test_a_count_at_the_limit_says_or_more(
    durable: Run, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counted(COUNT_LIMIT - 1) == "9999"
    assert counted(COUNT_LIMIT) == "10000+"
    monkeypatch.setattr(status_room, "COUNT_LIMIT", 2)
    monkeypatch.setattr("durable_core.deliveries.read.COUNT_LIMIT", 2)
    for _ in range(3):
        make(state="dead")
    assert "dead 2+" in durable("status").stdout


def test_a_check_passes_while_nothing_is_late(durable: Run, make: Callable[..., Made], all_swept: None) -> None:
    make()
    result = durable("status", "--check", "--json")
    assert result.exit_code == 0, result.stderr
    assert value_of(result)["healthy"] is True


def test_a_check_fails_when_the_oldest_due_row_is_too_old(
    durable: Run, make: Callable[..., Made], clock: MovableClock, swept: Callable[[str, float], None]
) -> None:
    make(queue="mail")
    clock.advance(seconds=400)
    for name in ("dispatch", "reap", "cron", "poll", "expire", "ingest", "prune"):
        swept(name, 0)

    result = durable("status", "--check", "--json")

    assert result.exit_code == 6
    assert "mail" in result.stderr
    assert len(json.loads(result.stdout)["problems"]) == 1
    assert durable("status", "--check", "--max-age", "3600").exit_code == 0
    assert durable("status").exit_code == 0


@pytest.mark.parametrize(("seconds", "exit_code"), [(20, 0), (60, 6)])
def test_a_late_sweep_is_shown_and_a_check_fails_once_it_is_missing(
    durable: Run, swept: Callable[[str, float], None], seconds: float, exit_code: int
) -> None:
    """A deploy that restarts beat, or a busy slot, holds up a sweep for some seconds."""
    swept("dispatch", 0)
    swept("reap", seconds)
    swept("cron", 0)
    swept("poll", 0)
    swept("expire", 5)
    swept("ingest", 5)
    swept("prune", 60)
    result = durable("status", "--check")
    assert result.exit_code == exit_code
    assert ("sweep reap" in result.stderr) is (exit_code == 6)
    assert "late" in result.stdout


def test_a_check_fails_when_no_sweep_ever_began(durable: Run) -> None:
    result = durable("status", "--check", "--max-age", "100000", "--json")
    assert result.exit_code == 6
    late = {line["name"] for line in value_of(result)["sweeps"] if line["late"]}
    # Beat first runs the hourly sweep an hour after its start: that is not late yet.
    assert late == {"dispatch", "reap", "cron", "poll"}


def test_a_check_fails_when_the_last_run_of_a_sweep_ended_with_an_error(
    durable: Run, engine: Engine, all_swept: None
) -> None:
    with engine.begin() as connection:
        connection.execute(text("update durable.loops set error = 'DataError: no' where name = 'reap'"))

    result = durable("status", "--check", "--json")

    assert result.exit_code == 6
    assert value_of(result)["healthy"] is False
    assert value_of(result)["problems"] == ["sweep reap failed: DataError: no"]
    assert "unhealthy: sweep reap failed" in result.stderr


@pytest.fixture
def in_trouble(engine: Engine, make: Callable[..., Made], clock: MovableClock) -> Callable[[str], None]:
    """Bring about one of the ways in which work stands still while every process is alive."""

    def _set(sql: str) -> None:
        with engine.begin() as connection:
            connection.execute(text(sql))

    def _in_trouble(trouble: str) -> None:
        match trouble:
            case "no worker reads a queue":
                make(queue="mail")
                _set("update durable.deliveries set due_at = due_at - interval '400 s'")
            case "no beat, no worker":
                _set("update durable.loops set began_at = began_at - interval '90 s' where name = 'dispatch'")
            case "no beat, but workers":
                _set("update durable.loops set host = 'h (a worker)' where name = 'reap'")
            case "dispatch fails":
                _set("update durable.loops set error = 'OperationalError: refused' where name = 'dispatch'")
            case "reap is behind":
                make(queue="mail", state="processing")
                _set("update durable.deliveries set lease_expires_at = lease_expires_at - interval '400 s'")
            case "the clock was set back":
                _set("update durable.loops set began_at = began_at + interval '1 h' where name = 'reap'")

    return _in_trouble


@pytest.mark.field("R94")
@pytest.mark.parametrize(
    ("trouble", "named"),
    [
        ("no worker reads a queue", "the oldest due delivery of queue mail has waited 6m"),
        ("no beat, no worker", "sweep dispatch last began 1m 3"),
        ("no beat, but workers", "sweep reap was last run by a worker: no beat drives it"),
        ("dispatch fails", "sweep dispatch failed: OperationalError: refused"),
        ("reap is behind", "a lease ended 6m"),
        ("the clock was set back", "sweep reap last began 59m"),
    ],
)
def test_work_that_stands_still_is_named_although_every_process_lives(
    durable: Run, all_swept: None, in_trouble: Callable[[str], None], trouble: str, named: str
) -> None:
    assert durable("status", "--check").exit_code == 0

    in_trouble(trouble)

    result = durable("status", "--check", "--json")
    assert result.exit_code == 6
    (problem,) = value_of(result)["problems"]
    assert problem.startswith(named)
    assert f"unhealthy: {problem}" in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        ("status", "--json"),
        ("deliveries", "redrive", "ID", "--by", "dana", "--reason", "why", "--yes"),
        ("deliveries", "redrive", "ID", "--by", "dana", "--reason", "why", "--dry-run"),
    ],
    ids=["status", "redrive", "a dry run"],
)
def test_the_schema_is_checked_once(
    durable: Run, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...]
) -> None:
    asked: list[Connection] = []
    found = migrate.found

    def counting(connection: Connection) -> str | None:
        asked.append(connection)
        return found(connection)

    monkeypatch.setattr(migrate, "found", counting)
    dead = make(state="dead").id
    assert durable(*(dead if word == "ID" else word for word in line)).exit_code == 0
    assert len(asked) == 1


def test_counts_read_no_more_rows_than_the_limit(
    durable: Run, declare: Callable[..., DeliveryKind[..., Any]], make: Callable[..., Made], database: Database,
    clock: MovableClock, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A remark on a row behind the limit is not looked for."""
    monkeypatch.setattr("durable_core.deliveries.read.COUNT_LIMIT", 2)
    kind = declare()
    for _ in range(3):
        make(kind, state="processing")
        clock.advance(seconds=1)
        last_due = make(kind)
    assert wait_for_handler(database, kind.name, last_due.id)

    (queue,) = value_of(durable("status", "--json"))["queues"]

    assert (queue["processing"], queue["due"], queue["waiting_for_handler"]) == (2, 2, 0)


def test_what_is_paused_behind_another_or_without_a_handler_is_counted_among_what_is_due(
    durable: Run, engine: Engine, database: Database, declare: Callable[..., DeliveryKind[..., Any]],
    make: Callable[..., Made],
) -> None:  # fmt: skip
    kind, paused = declare(), declare()
    make(kind, queue="letters")
    make(paused)
    make(paused, countdown=600)
    for _ in range(3):
        make(kind, ordering_key="a")
    # Of this line one runs, in another queue.
    make(kind, queue="elsewhere", ordering_key="b", state="processing")
    make(kind, ordering_key="b")
    make(paused, ordering_key="c")
    unknown = make(kind)
    assert wait_for_handler(database, kind.name, unknown.id)
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "letters", by="dana", reason="away")
        deliveries.pause(tx, "kind", paused.name, by="dana", reason="away")

    queues = {line["queue"]: line for line in value_of(durable("status", "--json"))["queues"]}

    found = {name: (line["due"], line["paused"], line["behind"]) for name, line in queues.items()}
    assert found == {"letters": (1, 1, 0), "durable": (7, 2, 3), "elsewhere": (0, 0, 0)}
    assert (queues["durable"]["waiting_for_handler"], queues["durable"]["later"]) == (1, 1)
    lines = durable("status").stdout.splitlines()
    table = {line.split()[0]: line.split()[-6:] for line in lines[:4]}
    assert table["durable"] == ["7", "2", "3", "1", "1", "0"]


def test_why_things_wait_is_counted_over_all_queues_and_who_paused_what_is_said(
    durable: Run, engine: Engine, database: Database, declare: Callable[..., Any], make: Callable[..., Made],
    worker: Worker, clock: MovableClock,
) -> None:  # fmt: skip
    def retries(step: Step) -> None:
        raise Retry("busy")

    def snoozes(step: Step) -> None:
        raise Snooze(60)

    kind, busy, later = declare(), declare(retries), declare(snoozes)
    clock.freeze()
    for one in (busy, later):
        perform(worker, one, make(one).id)
    make(kind, queue="mail")
    make(kind, queue="mail", ordering_key="a")
    make(kind, queue="letters", ordering_key="a")
    unknown, misfit, held = make(kind), make(kind), make(kind)
    assert wait_for_handler(database, kind.name, unknown.id)
    with engine.begin() as tx:
        for column, value, row_id in (("waiting_for", "arguments", misfit.id), ("held_reason", "P0001", held.id)):
            tx.execute(
                text(f"update durable.deliveries set {column} = :value where id = cast(:id as uuid)"),
                {"value": value, "id": row_id},
            )
        deliveries.pause(tx, "queue", "mail", by="dana", reason="the printer is away")
    clock.advance(90)

    seen = value_of(durable("status", "--json"))
    assert seen["waiting"] == {
        "paused": 2, "behind": 1, "waiting_for_handler": 1, "waiting_for_arguments": 1, "held": 1, "retrying": 0,
    }  # fmt: skip
    clock.advance(-85)
    assert value_of(durable("status", "--json"))["waiting"]["retrying"] == 1
    (pause,) = seen["pauses"]
    assert (pause["what"], pause["name"], pause["by"], pause["until"]) == ("queue", "mail", "dana", None)
    told = durable("status").stdout.splitlines()
    assert "1  backing off after a failure" in told
    assert "1  held back by a sweep that failed on them" in told
    assert "queue   mail  5s ago  dana: the printer is away" in told


def test_a_check_says_that_the_late_queue_is_paused_and_by_whom(
    durable: Run, engine: Engine, kind: DeliveryKind[..., Any], make: Callable[..., Made], clock: MovableClock,
    all_swept: None,
) -> None:  # fmt: skip
    make(queue="mail")
    with engine.begin() as tx:
        tx.execute(text("update durable.deliveries set due_at = due_at - interval '400 s'"))
        deliveries.pause(tx, "queue", "mail", by="dana", reason="the printer is away")
    result = durable("status", "--check", "--json")
    assert result.exit_code == 6
    (problem,) = value_of(result)["problems"]
    assert problem.endswith("more than 5m; the queue is paused by dana: the printer is away")
    assert "the queue is paused by dana" in result.stderr

    with engine.begin() as tx:
        deliveries.resume(tx, "queue", "mail", by="dana")
        deliveries.pause(tx, "kind", kind.name, by="dana", reason="away")
    (problem,) = value_of(durable("status", "--json"))["problems"]
    assert problem.endswith("; 1 of its due rows are of a paused kind")


def test_what_expires_soon_and_what_expired_lately_is_counted(
    durable: Run, database: Database, make: Callable[..., Made], clock: MovableClock
) -> None:
    make(expires=10)
    clock.advance(11)
    assert expire(database) == 1
    clock.advance(86400)
    for _ in range(2):
        make(expires=10)
    make(expires=3500)
    make(expires=3700, countdown=100)
    make(state="sent")
    clock.advance(11)
    assert expire(database) == 2

    seen = value_of(durable("status", "--json"))

    assert (seen["expiring"], seen["expiring_within_seconds"]) == (1, 3600)
    assert (seen["expired"], seen["expired_within_seconds"]) == (2, 86400)
    assert "expiring within 1h 1, expired in the last 1d 2" in durable("status").stdout


def test_of_more_rows_than_the_limit_the_newest_are_read_and_the_time_they_took_is_said(
    durable: Run, database: Database, make: Callable[..., Made], clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable_core.deliveries.read.COUNT_LIMIT", 2)
    make(expires=10)
    clock.advance(11)
    assert expire(database) == 1
    clock.advance(100)
    clock.freeze()
    make(state="sent")
    clock.advance(60)
    make(state="sent")

    seen = value_of(durable("status", "--json"))

    assert (seen["expired"], seen["expired_within_seconds"]) == (0, 60)
    assert "expired in the last 1m 0" in durable("status").stdout


def test_late_is_more_than_three_intervals() -> None:
    assert not is_late(15.0, 5.0)
    assert is_late(15.1, 5.0)


def test_instants_are_utc(durable: Run, make: Callable[..., Made], all_swept: None) -> None:
    make()
    seen = value_of(durable("status", "--json"))
    assert seen["now"].endswith("Z")
    assert seen["queues"][0]["oldest_due_at"].endswith("Z")
    assert seen["sweeps"][0]["began_at"].endswith("Z")
