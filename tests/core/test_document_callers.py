"""Documents on every transaction that deliveries take, sync and async; and what the database itself refuses."""

import asyncio

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import UnknownDocument, UnsupportedTransaction, VersionConflict
from durable_core.database.transactions import SERIALIZATION, sqlstate
from tests.core.callers import CALLERS, caller

A, B = {"title": "a", "body": ""}, {"title": "b", "body": ""}


def api(how, documents, name):
    """The method, or its async form, run in the caller's transaction."""
    method = getattr(documents, name if how._runner is None else f"a{name}")
    return lambda *args, **kwargs: how._run(method(how.tx, *args, **kwargs))


@pytest.mark.parametrize("level", [None, "AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("name", CALLERS)
def test_a_document_is_created_saved_read_restored_and_deleted_in_any_transaction(desk, engine, name, level):
    with caller(engine, name, level) as how:
        made = api(how, desk.briefs, "create")(A, owner="dana", by="dana")
        save = api(how, desk.briefs, "save")
        assert save(made.id, B, expected_version=0, by="eve").version == 1
        with pytest.raises(VersionConflict):
            save(made.id, A, expected_version=0, by="eve")
        how.write("after the conflict")
        assert api(how, desk.briefs, "get")(made.id).content == B
        assert [one.version for one in api(how, desk.briefs, "history")(made.id)] == [1, 0]
        assert api(how, desk.briefs, "revision")(made.id, 0).content == A
        assert api(how, desk.briefs, "restore")(made.id, 0, expected_version=1, by="eve").version == 2
        assert [one.id for one in api(how, desk.briefs, "page")()] == [made.id]
        how.commit()
    assert desk.raw(made.id).version == 2
    with engine.connect() as tx:
        assert tx.scalar(text("select note is null from effects where row_id = 'after the conflict'"))
    with caller(engine, name, level) as how:
        api(how, desk.briefs, "delete")(made.id, expected_version=2, by="dana")
        with pytest.raises(UnknownDocument):
            api(how, desk.briefs, "get")(made.id)
        how.commit()
    assert desk.raw(made.id).deleted_at is not None


@pytest.mark.parametrize("name", CALLERS)
def test_what_was_saved_in_a_transaction_that_rolls_back_was_never_saved(desk, engine, name):
    made, kept = desk.brief(), desk.brief()
    with caller(engine, name) as how:
        created = api(how, desk.briefs, "create")(A, owner="dana", by="dana")
        api(how, desk.briefs, "save")(made.id, B, expected_version=0, by="eve")
        api(how, desk.briefs, "delete")(kept.id, expected_version=0, by="eve")
        how.rollback()
    with engine.connect() as tx:
        assert desk.briefs.get(tx, made.id) == made
        assert desk.briefs.get(tx, kept.id) == kept
        with pytest.raises(UnknownDocument):
            desk.briefs.get(tx, created.id)
    assert desk.revisions(made.id) == desk.revisions(kept.id) == []


@pytest.mark.parametrize("name", CALLERS)
def test_a_caller_at_repeatable_read_is_told_of_what_was_saved_after_its_snapshot(desk, engine, name):
    """It sees the version that it names, so to save on it would look right."""
    made = desk.brief()
    with caller(engine, name, "REPEATABLE READ") as how:
        assert api(how, desk.briefs, "get")(made.id).version == 0
        desk.save(made.id, "theirs", 0, by="eve")
        with pytest.raises((DBAPIError, psycopg.Error)) as refused:
            api(how, desk.briefs, "save")(made.id, A, expected_version=0, by="dana")
        assert sqlstate(refused.value) == SERIALIZATION
        how.rollback()
    assert desk.raw(made.id).content["title"] == "theirs"


@pytest.mark.parametrize("name", ["get", "save", "create", "delete", "restore", "history", "revision", "page"])
@pytest.mark.parametrize("kind_of_caller", ["sync", "async"])
def test_what_is_no_transaction_is_refused(desk, engine, name, kind_of_caller):
    made, by = "0198a4c4-0000-7000-8000-000000000000", {"expected_version": 0, "by": "dana"}
    calls = {
        "get": ((made,), {}), "save": ((made, A), by), "create": ((A,), {"owner": "dana", "by": "dana"}),
        "delete": ((made,), by), "restore": ((made, 0), by), "history": ((made,), {}), "revision": ((made, 0), {}),
        "page": ((), {}),
    }  # fmt: skip
    args, kwargs = calls[name]
    sync, asynchronous = getattr(desk.briefs, name), getattr(desk.briefs, f"a{name}")
    call = sync if kind_of_caller == "sync" else lambda *args, **kwargs: asyncio.run(asynchronous(*args, **kwargs))
    with pytest.raises(UnsupportedTransaction):
        call(engine, *args, **kwargs)


# --- what the database refuses ---------------------------------------------------------------------


def refused(engine, sql, **parameters):
    with pytest.raises(DBAPIError) as error, engine.begin() as tx:
        tx.execute(text(sql), parameters)
    assert isinstance(error.value.orig, psycopg.Error)
    return f"{error.value.orig.sqlstate} {error.value.orig}"


KEPT = (
    "with kept as (insert into durable.document_revisions (document_id, version, content, saved_by, source, saved_at,"
    " reason, created_at) select id, version + {version}, {content}, {saved_by}, source, {saved_at}, '{reason}', now()"
    " from durable.documents where id = :id returning document_id)"
    " update durable.documents d set {change} from kept k where d.id = k.document_id"
)
TRUE = {
    "version": "0", "content": "content", "saved_by": "saved_by", "saved_at": "saved_at", "reason": "overwrite",
    "change": "content = '{}', version = version + 1",
}  # fmt: skip
GONE = "deleted_at = now(), deleted_by = 'psql'"


def test_by_hand_too_a_version_is_replaced_together_with_its_revision(desk, engine):
    made = desk.brief(saves=1)
    with engine.begin() as tx:
        assert tx.execute(text(KEPT.format_map(TRUE)), {"id": made.id}).rowcount == 1
    assert desk.raw(made.id).version == 2
    with engine.begin() as tx:
        assert tx.execute(text(KEPT.format_map({**TRUE, "change": GONE, "reason": "delete"})), {"id": made.id}).rowcount
    assert [reason for _, _, reason in desk.revisions(made.id)] == ["overwrite", "overwrite", "delete"]


@pytest.mark.parametrize(
    "lie",
    [
        {"content": "jsonb_build_object('title', 'another')"}, {"saved_by": "'eve'"}, {"saved_at": "now()"},
        {"reason": "delete"}, {"version": "1"}, {"version": "-1"}, {"version": "-2"},
        {"change": "content = '{}', version = version + 2"}, {"change": "version = version - 1"},
        {"change": "content = '{}'"}, {"change": "saved_by = 'eve'"}, {"change": "why = 'because'"},
        {"change": "deleted_at = null"}, {"change": GONE},
        {"reason": "delete", "change": f"{GONE}, version = version + 1"},
        {"reason": "delete", "change": f"{GONE}, content = '{{}}'"},
        {"reason": "delete", "change": f"{GONE}, saved_by = 'eve'"},
        {"change": "owner = 'eve', version = version + 1"}, {"change": "collection = 'x', version = version + 1"},
        {"change": "id = gen_random_uuid(), version = version + 1"},
        {"change": "created_at = now(), version = version + 1"},
    ],
)  # fmt: skip
def test_a_revision_tells_the_truth_and_a_change_is_the_next_version_whoever_asks(desk, engine, lie):
    made = desk.brief(saves=2)
    assert refused(engine, KEPT.format_map({**TRUE, **lie}), id=made.id)[:5] in ("55000", "23503", "23505")
    assert desk.revisions(made.id) == [(0, "Q3", "overwrite"), (1, "Q3 1", "overwrite")]
    with engine.connect() as tx:
        assert desk.briefs.get(tx, made.id) == made


def test_a_version_that_is_left_out_is_told_as_such(desk, engine):
    made = desk.brief(saves=2)
    for by in (2, -1, 0):
        said = refused(
            engine, KEPT.format_map({**TRUE, "change": f"content = '{{}}', version = version + {by}"}), id=made.id
        )
        assert f"goes up by one (2 to {2 + by})" in said


def test_a_document_and_its_history_stay_as_they_are_whoever_asks(desk, engine):
    made = desk.brief(saves=3)
    gone = desk.brief(saves=1)
    with engine.begin() as tx:
        desk.briefs.delete(tx, gone.id, expected_version=1, by="dana")
    live = [
        "update durable.documents set content = '{}' where id = :id",
        "update durable.documents set content = '{}', version = version + 1 where id = :id",
        "update durable.documents set version = version + 1 where id = :id",
        "update durable.documents set saved_by = 'eve' where id = :id",
        "update durable.documents set save_id = gen_random_uuid() where id = :id",
        "update durable.documents set owner = 'eve' where id = :id",
        f"update durable.documents set {GONE} where id = :id",
        "update durable.documents set content = '[]', version = version + 1 where id = :id",
        "delete from durable.documents where id = :id",
        "update durable.document_revisions set content = '{}' where document_id = :id",
        "update durable.document_revisions set version = 9 where document_id = :id and version = 0",
        "delete from durable.document_revisions where document_id = :id",
        "delete from durable.document_revisions where document_id = :id and version = 2",
        "insert into durable.document_revisions select id, version, content, saved_by, source, why, saved_at,"
        " 'overwrite', now() from durable.documents where id = :id",
        "insert into durable.document_revisions select id, 7, content, saved_by, source, why, saved_at,"
        " 'overwrite', now() from durable.documents where id = :id",
        "insert into durable.documents select (jsonb_populate_record(d, jsonb_build_object('id', gen_random_uuid()))).*"
        " from durable.documents d where d.id = :id",
    ]
    for change in live:
        assert refused(engine, change, id=made.id)[:5] in ("55000", "23514"), change
    deleted = [
        "update durable.documents set deleted_at = null, deleted_by = null where id = :id",
        "update durable.documents set content = '{}', version = version + 1 where id = :id",
        "update durable.documents set deleted_by = 'eve' where id = :id",
        "delete from durable.document_revisions where document_id = :id and version = 1",
        KEPT.format_map({**TRUE, "version": "1"}),
    ]
    for change in deleted:
        assert refused(engine, change, id=gone.id)[:5] in ("55000", "23514"), change
    assert "55000" in refused(engine, "truncate durable.document_revisions")
    assert "55000" in refused(engine, "truncate durable.documents cascade")


def test_the_oldest_revisions_may_go_and_a_deleted_document_goes_with_all_of_them(desk, engine):
    made = desk.brief(saves=3)
    with engine.begin() as tx:
        older = text("delete from durable.document_revisions where document_id = :id and version < :than")
        tx.execute(older, {"id": made.id, "than": 2})
        desk.briefs.delete(tx, made.id, expected_version=3, by="dana")
        assert tx.execute(older, {"id": made.id, "than": 3}).rowcount == 1
        tx.execute(text("delete from durable.documents where id = :id"), {"id": made.id})
    assert desk.revisions(made.id) == []
