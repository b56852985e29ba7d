"""A sample costs the same with any backlog: each look goes by an index, and reads its limit and no more."""

import json

import psycopg
import pytest
from sqlalchemy import text

from durable_core.database import looking as bounds
from durable_core.deliveries.read import COUNT_LIMIT
from durable_core.exporter import sample, tail
from durable_core.exporter.metrics import BY_NAME
from durable_core.testing import create_database, drop_database, migrated
from tests.core.test_looks_at_others import CALLS
from tests.core.test_plan_query_plans import ROWS as PLANS
from tests.core.test_query_plans import ROWS, nodes

JOURNAL = """
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason, at)
    select d.id, 'delivery', 'fail', 'processing', 'pending', 1, 'WORKER_ERROR', d.due_at
    from durable.deliveries d where d.state = 'sent'"""

DISCARD = """
    update durable.deliveries set discarded_at = now() where id in (
        select id from durable.deliveries where state = 'dead' order by finished_at desc limit :discarded)"""

LOAD = (
    ("sent", 0.5, -1),
    ("pending", 0.3, -1),
    ("pending", 0.17, 1),
    ("dead", 0.02, -1),
    ("processing", 0.01, -1),
)


OTHERS = {
    PLANS: (("executed", 0.2), ("pending", 0.02), ("approved", 0.01), ("executing", 0.01)),
    CALLS: (("succeeded", 0.2), ("queued", 0.02), ("running", 0.02)),
}


@pytest.fixture(scope="module")
def sizes(services, sized):
    """Two databases, the second with ten times the rows of the first; never analysed, and then analysed."""
    engines = {}
    for rows in (sized(20_000, 100_000), sized(200_000, 1_000_000)):
        name = f"durable_exported_{rows}"
        engine = engines[rows] = migrated(create_database(services.database_url, name))
        with engine.begin() as tx:
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(text("alter table durable.deliveries set (autovacuum_enabled = false)"))
            tx.execute(text("alter table durable.deliveries set unlogged, drop constraint holds_together"))
            first = 0
            for state, share, sign in LOAD:
                count = int(rows * share)
                told = {"kind": f"test.{state}", "state": state, "rows": count, "sign": sign, "first": first}
                tx.execute(text(ROWS), told)
                first += count
            tx.execute(text("update durable.deliveries set finished_at = due_at where state = 'dead'"))
            # Half of what is dead was discarded, the newest half.
            tx.execute(text(DISCARD), {"discarded": int(rows * 0.01)})
            tx.execute(text(JOURNAL))
            for sql, states in OTHERS.items():
                for state, share in states:
                    tx.execute(text(sql), {"state": state, "rows": int(rows * share), "first": first})
                    first += int(rows * share)
            tx.execute(text("update durable.plans set finished_at = created_at where state = 'executed'"))
    yield list(engines.values())
    for rows, engine in engines.items():
        engine.dispose()
        drop_database(services.database_url, f"durable_exported_{rows}")


@pytest.fixture(scope="module", params=["right after the load", "analysed"])
def loaded(sizes, request):
    if request.param == "analysed":
        for engine in sizes:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
                tx.execute(
                    text("vacuum analyze durable.deliveries, durable.journal, durable.plans, durable.operations")
                )
    return sizes


BOUNDS = {f"{name}_bounds": list(BY_NAME[metric].buckets) for name, (metric, _) in tail._TIMES.items()}
LONG_AGO = {"at": "2000-01-01T00:00:00Z", "limit": tail.BATCH, "lag_seconds": tail.LAG_SECONDS}
FIRST = "00000000-0000-0000-0000-000000000000"
LOOKS = {
    "queues": (
        sample._statements.queues,
        {"most_queues": sample.MOST_QUEUES, "limit": sample.MOST_DUE, "ages": list(sample.SINCE_SECONDS)},
    ),
    "waiting_queues": (sample._statements.waiting_queues, {"most_queues": sample.MOST_QUEUES}),
    "waiting": (sample._statements.waiting, {"queues": ["durable", "mail"], "share": COUNT_LIMIT // 2}),
    "processing": (sample._statements.processing, {"limit": COUNT_LIMIT}),
    "dead": (sample._statements.dead, {"limit": COUNT_LIMIT}),
    "estimates": (sample._statements.estimates, {}),
    "pauses": (sample._statements.pauses, {"limit": sample.MOST_NAMES}),
    "schedules": (sample._statements.schedules, {"limit": sample.MOST_NAMES}),
    "plans": (sample._statements.plans, {"limit": 1000}),
    "operations": (sample._statements.operations, {"limit": 1000}),
    "steps": (tail._statements.steps, {**LONG_AGO, "id": FIRST, "limit": 1000}),
    "polls": (tail._statements.polls, {"limit": 1000}),
    "operations_ended": (tail._statements.operations_ended, {**LONG_AGO, "id": FIRST, "limit": 1000}),
    "finished": (tail._statements.finished, {**LONG_AGO, "id": FIRST, **BOUNDS}),
    "finished_until": (tail._statements.finished_until, {"lag_seconds": tail.LAG_SECONDS}),
    "journal": (tail._statements.journal, {**LONG_AGO, "id": 0}),
    "enqueued": (
        tail._statements.enqueued,
        {"id": FIRST, "limit": tail.BATCH, "lag_seconds": tail.ENQUEUE_LAG_SECONDS},
    ),
    "enqueued_until": (tail._statements.enqueued_until, {"lag_seconds": tail.ENQUEUE_LAG_SECONDS}),
}

MOST = {
    "queues": 150, "waiting_queues": 100, "waiting": 5000, "processing": 2000, "dead": 4000, "estimates": 20,
    "pauses": 20, "schedules": 20, "plans": 2100, "operations": 2100, "steps": 4000,
    "polls": 1100, "operations_ended": 1100, "finished": 2000, "finished_until": 20, "journal": 60_000,
    "enqueued": 2000, "enqueued_until": 20,
}  # fmt: skip
"""How many buffers each may touch. A page holds some 16 rows; of each journal line the row is looked up, by its key."""


def ran(engine, statement, parameters, before="select"):
    """The plan of a look as the exporter takes it, and how many buffers it touched; nothing of `before` stays."""
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection:
        connection.execute(before)
        connection.execute(bounds._statements.bound.driver, {"milliseconds": "60000"})
        (answer,) = connection.execute(
            f"explain (analyze, buffers, format json) {statement.driver}".encode(), parameters
        ).fetchone()
        connection.rollback()
        top = answer[0]["Plan"]
        return top, top["Shared Hit Blocks"] + top["Shared Read Blocks"]


def test_every_statement_of_the_exporter_is_looked_at_here():
    known = {statement.name for statements in (sample._statements, tail._statements) for statement in statements}
    assert known == set(LOOKS) == set(MOST)


TABLES = ("deliveries", "journal", "plans", "plan_receipts", "operations")


@pytest.mark.full_size
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_reads_by_an_index_and_no_more_of_a_backlog_ten_times_as_long(loaded, name):
    statement, parameters = LOOKS[name]
    for engine in loaded:
        top, touched = ran(engine, statement, parameters)
        whole = [
            n["Relation Name"]
            for n in nodes(top)
            if n["Node Type"] in ("Seq Scan", "Bitmap Heap Scan") and n["Relation Name"] in TABLES
        ]
        assert not whole, json.dumps(top, indent=1)
        assert touched <= MOST[name], f"{touched} buffers: {json.dumps(top, indent=1)}"


PAUSED = "insert into durable.pauses (what, name, by_whom, reason) values ('kind', 'test.pending', 'dana', 'a test')"


def test_the_row_that_is_late_is_looked_for_no_further_than_the_limit(loaded):
    """Every due row is paused, so none is found: the whole share of each queue is read."""
    for engine in loaded:
        top, touched = ran(engine, *LOOKS["queues"], before=PAUSED)
        assert touched <= sample.MOST_DUE, json.dumps(top, indent=1)
