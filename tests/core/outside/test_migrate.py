"""Migrations of states, and executions that have no caller to raise at."""

import pytest
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from durable_core.cases import passing
from durable_core.cases.declare import CaseType
from durable_core.errors import DefinitionError
from durable_core.refusals import CaseBusy, ExecutionFailed, StepNotAvailable, UnknownCaseType
from tests.core.outside.desk import Desk, Parcel


def to_oslo(state):
    """What a migration is given is the JSON that was stored."""
    assert isinstance(state, dict)
    return {**state, "places": [*state["places"], "Oslo"]}


def migrated(desk, transform=to_oslo, name="to oslo", **how):
    return desk.cases.migrate(desk.type, name, transform, **how)


def places(desk, case_id):
    return desk.case(case_id).state.places


@pytest.mark.spec("cases", 37)
def test_every_case_is_migrated_once(either):
    ids = [either.made() for _ in range(3)]
    done = migrated(either)
    assert (done.scanned, done.changed, done.unchanged, done.failed, done.more) == (3, 3, 0, (), False)
    assert [places(either, case_id) for case_id in ids] == [["Oslo"]] * 3
    assert either.entries(ids[0]) == ["claimed", "completed"]
    assert migrated(either).scanned == 0
    assert migrated(either, name="another").scanned == 3


@pytest.mark.spec("cases", 37)
def test_of_two_runs_at_once_one_migrates_a_case(either):
    """The second has listed both before the first is through with them."""
    ids = [either.made() for _ in range(2)]
    first = []

    def meanwhile(done, of):
        if not first:
            first.append(migrated(either))

    second = migrated(either, progress=meanwhile)
    assert (first[0].scanned, second.scanned, second.changed, second.unchanged) == (1, 2, 1, 1)
    assert [places(either, case_id) for case_id in ids] == [["Oslo"]] * 2
    assert [either.entries(case_id) for case_id in ids] == [["claimed", "completed"]] * 2


@pytest.mark.spec("cases", 37)
def test_one_that_raises_is_listed_left_and_taken_up_by_the_next_run(either):
    good, bad = either.made(), either.made(places=["Rome"])

    def only_new(state):
        if state["places"]:
            raise ValueError("Rome is secret")
        return to_oslo(state)

    done = migrated(either, only_new)
    assert (done.scanned, done.changed) == (2, 1)
    assert [(one.case_id, one.reason) for one in done.failed] == [(bad, "EXECUTION_FAILED")]
    assert "secret" not in done.failed[0].detail
    assert (places(either, good), places(either, bad)) == (["Oslo"], ["Rome"])
    assert either.entries(bad) == ["claimed", "failed"], "one attempt"
    again = migrated(either)
    assert (again.scanned, again.changed) == (1, 1)
    assert places(either, bad) == ["Rome", "Oslo"]


@pytest.mark.spec("cases", 37)
def test_a_dry_run_writes_nothing_and_says_what_would_be(either, engine):
    ids = [either.made(), either.made(places=["Oslo"]), either.made(places=["Rome"])]

    def tried(state):
        if state["places"] == ["Rome"]:
            return {"places": 7}
        return {**state, "places": ["Oslo"]}

    dry = migrated(either, tried, dry_run=True)
    assert (dry.scanned, dry.changed, dry.unchanged) == (3, 1, 1)
    assert [(one.case_id, one.reason) for one in dry.failed] == [(ids[2], "INVALID_STATE")]
    assert [either.entries(case_id) for case_id in ids] == [[]] * 3
    assert [either.case(case_id).claim for case_id in ids] == [None] * 3
    wet = migrated(either, tried)
    assert (wet.changed, wet.unchanged, len(wet.failed)) == (1, 1, 1)
    assert places(either, ids[2]) == ["Rome"], "an invalid result leaves its case as it was"


@pytest.mark.spec("cases", 37)
def test_a_limit_leaves_the_rest_for_the_next_run(either):
    for _ in range(3):
        either.made()
    first = migrated(either, limit=2)
    assert (first.scanned, first.more) == (2, True)
    second = migrated(either, limit=2)
    assert (second.scanned, second.more) == (1, False)
    assert migrated(either).scanned == 0


@pytest.mark.spec("cases", 37)
def test_an_ended_case_waits_until_it_is_asked_for(either):
    case_id = either.made()
    either.act = lambda state, ctx: ctx.end()
    either.cases.execute(case_id, "tell")
    assert migrated(either).scanned == 0
    assert migrated(either, ended=True).changed == 1
    assert either.case(case_id).ended, "it was changed and not woken"


@pytest.mark.spec("cases", 37)
def test_a_busy_case_fails_and_is_taken_up(either):
    case_id = either.made()
    met = []
    either.act = lambda state, ctx: met.append(migrated(either))
    either.cases.execute(case_id, "tell")
    assert [(one.case_id, one.reason) for one in met[0].failed] == [(case_id, "CASE_BUSY")]
    assert migrated(either).changed == 1


def test_an_unchanged_case_is_journaled_and_marked(either):
    case_id = either.made()
    done = migrated(either, lambda state: state)
    assert (done.changed, done.unchanged) == (0, 1)
    assert either.entries(case_id) == ["claimed", "completed"]
    assert migrated(either).scanned == 0


def test_a_migration_that_was_broken_off_goes_on(either):
    ids = [either.made() for _ in range(3)]

    def broken_off(done, of):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrated(either, progress=broken_off)
    assert migrated(either).scanned == 1
    assert [places(either, case_id) for case_id in ids] == [["Oslo"]] * 3


def test_it_goes_through_many_batches_and_says_how_far_it_is(either):
    for _ in range(7):
        either.made()
    told = []
    assert migrated(either, batch=3, progress=lambda done, of: told.append((done, of))).changed == 7
    assert told == [(n, 7) for n in range(1, 8)]


def test_one_that_always_fails_does_not_stop_the_run(either):
    for _ in range(5):
        either.made()
    done = migrated(either, lambda state: 1 / 0, batch=2)
    assert (done.scanned, len(done.failed)) == (5, 5)


def test_only_cases_that_are_named_are_migrated(either):
    ids = [either.made() for _ in range(3)]
    assert migrated(either, ids=[ids[1]]).scanned == 1
    assert places(either, ids[1]) == ["Oslo"]
    assert migrated(either).scanned == 2


def test_states_that_the_deployed_schema_refuses_are_what_migrations_are_for(engine):
    """The old state has no place in the new schema: it is read as JSON, and the new one is validated."""
    old = Desk(engine)
    try:
        case_id = old.made(places=["Rome"])

        class Parcel2(BaseModel):
            stops: list[str]

        new = CaseType(old.type.name, state=Parcel2, registered=False)
        cases = type(old.cases)(engine, [new])
        done = cases.migrate(new, "stops", lambda state: {"stops": state["places"]})
        assert done.changed == 1
        with old.tx() as tx:
            assert cases.get(tx, case_id).state == Parcel2(stops=["Rome"])
    finally:
        old.forget()


def test_a_definition_that_knows_the_old_states_reads_them(either):
    case_id = either.made(places=["Rome"])
    reads = CaseType(either.type.name, state=Parcel, registered=False)

    def moved(state):
        assert isinstance(state, Parcel)
        state.places.append("Bergen")
        return state

    assert migrated(either, moved, reads=reads).changed == 1
    assert places(either, case_id) == ["Rome", "Bergen"]


def test_old_states_become_new_ones_that_the_old_definition_could_not_read(either):
    class Old(BaseModel):
        a: int

    class New(BaseModel):
        b: str

    old = CaseType("tests.reshaped", state=Old, registered=False)
    new = CaseType("tests.reshaped", state=New, registered=False)
    before = type(either.cases)(either.where, [old])
    with either.tx() as tx:
        case_id = before.create(tx, old, Old(a=7)).id
    after = type(either.cases)(either.where, [new])
    done = after.migrate(new, "b", lambda state: New(b=str(state.a)), reads=old)
    assert (done.changed, done.failed) == (1, ())
    with either.tx() as tx:
        assert after.get(tx, case_id).state == New(b="7")


def test_a_state_that_the_old_definition_does_not_know_is_left_and_said(either):
    class Old(BaseModel):
        a: int

    case_id = either.made()
    reads = CaseType(either.type.name, state=Old, registered=False)
    for dry_run in (True, False):
        done = migrated(either, lambda state: {}, reads=reads, dry_run=dry_run)
        assert [(one.case_id, one.reason) for one in done.failed] == [(case_id, "INVALID_STATE")]
    assert either.entries(case_id) == []


@pytest.mark.parametrize(
    "how",
    [
        {"name": ""},
        {"name": "  "},
        {"name": None},
        {"transform": "to_oslo"},
        {"limit": 0},
        {"batch": 0},
        {"reads": CaseType("another", registered=False)},
    ],
)
def test_what_is_no_migration_is_loud(either, how):
    with pytest.raises(DefinitionError):
        migrated(either, **how)


def test_a_type_that_is_not_known_is_refused(either):
    with pytest.raises(UnknownCaseType):
        either.cases.migrate("nothing", "x", to_oslo)


def test_an_outage_ends_the_run(desk, nowhere):
    first, second = desk.made(), desk.made()
    here = desk.cases.store.database

    def outage(state):
        desk.cases.store.database = nowhere
        return to_oslo(state)

    with pytest.raises(OperationalError):
        migrated(desk, outage)
    desk.cases.store.database = here
    assert (desk.entries(first), desk.entries(second)) == (["claimed"], [])
    done = migrated(desk)
    assert (done.changed, [one.reason for one in done.failed]) == (1, ["CASE_BUSY"]), "its lease lasts for a while"


# --- runs of the system --------------------------------------------------------------------------


@pytest.mark.spec("cases", 36)
def test_whatever_exception_came_of_it_is_returned(either):
    case_id = either.made(lost=True)
    run = either.cases.run_as_system
    done = run(case_id, "tell")
    assert (done.committed, done.settled, done.error) == (True, False, None)
    assert done.result.seq == 1
    assert either.ran[0].actor == {"system": "durable"}

    refused = run(case_id, "scan", input={"place": "Oslo"})
    assert (refused.committed, refused.settled, refused.result) == (False, True, None)
    assert isinstance(refused.error, StepNotAvailable)

    either.act = lambda state, ctx: 1 / 0
    failed = run(case_id, "tell")
    assert isinstance(failed.error, ExecutionFailed)
    assert isinstance(run("no id", "tell").error, Exception)

    met = []
    either.act = lambda state, ctx: met.append(run(case_id, "tell"))
    assert run(case_id, "tell").committed
    assert isinstance(met[0].error, CaseBusy)


@pytest.mark.spec("cases", 36)
def test_an_outage_is_returned(desk, nowhere):
    case_id = desk.made()
    away = desk.cases.on(nowhere)
    assert isinstance(away.run_as_system(case_id, "tell").error, OperationalError)


class TimeIsUp(Exception):
    """As the soft time limit of a task is: an Exception, and no outcome of a handler."""


@pytest.mark.spec("cases", 36)
@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit, TimeIsUp])
def test_what_ends_the_process_or_the_task_passes(either, ends, monkeypatch):
    monkeypatch.setattr(passing, "_passing", (TimeIsUp,))
    case_id = either.made()

    def end(state, ctx):
        raise ends

    either.act = end
    with pytest.raises(ends):
        either.cases.run_as_system(case_id, "tell")
    assert either.entries(case_id) == ["claimed"], "left to its lease, as that of a killed process"


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_ends_the_task_ends_a_migration(either, dry_run, monkeypatch):
    monkeypatch.setattr(passing, "_passing", (TimeIsUp,))
    either.made()

    def end(state):
        raise TimeIsUp

    with pytest.raises(TimeIsUp):
        migrated(either, end, dry_run=dry_run)


def test_a_definition_may_be_given_for_one_run(either):
    case_id = either.made()
    other = CaseType(either.type.name, state=Parcel, registered=False)

    @other.step("mend")
    def mend(state, ctx):
        state.places.append("mended")
        return state

    assert either.cases.run_as_system(case_id, "mend", definition=other).committed
    assert places(either, case_id) == ["mended"]
    assert not either.cases.run_as_system(case_id, "mend").committed


def test_a_migration_of_many_cases_holds_no_transaction_open_meanwhile(desk, engine):
    desk.made()
    seen = []

    def look(state):
        with engine.connect() as other:
            open_ones = text(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and state like 'idle in transaction%' and pid <> pg_backend_pid()"
            )
            seen.append(other.scalar(open_ones))
        return to_oslo(state)

    migrated(desk, look)
    assert seen == [0]
