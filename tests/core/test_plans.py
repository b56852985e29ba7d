"""With a million finished rows behind it and 200,000 ahead, each hot statement goes by the time in its index."""

import json

import psycopg
import pytest
from sqlalchemy import text

from durable_core.claims.claim import Holder
from durable_core.deliveries import attempt, read, sweep
from durable_core.deliveries.declare import terms
from durable_core.testing import create_database, drop_database, make_delivery, migrated

FINISHED, FUTURE, PROCESSING, DUE = 1_000_000, 200_000, 200, 500

ROWS = """
    insert into durable.deliveries (id, kind, queue, priority, arguments, digest, state, due_at, hint_at, fence,
        settled_fence, attempts, max_attempts, max_interruptions, owner, lease_expires_at, deadline_at, beat_at,
        created_at, finished_at)
    select cast(lpad(to_hex(n + :first), 32, '0') as uuid), :kind,
        case when n % 4 = 0 then 'mail' else 'durable' end, 5, '{}', repeat('0', 64),
        :state, at, at, 1, case when :state in ('sent') then 1 else 0 end, 1, 5, 20,
        case when :state = 'processing' then 'x' end, case when :state = 'processing' then at end,
        case when :state = 'processing' then at + interval '1 minute' end, at, at,
        case when :state = 'sent' then at end
    from generate_series(1, :rows) as n,
        lateral (select now() + :sign * (n * interval '10 seconds') as at) as instant"""

EXPECTED = {
    "take": ("deliveries_pkey", None),
    "take_due": ("deliveries_due", "due_at"),
    "hint": ("deliveries_hint", "hint_at"),
    "due_queues": ("deliveries_hint", "hint_at"),
    "lapsed": ("deliveries_processing", None),
    "prune": ("deliveries_finished", "finished_at"),
    "queues": ("deliveries_due", "due_at"),
    "keep": ("deliveries_pkey", None),
    "reap": ("deliveries_pkey", None),
}
"""The index, and the column that its condition must hold; a claim by id has the id, the reap a filter."""


@pytest.fixture(scope="module")
def full(services):
    """A database of its own, filled past the guards, and analysed."""
    engine = migrated(create_database(services.database_url, "durable_full"))
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text("set local maintenance_work_mem = '256MB'"))
        tx.execute(text("alter table durable.deliveries set unlogged, drop constraint digest_is_sha256"))
        indexes = tx.execute(
            text(
                "select indexname, indexdef from pg_indexes"
                " where schemaname = 'durable' and tablename = 'deliveries' and indexname <> 'deliveries_pkey'"
            )
        ).all()
        for name, _ in indexes:  # filling first and indexing then takes a third of the time
            tx.execute(text(f"drop index durable.{name}"))
        first = 0
        for state, rows, sign in (
            ("sent", FINISHED, -1), ("pending", FUTURE, 1), ("pending", DUE, -1), ("processing", PROCESSING, -1),
        ):  # fmt: skip
            tx.execute(text(ROWS), {"kind": "test.plans", "state": state, "rows": rows, "sign": sign, "first": first})
            first += rows
        for _, definition in indexes:
            tx.execute(text(definition))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.execute(text("vacuum analyze durable.deliveries"))
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_full")


def plan(engine, statement, **parameters):
    """The plan as the server makes it for these very values."""
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection:
        connection.execute("set local plan_cache_mode = force_custom_plan")
        (answer,) = connection.execute(f"explain (format json) {statement.driver}".encode(), parameters).fetchone()
        return answer[0]["Plan"]


def nodes(node):
    yield node
    for below in node.get("Plans", ()):
        yield from nodes(below)


@pytest.mark.serial
def test_every_hot_statement_finds_its_rows_by_the_time_in_its_partial_index(full, declare):
    kind = declare(name="test.plans")
    holder = Holder()
    with full.begin() as tx:
        made = make_delivery(tx, kind)
    ids, fences = [made.id] * 100, [1] * 100
    depths = json.dumps([{"queue": queue, "depth": 0, "cap": 100} for queue in ("durable", "mail")])
    statements = {
        "take": (
            attempt._statements.take,
            {"id": made.id, "kinds": list(kind.names), **terms([kind])[0], **holder.parameters},
        ),
        "take_due": (
            attempt._statements.take_due,
            {"queue": "durable", "limit": 25, "terms": json.dumps(terms([kind])), **holder.parameters},
        ),
        "hint": (sweep._statements.hint, {"depths": depths}),
        "due_queues": (sweep._statements.due_queues, {}),
        "lapsed": (sweep._statements.lapsed, {"limit": 500, "heartbeat_seconds": 8.0}),
        "prune": (sweep._statements.prune, {"retention_seconds": 14 * 86400.0, "limit": 1000}),
        "queues": (read._statements.queues, {"count_limit": 10_000}),
        "keep": (attempt._statements.keep, {"ids": ids, "fences": fences, "lease_seconds": 30.0}),
        "reap": (
            sweep._statements.reap,
            {"verdicts": json.dumps([{"id": made.id, "fence": 1}] * 500), "move": "reap"},
        ),
    }
    wrong = {}
    for name, (statement, parameters) in statements.items():
        index, column = EXPECTED[name]
        top = plan(full, statement, **parameters)
        scans = [n for n in nodes(top) if n.get("Relation Name") == "deliveries" or "Index Name" in n]
        told = [(n["Node Type"], n.get("Index Name"), n.get("Index Cond"), n.get("Filter")) for n in scans]
        if any(n["Node Type"] == "Seq Scan" and n.get("Relation Name") == "deliveries" for n in scans):
            wrong[name] = told
        elif column is None:
            if not any(n.get("Index Name") == index for n in scans):
                wrong[name] = told
        elif not any(n.get("Index Name") == index and column in n.get("Index Cond", "") for n in scans):
            wrong[name] = told
    assert not wrong, json.dumps(wrong, indent=1)
    lapsed = plan(full, *statements["lapsed"][:1], **statements["lapsed"][1])
    assert any("lease_expires_at" in n.get("Filter", "") for n in nodes(lapsed)), "the lease is a filter, by design"
