"""What the doctor says of the server, the role and who is in the way; each produced for real."""

import socket
import time
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import create_engine, text

from durable_core.database.connections import Database
from durable_core.deliveries.declare import delivery, registry
from durable_core.doctor import database as of_database
from durable_core.doctor.findings import Check, Reason, Status, examine, found, well
from durable_core.testing import MovableClock, make_delivery
from tests.celery.nodes import wait_until
from tests.doctor.conftest import checks_of, is_mendable, look, only, reasons
from tests.faults.pooler import Pooler, find_pgbouncer
from tests.relay import Relay


def test_what_is_well_passes_and_says_so(app):
    made = look(app)
    # The suite's own server keeps nothing over a crash, and nobody sweeps this database.
    strange = {finding.reason for finding in made.findings if finding.status is not Status.PASS}
    assert strange == {Reason.SYNCHRONOUS_COMMIT_OFF, Reason.FSYNC_OFF, Reason.SWEEP_LATE}
    assert not made.skipped
    assert {finding.check for finding in made.findings} == {check.name for check in checks_of(app)}


# --- who answers ------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_fails_and_nothing_more_is_asked(app):
    nowhere = create_engine(app.url.set(port=1))
    made = look(nowhere)
    (finding,) = made.findings
    assert is_mendable(finding, Reason.DATABASE_UNREACHABLE, Status.FAIL)
    assert "doctor-app" not in finding.observed
    assert set(made.skipped) == {check.name for check in checks_of(app)} - {"database"}


def test_a_server_that_takes_a_connection_and_says_nothing_is_waited_for_once(app):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = create_engine(app.url.set(port=silent.getsockname()[1]))
        made = look(engine, seconds=1)
    (finding,) = made.findings
    assert is_mendable(finding, Reason.COULD_NOT_LOOK, Status.FAIL)
    assert len(made.skipped) == len(checks_of(app)) - 1


def test_a_server_that_falls_silent_between_two_looks_ends_the_examination_there(app):
    relay = Relay(app.url.host, app.url.port)
    engine = create_engine(app.url.set(host="127.0.0.1", port=relay.port))
    try:
        relay.silence_before(b"has_schema_privilege")
        made = look(engine, seconds=1)
    finally:
        relay.close()
    assert made.findings[-1].check == "role"
    assert made.findings[-1].reason is Reason.COULD_NOT_LOOK
    assert made.skipped["drift"] == "role had no answer"


def test_a_look_that_meets_a_locked_catalog_is_a_finding_and_the_others_go_on(owner, app, monkeypatch):
    monkeypatch.setattr(of_database, "LOOK_SECONDS", 0.3)
    with owner.begin() as tx:
        tx.execute(text("lock table durable.loops in access exclusive mode"))
        made = look(app)
    (finding,) = [one for one in made.findings if one.check == "sweeps"]
    assert is_mendable(finding, Reason.COULD_NOT_LOOK, Status.FAIL)
    assert [one.status for one in made.findings if one.check == "ended"] == [Status.PASS]


def test_a_look_writes_nothing_and_could_not(app):
    def writes(connection):
        connection.execute(text("delete from durable.loops"))

    made = examine([Check("one", "room", of_database.inside(Database(app), writes))])
    assert "read-only transaction" in made.findings[0].observed


def test_a_fault_of_a_check_is_its_finding_and_hides_no_other():
    def breaks():
        raise ValueError("odd")

    made = examine([Check("one", "a", breaks), Check("two", "a", lambda: [well("two", "fine")])])
    assert [finding.reason for finding in made.findings] == [Reason.COULD_NOT_LOOK, Reason.OK]
    gated = examine([Check("one", "a", breaks, gate=True), Check("two", "a", lambda: [well("two", "fine")])])
    assert gated.skipped == {"two": "one could not look"}


def test_warnings_are_unhealthy_for_the_strict_alone():
    warns = examine([Check("one", "a", lambda: [found("one", Reason.CLOCK_SKEW, "late", "mend it")])])
    fails = examine([Check("one", "a", lambda: [found("one", Reason.READ_ONLY, "no", "mend it")])])
    assert (warns.unhealthy(), warns.unhealthy(strict=True), fails.unhealthy()) == (False, True, True)


# --- server and role --------------------------------------------------------------------------------


def test_an_old_server_fails(app, monkeypatch):
    monkeypatch.setattr(of_database, "OLDEST_SERVER", 990_000)
    assert Reason.SERVER_TOO_OLD in reasons(app, "server")


def test_a_server_that_forgets_what_it_acknowledged_warns(app):
    findings = {finding.reason: finding for finding in look(app, "server").findings}
    assert is_mendable(findings[Reason.SYNCHRONOUS_COMMIT_OFF], Reason.SYNCHRONOUS_COMMIT_OFF, Status.WARN)
    assert is_mendable(findings[Reason.FSYNC_OFF], Reason.FSYNC_OFF, Status.WARN)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("default_transaction_read_only = on", Reason.READ_ONLY),
        ("session_replication_role = replica", Reason.GUARDS_OFF),
    ],
)
def test_a_setting_of_the_role_that_breaks_a_promise_fails(owner, app, role, setting, reason):
    with owner.begin() as tx:
        tx.execute(text(f"alter role {role} set {setting}"))
    (finding,) = [one for one in look(app, "server").findings if one.status is Status.FAIL]
    assert is_mendable(finding, reason, Status.FAIL)
    assert role in finding.fix


def test_the_role_of_an_application_passes(app):
    assert only(app, "role").status is Status.PASS


def test_a_superuser_warns(owner):
    assert is_mendable(only(owner, "role"), Reason.ROLE_SUPERUSER, Status.WARN)


def test_a_role_that_owns_a_table_warns(owner, app, role):
    with owner.begin() as tx:
        tx.execute(text(f"grant create on schema durable to {role}"))
        tx.execute(text(f"alter table durable.loops owner to {role}"))
    assert is_mendable(only(app, "role"), Reason.ROLE_OWNS_TABLES, Status.WARN)


@pytest.mark.parametrize(
    ("taken", "lacks"),
    [
        ("revoke delete on durable.journal from", "DELETE on journal"),
        ("revoke usage on schema durable from", "USAGE on schema durable"),
        ("revoke select on durable.schema_version from", "SELECT on schema_version"),
    ],
)
def test_a_role_without_a_right_it_needs_fails(owner, app, role, taken, lacks):
    with owner.begin() as tx:
        tx.execute(text(f"{taken} {role}"))
    finding = only(app, "role")
    assert is_mendable(finding, Reason.ROLE_LACKS_RIGHTS, Status.FAIL)
    assert lacks in finding.observed


def test_the_mend_of_a_role_that_lacks_rights_mends_it_and_gives_none_on_tables_of_the_host(owner, worker_id):
    """As it is printed, whatever the role is called; the host keeps a table of its own in our schema."""
    name = f"Odd-app_{worker_id}"
    with owner.begin() as tx:
        tx.execute(text("create table durable.hosts (a int)"))
        tx.execute(text("create function durable.hosts_own() returns int language sql as 'select 1'"))
        tx.execute(text("revoke execute on all functions in schema durable from public"))
        tx.execute(text(f"create role \"{name}\" login password 'doctor-app'"))
    engine = create_engine(owner.url.set(username=name, password="doctor-app"))
    try:
        finding = only(engine, "role")
        assert is_mendable(finding, Reason.ROLE_LACKS_RIGHTS, Status.FAIL)
        assert "hosts" not in finding.observed + finding.fix
        with owner.begin() as tx:
            tx.execute(text(finding.fix))
        assert only(engine, "role").status is Status.PASS
        with owner.connect() as tx:
            reads = text("select has_table_privilege(:role, 'durable.hosts', 'select')")
            assert tx.scalar(reads, {"role": name}) is False
    finally:
        engine.dispose()
        with owner.begin() as tx:
            tx.execute(text(f'drop owned by "{name}"'))
            tx.execute(text(f'drop role "{name}"'))


def test_a_role_that_owns_tables_of_the_host_alone_passes(owner, app, role):
    with owner.begin() as tx:
        tx.execute(text("create table durable.hosts (a int)"))
        tx.execute(text(f"grant create on schema durable to {role}"))
        tx.execute(text(f"alter table durable.hosts owner to {role}"))
    assert only(app, "role").status is Status.PASS


def test_a_function_that_the_role_may_not_call_fails(owner, app):
    with owner.begin() as tx:
        tx.execute(text("revoke execute on function durable.durable_now() from public"))
    assert "EXECUTE on durable_now" in only(app, "role").observed


# --- the clock, and who is in the way ----------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "says"), [(5, "ahead of"), (-5, "behind")])
def test_a_clock_that_is_off_warns(owner, app, seconds, says):
    clock = MovableClock(owner)
    clock.install()
    with owner.begin() as tx:
        tx.execute(text(f"grant select on durable.test_clock to {app.url.username}"))
    assert only(app, "clock").status is Status.PASS
    clock.advance(seconds)
    finding = only(app, "clock")
    assert is_mendable(finding, Reason.CLOCK_SKEW, Status.WARN)
    assert says in finding.observed


@pytest.fixture
def later(owner):
    """Two minutes have passed for everybody."""
    clock = MovableClock(owner)
    clock.install()
    return lambda: clock.advance(120)


def test_a_transaction_left_open_warns_with_the_session_that_holds_it(owner, later):
    with owner.connect() as connection:
        pid = connection.scalar(text("select pg_backend_pid()"))
        later()
        finding = only(owner, "transactions")
    assert is_mendable(finding, Reason.IDLE_IN_TRANSACTION, Status.WARN)
    assert f"pg_terminate_backend({pid})" in finding.fix


def test_a_statement_that_takes_long_warns(owner, later):
    busy = psycopg.connect(owner.url.set(drivername="postgresql").render_as_string(hide_password=False))
    try:
        pid = busy.info.backend_pid
        busy.pgconn.send_query(b"select pg_sleep(60)")
        wait_until(lambda: _state(owner, pid) == "active", "it sleeps")
        later()
        assert is_mendable(only(owner, "transactions"), Reason.LONG_TRANSACTION, Status.WARN)
    finally:
        busy.cancel()
        busy.close()


def _state(engine, pid):
    with engine.connect() as connection:
        return connection.scalar(text("select state from pg_stat_activity where pid = :pid"), {"pid": pid})


def test_a_role_that_may_not_see_the_others_says_how_many_hide(owner, app):
    with owner.begin() as tx:
        tx.execute(text("create temp table open_one ()"))
        finding = only(app, "transactions")
    assert finding.status is Status.PASS
    assert "1 of other roles hide theirs" in finding.observed


@pytest.fixture
def held(owner):
    """A claimed delivery past its deadline and a lease, whose owner keeps the row locked, in a transaction so named."""
    clock = MovableClock(owner)
    clock.install()
    kind = delivery("test.doctor_stuck")(lambda step: None)
    try:
        with owner.begin() as connection:
            made = make_delivery(connection, kind, state="processing")
        with owner.begin() as connection:
            named = f"durable {made.id} {made.held.fence}"
            connection.execute(text("select set_config('application_name', :name, true)"), {"name": named})
            connection.execute(text("select from durable.deliveries where id = :id for no key update"), {"id": made.id})
            clock.advance(300 + 31)
            yield made
    finally:
        registry.remove("test.doctor_stuck")


def test_a_process_stopped_inside_its_commit_fails_with_its_session(owner, held):
    (finding,) = [one for one in look(owner, "stuck").findings]
    assert is_mendable(finding, Reason.STUCK_IN_COMMIT, Status.FAIL)
    assert held.id in finding.observed


def test_dead_rows_that_vacuum_cannot_clean_warn(owner, monkeypatch):
    monkeypatch.setattr(of_database, "LEAST_DEAD_ROWS", 50)
    with owner.begin() as tx:
        tx.execute(text("alter table durable.loops set (autovacuum_enabled = off)"))
        tx.execute(text("insert into durable.loops (name, began_at) values ('one', durable.durable_now())"))
    with owner.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for _ in range(100):
            connection.execute(text("update durable.loops set moved = coalesce(moved, 0) + 1"))
        connection.execute(text("select pg_stat_force_next_flush()"))
    wait_until(lambda: reasons(owner, "vacuum") == [Reason.VACUUM_BEHIND], "the dead are counted")
    assert is_mendable(only(owner, "vacuum"), Reason.VACUUM_BEHIND, Status.WARN)
    with owner.begin() as tx:
        tx.execute(text("alter table durable.loops rename to hosts"))
    assert only(owner, "vacuum").status is Status.PASS, "a table of the host's own is theirs to clean"


# --- a pooler in between ----------------------------------------------------------------------------


@contextmanager
def pooled(engine, **connect):
    pooler = Pooler(engine.url, pool_size=2)
    through = create_engine(pooler.url.set(database=engine.url.database), connect_args=connect)
    try:
        yield through
    finally:
        through.dispose()
        pooler.stop()


@pytest.mark.skipif(find_pgbouncer() is None, reason="no pgbouncer here")
def test_a_pooler_that_mixes_up_prepared_statements_fails(owner):
    with pooled(owner) as through:
        # A finding that a busy pooler may hide: asked until the two sessions meet.
        until = time.monotonic() + 30
        while (finding := only(through, "pooler")).status is Status.PASS and time.monotonic() < until:
            pass
    assert is_mendable(finding, Reason.POOLER_UNSAFE, Status.FAIL)


@pytest.mark.skipif(find_pgbouncer() is None, reason="no pgbouncer here")
def test_behind_a_pooler_without_prepared_statements_all_looks_are_possible(owner):
    with pooled(owner, prepare_threshold=None) as through:
        made = look(through)
    assert not [finding for finding in made.findings if finding.reason is Reason.COULD_NOT_LOOK]
    (finding,) = [one for one in made.findings if one.check == "pooler"]
    assert (finding.status, finding.observed[:8]) == (Status.PASS, "a pooler")
