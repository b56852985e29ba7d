"""One delivery per slot, however many beats fire; missed, paused, resumed, edited and removed schedules."""

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from durable_core import InvalidOption, NotFound, SchemaBehind, Step, UnknownHandler, deliveries, periodic
from durable_core.database.connections import Database
from durable_core.deliveries import sweep as delivery_sweeps
from durable_core.deliveries.attempt import Outcome, perform
from durable_core.deliveries.declare import registry
from durable_core.deliveries.slots import Cadence
from durable_core.periodic.sweep import fire, slot_key
from durable_core.sweeps import Bounds, named, run_sweep
from durable_core.testing import wait_until_somebody_blocks
from tests.poison import poisoned

KEYS = "select key from durable.deliveries where kind = :kind and key is not null order by key"


def keys_of(tx, kind):
    return tx.scalars(text(KEYS), {"kind": kind}).all()


HOURLY = "0 * * * *"
MINUTELY = "* * * * *"


def tick(step: Step) -> None: ...


@pytest.fixture
def at(clock):
    """Stop the clock, and set it: `at("2026-03-29T00:30")`, in UTC."""
    clock.freeze()

    def _at(instant: str | datetime) -> datetime:
        wanted = datetime.fromisoformat(instant).replace(tzinfo=UTC) if isinstance(instant, str) else instant
        clock.advance((wanted - clock.now()).total_seconds())
        return wanted

    return _at


@pytest.fixture
def slots(engine):
    """The slots that have a row, in order: `slots(kind)`; as "HH:MM" of UTC."""

    def _slots(kind):
        with engine.connect() as tx:
            return [key.removeprefix("cron:")[11:16] for key in keys_of(tx, kind.name)]

    return _slots


@pytest.fixture
def schedule(engine):
    def _schedule(kind):
        with engine.connect() as tx:
            return next(one for one in periodic.schedules(tx) if one.kind == kind.name)

    return _schedule


@pytest.fixture
def hourly(declare, database, at):
    """A kind that is due each hour, first seen at 07:30."""
    at("2026-02-02T07:30")
    kind = declare(tick, cron=HOURLY)
    assert fire(database) == 0
    return kind


# --- one row per slot ------------------------------------------------------------------------------


def test_a_schedule_begins_when_it_is_first_seen_and_makes_up_for_nothing(hourly, database, at, slots, schedule):
    assert slots(hourly) == []
    assert schedule(hourly).next_slot == datetime(2026, 2, 2, 8, tzinfo=UTC)
    at("2026-02-02T07:59:59")
    assert fire(database) == 0
    at("2026-02-02T08:00")
    assert fire(database) == 1
    assert fire(database) == 0
    assert slots(hourly) == ["08:00"]


@pytest.mark.field("R80")
def test_five_sweeps_at_once_write_one_row_per_slot(hourly, engine, other_engine, at, slots):
    """Ten times over, each with a connection of its own and all let go at the same instant."""
    for hour in range(8, 18):
        at(datetime(2026, 2, 2, hour, tzinfo=UTC))
        ready = threading.Barrier(5)

        def beat(ready=ready):
            ready.wait()
            return fire(Database(other_engine))

        with ThreadPoolExecutor(5) as pool:
            written = [one.result(30) for one in [pool.submit(beat) for _ in range(5)]]
        assert sum(written) == 1
    assert slots(hourly) == [f"{hour:02}:00" for hour in range(8, 18)]


@pytest.mark.field("R80")
def test_beats_that_restart_and_come_again_at_once_find_nothing_to_do(hourly, database, at, slots, carrier):
    """By the sweep as beat drives it: its turn, and then the slot."""
    at("2026-02-02T08:00:01")
    assert [run_sweep(database, named("cron"), Bounds()).get("moved") for _ in range(3)] == [1, 0, 0]
    at("2026-02-02T08:00:02")
    assert run_sweep(database, named("cron"), Bounds()) == {"moved": 0}
    assert slots(hourly) == ["08:00"]


def test_a_schedule_that_somebody_has_locked_is_theirs_and_keeps_nobody_waiting(
    hourly, declare, database, other_engine, at, slots
):
    other = declare(tick, cron=HOURLY)
    fire(database)
    at("2026-02-02T08:00")
    with other_engine.begin() as holder:
        holder.execute(text("select from durable.schedules where kind = :k for no key update"), {"k": hourly.name})
        assert fire(database) == 1
        assert (slots(hourly), slots(other)) == ([], ["08:00"])
    assert fire(database) == 1


def test_a_sweep_killed_between_the_row_and_its_commit_leaves_neither_and_the_next_does_both(
    hourly, database, engine, other_engine, at, slots, schedule
):
    """Two sessions: the first is held after it has written the row, and its backend is ended there."""
    at("2026-02-02T08:00")
    with ThreadPoolExecutor(2) as pool, other_engine.connect() as gate:
        gate.execute(text("lock table durable.journal in exclusive mode"))
        held = Database(other_engine)
        at("2026-02-02T18:00")  # nine slots are left out, so that it must write to the journal, which is locked
        killed = pool.submit(fire, held)
        pid = wait_until_somebody_blocks(engine)
        second = pool.submit(fire, database)
        assert second.result(10) == 0, "the schedule is locked: nothing is waited for, and nothing done twice"
        with engine.begin() as operator:
            assert operator.scalar(text("select pg_terminate_backend(:pid)"), {"pid": pid})
        with pytest.raises(Exception, match="terminat"):
            killed.result(30)
        gate.rollback()
    assert slots(hourly) == []
    assert schedule(hourly).last_slot is None
    assert fire(database) == 1
    assert slots(hourly) == ["18:00"]


def test_a_slot_is_over_also_when_its_row_was_pruned(hourly, database, engine, at, slots, worker):
    at("2026-02-02T08:00")
    fire(database)
    with engine.connect() as tx:
        (row,) = deliveries.page(tx, kind=hourly.name)
    assert perform(worker, hourly, row.id).outcome is Outcome.SENT
    with engine.begin() as tx:
        tx.execute(text("update durable.deliveries set finished_at = finished_at - interval '15 days'"))
    assert delivery_sweeps.prune(database) == 1
    assert fire(database) == 0
    with engine.begin() as tx, pytest.raises(Exception, match="next_slot_is_later_than_the_last"):
        tx.execute(text("update durable.schedules set next_slot = last_slot"))


def test_a_clock_set_back_repeats_no_slot(hourly, database, at, slots):
    at("2026-02-02T09:00")
    fire(database)
    at("2026-02-02T08:30")
    assert fire(database) == 0
    at("2026-02-02T09:00")
    assert fire(database) == 0
    at("2026-02-02T10:00")
    assert fire(database) == 1
    assert slots(hourly) == ["09:00", "10:00"]


def test_a_row_that_stands_under_the_key_of_a_slot_is_its_row(hourly, database, engine, at, slots):
    """As when a schedule was deleted by hand: the database's own key still keeps one."""
    at("2026-02-02T08:00")
    fire(database)
    with engine.begin() as tx:
        tx.execute(text("delete from durable.schedules"))
    at("2026-02-02T07:30")
    fire(database)
    at("2026-02-02T08:00")
    assert fire(database) == 0
    assert slots(hourly) == ["08:00"]


def test_the_delivery_of_a_slot_is_one_like_any_other_and_its_handler_is_given_the_slot(
    declare, database, engine, at, worker, carrier
):
    seen = []

    def report(step: Step, slot: datetime) -> None:
        seen.append(slot)

    at("2026-07-01T05:00")
    kind = declare(report, cron="0 8 * * 1-5", timezone="Europe/Prague", queue="mail", priority=2, max_attempts=2)
    fire(database)
    at("2026-07-01T06:00:03")
    assert fire(database) == 1
    (hint,) = carrier.offered
    assert (hint.kind, hint.queue, hint.priority) == (kind.name, "mail", 2)
    assert perform(worker, kind, hint.id).outcome is Outcome.SENT
    assert [slot.isoformat() for slot in seen] == ["2026-07-01T08:00:00+02:00"]
    with engine.connect() as tx:
        row = deliveries.get(tx, hint.id)
    assert (row.key, row.max_attempts) == ("cron:2026-07-01T06:00:00Z", 2)


def test_a_quiet_second_costs_one_statement_and_none_where_nothing_is_periodic(database, engine, declare, at):
    from sqlalchemy import event

    asked = []
    event.listen(engine, "before_cursor_execute", lambda *call: asked.append(call[2]))
    fire(database)
    assert asked == []
    at("2026-02-02T07:30")
    kinds = [declare(tick, cron=HOURLY) for _ in range(20)]
    assert fire(database) == 0
    asked.clear()
    assert fire(database) == 0
    assert len(asked) == 1
    assert len(kinds) == 20


# --- daylight saving -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "start", "end", "expected"),
    [
        ("30 2 * * *", "2026-03-28T12:00", "2026-03-29T12:00", ["01:00"]),
        ("30 2 * * *", "2026-10-24T12:00", "2026-10-25T12:00", ["00:30"]),
        ("*/30 2 * * *", "2026-03-28T12:00", "2026-03-29T12:00", []),
        ("*/30 2 * * *", "2026-10-24T12:00", "2026-10-25T12:00", ["00:00", "00:30", "01:00", "01:30"]),
    ],
)
def test_over_a_change_of_the_clock_the_rows_are_those_of_the_rule(
    declare, database, at, slots, cron, start, end, expected
):
    """A sweep each ten minutes; in UTC the change is at 01:00."""
    now = at(start)
    kind = declare(tick, cron=cron, timezone="Europe/Prague")
    fire(database)
    while now < datetime.fromisoformat(end).replace(tzinfo=UTC):
        now = at(now + timedelta(minutes=10))
        fire(database)
    assert slots(kind) == expected


def test_over_a_year_with_jumps_of_any_size_every_slot_gets_one_row(declare, database, engine, at, seed):
    """With `all` and jumps below its bounds no slot is missing either, and none comes twice."""
    draw = random.Random(seed)
    start = now = at("2026-03-20T00:00")
    cadences = {}
    for _ in range(6):
        hour = draw.choice(["*/6", "2", "2-3", f"{draw.randrange(24)}", "*/2"])
        cron = f"{draw.choice([0, 30, draw.randrange(60)])} {hour} * * {draw.choice(['*', '0', '1-5'])}"
        zone = draw.choice(["Europe/Prague", "Australia/Lord_Howe", "UTC"])
        kind = declare(tick, cron=cron, timezone=zone, missed="all")
        cadences[kind.name] = Cadence(cron, zone)
    fire(database)
    while now < start + timedelta(days=366):
        calm = not (3 <= now.month <= 4 or now.month == 10)
        now = at(now + timedelta(hours=draw.uniform(20, 24) if calm else draw.uniform(0.1, 23)))
        fire(database)
    for name, cadence in cadences.items():
        with engine.connect() as tx:
            keys = keys_of(tx, name)
        assert keys == [slot_key(slot) for slot in cadence.latest(cadence.after(start), now, 100_000)]


# --- missed slots ----------------------------------------------------------------------------------


@pytest.mark.field("R83")
@pytest.mark.parametrize(
    ("missed", "away", "ran", "left_out"),
    [
        ("skip", 210, ["07:33"], "07:31 07:32"),
        ("once", 210, ["07:33"], "07:31 07:32"),
        ("all", 210, ["07:31", "07:32", "07:33"], None),
    ],
)
def test_slots_missed_while_nobody_swept_are_made_up_for_as_declared(
    declare, database, engine, at, slots, schedule, caplog, missed, away, ran, left_out
):
    """A schedule of every minute, and no sweep for three and a half."""
    now = at("2026-02-02T07:30:00")
    kind = declare(tick, cron=MINUTELY, missed=missed)
    fire(database)
    at(now + timedelta(seconds=away))
    with caplog.at_level(logging.WARNING, "durable.sweep"):
        assert fire(database) == len(ran)
    assert slots(kind) == ran
    assert schedule(kind).next_slot == now + timedelta(minutes=4)
    told = [(f"{r.__dict__['from']}"[11:16], r.to[11:16]) for r in caplog.records if r.message == "slots_skipped"]
    assert told == ([tuple(left_out.split())] if left_out else [])
    with engine.connect() as tx:
        lines = deliveries.journal(tx, schedule(kind).id)
    assert [line.move for line in lines] == (["skip"] if left_out else [])


@pytest.mark.field("R83")
@pytest.mark.parametrize(
    ("missed", "cron", "hours", "ran"),
    [
        ("skip", HOURLY, 2.52, []),
        ("skip", HOURLY, 0.51, ["08:00"]),
        ("once", HOURLY, 100, ["11:00"]),
        ("once", "0 8 1 * *", 6 * 24, []),
        ("once", "0 8 3 * *", 8 * 24 - 0.4, ["08:00"]),
        ("once", "0 8 3 * *", 8 * 24 + 1, []),
        ("all", HOURLY, 30, [f"{hour % 24:02}:00" for hour in range(14, 38)]),
        ("all", "*/10 * * * *", 30, 100),
    ],
)
def test_nothing_older_than_its_bound_runs_and_what_is_left_out_is_told(
    declare, database, at, slots, schedule, missed, cron, hours, ran
):
    now = at("2026-02-02T07:30:00")
    kind = declare(tick, cron=cron, missed=missed)
    fire(database)
    first = schedule(kind).next_slot
    at(now + timedelta(hours=hours))
    fire(database)
    assert (sorted(slots(kind)) == sorted(ran)) if isinstance(ran, list) else len(slots(kind)) == ran
    seen = schedule(kind)
    due = Cadence.of("k", cron, "UTC", missed).latest(first, now + timedelta(hours=hours), 100_000)
    many = ran if isinstance(ran, int) else len(ran)
    if len(due) > many:
        assert (seen.skipped_from, seen.skipped_to) == (first, due[len(due) - many - 1])
    else:
        assert seen.skipped_from is None
    assert fire(database) == 0


# --- pause, resume, run now ------------------------------------------------------------------------


@pytest.mark.field("R83")
def test_a_paused_schedule_runs_nothing_and_resumed_it_goes_on_with_its_next_slot(
    hourly, database, engine, at, slots, schedule
):
    with engine.begin() as tx:
        periodic.pause(tx, hourly.name, by="dana", reason="the bank is closed")
    at("2026-02-02T10:30")
    assert fire(database) == 0
    assert schedule(hourly).next_slot is None
    with engine.begin() as tx:
        assert periodic.resume(tx, hourly.name, by="erin")
    assert fire(database) == 0
    at("2026-02-02T11:00")
    assert fire(database) == 1
    assert slots(hourly) == ["11:00"]
    with engine.begin() as tx:
        assert not periodic.resume(tx, hourly.name, by="erin"), "a lost race is a value"
        lines = deliveries.journal(tx, schedule(hourly).id)
    assert [(line.move, line.by, line.reason) for line in lines] == [
        ("pause", "dana", "the bank is closed"), ("resume", "erin", None),
    ]  # fmt: skip


@pytest.mark.parametrize(("looked", "ran"), [("10:00:05", ["10:00"]), ("09:59", []), ("11:00:01", ["11:00"])])
def test_a_pause_with_an_end_ends_by_itself_and_the_slot_at_its_end_runs(
    hourly, database, engine, at, slots, schedule, looked, ran
):
    with engine.begin() as tx:
        until = datetime(2026, 2, 2, 10, tzinfo=UTC)
        periodic.pause(tx, hourly.name, by="dana", reason="a window", until=until)
    assert schedule(hourly).next_slot == until
    at(f"2026-02-02T{looked}")
    fire(database)
    assert slots(hourly) == ran
    assert (schedule(hourly).paused_at is None) == bool(ran)


@pytest.mark.parametrize("paused", [False, True])
def test_run_now_writes_a_row_beside_the_slots(declare, database, engine, at, slots, worker, carrier, paused):
    seen = []

    def report(step: Step, slot: datetime) -> None:
        seen.append(slot)

    at("2026-02-02T07:30")
    kind = declare(report, cron=HOURLY)
    fire(database)
    with engine.begin() as tx:
        if paused:
            periodic.pause(tx, kind.name, by="dana", reason="x")
        ref = periodic.run_now(tx, kind.name, by="dana", reason="the first was wrong")
    assert perform(worker, kind, ref.id).outcome is Outcome.SENT
    assert [slot.isoformat() for slot in seen] == ["2026-02-02T07:30:00+00:00"]
    with engine.connect() as tx:
        (line,) = deliveries.journal(tx, ref.id)
    assert (line.move, line.by, line.reason) == ("run_now", "dana", "the first was wrong")
    at("2026-02-02T08:00")
    assert fire(database) == (0 if paused else 1)


def test_an_act_names_a_schedule_and_who_acts_or_is_refused_with_nothing_written(hourly, engine, kind):
    with engine.begin() as tx:
        for act in (periodic.pause, periodic.resume):
            with pytest.raises(NotFound):
                act(tx, "nobody", by="dana", reason="x")
        for act in (periodic.pause, periodic.resume, periodic.run_now):
            with pytest.raises(InvalidOption):
                act(tx, hourly.name, by=" ", reason="x")
        with pytest.raises(InvalidOption, match="until"):
            periodic.pause(tx, hourly.name, by="dana", reason="x", until=datetime(2026, 2, 2))
        with pytest.raises(UnknownHandler):
            periodic.run_now(tx, "nobody", by="dana")
        with pytest.raises(InvalidOption, match="no cron"):
            periodic.run_now(tx, kind.name, by="dana")
    with engine.connect() as tx:
        assert deliveries.page(tx) == []
        assert tx.scalar(text("select count(*) from durable.journal")) == 0


# --- edited, renamed, removed, broken --------------------------------------------------------------


@pytest.fixture
def redeclare(declare):
    """The same kind by other code: a deploy."""

    def _redeclare(kind, **terms):
        registry.remove(kind.name)
        return declare(tick, name=terms.pop("name", kind.name), **terms)

    return _redeclare


@pytest.mark.field("R83")
def test_an_edited_schedule_follows_the_code_from_now_on_with_no_burst_of_the_past(
    hourly, redeclare, database, at, slots, schedule
):
    at("2026-02-02T08:30")
    fire(database)
    kind = redeclare(hourly, cron="*/5 * * * *", missed="all")
    assert fire(database) == 0
    assert schedule(kind).next_slot == datetime(2026, 2, 2, 8, 35, tzinfo=UTC)
    assert schedule(kind).since == datetime(2026, 2, 2, 8, 30, tzinfo=UTC)
    at("2026-02-02T08:40")
    assert fire(database) == 2


def test_a_change_of_the_policy_alone_moves_no_slot(hourly, redeclare, database, at, schedule):
    before = schedule(hourly)
    kind = redeclare(hourly, cron=HOURLY, missed="all")
    at("2026-02-02T07:45")
    fire(database)
    after = schedule(kind)
    assert (after.missed, after.next_slot, after.since) == ("all", before.next_slot, before.since)


def test_a_slot_that_is_due_when_other_code_comes_is_not_lost_by_the_change(hourly, redeclare, database, at, slots):
    """During a rolling deploy old and new code change the schedule in turn."""
    at("2026-02-02T08:00")
    kind = redeclare(hourly, cron="30 8 * * *")
    assert fire(database) == 1
    assert slots(kind) == ["08:00"]


def test_a_renamed_kind_takes_its_schedule_along(hourly, redeclare, database, engine, at, slots):
    at("2026-02-02T08:00")
    fire(database)
    kind = redeclare(hourly, name="test.renamed", formerly=(hourly.name,), cron=HOURLY)
    assert fire(database) == 0
    at("2026-02-02T09:00")
    assert fire(database) == 1
    assert slots(kind) == ["09:00"]
    with engine.connect() as tx:
        assert [one.kind for one in periodic.schedules(tx)] == ["test.renamed"]


def test_a_process_that_does_not_know_the_kind_leaves_its_slots_to_others(hourly, redeclare, database, at, schedule):
    registry.remove(hourly.name)
    at("2026-02-02T08:00")
    assert fire(database) == 0
    seen = schedule(hourly)
    assert (seen.declared, seen.next_slot) == (False, datetime(2026, 2, 2, 8, tzinfo=UTC))
    redeclare(hourly, cron=HOURLY)
    assert schedule(hourly).declared
    assert fire(database) == 1


def test_a_kind_that_is_periodic_no_more_fires_nothing(hourly, redeclare, database, at, schedule):
    kind = redeclare(hourly)
    at("2026-02-02T08:00")
    assert fire(database) == 0
    assert not schedule(kind).declared


@pytest.mark.field("R85")
def test_of_two_hundred_schedules_on_one_minute_a_broken_one_is_reported_and_the_rest_run(
    declare, database, engine, at, slots
):
    """Of one more a person wrote the delivery by hand, with arguments of his own: that one is the slot's."""

    def counted(step: Step, n: int = 0) -> None: ...

    at("2026-02-02T07:30")
    kinds = [declare(counted, cron=HOURLY) for _ in range(200)]
    fire(database)
    broken, conflicting = kinds[50], kinds[100]
    with engine.begin() as tx:
        key = slot_key(datetime(2026, 2, 2, 8, tzinfo=UTC))
        by_hand = conflicting.options(key=key).enqueue(tx, n=5)
    with engine.connect() as tx:
        row_id = next(one.id for one in periodic.schedules(tx) if one.kind == broken.name)
    at("2026-02-02T08:00")
    began = time.monotonic()
    with poisoned(engine, row_id, "update", table="schedules"), pytest.raises(Exception, match="host says no"):
        run_sweep(database, named("cron"), Bounds())
    assert time.monotonic() - began < 10
    with engine.connect() as tx:
        assert [row.id for row in deliveries.page(tx, kind=conflicting.name)] == [by_hand.id]
    assert [kind for kind in kinds if slots(kind) != ["08:00"]] == [broken]
    with engine.connect() as tx:
        assert "host says no" in tx.scalar(text("select error from durable.loops where name = 'cron'"))
    assert fire(database) == 1, "its row was not written without its slot, and comes once it can"


def test_on_the_schema_before_it_the_sweep_says_what_to_run_and_needs_nothing_without_a_periodic_kind(
    database, engine, declare
):
    with engine.begin() as tx:
        tx.execute(text("alter table durable.schedules rename to schedules_of_later"))
    try:
        assert fire(database) == 0
        declare(tick, cron=HOURLY)
        with pytest.raises(SchemaBehind):
            fire(database)
    finally:
        with engine.begin() as tx:
            tx.execute(text("alter table durable.schedules_of_later rename to schedules"))
