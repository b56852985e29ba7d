"""`durable migrate`: from nothing, twice, in another schema, as printed SQL, under work; old code and new code."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from durable_core.database import migrate as migrations
from durable_core.database.connections import Database
from durable_core.database.statements import checked_schema, use_schema
from durable_core.errors import DefinitionError, SchemaAhead, SchemaBehind
from durable_core.testing import (
    create_database,
    drop_database,
    make_delivery,
    migrated,
    wait_until_blocked,
    wait_until_somebody_blocks,
)
from tests.next_revision import NEXT, newer_code

_numbers = itertools.count()

SHAPE = """
    select 'column' as what, table_name || '.' || column_name as name,
        concat_ws(' ', data_type, is_nullable, column_default) as is
    from information_schema.columns where table_schema = :schema
    union all
    select 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
    from pg_constraint where connamespace = to_regnamespace(:schema)
    union all
    select 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
    from pg_index i join pg_class c on c.oid = indrelid where c.relnamespace = to_regnamespace(:schema)
    union all
    select 'function', proname, prosrc || array_to_string(proconfig, ' ') || provolatile::text
    from pg_proc where pronamespace = to_regnamespace(:schema)
    union all
    select 'trigger', tgrelid::regclass || '.' || tgname, pg_get_triggerdef(t.oid)
    from pg_trigger t join pg_class c on c.oid = tgrelid where c.relnamespace = to_regnamespace(:schema)
        and not tgisinternal
    union all
    select 'options', relname, array_to_string(reloptions, ' ')
    from pg_class where relnamespace = to_regnamespace(:schema)"""


def shape(engine, schema="durable"):
    with engine.connect() as tx:
        tx.execute(text("set local search_path = pg_catalog"))
        rows = tx.execute(text(SHAPE), {"schema": schema}).all()
    found = [[str(part).replace(f'"{schema}".', f"{schema}.") for part in row] for row in rows]
    return sorted(tuple(part.replace(f"{schema}.", "SCHEMA.") for part in row) for row in found)


REVISIONS = sorted(path.stem[1:5] for path in (migrations.MIGRATIONS / "versions").glob("r*.py"))


@pytest.fixture
def empty(services):
    """An engine on a database with nothing in it."""
    name = f"durable_empty_{next(_numbers)}"
    engine = create_engine(create_database(services.database_url, name))
    yield engine
    engine.dispose()
    drop_database(services.database_url, name)


@pytest.fixture
def in_other_schema():
    use_schema("work_2")
    yield "work_2"
    use_schema("durable")


def test_a_migration_from_nothing_installs_everything_and_a_second_one_nothing(empty):
    with empty.connect() as tx:
        assert migrations.found(tx) is None
        assert [line.split(":")[0] for line in migrations.pending(tx)] == REVISIONS
    assert migrations.migrate(empty)
    first = shape(empty)
    with empty.connect() as tx:
        assert migrations.found(tx) == migrations.newest()
        assert migrations.pending(tx) == []
        assert migrations.check(tx) == migrations.newest()
    assert migrations.migrate(empty) == []
    assert shape(empty) == first
    assert {what for what, _, _ in first} >= {"column", "constraint", "index", "function", "trigger", "options"}


def test_two_migrations_at_once_run_one_after_the_other(empty):
    with ThreadPoolExecutor(2) as pool:
        ran = [*pool.map(lambda _: migrations.migrate(empty), range(2))]
    assert sorted(map(len, ran)) == [0, len(REVISIONS)]


def test_a_migration_that_fails_leaves_nothing_half_done(empty):
    with empty.begin() as tx:
        tx.execute(text("create schema durable"))
        tx.execute(text("create table durable.journal (mine text)"))
    with pytest.raises(psycopg.errors.DuplicateTable):
        migrations.migrate(empty)
    with empty.connect() as tx:
        assert tx.scalar(text("select count(*) from pg_class where relname = 'loops'")) == 0
        assert migrations.found(tx) is None


def test_the_printed_sql_run_by_hand_gives_the_same_schema(empty, services):
    printed = migrations.sql()
    url = empty.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as psql:
        psql.execute(printed.encode())
    by_hand = shape(empty)
    with empty.connect() as tx:
        assert migrations.check(tx) == migrations.newest()
    name = f"durable_twin_{next(_numbers)}"
    twin = migrated(create_database(services.database_url, name))
    try:
        assert by_hand == shape(twin)
    finally:
        twin.dispose()
        drop_database(services.database_url, name)


def test_another_schema_is_the_same_but_for_its_name(empty, engine, services, in_other_schema):
    migrations.migrate(empty)
    other = shape(empty, in_other_schema)
    with empty.connect() as tx:
        assert tx.scalar(text("select to_regnamespace('durable')")) is None
        assert migrations.check(tx) == migrations.newest()
    use_schema("durable")
    name = f"durable_twin_{next(_numbers)}"
    twin = migrated(create_database(services.database_url, name))
    try:
        assert other == shape(twin)
    finally:
        twin.dispose()
        drop_database(services.database_url, name)


def test_a_delivery_lives_its_life_in_another_schema(empty, in_other_schema, kind):
    from durable_core import deliveries
    from durable_core.deliveries import sweep
    from durable_core.deliveries.attempt import Outcome, Worker, perform

    migrations.migrate(empty)
    with empty.begin() as tx:
        tx.execute(text("create table effects (row_id text, fence bigint, note text)"))
        made = make_delivery(tx, kind, key="k")
        dead = make_delivery(tx, kind, state="dead")
        deliveries.redrive(tx, dead.id, by="dana", reason="x")
    database = Database(empty)
    worker = Worker(database)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    worker.heartbeat.stop()
    assert sweep.reap(database) == sweep.prune(database) == 0
    with empty.connect() as tx:
        assert [queue.due for queue in deliveries.queues(tx)] == [1]
        assert deliveries.journal(tx, dead.id)[0].move == "redrive"
        with pytest.raises(Exception, match="TRUNCATE is refused"):
            tx.execute(text("truncate work_2.journal"))


def test_a_database_without_the_schema_is_refused_with_the_command_that_mends_it(empty):
    with empty.connect() as tx, pytest.raises(SchemaBehind) as refused:
        migrations.check(tx)
    assert str(refused.value) == (
        f'schema "durable" is not installed and this code needs {migrations.newest()}: run `durable migrate`.'
    )


@pytest.mark.parametrize("ask", [migrations.check, migrations.pending])
def test_a_schema_from_a_newer_version_is_refused_and_not_called_behind(empty, ask):
    migrations.migrate(empty)
    with empty.begin() as tx:
        tx.execute(text("update durable.schema_version set version_num = '9999'"))
    with empty.connect() as tx, pytest.raises(SchemaAhead) as refused:
        ask(tx)
    assert "is at revision 9999, which this code does not know" in str(refused.value)


def test_old_code_goes_on_on_a_newer_revision_that_says_it_may(empty, tmp_path):
    """During a rolling deploy a worker of the old code may restart at any time."""
    migrations.migrate(empty)
    with newer_code(tmp_path):
        assert migrations.migrate(empty) == [
            f"{NEXT}: A nullable column and an index, as a later version might add them."
        ]
    newer = shape(empty)
    with empty.connect() as tx:
        assert migrations.check(tx) == NEXT
        assert migrations.pending(tx) == []
    assert migrations.migrate(empty) == []
    assert shape(empty) == newer, "an old `durable migrate` changes nothing"


@pytest.mark.parametrize("at", [NEXT, "9002"])
def test_old_code_is_refused_where_the_newer_revision_excludes_it_or_says_nothing(empty, tmp_path, at):
    """What an earlier revision allowed is no promise about a later one."""
    with newer_code(tmp_path, oldest=NEXT if at == NEXT else migrations.newest()):
        migrations.migrate(empty)
    with empty.begin() as tx:
        tx.execute(text("update durable.schema_version set version_num = :at"), {"at": at})
    for ask in (migrations.check, migrations.pending):
        with empty.connect() as tx, pytest.raises(SchemaAhead):
            ask(tx)
    with pytest.raises(SchemaAhead):
        migrations.migrate(empty)


def test_printed_sql_says_as_well_which_code_may_go_on(empty, tmp_path):
    with newer_code(tmp_path):
        printed = migrations.sql()
    url = empty.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as psql:
        psql.execute(printed.encode())
    with empty.connect() as tx:
        assert migrations.check(tx) == NEXT


def test_new_code_runs_on_the_older_revisions_it_lists_and_else_names_what_to_run(empty, tmp_path):
    today = migrations.newest()
    migrations.migrate(empty)
    with newer_code(tmp_path), empty.connect() as tx:
        with pytest.raises(SchemaBehind) as refused:
            migrations.check(tx)
        assert str(refused.value) == (
            f'schema "durable" is at revision {today} and this code needs {NEXT}: run `durable migrate`.'
        )
    with newer_code(tmp_path, also=(today,)), empty.connect() as tx:
        assert migrations.check(tx) == today


def test_every_revision_after_the_first_says_which_code_may_run_on_it():
    sources = {path.stem: path.read_text() for path in (migrations.MIGRATIONS / "versions").glob("r*.py")}
    assert {name for name, source in sources.items() if "runs_with_code_from(" not in source} == {"r0001_deliveries"}


@pytest.fixture
def a_long_transaction(empty):
    """One that has read the deliveries and does not end: a report, or pg_dump."""
    migrations.migrate(empty)
    with empty.connect() as report:
        report.execute(text("select count(*) from durable.deliveries"))
        yield report


def test_a_migration_behind_a_long_transaction_holds_up_no_work(empty, a_long_transaction, tmp_path, kind):
    """Who queues behind it waits no longer than its lock timeout; it tries again, and gets through in the end."""
    report = a_long_transaction
    with newer_code(tmp_path), ThreadPoolExecutor(2) as pool:
        migrating = pool.submit(migrations.migrate, empty)
        wait_until_blocked(empty, wait_until_somebody_blocks(empty), by=report.scalar(text("select pg_backend_pid()")))

        def work():
            with empty.begin() as tx:
                return make_delivery(tx, kind, state="sent")

        assert pool.submit(work).result(timeout=20), "work gets through while the long transaction lasts"
        assert not migrating.done()
        report.rollback()
        assert len(migrating.result(timeout=60)) == 1


def test_a_migration_that_never_gets_its_lock_gives_up_with_nothing_changed(
    empty, a_long_transaction, tmp_path, monkeypatch
):
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT", "200ms")
    monkeypatch.setattr(migrations, "TRIES", 2)
    before = shape(empty)
    with newer_code(tmp_path), pytest.raises(OperationalError, match="lock timeout"):
        migrations.migrate(empty)
    assert shape(empty) == before
    with empty.connect() as tx:
        assert migrations.check(tx) == migrations.newest()


def test_the_hosts_own_migration_history_is_not_touched(empty):
    with empty.begin() as tx:
        tx.execute(text("create table alembic_version (version_num text)"))
        tx.execute(text("insert into alembic_version values ('theirs')"))
    migrations.migrate(empty)
    with empty.connect() as tx:
        assert tx.scalars(text("select version_num from alembic_version")).all() == ["theirs"]


def test_every_word_that_postgres_reserves_is_refused_as_a_schema_and_others_need_no_quotes(engine):
    """At the door, for `durable migrate` and every mend that names the schema write it without quotes."""
    with engine.connect() as tx:
        words = tx.execute(text("select word, catcode in ('R', 'T') from pg_get_keywords() where word ~ '^[a-z_]+$'"))
        refused = 0
        for word, is_reserved in words.all():
            try:
                checked_schema(word)
            except DefinitionError:
                refused += 1
                continue
            assert not is_reserved, word
            tx.execute(text(f"create schema {word}"))
        assert refused > 90
        tx.rollback()
