"""What is asked of the inbox, of migrations and of pages finds its rows by an index, whatever has piled up."""

import json

import pytest
from sqlalchemy import text
from uuid_utils.compat import uuid7

from durable_core.cases import inbox, migrate, survey, sweep
from durable_core.testing import create_database, drop_database, migrated
from tests.core.test_query_plans import nodes, ran

ROWS = 20_000
MOST = 600
"""Buffers that a statement may touch; each of the tables has more, or is looked at by an index alone."""

CASES = """
    insert into durable.cases (id, case_type, state, created_at, updated_at)
    select gen_random_uuid(), 'test.outside', '{}', now(), now() from generate_series(1, :rows)"""
JOURNAL = """
    insert into durable.case_journal (case_id, number, id, execution_id, entry, attempt, step, error, salt,
        payload_digest, digest, chain, keyed, recorded_at)
    select (select max(cast(id as text)) from durable.cases)::uuid, n, gen_random_uuid(), gen_random_uuid(), 'failed',
        1, 'often', '{"name": "ValueError", "message": "no"}', '0', repeat('0', 64), repeat('0', 64), repeat('0', 64),
        false, now()
    from generate_series(1, :rows) as n"""
EVENTS = """
    insert into durable.case_events (id, system, external_id, type, idempotency_key, status, reason, event,
        received_at, pending_at, settled_at)
    select gen_random_uuid(), case when n % 4000 = 0 then 'rare' else 'often' end, n, 't', n, 'dead-lettered',
        case when n % 4000 = 0 then 'no-step' else 'unrouted' end, '{}', now(), now(), now()
    from generate_series(1, :rows) as n"""
NAMES = """
    insert into durable.case_correlations (id, system, external_id, case_id, created_at, updated_at)
    select gen_random_uuid(), 'often', n, (select max(cast(id as text)) from durable.cases)::uuid, now(), now()
    from generate_series(1, :rows) as n"""


@pytest.fixture(scope="module")
def full(services):
    engine = migrated(create_database(services.database_url, "durable_full_outside"))
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        for filled in (CASES, JOURNAL, EVENTS, NAMES):
            tx.execute(text(filled), {"rows": ROWS})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze"))
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_full_outside")


def test_whatever_has_piled_up_a_look_touches_little(full):
    with full.connect() as tx:
        last = tx.scalar(text("select max(cast(id as text)) from durable.cases"))
    of = {"system": None, "case_id": None, "reason": None, "after": None, "limit": 5}
    of_page = {"case_type": None, "dormant": False, "after": None, "limit": 50}
    of_migration = {"case_type": "test.outside", "step": "migrate:x", "after": None, "ended": False, "limit": 50}
    _inbox, _migrate = inbox._statements, migrate._statements
    statements = {
        "known": (_inbox.known, {"idempotency_key": "7"}),
        "dead letters": (_inbox.dead_letters, of),
        "of a rare reason": (_inbox.dead_letters, of | {"reason": "no-step"}),
        "of a rare system": (_inbox.dead_letters, of | {"system": "rare"}),
        "of a case": (_inbox.dead_letters, of | {"case_id": last}),
        "is one stuck": sweep.look(),
        "take stuck": (sweep._statements.take_stuck, {"stuck_seconds": 60, "limit": 100, "types": "[]"}),
        "to migrate": (_migrate.waiting, of_migration),
        "to migrate, of a long journal": (_migrate.waiting_among, of_migration | {"ids": [last]}),
        "page": (survey._statements.page, of_page),
        "of a type": (survey._statements.page, of_page | {"case_type": "test.outside"}),
        "counts": (survey._statements.counts, {"limit": 1000}),
        "by execution": (survey._statements.by_execution, {"id": str(uuid7())}),
        "by external id": (survey._statements.by_external_id, {"external_id": "7", "most": 20}),
        "by beginning": (survey._statements.by_beginning, {"first": last, "last": last, "most": 20}),
    }  # fmt: skip
    wrong = {}
    for name, (statement, parameters) in statements.items():
        top, touched = ran(full, statement, **parameters)
        if touched > MOST:
            wrong[name] = [touched, [(n["Node Type"], n.get("Index Name")) for n in nodes(top) if "Relation Name" in n]]
    assert not wrong, json.dumps(wrong, indent=1)
