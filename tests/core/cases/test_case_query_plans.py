"""What is asked of cases finds its rows by an index, with a hundred thousand entries in the journal of one."""

import json
from datetime import UTC, datetime

import pytest
from sqlalchemy import event, text
from uuid_utils import uuid7

from durable_core.cases.cases import Cases
from durable_core.cases.declare import CaseType, Scope
from durable_core.cases.postgres import _statements
from durable_core.testing import create_database, drop_database, migrated
from tests.core.test_query_plans import nodes, ran

ENTRIES, CASES = 100_000, 20_000
MOST = 300
"""Buffers that a statement may touch. The journal has some thousands."""

FILLED = """
    insert into durable.case_journal (case_id, number, id, execution_id, entry, attempt, step, scope_key, error, salt,
        payload_digest, digest, chain, keyed, recorded_at)
    select cast(:id as uuid), n, gen_random_uuid(), gen_random_uuid(), 'failed', 1,
        case when n % 10000 = 0 then 'rare' else 'often' end, case when n % 10000 = 0 then 'rare' end,
        '{"name": "ValueError", "message": "no"}', '0', repeat('0', 64), repeat('0', 64), repeat('0', 64), false, now()
    from generate_series(1, :rows) as n"""
OTHERS = """
    insert into durable.cases (id, case_type, state, created_at, updated_at)
    select gen_random_uuid(), 'test.plans', '{}', now(), now() from generate_series(1, :rows)"""
COUNTED = "update durable.cases set journal_count = :rows where id = cast(:id as uuid)"


@pytest.fixture(scope="module")
def kind():
    kind = CaseType("test.plans", registered=False)
    kind.step("go")(lambda state, ctx: state)
    return kind


@pytest.fixture(scope="module")
def full(services, kind):
    engine = migrated(create_database(services.database_url, "durable_full_cases"))
    with engine.begin() as tx:
        case_id = Cases(engine, [kind]).create(tx, kind, {}).id
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text(FILLED), {"id": case_id, "rows": ENTRIES})
        tx.execute(text(OTHERS), {"rows": CASES})
        tx.execute(text(COUNTED), {"id": case_id, "rows": ENTRIES})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze"))
    yield engine, case_id
    engine.dispose()
    drop_database(services.database_url, "durable_full_cases")


def test_what_is_asked_of_a_case_is_found_by_an_index_however_long_its_journal(full):
    engine, case_id = full
    with engine.connect() as tx:
        execution_id = tx.scalar(text("select cast(execution_id as text) from durable.case_journal where number = 500"))
    page = {"case_id": case_id, "after": 0, "limit": 10, "kinds": None}
    of_execution = {"step": None, "scope_key": None, "execution_id": execution_id}
    statements = {
        "case_of": (_statements.case_of, {"id": case_id}),
        "claim_of": (_statements.claim_of, {"id": case_id}),
        "lock": (_statements.lock, {"id": case_id, "lock_timeout": "5s"}),
        "look": (_statements.look, {"id": case_id, "request_id": execution_id}),
        "keep": (_statements.keep, {"case_id": case_id, "execution_id": execution_id, "lease_seconds": 30.0}),
        "written": (_statements.written, {"id": execution_id}),
        "first page": (_statements.numbers, page),
        "last page": (_statements.numbers, page | {"after": ENTRIES - 5}),
        "of a step": (_statements.numbers_of_step, page | {"step": "rare", "scope_key": None}),
        "of a scope key": (_statements.numbers_of_scope, page | {"scope_key": "rare"}),
        "of an execution": (_statements.numbers_of_execution, page | of_execution),
        "entries": (_statements.entries, {"case_id": case_id, "numbers": list(range(50_000, 50_100))}),
        "correlation": (_statements.correlation, {"system": "s", "external_id": "e"}),
    }
    wrong = {}
    for name, (statement, parameters) in statements.items():
        top, touched = ran(engine, statement, **parameters)
        big = {"cases", "case_journal"}
        whole = any(n["Node Type"] == "Seq Scan" and n.get("Relation Name") in big for n in nodes(top))
        if whole or touched > MOST:
            wrong[name] = [touched, [(n["Node Type"], n.get("Index Name")) for n in nodes(top) if "Relation Name" in n]]
    assert not wrong, json.dumps(wrong, indent=1)


def test_an_entry_costs_as_little_at_the_end_of_a_long_journal_as_of_a_short_one(full, kind):
    """Its guards included: they look for the entry and for the case."""
    engine, long = full
    with engine.begin() as tx:
        short = Cases(engine, [kind]).create(tx, kind, {}).id

    def touched(case_id, number):
        entry = {
            "case_id": case_id, "number": number, "id": str(uuid7()), "execution_id": str(uuid7()), "request_id": None,
            "entry": "failed", "attempt": 1, "step": "go", "scope_key": None, "actor": "null", "error": "{}",
            "salt": "0", "payload_digest": "0" * 64, "digest": "0" * 64, "chain": "1" * 64, "keyed": False,
            "recorded_at": datetime.now(UTC), "next_attempt": None, "release": True,
        }  # fmt: skip
        return ran(engine, _statements.append, **entry)[1]

    few, many = touched(short, 1), touched(long, ENTRIES + 1)
    assert many <= few + 20, (few, many)


def test_a_thousand_affordances_over_two_hundred_elements_are_one_load(engine):
    kind = CaseType("test.wide", registered=False)
    loads = []
    scope = Scope(lambda state: loads.append(1) or state["elements"], lambda element: element["id"])
    for n in range(5):
        kind.step(f"step {n}", scope=scope, requires={"open": lambda state, element: element["open"]})(
            lambda state, ctx: state
        )
    cases = Cases(engine, [kind])
    with engine.begin() as tx:
        case_id = cases.create(tx, kind, {"elements": [{"id": f"e{n}", "open": True} for n in range(200)]}).id
    with engine.connect() as connection:
        sent = []
        event.listen(connection, "before_cursor_execute", lambda *of: sent.append(of[2]))
        found = cases.affordances(connection, case_id, actor=None)
    assert len(found) == 1000
    assert len(loads) == 5  # once a step
    assert len([statement for statement in sent if "durable" in statement]) == 2
