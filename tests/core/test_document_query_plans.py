"""What is asked of documents finds them by an index, however many lie there and however long their histories are."""

from uuid import uuid4

import pytest
from sqlalchemy import text

from durable_core.documents import find, read, save
from durable_core.testing import create_database, drop_database, migrated
from tests.core.test_query_plans import nodes, ran

DOCUMENTS, REVISIONS = 60_000, 5_000
MOST_READ, MOST_WRITTEN = 200, 700
"""Buffers that a statement may touch; a guard that is asked first reads the catalog. The tables have thousands."""

ROWS = """
    insert into durable.documents
        (id, collection, owner, content, version, saved_by, source, created_at, saved_at, deleted_at, deleted_by)
    select cast(lpad(to_hex(n), 32, '0') as uuid),
        case when n <= 3 then 'rare' else 'c' || n % 10 end, 'o' || n % 500, cast('{"a": 1}' as jsonb),
        case when n = 1 then :revisions else 0 end, 'dana', 'user', now(), now(),
        case when n % 50 = 0 then now() end, case when n % 50 = 0 then 'dana' end
    from generate_series(1, :documents) as n"""
HISTORY = """
    insert into durable.document_revisions
        (document_id, version, content, saved_by, source, saved_at, reason, created_at)
    select cast(lpad('1', 32, '0') as uuid), n, cast('{"a": 1}' as jsonb), 'dana', 'user', now(), 'overwrite', now()
    from generate_series(0, :revisions - 1) as n"""


@pytest.fixture(scope="module")
def full(services):
    engine = migrated(create_database(services.database_url, "durable_full_documents"))
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text(ROWS), {"documents": DOCUMENTS, "revisions": REVISIONS})
        tx.execute(text(HISTORY), {"revisions": REVISIONS})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze durable.documents, durable.document_revisions"))
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_full_documents")


ONE = "00000000-0000-0000-0000-000000000001"
SCOPE = {"collection": "rare", "owner": "o1", "deleted": False}
SAID = {"by": "dana", "why": None}
CONTENT = {"content": '{"a": 2}', "source": "user", **SAID}
LOOKS = {
    "get": (read._statements.get, {"id": ONE, **SCOPE}),
    "version": (read._statements.version, {"id": ONE, "collection": "rare"}),
    "current": (read._statements.current, {"id": ONE, "contents": True, **SCOPE}),
    "revisions": (read._statements.revisions, {"id": ONE, "before": 4000, "limit": 50, "contents": True}),
    "newest revisions": (read._statements.revisions, {"id": ONE, "before": None, "limit": 50, "contents": False}),
    "revision": (read._statements.revision, {"id": ONE, "version": 17, **SCOPE}),
    "page": (read._statements.page, {"after": None, "limit": 50, **SCOPE, "owner": None}),
    "page of everything": (
        read._statements.page, {"after": ONE, "limit": 50, "collection": None, "owner": None, "deleted": True},
    ),
    "page of an owner": (read._statements.page, {"after": None, "limit": 50, **SCOPE, "collection": "c1"}),
    "save": (
        save._statements.save,
        {"id": ONE, **SCOPE, **CONTENT, "expected": REVISIONS, "keep": REVISIONS - 5, "save_id": str(uuid4())},
    ),
    "stale save": (
        save._statements.save, {"id": ONE, **SCOPE, **CONTENT, "expected": 3, "keep": 50, "save_id": None},
    ),
    "delete": (save._statements.delete, {"id": ONE, **SCOPE, **SAID, "expected": REVISIONS, "keep": None}),
    "create": (save._statements.create, {"id": str(uuid4()), **SCOPE, **CONTENT}),
    "find": (find._statements.by_id, {"id": ONE}),
    "find beginning": (find._statements.by_beginning, {"first": ONE, "last": ONE, "most": 20}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_each_statement_finds_its_documents_by_an_index(full, name):
    statement, parameters = LOOKS[name]
    plan, buffers = ran(full, statement, **parameters)
    scans = [node for node in nodes(plan) if node["Node Type"] == "Seq Scan"]
    assert [node["Relation Name"] for node in scans if node["Relation Name"].startswith("document")] == []
    assert buffers < (MOST_READ if statement in read._statements else MOST_WRITTEN)
