"""With many finished rows behind and future ones ahead, each hot statement goes by an index and reads its share."""

import json

import psycopg
import pytest
from sqlalchemy import text

from durable_core import sweeps
from durable_core.claims.claim import Holder
from durable_core.claims.shares import Share, as_written
from durable_core.deliveries import attempt, ended, read, stuck, sweep, waiting
from durable_core.deliveries.declare import terms
from durable_core.operations import sweep as operations
from durable_core.plans import heal
from durable_core.plans import sweep as plans
from durable_core.testing import create_database, drop_database, make_delivery, migrated

PROCESSING, DUE = 200, 500

ROWS = """
    insert into durable.deliveries (id, kind, queue, priority, arguments, digest, state, due_at, hint_at, fence,
        settled_fence, attempts, max_attempts, max_interruptions, owner, owner_pid, lease_expires_at, deadline_at,
        beat_at, created_at, finished_at)
    select cast(lpad(to_hex(n + :first), 32, '0') as uuid), :kind,
        case when n % 4 = 0 then 'mail' else 'durable' end, 5, '{}', repeat('0', 64),
        :state, at, at, 1, case when :state in ('sent') then 1 else 0 end, 1, 5, 20,
        case when :state = 'processing' then 'x' end, case when :state = 'processing' then 1 end,
        case when :state = 'processing' then at end, case when :state = 'processing' then at + interval '1 minute' end,
        at, at, case when :state = 'sent' then at end
    from generate_series(1, :rows) as n,
        lateral (select now() + :sign * (n * interval '10 seconds') as at) as instant"""

EXPECTED = {
    "take": ("deliveries_pkey", None, 500),
    "take_due": ("deliveries_due", "due_at", 1500),
    "unhinted": ("deliveries_hint", "hint_at", 9000),
    "mark": ("deliveries_pkey", None, 4000),
    "due_queues": (None, None, 100),
    "a_lapsed_one": (None, None, 1500),
    "an_overdue_one": (None, None, 100),
    "lapsed": ("deliveries_processing", None, 1500),
    "owned": ("deliveries_processing", None, 500),
    "old": ("deliveries_finished", "finished_at", 10_000),
    "prune": ("deliveries_pkey", None, 10_000),
    "overdue": ("deliveries_expiring", "expires_at", 20),
    "discarded": ("deliveries_discarded", "discarded_at", 20),
    "next_of_line": ("deliveries_line", "ordering_key", 20),
    "queues": ("deliveries_due", "due_at", 10_000),
    "ended": ("deliveries_still_dead", None, 50),
    "expiries": ("deliveries_finished", "finished_at", 10_500),
    "ahead": ("deliveries_line", "ordering_key", 50),
    "keep": ("deliveries_pkey", None, 2000),
    "reap": ("deliveries_pkey", None, 6000),
    "page": ("deliveries_pkey", None, 200),
    "page after a row": ("deliveries_pkey", "id", 200),
    "page of a kind and key": ("deliveries_key", "key", 50),
    "few": ("deliveries_dead", None, 50),
}
"""The index; the column that its condition must hold (a claim by id has the id, the reap a filter); and how many
buffers the statement may touch. A table of full size has 70,000, so that is the work of its rows and no more."""

FUNCTIONS = (sweep._statements.due_queues, sweeps.DUE, sweeps.LAPSED, sweeps.OVERDUE, sweeps.POLLS)
"""What is inside shows no plan: there the buffers alone tell."""


@pytest.fixture(scope="module")
def loaded(services, sized):
    """A database of its own, filled past the guards with its indexes in place, and never analysed."""
    engine = migrated(create_database(services.database_url, "durable_full"))
    finished, future = sized(20_000, 1_000_000), sized(4000, 200_000)
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text("alter table durable.deliveries set (autovacuum_enabled = false)"))
        tx.execute(text("alter table durable.deliveries set unlogged"))
        first = 0
        for state, rows, sign in (
            ("sent", finished, -1), ("pending", future, 1), ("pending", DUE, -1), ("processing", PROCESSING, -1),
        ):  # fmt: skip
            tx.execute(text(ROWS), {"kind": "test.plans", "state": state, "rows": rows, "sign": sign, "first": first})
            first += rows
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_full")


@pytest.fixture(scope="module", params=["right after the load", "analysed"])
def full(loaded, request):
    if request.param == "analysed":
        with loaded.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
            tx.execute(text("vacuum analyze durable.deliveries"))
    else:
        with loaded.connect() as tx:
            assert not tx.scalar(text("select count(*) from pg_stats where tablename = 'deliveries'"))
    return loaded


def ran(engine, statement, **parameters):
    """
    The plan that the server makes for these very values, and how many buffers it touched; nothing stays.

    A function is called once before: what its session reads of the catalog is no work of the statement.
    """
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection:
        connection.execute("set local plan_cache_mode = force_custom_plan")
        explain = f"explain (analyze, buffers, format json) {statement.driver}"
        for _ in range(2 if statement in FUNCTIONS else 1):
            (answer,) = connection.execute(explain.encode(), parameters).fetchone()
        connection.rollback()
        top = answer[0]["Plan"]
        return top, top["Shared Hit Blocks"] + top["Shared Read Blocks"]


def nodes(node):
    yield node
    for below in node.get("Plans", ()):
        yield from nodes(below)


@pytest.mark.field("R63")
@pytest.mark.full_size
def test_every_hot_statement_finds_its_rows_by_an_index_and_reads_no_more_than_its_share(full, declare):
    kind = declare(name="test.plans")
    holder = Holder()
    with full.begin() as tx:
        made = make_delivery(tx, kind)
        behind = [make_delivery(tx, kind, ordering_key="plans") for _ in range(3)][-1]
        held, old = (
            [
                str(row_id)
                for row_id in tx.scalars(text(f"select id from durable.deliveries where state = '{s}' limit {n}"))
            ]
            for s, n in (("processing", 100), ("sent", 1000))
        )
    depths = json.dumps([{"queue": queue, "depth": 0, "cap": 100} for queue in ("durable", "mail")])
    verdict = {"fence": 1, "state": "pending", "delay_seconds": 0, "counted": "interruption", "error_code": "X"}
    everything = {name: None for name in ("state", "kind", "queue", "key", "after", "ids")} | {"limit": 50}
    statements = {
        "take": (
            attempt._statements.take,
            {"id": made.id, "kinds": list(kind.names), **terms([kind])[0], **holder.parameters},
        ),
        "take_due": (
            attempt._statements.take_due,
            {"queue": "durable", "limit": 25, "terms": json.dumps(terms([kind])), **holder.parameters},
        ),
        "unhinted": (sweep._statements.unhinted, {"depths": depths}),
        "mark": (sweep._statements.mark, {"ids": held, "idle": held[:2], "idle_seconds": 5}),
        "due_queues": (sweep._statements.due_queues, {}),
        "a_lapsed_one": (sweeps.LAPSED, {}),
        "an_overdue_one": (sweeps.OVERDUE, {}),
        "lapsed": (sweep._statements.lapsed, {"limit": 500, "heartbeat_seconds": 8.0}),
        "owned": (sweep._statements.owned, {"owner": "x", "pids": [1]}),
        "old": (sweep._statements.old, {"retention_seconds": 86400.0, "limit": 1000, "since": None, "without": []}),
        "prune": (sweep._statements.prune, {"ids": old}),
        "overdue": (sweep._statements.overdue, {"limit": 1000}),
        "discarded": (
            sweep._statements.discarded,
            {"retention_seconds": 0.0, "limit": 1000, "since": None, "without": []},
        ),
        "next_of_line": (ended._statements.next_of_line, {"ordering_key": "a line"}),
        "queues": (read._statements.queues, {"count_limit": 10_000}),
        "ended": (read._statements.ended, {"count_limit": 10_000}),
        "expiries": (
            read._statements.expiries,
            {"count_limit": 10_000, "soon_seconds": 3600.0, "lately_seconds": 86400.0},
        ),
        "ahead": (waiting._statements.ahead, {"id": behind.id}),
        "keep": (attempt._statements.keep, {"ids": held, "fences": [1] * 100, "lease_seconds": 30.0}),
        "reap": (
            sweep._statements.reap,
            {"verdicts": json.dumps([{"id": row_id, **verdict} for row_id in held]), "move": "reap"},
        ),
        "page": (read._statements.page, everything),
        "page after a row": (read._statements.page, {**everything, "after": held[0]}),
        "page of a kind and key": (read._statements.page, {**everything, "kind": kind.name, "key": "none"}),
        "few": (read._statements.few, {**everything, "state": "dead"}),
    }
    wrong = {}
    for name, (statement, parameters) in statements.items():
        index, column, most = EXPECTED[name]
        top, touched = ran(full, statement, **parameters)
        scans = [n for n in nodes(top) if n.get("Relation Name") == "deliveries" or "Index Name" in n]
        told = [(n["Node Type"], n.get("Index Name"), n.get("Index Cond"), n.get("Filter")) for n in scans]
        whole = any(n["Node Type"] == "Seq Scan" and n.get("Relation Name") == "deliveries" for n in scans)
        found = any(n.get("Index Name") == index and (column or "") in n.get("Index Cond", "") for n in scans)
        if whole or not (found or index is None) or touched > most:
            wrong[name] = [touched, *told]
    assert not wrong, json.dumps(wrong, indent=1)
    lapsed, _ = ran(full, statements["lapsed"][0], **statements["lapsed"][1])
    assert any("lease_expires_at" in n.get("Filter", "") for n in nodes(lapsed)), "the lease is a filter, by design"


LINE = """
    insert into durable.deliveries (id, kind, queue, priority, arguments, digest,
        state, due_at, hint_at, fence, attempts, max_attempts, max_interruptions,
        owner, owner_pid, owner_host, lease_expires_at, deadline_at, claimed_at, beat_at, created_at, ordering_key)
    select cast(lpad(to_hex(n + 50000000), 32, '0') as uuid), 'test.plans', 'line', 5, '{}', repeat('0', 64),
        case when first then :state else 'pending' end, case when first then :due else at end, at,
        cast(first as integer), cast(first as integer), 5, 20,
        case when running then 'x' end, case when running then 1 end, case when running then 'y' end,
        case when running then at + interval '1 day' end, case when running then at + interval '1 day' end,
        case when running then at end, case when running then at end, at, :line
    from generate_series(1, :rows) as n,
        lateral (select now() - interval '1 hour' + n * interval '1 ms' as at, n = 1 as first,
            n = 1 and :state = 'processing' as running) as told"""


@pytest.mark.parametrize("head", ["processing", "waits for its retry", "pending"])
def test_the_next_of_a_long_line_and_those_that_wait_in_it_are_found_without_reading_the_line(full, declare, head):
    """Twenty thousand orders of one customer: what stands behind the first is not read for every one of them."""
    declare(name="test.plans")
    rows, hinted = 20_000, 100
    told = {"state": "processing" if head == "processing" else "pending", "rows": rows, "line": f"its first {head}"}
    try:
        with full.begin() as tx:
            tx.execute(text("set local session_replication_role = replica"))
            later = tx.scalar(text("select now() + interval '1 hour'"))
            earlier = tx.scalar(text("select now() - interval '1 hour'"))
            tx.execute(text(LINE), {**told, "due": later if head == "waits for its retry" else earlier})
            if head == "pending":
                tx.execute(text("update durable.deliveries set attempts = 0, fence = 0 where queue = 'line'"))
        _, for_next = ran(full, ended._statements.next_of_line, ordering_key=told["line"])
        depths = json.dumps([{"queue": "line", "depth": 0, "cap": hinted}])
        _, for_hints = ran(full, sweep._statements.unhinted, depths=depths)
    finally:
        with full.begin() as tx:
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(text("delete from durable.deliveries where queue = 'line'"))
    # A look at an index is a handful of buffers; dead entries of the load are passed on the way.
    assert for_next < 400, for_next
    assert for_hints < hinted * 100, for_hints


# --- plans and operations ------------------------------------------------------------------------------

MANY = 20_000

PLANS = """
    insert into durable.plans (id, risk, steps, step_count, digest, scopes, self_approval, proposed_by, state, receipts,
        kind, queue, approved_by, approved_at, approved_digest, fence, settled_fence, owner, owner_pid, owner_host,
        lease_expires_at, deadline_at, continue_until, hint_at, hints, created_at, expires_at, finished_at)
    select cast(lpad(to_hex(n + :first), 32, '0') as uuid), 'low',
        cast('[{"kind": "k", "queue": "durable", "arguments": {}, "target": null}]' as jsonb),
        1, repeat('0', 64), '{}', true, 'a', :state, cast(:state = 'executed' as integer), 'k',
        case when n % 4 = 0 then 'mail' else 'durable' end, 'd', at, repeat('0', 64), 1, 1,
        case when :owned then 'x' end, case when :owned then 1 end, case when :owned then 'h' end,
        case when :owned then now() + interval '60 s' end, case when :owned then now() + interval '300 s' end,
        case when :state = 'executing' then now() + n * interval '1 s' + interval '1 hour' end,
        case when n % 2 = 0 then at else now() + n * interval '1 s' end, case when n % 4 < 2 then 1 else 12 end, at,
        now() + interval '30 days',
        case when :state = 'executed' then at end
    from generate_series(1, :rows) as n, lateral (select now() - interval '1 day' + n * interval '1 s' as at) as told"""

OPERATIONS = """
    insert into durable.operations (id, kind, queue, arguments, digest, started_by, one_in_flight, finds, cancels,
        patience_seconds, every_seconds, state, issued_at, external_ids, patience_until, start_before, fence,
        settled_fence, owner, owner_pid, owner_host, lease_expires_at, deadline_at, due_at, hint_at, hints, canceled_by,
        created_at, finished_at)
    select cast(lpad(to_hex(n + :first), 32, '0') as uuid), 'k', case when n % 4 = 0 then 'mail' else 'durable' end,
        '{}', repeat('0', 64), 'a', false, false, true, 300, 5, :state,
        case when :state <> 'queued' then at end, case when :state <> 'queued' then cast('["x"]' as jsonb) end,
        case when :state <> 'queued' then now() + n * interval '1 s' + interval '1 hour' end,
        now() + n * interval '1 s' + interval '1 hour', 1, 1,
        case when :owned then 'x' end, case when :owned then 1 end, case when :owned then 'h' end,
        case when :owned then now() + interval '60 s' end, case when :owned then now() + interval '300 s' end,
        case when n % 2 = 0 then at else now() + n * interval '1 s' end,
        case when n % 2 = 0 then at else now() + n * interval '1 s' end, case when n % 4 < 2 then 1 else 12 end,
        case when :state = 'canceled' then 'd' end, at,
        case when :state in ('succeeded', 'canceled')
            then now() - case when :state = 'canceled' then interval '1 hour' else interval '1 s' end end
    from generate_series(1, :rows) as n, lateral (select now() - interval '1 day' + n * interval '1 s' as at) as told"""

SLOTS = 50
"""So many are in the hands of workers."""


@pytest.fixture(scope="module")
def crowded(services):
    """A database of its own in which very much waits of plans and operations, and nothing is over; never analysed."""
    engine = migrated(create_database(services.database_url, "durable_crowded"))
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        for table in ("plans", "operations"):
            tx.execute(text(f"alter table durable.{table} set (autovacuum_enabled = false)"))
        first = 0
        for insert, state, rows, owned in (
            (PLANS, "executed", MANY, False), (PLANS, "approved", MANY, False), (PLANS, "executing", MANY, False),
            (PLANS, "executing", SLOTS, True),
            (OPERATIONS, "succeeded", MANY, False), (OPERATIONS, "canceled", MANY, False),
            (OPERATIONS, "queued", MANY, False), (OPERATIONS, "running", MANY, False),
            (OPERATIONS, "running", SLOTS, True),
        ):  # fmt: skip
            tx.execute(text(insert), {"state": state, "rows": rows, "first": first, "owned": owned})
            first += rows
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_crowded")


@pytest.fixture(scope="module", params=["right after the load", "analysed", "analysed while it was small"])
def busy(crowded, request):
    with crowded.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        for table in ("plans", "operations"):
            if request.param == "analysed":
                tx.execute(text(f"vacuum analyze durable.{table}"))
            elif request.param != "right after the load":
                # What the statistics say when a burst came after them.
                tx.execute(text(f"delete from pg_statistic where starelid = cast('durable.{table}' as regclass)"))
                tx.execute(text(
                    f"update pg_class set reltuples = 20, relpages = 1 where oid = cast('durable.{table}' as regclass)"
                ))  # fmt: skip
            else:
                assert not tx.scalar(text("select count(*) from pg_stats where tablename = :t"), {"t": table})
    return crowded


ROOM, WINDOW = 100, 1000
"""Hints that there is room for in each of two queues, and rows of each that are looked at."""


def asked_by_sweeps():
    """Each statement of the sweeps, and how many buffers it may touch: its rows' work, in a table of thousands."""
    full, empty = (
        as_written({queue: Share(ROOM, empty=nothing) for queue in ("durable", "mail")}) for nothing in (False, True)
    )
    counted = {"limit": WINDOW, "queues": None}
    look = {"precheck_seconds": 30.0, "window": WINDOW}
    plan, operation = plans._statements, operations._statements
    return {
        "what dispatch looks at": (sweeps.DUE, {}, 200),
        "what reap looks at": (sweeps.LAPSED, {}, 500),
        "what poll looks at": (sweeps.POLLS, {}, 200),
        "what expire looks at": (sweeps.OVERDUE, {}, 200),
        "plans due": (plan.due, counted, 2 * WINDOW + 500),
        "plans unhinted": (plan.unhinted, {"shares": full, "window": WINDOW}, 4 * WINDOW + 10 * ROOM + 500),
        "plans unhinted, in empty queues": (
            plan.unhinted, {"shares": empty, "window": WINDOW}, 2 * WINDOW + 10 * ROOM + 500,
        ),
        "plans holding_pids": (plan.holding_pids, {"owner": "x"}, 200),
        "plans owned": (plan.owned, {"owner": "nobody", "pids": [1]}, 200),
        "plans stale": (heal.statements.stale, {"limit": 500}, 200),
        "plans overdue": (heal.statements.overdue, {"limit": 500}, 200),
        "operations due": (operation.due, counted, 2 * WINDOW + 500),
        "operations polls due": (operation.polls_due, counted, 2 * WINDOW + 500),
        "operations unhinted, queued": (
            operation.unhinted, {"shares": full, "state": "queued", **look}, 2 * WINDOW + 10 * ROOM + 500,
        ),
        "operations unhinted, running": (
            operation.unhinted, {"shares": full, "state": "running", **look}, 2 * WINDOW + 10 * ROOM + 500,
        ),
        "operations unhinted, queued in empty queues": (
            operation.unhinted, {"shares": empty, "state": "queued", **look}, 2 * WINDOW + 10 * ROOM + 500,
        ),
        "operations unhinted, running in empty queues": (
            operation.unhinted, {"shares": empty, "state": "running", **look}, 4 * WINDOW + 10 * ROOM + 500,
        ),
        "operations to_ask": (operation.to_ask, {"ask_seconds": 60.0, "again_seconds": 10.0, "limit": 100}, 200),
        "operations holding_pids": (operation.holding_pids, {"owner": "x"}, 200),
        "operations owned": (operation.owned, {"owner": "nobody", "pids": [1]}, 200),
        "operations lapsed": (operation.lapsed, {"limit": 500}, 200),
        "operations overdue": (operation.overdue, {"limit": 500}, 200),
        "stuck": (stuck._statements.stuck, {"grace_seconds": 30.0}, 500),
    }  # fmt: skip


def test_each_sweep_looks_at_a_bounded_number_of_plans_and_operations(busy):
    wrong = {}
    for name, (statement, parameters, most) in asked_by_sweeps().items():
        top, touched = ran(busy, statement, **parameters)
        whole = any(
            n["Node Type"] == "Seq Scan" and n.get("Relation Name") in ("plans", "operations") and n["Actual Loops"]
            for n in nodes(top)
        )
        if whole or touched > most:
            scans = [n for n in nodes(top) if "Relation Name" in n or "Index Name" in n]
            wrong[name] = [touched, *(f"{n['Node Type']} {n.get('Index Name')} {n['Actual Rows']}" for n in scans)]
    assert not wrong, json.dumps(wrong, indent=1)


def test_what_the_sweeps_mark_and_move_of_plans_and_operations_costs_its_rows(busy):
    with busy.connect() as tx:
        waiting, left, due, running = (
            [str(one) for one in tx.scalars(text(f"select id from durable.{table} where {which} limit 100"))]
            for table, which in (
                ("plans", "state = 'approved'"), ("plans", "state = 'executing' and owner is null"),
                ("operations", "state = 'queued'"), ("operations", "state = 'running' and owner is null"),
            )
        )  # fmt: skip
    marked = {"idle": [], "unsure": [], "idle_seconds": 30.0}
    statements = {
        "plans mark": (plans._statements.mark, {"ids": waiting, **marked}),
        "plans heal": (heal.statements.heal, {"ids": left, "move": "heal"}),
        "plans expire": (heal.statements.expire, {"ids": waiting}),
        "operations mark": (operations._statements.mark, {"ids": due, **marked}),
        "operations take_back": (
            operations._statements.take_back, {"ids": running, "move": "reap", "code": "X", "outage_seconds": 30.0},
        ),
        "operations expire": (operations._statements.expire, {"ids": due}),
    }  # fmt: skip
    touched = {name: ran(busy, statement, **told)[1] for name, (statement, told) in statements.items()}
    assert all(buffers <= 100 * 100 for buffers in touched.values()), touched
