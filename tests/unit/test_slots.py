"""When a crontab is due in a time zone: the calendar, the gaps and the overlaps of the clock."""

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from durable_core import DefinitionError, Step, delivery
from durable_core.deliveries.declare import registry
from durable_core.deliveries.slots import MISSED, Cadence

PRAGUE = "Europe/Prague"
LORD_HOWE = "Australia/Lord_Howe"
"""Its summer time is half an hour: 02:00 becomes 02:30, and back again 02:00 becomes 01:30."""


def local(cron: str, zone: str, day: tuple[int, int, int], hours: int = 24) -> list[str]:
    """The slots of one local day, as the wall clock shows them, with the offset."""
    cadence = Cadence.of("test.kind", cron, zone, "once")
    start = datetime(*day, tzinfo=ZoneInfo(zone)).astimezone(UTC)
    slots = cadence.latest(start, start + timedelta(hours=hours) - timedelta(seconds=1), 10_000)
    return [slot.astimezone(ZoneInfo(zone)).strftime("%H:%M%z")[:-2] for slot in slots]


SPRING, AUTUMN = (2026, 3, 29), (2026, 10, 25)


@pytest.mark.parametrize(
    ("cron", "day", "slots"),
    [
        ("30 2 * * *", SPRING, ["03:00+02"]),
        ("30 2 * * *", AUTUMN, ["02:30+02"]),
        ("0,30 2 * * *", SPRING, ["03:00+02"]),
        ("30 2-3 * * *", SPRING, ["03:00+02", "03:30+02"]),
        ("0 2,3 * * *", SPRING, ["03:00+02"]),
        ("0 1-3 * * *", AUTUMN, ["01:00+02", "02:00+02", "03:00+01"]),
        ("15 * * * *", SPRING, ["00:15+01", "01:15+01", "03:15+02", "04:15+02"]),
        ("15 * * * *", AUTUMN, ["00:15+02", "01:15+02", "02:15+02", "02:15+01", "03:15+01", "04:15+01"]),
        ("*/30 2 * * *", SPRING, []),
        ("*/30 2 * * *", AUTUMN, ["02:00+02", "02:30+02", "02:00+01", "02:30+01"]),
        ("30 */2 * * *", SPRING, ["00:30+01", "04:30+02"]),
    ],
)
def test_in_prague_times_follow_the_clock_on_the_wall_and_stars_run_whenever_it_matches(cron, day, slots):
    """A time that the clock leaves out is due at the first instant after the gap, one that it shows twice once."""
    assert [slot for slot in local(cron, PRAGUE, day, hours=6) if slot < "05"] == slots


def test_a_quarter_of_an_hour_stays_one_over_both_changes():
    for day, hours in ((SPRING, 23), (AUTUMN, 25)):
        assert len(local("*/15 * * * *", PRAGUE, day, hours)) == 4 * hours


@pytest.mark.parametrize(
    ("cron", "day", "slots"),
    [
        ("15 2 * * *", (2026, 10, 4), ["02:30+11"]),
        ("45 1 * * *", (2026, 4, 5), ["01:45+11"]),
        ("*/20 3 * * *", (2026, 10, 4), ["03:00+11", "03:20+11", "03:40+11"]),
        ("*/20 1 * * *", (2026, 4, 5), ["01:00+11", "01:20+11", "01:40+11", "01:40+10"]),
        ("*/20 2 * * *", (2026, 4, 5), ["02:00+10", "02:20+10", "02:40+10"]),
    ],
)
def test_where_summer_time_is_half_an_hour_no_time_is_lost_or_doubled(cron, day, slots):
    """cronsim alone, which steps by hours, leaves out what is due in the half hour after such a change."""
    assert local(cron, LORD_HOWE, day) == slots


def test_where_the_day_begins_in_a_gap_midnight_is_due_at_its_end():
    assert local("0 0 * * *", "Africa/Cairo", (2026, 4, 24), hours=20) == ["01:00+03"]


def matches(cadence: Cadence, wall: datetime) -> bool:
    return next(CronSim(cadence.cron, wall - timedelta(seconds=1))) == wall


def minute_by_minute(cadence: Cadence, start: datetime, end: datetime) -> list[datetime]:
    """The rule, spelled out for each minute: slow, and with no idea of what comes next."""
    slots, minute = [], timedelta(minutes=1)
    before = (start - minute).astimezone(cadence.zone).utcoffset()
    at = start
    while at <= end:
        shown = at.astimezone(cadence.zone)
        wall, offset = shown.replace(tzinfo=None, fold=0), shown.utcoffset()
        if not cadence.names_times:
            due = matches(cadence, wall)
        else:
            due = shown.fold == 0 and matches(cadence, wall)
            left_out = wall - max(offset - before, timedelta())
            while left_out < wall:
                due = due or matches(cadence, left_out)
                left_out += minute
        if due:
            slots.append(at)
        before, at = offset, at + minute
    return slots


def a_field(lowest: int, highest: int) -> st.SearchStrategy[str]:
    number = st.integers(lowest, highest)
    return st.one_of(
        st.just("*"),
        st.integers(2, 20).map(lambda step: f"*/{step}"),
        st.lists(number, min_size=1, max_size=3).map(lambda some: ",".join(map(str, some))),
        st.tuples(number, number).map(lambda two: f"{min(two)}-{max(two)}"),
    )


CHANGES = [
    (PRAGUE, datetime(2026, 3, 28, 20)), (PRAGUE, datetime(2026, 10, 24, 20)),
    (LORD_HOWE, datetime(2026, 10, 3, 10)), (LORD_HOWE, datetime(2026, 4, 4, 10)),
    ("Africa/Cairo", datetime(2026, 4, 23, 16)), ("Asia/Kolkata", datetime(2026, 1, 1)),
    ("Pacific/Apia", datetime(2011, 12, 30, 6)),
]  # fmt: skip
"""The last left out a whole day."""


@given(a_field(0, 59), a_field(0, 23), st.sampled_from(CHANGES), st.floats(0, 1))
def test_around_every_change_of_the_clock_the_slots_are_those_of_the_rule_wherever_one_begins(
    minutes, hours, change, begin
):
    zone, start = change
    start = start.replace(tzinfo=UTC)
    end = start + timedelta(hours=18)
    cadence = Cadence.of("test.kind", f"{minutes} {hours} * * *", zone, "once")
    expected = minute_by_minute(cadence, start, end)
    assert cadence.latest(start, end, 100_000) == expected
    anywhere = start + begin * (end - start)
    following = cadence.after(anywhere)
    later = [slot for slot in expected if slot > anywhere]
    assert following == later[0] if later else following > end


def test_over_a_year_every_slot_is_later_than_the_one_before(seed):
    draw = random.Random(seed)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(100):
        minute = draw.choice(["0", "*/30", f"{draw.randrange(60)}", f"{draw.randrange(30)},{draw.randrange(30, 60)}"])
        hour = draw.choice(["*", "*/5", "2", "0-3", f"{draw.randrange(24)}"])
        cron = f"{minute} {hour} {draw.choice(['*', '*', 'L', '1-7'])} * {draw.choice(['*', '0', '1-5', 'MON#1'])}"
        cadence = Cadence.of("test.kind", cron, draw.choice([PRAGUE, LORD_HOWE, "America/St_Johns", "UTC"]), "once")
        slot, before = cadence.after(start), start
        while slot < start + timedelta(days=366):
            assert slot > before, cron
            slot, before = cadence.after(slot), slot


def test_the_last_slots_of_a_year_of_minutes_are_found_without_walking_through_it():
    cadence = Cadence.of("test.kind", "* * * * *", PRAGUE, "all")
    end = datetime(2026, 7, 1, tzinfo=UTC)
    found = cadence.latest(end - timedelta(days=365), end, MISSED["all"].most)
    assert found == [end - timedelta(minutes=n) for n in reversed(range(100))]


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "* * * *"}, "five fields"),
        ({"cron": "0 * * * * *"}, "five fields"),
        ({"cron": "@daily"}, "five fields"),
        ({"cron": 5}, "five fields"),
        ({"cron": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"cron": "0 8 * * *", "timezone": "Europe/Pragu"}, "Europe/Pragu"),
        ({"cron": "0 8 * * *", "timezone": "../etc/passwd"}, "none that this system knows"),
        ({"cron": "0 8 * * *", "timezone": None}, "none that this system knows"),
        ({"cron": "0 8 * * *", "missed": "some"}, "one of skip, once, all"),
        ({"timezone": "Europe/Prague"}, "there is none"),
        ({"missed": "all"}, "there is none"),
    ],
)
def test_a_cron_that_cannot_work_is_refused_when_it_is_declared(terms, said):
    with pytest.raises(DefinitionError, match=said) as refused:
        delivery("test.refused", **terms)(lambda step: None)
    assert "test.refused" in str(refused.value)
    assert "test.refused" not in registry


def needs_more(step: Step, invoice_id: int) -> None: ...


def takes_text(step: Step, slot: str) -> None: ...


def takes_anything(step: Step, slot) -> None: ...


@pytest.mark.parametrize(
    ("handler", "said"),
    [(needs_more, "invoice_id"), (takes_text, "slot: datetime"), (takes_anything, "slot: datetime")],
)
def test_a_handler_that_a_cron_cannot_call_is_refused(handler, said):
    with pytest.raises(DefinitionError, match=said):
        delivery("test.refused", cron="0 8 * * *")(handler)


def takes_slot(step: Step, slot: datetime) -> None: ...


def may_take_it(step: Step, n: int = 0, *, slot: datetime | None = None) -> None: ...


@pytest.mark.parametrize("handler", [takes_slot, may_take_it])
def test_the_slot_reaches_the_handler_with_the_offset_of_its_zone(handler):
    kind = delivery("test.slot", cron="0 8 * * *", timezone=PRAGUE)(handler)
    try:
        stored = kind.slot_arguments(datetime(2026, 7, 1, 6, tzinfo=UTC))
        assert stored == '{"slot":"2026-07-01T08:00:00+02:00"}'
        given_slot = kind.signature.unpack(stored)["slot"]
        assert (given_slot, given_slot.utcoffset()) == (datetime(2026, 7, 1, 6, tzinfo=UTC), timedelta(hours=2))
    finally:
        registry.remove("test.slot")
