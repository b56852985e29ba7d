"""What runs often on plans finds its rows by an index, however many lie there that are done with."""

import json

import pytest
from sqlalchemy import text

from durable_core import sweeps
from durable_core.claims.claim import Holder
from durable_core.claims.shares import Share, as_written
from durable_core.exporter.sample import _statements as exported
from durable_core.plans import attempt, heal, read, sweep
from durable_core.plans.compensate import _statements as compensating
from durable_core.testing import create_database, drop_database, migrated
from tests.core.test_query_plans import nodes, ran

FINISHED, WAITING, EXECUTING = 20_000, 300, 50
MOST = 2500
"""Buffers that a statement may touch. The table has six thousand, so that is the work of its rows and no more."""

SHARES = as_written({"durable": Share(500, empty=True)})

ROWS = """
    insert into durable.plans (id, origin, risk, steps, step_count, digest, scopes, self_approval, proposed_by, state,
        receipts, kind, queue, approved_by, approved_at, approved_digest, fence, owner, owner_pid, owner_host,
        lease_expires_at, deadline_at, continue_until, hint_at, created_at, expires_at, finished_at)
    select cast(lpad(to_hex(n + :first), 32, '0') as uuid), 'o' || n % 100, 'low',
        cast('[{"kind": "k", "queue": "durable", "arguments": {}, "target": null}]' as jsonb),
        1, repeat('0', 64), '{}', true, 'a', :state, cast(:state = 'executed' as integer), 'k', 'durable',
        case when :state <> 'pending' then 'd' end, case when :state <> 'pending' then at end,
        case when :state <> 'pending' then repeat('0', 64) end, 1,
        case when owned then 'x' end, case when owned then 1 end, case when owned then 'h' end,
        case when owned then at end, case when owned then at + interval '1 day' end, at, at, at,
        at + interval '30 days', case when :state = 'executed' then at end
    from generate_series(1, :rows) as n,
        lateral (select now() - interval '20 days' + n * interval '1 s' as at, :state = 'executing' as owned) as t"""


@pytest.fixture(scope="module")
def full(services):
    engine = migrated(create_database(services.database_url, "durable_full_plans"))
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        first = 0
        for state, rows in (
            ("executed", FINISHED),
            ("approved", WAITING),
            ("pending", WAITING),
            ("executing", EXECUTING),
        ):
            tx.execute(text(ROWS), {"state": state, "rows": rows, "first": first})
            first += rows
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze durable.plans"))
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_full_plans")


def test_every_statement_that_runs_often_finds_its_plans_by_an_index(full):
    with full.connect() as tx:
        one = tx.scalar(text("select cast(id as text) from durable.plans where state = 'approved' limit 1"))
    origin = {"id": one, "origin": None}
    statements = {
        "take": (attempt._statements.take, {"id": one, "kinds": ["k"], "timeout_seconds": 5.0, **Holder().parameters}),
        "keep": (attempt._statements.keep, {"ids": [one], "fences": [1], "lease_seconds": 30.0}),
        "due": (sweep._statements.due, {"limit": 1000, "queues": None}),
        "unhinted": (sweep._statements.unhinted, {"shares": SHARES, "window": 1000}),
        "mark": (sweep._statements.mark, {"ids": [one], "idle": [], "unsure": [], "idle_seconds": 30.0}),
        "owned": (sweep._statements.owned, {"owner": "nobody", "pids": [1]}),
        "holding_pids": (sweep._statements.holding_pids, {"owner": "nobody"}),
        "old": (
            sweep._statements.old, {"retention_seconds": 19.5 * 86400, "limit": 100, "since": None, "without": []},
        ),
        "stale": (heal.statements.stale, {"limit": 500}),
        "stale one": (heal.statements.stale_one, {"id": one}),
        "overdue": (heal.statements.overdue, {"limit": 500}),
        "overdue one": (heal.statements.overdue_one, {"id": one}),
        "get": (read._statements.get, origin),
        "receipts": (read._statements.receipts, {"id": one}),
        "there": (read._statements.there, origin),
        "before": (read._statements.before, {"id": one, "origin": "o7"}),
        "page": (read._statements.page, {"state": None, "origin": None, "after": None, "limit": 50}),
        "page of an origin": (read._statements.page, {"state": None, "origin": "o7", "after": None, "limit": 50}),
        "waiting": (read._statements.waiting, {"limit": 10_000}),
        "compensable": (compensating.compensable, origin),
        "of the exporter": (exported.plans, {"limit": 10_000}),
        "a due one": (sweeps.DUE, {}),
        "an abandoned one": (sweeps.LAPSED, {}),
        "an overdue one": (sweeps.OVERDUE, {}),
    }  # fmt: skip
    wrong = {}
    for name, (statement, parameters) in statements.items():
        top, touched = ran(full, statement, **parameters)
        whole = any(n["Node Type"] == "Seq Scan" and n.get("Relation Name") == "plans" for n in nodes(top))
        if whole or touched > MOST:
            wrong[name] = [touched, [(n["Node Type"], n.get("Index Name")) for n in nodes(top) if "Relation Name" in n]]
    assert not wrong, json.dumps(wrong, indent=1)
