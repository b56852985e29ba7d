"""What the doctor says of the sweeps and of the work that waits."""

import pytest
from sqlalchemy import text

from durable_core import deliveries
from durable_core.database.connections import Database
from durable_core.deliveries.declare import delivery, registry
from durable_core.doctor import work
from durable_core.doctor.database import inside, looking
from durable_core.doctor.findings import Examination, Reason, Status
from durable_core.sweeps import SWEEPS, standings
from durable_core.testing import make_delivery
from tests.doctor.conftest import is_mendable, look, only

SWEPT = (
    "insert into durable.loops (name, began_at, ended_at, moved, error, host, hold_until) values (:name,"
    " durable.durable_now() - make_interval(secs => :age), durable.durable_now() - make_interval(secs => :age), 0,"
    " :error, :host, durable.durable_now() + make_interval(secs => :hold))"
)


@pytest.fixture
def swept(owner):
    """All sweeps have just run, but for what is said: `swept(reap={"age": 60})`."""

    def _swept(**differently):
        with owner.begin() as tx:
            for sweep in SWEEPS:
                facts = {"age": 0, "error": None, "host": "box", "hold": None} | differently.get(sweep.name, {})
                tx.execute(text(SWEPT), {"name": sweep.name, **facts})
        return [finding for finding in look(owner, "sweeps").findings if finding.status is not Status.PASS]

    return _swept


@pytest.fixture
def declare():
    names = []

    def _declare(name, **terms):
        kind = delivery(name, **terms)(lambda step: None)
        names.append(name)
        return kind

    yield _declare
    for name in names:
        registry.remove(name)


@pytest.fixture
def make(owner):
    def _make(kind, **how):
        with owner.begin() as connection:
            return make_delivery(connection, kind, **how)

    return _make


def test_sweeps_that_ran_just_now_are_well_and_say_where(app, swept):
    assert swept() == []
    findings = look(app, "sweeps").findings
    assert [finding.observed.split()[0] for finding in findings] == [sweep.name for sweep in SWEEPS]
    assert all("on box" in finding.observed for finding in findings)


def test_sweeps_that_never_began_fail(app):
    findings = look(app, "sweeps").findings
    assert [finding.observed.split()[0] for finding in findings] == ["dispatch", "reap", "cron", "poll"]
    assert is_mendable(findings[0], Reason.SWEEP_LATE, Status.FAIL)


@pytest.mark.parametrize(
    ("differently", "reason", "status", "says"),
    [
        ({"reap": {"age": 31}}, Reason.SWEEP_LATE, Status.FAIL, "reap last began 31 s ago"),
        ({"reap": {"age": -60}}, Reason.SWEEP_LATE, Status.FAIL, "ahead of the database's clock"),
        ({"cron": {"host": "box (a worker)"}}, Reason.SWEEP_BY_A_WORKER, Status.WARN, "cron was last run by a worker"),
        ({"expire": {"error": "no room"}}, Reason.SWEEP_FAILED, Status.FAIL, "expire ended with an error: no room"),
        ({"reap": {"hold": 8}}, Reason.SWEEP_HELD_BACK, Status.WARN, "reap takes nothing"),
    ],
)
def test_a_sweep_that_is_not_well_is_told(swept, differently, reason, status, says):
    (finding,) = swept(**differently)
    assert is_mendable(finding, reason, status)
    assert says in finding.observed


@pytest.mark.parametrize(
    ("name", "age", "late", "missing"),
    [
        ("dispatch", 2, False, False),
        ("dispatch", 29, True, False),
        ("dispatch", 31, True, True),
        ("dispatch", -31, True, True),
        ("expire", 44, False, False),
        ("expire", 46, True, True),
    ],
)
def test_a_sweep_is_late_before_a_gate_is_failed_for_it(owner, swept, name, age, late, missing):
    """What a deploy restarts comes back within half a minute; who looks at a screen sees it at once."""
    swept(**{name: {"age": age}})
    with owner.connect() as tx:
        (one,) = [one for one in standings(tx) if one.sweep.name == name]
    assert (one.late, one.missing) == (late, missing)


def test_a_sweep_that_has_never_begun_is_missing_unless_it_runs_seldom(owner):
    with owner.connect() as tx:
        stand = {one.sweep.name: (one.age_seconds, one.late, one.missing) for one in standings(tx)}
    assert stand["dispatch"] == (None, True, True)
    assert stand["prune"] == (None, False, False)


def test_due_rows_of_kinds_that_nobody_declares_are_a_note(owner, declare, make):
    kind, other = declare("test.doctor_known"), declare("test.doctor_gone", queue="odd")
    make(kind)
    make(other)
    make(other)
    make(other, countdown=60)

    def ask(known):
        return inside(Database(owner), lambda connection: work.waiting(connection, known))()

    (finding,) = ask({"test.doctor_known"})
    assert is_mendable(finding, Reason.KIND_UNDECLARED, Status.NOTE)
    assert finding.observed.endswith(": 2 rows of test.doctor_gone")
    assert len(ask(set())) == 1, "one note, however many"
    made = Examination([finding])
    assert not made.unhealthy(strict=True), "another app on this schema may declare them"
    assert ask(None)[0].status is Status.PASS, "where no app was loaded, nothing is undeclared"


@pytest.mark.parametrize(
    ("column", "value", "reason", "status"),
    [
        ("waiting_for", "handler", Reason.WAITING_FOR_HANDLER, Status.FAIL),
        ("waiting_for", "arguments", Reason.WAITING_FOR_ARGUMENTS, Status.FAIL),
        ("held_reason", "reap failed", Reason.HELD_ROWS, Status.WARN),
    ],
)
def test_what_waits_for_code_or_for_a_person_is_told(owner, app, declare, make, column, value, reason, status):
    made = make(declare("test.doctor_waits"))
    assert only(app, "waiting").status is Status.PASS
    with owner.begin() as tx:
        tx.execute(
            text(f"update durable.deliveries set {column} = :value where id = :id"), {"value": value, "id": made.id}
        )
    finding = only(app, "waiting")
    assert is_mendable(finding, reason, status)
    assert finding.observed.startswith("1 row of test.doctor_waits")


def test_a_row_that_runs_and_is_held_is_told(owner, app, declare, make):
    made = make(declare("test.doctor_held"), state="processing")
    with owner.begin() as tx:
        tx.execute(text("update durable.deliveries set held_reason = 'odd' where id = :id"), {"id": made.id})
    assert is_mendable(only(app, "waiting"), Reason.HELD_ROWS, Status.WARN)


def test_a_count_that_stops_at_its_limit_says_so(owner, app, declare, make, monkeypatch):
    monkeypatch.setattr(work, "LOOKED_AT", 2)
    kind = declare("test.doctor_many")
    for _ in range(3):
        make(kind)
    with owner.begin() as tx:
        tx.execute(text("update durable.deliveries set waiting_for = 'handler'"))
    assert only(app, "waiting").observed.startswith("2+ rows of")


@pytest.mark.parametrize(
    ("age", "does", "overdue"),
    [
        (61, None, True),
        (59, None, False),
        (61, "update durable.deliveries set held_reason = 'odd'", False),
        (61, "insert into durable.pauses (what, name, by_whom, reason) values ('queue', 'unread', 'dana', 'x')", False),
        (
            61,
            "insert into durable.pauses (what, name, by_whom, reason) values ('kind', 'test.unread', 'dana', 'x')",
            False,
        ),
        (61, "insert into durable.pauses (what, name, by_whom, reason) values ('queue', 'other', 'dana', 'x')", True),
        (
            61,
            "insert into durable.pauses (what, name, by_whom, reason, until)"
            " values ('queue', 'unread', 'dana', 'x', durable.durable_now())",
            True,
        ),
    ],
)
def test_a_queue_is_overdue_when_nothing_but_a_worker_is_missing(owner, app, declare, make, age, does, overdue):
    kind = declare("test.unread", queue="unread")
    make(kind, countdown=60)
    with looking(Database(app)) as connection:
        assert work.due_queues(connection) == {}
    made = make(kind)
    with owner.begin() as tx:
        older = "update durable.deliveries set due_at = due_at - make_interval(secs => :age) where id = :id"
        tx.execute(text(older), {"age": age, "id": made.id})
        if does is not None:
            tx.execute(text(does))
    with looking(Database(app)) as connection:
        assert work.due_queues(connection) == {"unread": overdue}


@pytest.mark.parametrize(("state", "reason"), [("dead", Reason.DEAD_DELIVERIES), ("failed", Reason.FAILED_DELIVERIES)])
def test_what_was_given_up_warns_until_it_is_discarded(owner, app, declare, make, state, reason):
    made = make(declare("test.doctor_ended"), state=state)
    finding = only(app, "ended")
    assert is_mendable(finding, reason, Status.WARN)
    assert finding.observed == f"1 {state}"
    with owner.begin() as tx:
        deliveries.discard(tx, made.id, by="dana", reason="gone")
    assert only(app, "ended").status is Status.PASS


def test_what_is_paused_is_told_with_who_and_why(owner, app):
    with owner.begin() as tx:
        deliveries.pause(tx, "queue", "mail", by="dana", reason="the server moves")
    finding = only(app, "pauses")
    assert is_mendable(finding, Reason.PAUSED, Status.WARN)
    assert finding.observed == "queue mail is paused by dana: the server moves"


SCHEDULE = (
    "insert into durable.schedules (kind, id, cron, timezone, missed, since, next_slot)"
    " values ('test.doctor_cron', gen_random_uuid(), '0 * * * *', :zone, 'skip', durable.durable_now(),"
    " durable.durable_now() + interval '1 hour')"
)


@pytest.mark.parametrize("zone", ["Mars/Olympus_Mons", "../etc/passwd"])
def test_a_schedule_in_a_zone_that_is_unknown_here_fails(owner, app, zone):
    with owner.begin() as tx:
        tx.execute(text(SCHEDULE), {"zone": zone})
    assert is_mendable(only(app, "schedules"), Reason.TIMEZONE_UNKNOWN, Status.FAIL)


def test_a_schedule_that_nobody_declares_is_a_note_and_one_that_is_paused_warns(owner, app):
    with owner.begin() as tx:
        tx.execute(text(SCHEDULE), {"zone": "Europe/Berlin"})
    assert only(app, "schedules").status is Status.PASS
    (finding,) = inside(Database(app), lambda connection: work.schedules(connection, set()))()
    assert is_mendable(finding, Reason.SCHEDULE_UNDECLARED, Status.NOTE)
    assert finding.observed.endswith(": test.doctor_cron")
    with owner.begin() as tx:
        tx.execute(
            text(
                "update durable.schedules set paused_at = durable.durable_now(),"
                " paused_by = 'dana', paused_reason = 'x'"
            )
        )
    assert is_mendable(only(app, "schedules"), Reason.SCHEDULE_PAUSED, Status.WARN)


@pytest.mark.parametrize("declared", [set(), {"test.doctor_cron"}])
def test_a_slot_that_nobody_decides_warns_unless_its_schedule_is_paused(owner, app, declared):
    def ask():
        return inside(Database(app), lambda connection: work.schedules(connection, declared))()

    with owner.begin() as tx:
        tx.execute(text(SCHEDULE), {"zone": "Europe/Berlin"})
        tx.execute(text("update durable.schedules set next_slot = durable.durable_now() - interval '59 s'"))
    assert Reason.SCHEDULE_LATE not in {one.reason for one in ask()}
    with owner.begin() as tx:
        tx.execute(text("update durable.schedules set next_slot = durable.durable_now() - interval '61 s'"))
    finding = ask()[0]
    assert is_mendable(finding, Reason.SCHEDULE_LATE, Status.WARN)
    assert finding.observed.startswith("test.doctor_cron was due 61 s ago")
    paused = "paused_at = durable.durable_now(), paused_by = 'dana', paused_reason = 'x'"
    with owner.begin() as tx:
        tx.execute(text(f"update durable.schedules set {paused}"))
    assert not {Reason.SCHEDULE_LATE, Reason.OK} & {one.reason for one in ask()}
