"""Whoever looks at plans and operations reads their share by an index, however many lie there."""

import json

import pytest
from sqlalchemy import text

from durable_core.doctor import standstill
from durable_core.operations import find as find_operations
from durable_core.operations import survey as survey_operations
from durable_core.operations import why as why_operations
from durable_core.plans import find as find_plans
from durable_core.plans import survey as survey_plans
from durable_core.plans import why as why_plans
from durable_core.testing import create_database, drop_database, migrated
from tests.core.test_plan_query_plans import ROWS
from tests.core.test_query_plans import nodes, ran

CALLS = """
    insert into durable.operations (id, kind, queue, arguments, digest, started_by, one_in_flight, finds,
        patience_seconds, every_seconds, state, issued_at, external_ids, patience_until, start_before, fence,
        settled_fence, due_at, hint_at, created_at, finished_at)
    select cast(lpad(to_hex(n + :first), 32, '0') as uuid), 'test.calls', 'calls', '{}', repeat('0', 64), 'dana',
        false, false, 300, 2, :state, case when :state <> 'queued' then now() end,
        case when :state <> 'queued' then cast('["a"]' as jsonb) end, case when :state <> 'queued' then now() end,
        now() + n * interval '1 s', 1, 1, now(), now(), now(),
        case when :state = 'succeeded' then now() - n * interval '1 ms' end
    from generate_series(1, :rows) as n"""


@pytest.fixture(scope="module")
def piled(services):
    """Twenty thousand of each that ended, and five thousand in each state that has not."""
    engine = migrated(create_database(services.database_url, "durable_piled"))
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        first = 0
        for state, rows in (("executed", 20_000), ("approved", 5000), ("pending", 5000), ("executing", 5000)):
            tx.execute(text(ROWS), {"state": state, "rows": rows, "first": first})
            first += rows
        for state, rows in (("succeeded", 20_000), ("queued", 5000), ("running", 5000)):
            tx.execute(text(CALLS), {"state": state, "rows": rows, "first": first})
            first += rows
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze durable.plans, durable.operations"))
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_piled")


SHARE = {"most": 200, "patience_seconds": 60.0}
ONE = "00000000-0000-0000-0000-000000000007"
FEW = {"first": "00000000-0000-0000-0000-000000000000", "last": "00000000-0000-0000-0000-00000000ffff", "most": 20}
LOOKS = {
    "doctor, plans": (standstill._statements.plans, SHARE, 400),
    "doctor, operations": (standstill._statements.operations, SHARE, 500),
    "doctor, queues of plans": (standstill._statements.plan_queues, SHARE, 400),
    "doctor, queues of operations": (standstill._statements.operation_queues, SHARE, 400),
    "steps that wait": (survey_plans._statements.waiting, {"share": 200}, 400),
    "operations that wait": (survey_operations._statements.waiting, {"share": 200}, 400),
    "find a plan": (find_plans._statements.by_id, {"id": ONE}, 10),
    "find the beginning of a plan": (find_plans._statements.by_beginning, FEW, 60),
    "find an origin": (find_plans._statements.by_origin, {"origin": "o7", "most": 20}, 60),
    "find an operation": (find_operations._statements.by_id, {"id": ONE}, 10),
    "find the beginning of an operation": (find_operations._statements.by_beginning, FEW, 60),
    "why of a plan": (why_plans._statements.hinted, {"id": ONE}, 10),
    "why of an operation": (why_operations._statements.hinted, {"id": ONE}, 10),
}
"""The statement, and how many buffers it may touch: those of its share, one for each row at most, and no more."""


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_goes_by_an_index_and_reads_no_more_than_its_share(piled, name):
    statement, parameters, most = LOOKS[name]
    top, touched = ran(piled, statement, **parameters)
    scans = [node for node in nodes(top) if node.get("Relation Name") in ("plans", "operations")]
    told = json.dumps([(n["Node Type"], n.get("Index Name"), n.get("Actual Rows"), n["Relation Name"]) for n in scans])
    assert scans
    assert not [node for node in scans if node["Node Type"] == "Seq Scan"], told
    assert touched <= most, f"{touched}: {told}"


def test_every_statement_of_these_looks_is_looked_at_here():
    known = {statement for statement, _, _ in LOOKS.values()}
    for statements in (standstill, survey_plans, survey_operations, find_plans, why_plans, why_operations):
        assert known >= set(statements._statements)
