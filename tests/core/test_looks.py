"""What people look at costs the same with any backlog: bounded reads by an index, on 200,000 rows and as many lines."""

import json

import psycopg
import pytest
from sqlalchemy import text

from durable_core.database import looking as bounds
from durable_core.deliveries import bulk, find, groups, history, read, survey
from durable_core.testing import create_database, drop_database, migrated

ROWS, LINES, KINDS = 200_000, 200_000, 8

FILL = """
    insert into durable.deliveries (id, kind, queue, priority, key, ordering_key, arguments, digest, state, due_at,
        hint_at, fence, settled_fence, attempts, max_attempts, max_interruptions, error_code, error_message, created_at,
        finished_at)
    select cast(lpad(to_hex(n + 1000000), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(n), 12, '0') as uuid),
        'test.looks_' || n % :kinds, case when n % 4 = 0 then 'mail' else 'durable' end, 5,
        case when n % 3 = 0 then 'key:' || n end, case when n % 5 = 0 then 'line:' || n % 1000 end,
        '{}', repeat('0', 64), state, at, at, 1, case when state in ('dead', 'sent') then 1 else 0 end,
        case when state = 'dead' or n % 20 = 3 then 1 else 0 end, 5, 20,
        case when state = 'dead' or n % 20 = 3 then 'WORKER_ERROR' end,
        case when state = 'dead' or n % 20 = 3 then 'OSError: printer ' || n || ' is on fire' end,
        at, case when state in ('dead', 'sent') then at end
    from generate_series(1, :rows) as n,
        lateral (select
            -- Every fourth waits and is due, every fourth is due later; the others ended, well or badly.
            case when n % 4 < 2 then 'pending' when n % 4 = 2 then 'sent' else 'dead' end as state,
            now() + case when n % 4 = 1 then 1 else -1 end * (n * interval '1 second') as at) as told"""

DISCARDED = """
    insert into durable.deliveries (id, kind, queue, priority, arguments, digest, state, due_at, hint_at, fence,
        settled_fence, attempts, max_attempts, max_interruptions, error_code, error_message, created_at, finished_at,
        discarded_at)
    select cast(lpad(to_hex(n + 5000000), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(n), 12, '0') as uuid),
        'test.looks_0', 'durable', 5, '{}', repeat('0', 64), case when n % 2 = 0 then 'dead' else 'failed' end, now(),
        now(), 1, 1, 1, 5, 20, 'WORKER_ERROR', 'OSError: no paper', now(), now(), now()
    from generate_series(1, :rows) as n"""
"""A mass that a person discarded in bulk, newer than all that is still to be looked at."""

JOURNAL = """
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt, reason, at)
    select cast(lpad(to_hex(n + 1000000), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(n), 12, '0') as uuid),
        'delivery', case when n % 4 < 2 then 'fail' else 'redrive' end, 'processing',
        case when n % 4 < 2 then 'pending' else 'dead' end, 1, 1, 'WORKER_ERROR', now() - (:lines - n) * interval '1 s'
    from generate_series(1, :lines) as n"""


@pytest.fixture(scope="module")
def loaded(services):
    """A database of its own, filled past the guards with its indexes in place, and never analysed."""
    engine = migrated(create_database(services.database_url, "durable_looks"))
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        for table in ("deliveries", "journal"):
            tx.execute(text(f"alter table durable.{table} set (autovacuum_enabled = false)"))
            tx.execute(text(f"alter table durable.{table} set unlogged"))
        tx.execute(text(FILL), {"rows": ROWS, "kinds": KINDS})
        tx.execute(text(DISCARDED), {"rows": ROWS})
        tx.execute(text(JOURNAL), {"lines": LINES})
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_looks")


@pytest.fixture(scope="module", params=["right after the load", "analysed"])
def full(loaded, request):
    if request.param == "analysed":
        with loaded.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
            tx.execute(text("vacuum analyze durable.deliveries"))
            tx.execute(text("vacuum analyze durable.journal"))
    return loaded


def ran(engine, statement, look=True, **parameters):
    """The plan that the server makes for these very values in a look, and how many buffers it touched."""
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection:
        if look:
            connection.execute(bounds._statements.bound.driver.encode(), {"milliseconds": "60000"})
        connection.execute("set local plan_cache_mode = force_custom_plan")
        explain = f"explain (analyze, buffers, format json) {statement.driver}"
        (answer,) = connection.execute(explain.encode(), parameters).fetchone()
        top = answer[0]["Plan"]
        return top, top["Shared Hit Blocks"] + top["Shared Read Blocks"]


def nodes(node):
    yield node
    for below in node.get("Plans", ()):
        yield from nodes(below)


LOOKED_AT = 10_000
ONE_ROW = "000f4241-0000-7000-8000-000000000001"
EVERY = {"id": None, "since_seconds": None, "move": None, "after": None, "limit": 50, "looked_at": LOOKED_AT}
BOUNDS = {"kind": None, "looked_at": LOOKED_AT, "characters": 1000}

LOOKS = {
    "the journal": (history._statements.newest, EVERY, 1000),
    "the journal, a move that is not there": (history._statements.newest, {**EVERY, "move": "no such"}, 1000),
    "the journal, lately": (history._statements.newest, {**EVERY, "since_seconds": 60.0}, 1000),
    "the journal, after a line": (history._statements.newest, {**EVERY, "after": 100_000}, 1000),
    "the journal of one row": (history._statements.newest, {**EVERY, "id": ONE_ROW}, 50),
    "errors that ended": (groups._statements.ended, BOUNDS, 4000),
    "errors of a kind that is not there": (groups._statements.ended, {**BOUNDS, "kind": "no such"}, 4000),
    "errors that are tried again": (groups._statements.retrying, BOUNDS, 30_000),
    "queues": (survey._statements.queues, {}, 100),
    "what waits": (survey._statements.waiting, {"queues": ["durable", "mail"], "share": 10_000}, 8000),
    "what was given up": (survey._statements.given_up, {"count_limit": LOOKED_AT}, 4000),
    "what is done": (survey._statements.done, {"count_limit": LOOKED_AT}, 4000),
    "what runs": (survey._statements.running, {}, 20),
    "find an id": (find._statements.by_id, {"id": ONE_ROW}, 20),
    "find a beginning": (
        find._statements.by_beginning,
        {"first": ONE_ROW, "last": "000f4241-ffff-ffff-ffff-ffffffffffff", "most": 20},
        50,
    ),
    "find a key": (find._statements.by_key, {"key": "key:9", "most": 20}, 200),
    "find a key that is not there": (find._statements.by_key, {"key": "none", "most": 20}, 200),
    "find a line": (find._statements.by_ordering_key, {"key": "line:5", "most": 20}, 300),
    "status": (read._statements.queues, {"count_limit": LOOKED_AT}, 12_000),
    "status, what is failed and dead": (read._statements.ended, {"count_limit": LOOKED_AT}, 4000),
}
"""The statement, and how many buffers it may touch: a page or a few for each row that it may read, and no more."""


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_reads_its_share_by_an_index(full, name):
    statement, parameters, most = LOOKS[name]
    top, touched = ran(full, statement, **parameters)
    scans = [node for node in nodes(top) if node.get("Relation Name") in ("deliveries", "journal")]
    whole = [node["Relation Name"] for node in scans if node["Node Type"] == "Seq Scan"]
    told = json.dumps([(n["Node Type"], n.get("Index Name"), n.get("Actual Rows"), n["Relation Name"]) for n in scans])
    assert not whole, told
    assert touched <= most, f"{touched}: {told}"
    # A function that is called, not made a part of the statement, would be planned at each call.
    assert not [node["Function Name"] for node in nodes(top) if node.get("Function Name") == "waiting_queues"]


def test_a_group_of_ten_thousand_is_acted_on_batch_by_batch(full):
    with full.connect() as tx:
        dead = "select id from durable.deliveries where state = 'dead' and discarded_at is null limit 10000"
        ids = [str(one) for one in tx.scalars(text(dead))]
    nothing = dict.fromkeys(("kind", "queue", "error_code", "ordering_key", "older_seconds"))
    top, touched = ran(
        full, bulk._statements.chosen, look=False, ids=ids, states=["dead"], after=None, limit=100, **nothing
    )
    assert touched < 5000, json.dumps([(n["Node Type"], n.get("Index Name"), n.get("Actual Rows")) for n in nodes(top)])
