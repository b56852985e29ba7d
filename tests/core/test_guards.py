"""What the database refuses, whoever asks: plain SQL, as psql would send it."""

import re

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core.states import DELIVERY_MOVES, DeliveryState, FenceRule, SettleRule

LEGAL = {(move.source, move.target): move for move in DELIVERY_MOVES}
MOVE = """
    update durable.deliveries
    set state = :state, fence = :fence, settled_fence = :settled,
        owner = case when :state = 'processing' then 'psql' end,
        lease_expires_at = case when :state = 'processing' then now() end,
        deadline_at = case when :state = 'processing' then now() end,
        finished_at = case when :state not in ('pending', 'processing') then now() end
    where id = :id"""
COLUMNS = """
    select attname from pg_attribute
    where attrelid = 'durable.deliveries'::regclass and attnum > 0 and not attisdropped"""


def refused(tx, sql, **parameters):
    """The sentence and code with which a statement is refused; the transaction goes on."""
    with pytest.raises(DBAPIError) as error, tx.begin_nested():
        tx.execute(text(sql), parameters)
    assert isinstance(error.value.orig, psycopg.Error)
    return error.value.orig.sqlstate, str(error.value.orig)


def move(tx, made, state, fence, settled):
    with tx.begin_nested():
        tx.execute(text(MOVE), {"id": made.id, "state": state, "fence": fence, "settled": settled})


@pytest.mark.parametrize("source", DeliveryState)
@pytest.mark.parametrize("target", DeliveryState)
def test_a_move_is_possible_exactly_when_the_table_of_states_has_it(conn, make, source, target):
    """By hand, with every fence the move could need; a state it has not is refused whatever the fences."""
    made = make(state=source)
    before = conn.execute(text("select fence, settled_fence from durable.deliveries")).one()
    allowed, refusals = set(), []
    for raised in (0, 1, 2):
        for settled in {before.settled_fence, before.fence, before.fence + raised}:
            nested = conn.begin_nested()
            try:
                move(conn, made, target, before.fence + raised, settled)
                allowed.add((raised, settled))
            except DBAPIError as error:
                refusals.append((error.orig.sqlstate, str(error.orig)))
            nested.rollback()
    for code, sentence in refusals:
        assert code in ("55000", "23514")
        assert made.id in sentence or "settled_fence_was_held" in sentence
    if source == target:
        return
    if (source, target) not in LEGAL:
        assert allowed == set()
        return
    legal = LEGAL[source, target]
    raised = 1 if legal.fence is FenceRule.RAISED else 0
    fence = before.fence + raised
    expected = {
        SettleRule.KEPT: {before.settled_fence},
        SettleRule.OPTIONAL: {before.settled_fence, fence},
        SettleRule.REQUIRED: {fence} if fence > before.settled_fence else set(),
    }[legal.settle]
    assert allowed == {(raised, settled) for settled in expected}


def test_a_fence_never_falls(conn, make):
    made = make(state="processing")
    code, sentence = refused(conn, "update durable.deliveries set fence = 0 where id = :id", id=made.id)
    assert code == "55000"
    assert "a fence never falls" in sentence
    assert made.id in sentence


def test_a_settled_fence_never_falls_nor_passes_the_fence(conn, make):
    made = make(state="sent")
    assert "a fence never falls" in refused(conn, "update durable.deliveries set settled_fence = 0")[1]
    code, sentence = refused(conn, "update durable.deliveries set settled_fence = 9 where id = :id", id=made.id)
    assert (code, "settled_fence_was_held" in sentence) == ("23514", True)


def test_pending_is_not_sent_without_a_settled_fence(conn, make):
    make()
    code, sentence = refused(conn, "update durable.deliveries set state = 'sent', finished_at = now()")
    assert code == "55000"
    assert "pending to sent breaks its fence rule" in sentence


def test_a_terminal_state_is_left_by_redrive_alone(conn, make):
    make(state="sent")
    code, sentence = refused(
        conn, "update durable.deliveries set state = 'pending', fence = 2, settled_fence = 2, finished_at = null"
    )
    assert code == "55000"
    assert "sent to pending is no legal move" in sentence


@pytest.mark.parametrize("state", ["pending", "processing"])
def test_a_live_row_cannot_be_deleted(conn, make, state):
    make(state=state)
    code, sentence = refused(conn, "delete from durable.deliveries")
    assert code == "55000"
    assert "only finished deliveries may be deleted" in sentence


@pytest.mark.parametrize("state", ["sent", "failed", "dead", "canceled", "expired"])
def test_a_finished_row_can_be_deleted(conn, make, state):
    make(state=state)
    assert conn.execute(text("delete from durable.deliveries")).rowcount == 1


@pytest.mark.parametrize("table", ["deliveries", "journal"])
@pytest.mark.parametrize("cascade", ["", " cascade"])
def test_truncate_is_refused(conn, make, table, cascade):
    make()
    code, sentence = refused(conn, f"truncate durable.{table}{cascade}")
    assert code == "55000"
    assert f"{table}: TRUNCATE is refused" in sentence


INSERT = """
    insert into durable.deliveries (id, kind, queue, priority, arguments, digest, max_attempts, max_interruptions,
        due_at, hint_at, created_at, state, fence, settled_fence, attempts, finished_at)
    values (gen_random_uuid(), 'psql', 'durable', 5, '{}', repeat('0', 64), 5, 20, now(), now(), now(),
        :state, :fence, :settled, :attempts, case when :state = 'sent' then now() end)"""


@pytest.mark.parametrize(
    ("state", "fence", "settled", "attempts"),
    [("sent", 1, 1, 1), ("sent", 0, 0, 0), ("pending", 1, 0, 0), ("pending", 1, 1, 0), ("pending", 0, 0, 1)],
)
def test_a_row_begins_pending_and_unclaimed(conn, state, fence, settled, attempts):
    code, sentence = refused(conn, INSERT, state=state, fence=fence, settled=settled, attempts=attempts)
    assert code == "55000"
    assert "begins pending, unclaimed, with fence 0" in sentence


def test_a_row_may_be_inserted_by_hand_when_it_is_as_enqueue_makes_it(conn):
    conn.execute(text(INSERT), {"state": "pending", "fence": 0, "settled": 0, "attempts": 0})


@pytest.mark.parametrize(
    "change",
    [
        "kind = 'other'", "key = 'other'", "key = null", f"digest = '{'1' * 64}'", "created_at = now()",
        "id = gen_random_uuid()", "ordering_key = 'other'", "ordering_strict = true",
    ],
)  # fmt: skip
def test_what_a_row_is_never_changes(conn, make, change):
    make(key="k")
    code, sentence = refused(conn, f"update durable.deliveries set {change}")
    assert code == "55000"
    assert "never changes" in sentence


def test_the_arguments_of_a_waiting_row_change_under_a_new_fence_alone(conn, make):
    """Whoever has the old ones, and was reaped, cannot report on the new ones."""
    made = make()
    other = "1" * 64
    for fences in ("fence = 1", "fence = 2, settled_fence = 2", "fence = 0"):
        code, sentence = refused(conn, f"update durable.deliveries set digest = '{other}', {fences}")
        assert (code, "under a new fence" in sentence) == ("55000", True)
    conn.execute(text(f"update durable.deliveries set digest = '{other}', fence = 1, settled_fence = 1"))
    assert made.id


@pytest.mark.parametrize("state", ["processing", "sent", "failed", "dead", "canceled", "expired"])
def test_a_row_that_has_begun_may_give_up_its_key_and_its_arguments_stay(conn, make, state):
    make(state=state, key="k")
    code, sentence = refused(
        conn, f"update durable.deliveries set digest = '{'1' * 64}', fence = fence + 1, settled_fence = fence + 1"
    )
    assert (code, "under a new fence" in sentence) == ("55000", True)
    assert "never changes" in refused(conn, "update durable.deliveries set key = 'other'")[1]
    assert conn.execute(text("update durable.deliveries set key = null")).rowcount == 1
    assert "never changes" in refused(conn, "update durable.deliveries set key = 'k'")[1]


CONTRADICTIONS = [
    ("state = 'parked'", "state_is_known"), ("owner = null", "owned_exactly_while_processing"),
    ("lease_expires_at = null", "owned_exactly_while_processing"),
    ("deadline_at = null", "owned_exactly_while_processing"), ("finished_at = now()", "finished_exactly_when_terminal"),
    ("fence = -1, settled_fence = -1", "fence_counts_up"), ("settled_fence = fence + 1", "settled_fence_was_held"),
    ("interruptions = 2", "counters_add_up"), ("snoozes = -1", "counters_add_up"), ("shutdowns = 2", "counters_add_up"),
    ("attempts = -1", "counters_add_up"), ("max_attempts = 0", "at_least_one_attempt"),
    ("max_interruptions = -1", "interruptions_budget"), ("waiting_for = 'godot'", "waits_for_something_known"),
    ("discarded_at = now()", "discarded_only_when_it_needs_a_person"),
]  # fmt: skip
MISSHAPEN = [
    ("kind = ''", "kind_has_a_name"), ("queue = ''", "queue_has_a_name"),
    ("queue = repeat('q', 101)", "queue_has_a_name"), ("priority = 10", "priority_0_is_most_urgent"),
    ("priority = -1", "priority_0_is_most_urgent"), ("key = ''", "key_fits_an_index"),
    ("key = repeat('k', 1001)", "key_fits_an_index"), ("arguments = '[]'", "arguments_by_name"),
    ("digest = repeat('A', 64)", "digest_is_sha256"), ("digest = 'a'", "digest_is_sha256"),
    ("due_at = '9999-01-01'", "due_before_year_9000"), ("ordering_key = ''", "ordering_key_fits_an_index"),
    ("expires_at = '9999-01-01'", "expires_before_year_9000"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "constraint"), CONTRADICTIONS)
def test_a_row_that_contradicts_itself_is_refused_by_a_named_constraint_with_triggers_off_too(
    conn, make, change, constraint
):
    make(state="processing")
    conn.execute(text("set local session_replication_role = replica"))
    code, sentence = refused(conn, f"update durable.deliveries set {change}")
    assert (code, f'violates check constraint "{constraint}"' in sentence) == ("23514", True)


@pytest.mark.parametrize(("change", "constraint"), MISSHAPEN)
def test_what_callers_write_has_its_shape(conn, make, change, constraint):
    make()
    with pytest.raises(DBAPIError) as error, conn.begin_nested():
        conn.execute(text(f"update durable.deliveries set {change}"))
    diagnosis = error.value.orig.diag
    assert (diagnosis.sqlstate, diagnosis.constraint_name) in {("23514", constraint), ("55000", None)}
    column, value = change.split(" = ")
    copied = [name for name in conn.scalars(text(COLUMNS)) if name not in ("id", column)]
    with pytest.raises(DBAPIError) as error, conn.begin_nested():
        conn.execute(
            text(
                f"insert into durable.deliveries (id, {column}, {', '.join(copied)})"
                f" select gen_random_uuid(), {value}, {', '.join(copied)} from durable.deliveries"
            )
        )
    diagnosis = error.value.orig.diag
    assert (diagnosis.sqlstate, diagnosis.constraint_name) == ("23514", constraint)


def test_no_rule_is_without_a_test(conn):
    sources = conn.scalars(
        text(
            "select prosrc from pg_proc"
            " where oid in ('durable.holds_together'::regproc, 'durable.check_delivery'::regproc)"
            " union all select conname from pg_constraint"
            " where conrelid = 'durable.deliveries'::regclass and contype = 'c' and conname <> 'holds_together'"
        )
    )
    named = {
        name for source in sources for name in re.findall(r"then '(\w+)'|^(\w+)$", source) for name in name if name
    }
    assert named == {constraint for _, constraint in CONTRADICTIONS + MISSHAPEN}


# --- the journal -----------------------------------------------------------------------------------

LINE = """
    insert into durable.journal (row_id, contract, move, fence) values (:id, 'delivery', 'note', 0)"""


def test_the_journal_takes_no_update(conn, make):
    conn.execute(text(LINE), {"id": make().id})
    code, sentence = refused(conn, "update durable.journal set reason = 'rewritten'")
    assert (code, "append only" in sentence) == ("55000", True)


def test_a_line_stays_while_its_row_lives_and_may_go_with_it(conn, make):
    alive, gone = make(), make(state="sent")
    for made in (alive, gone):
        conn.execute(text(LINE), {"id": made.id})
    assert "stays while its row lives" in refused(conn, "delete from durable.journal")[1]
    conn.execute(text("delete from durable.deliveries where id = :id"), {"id": gone.id})
    assert conn.execute(text("delete from durable.journal where row_id = :id"), {"id": gone.id}).rowcount == 1


# --- roles -----------------------------------------------------------------------------------------


@pytest.fixture
def runtime_role(engine):
    """A role that may use the tables but owns nothing, as an application should have."""
    role = "durable_runtime"
    with engine.begin() as tx:
        tx.execute(text(f"drop role if exists {role}"))
        tx.execute(text(f"create role {role} login password 'only for this test'"))
        tx.execute(text(f"grant usage on schema durable to {role}"))
        tx.execute(text(f"grant select, insert, update, delete on all tables in schema durable to {role}"))
        tx.execute(text(f"grant select, insert on effects to {role}"))
    yield role
    with engine.begin() as tx:
        tx.execute(text(f"drop owned by {role}"))
        tx.execute(text(f"drop role {role}"))


@pytest.mark.parametrize(
    "sql",
    [
        "create or replace function durable.durable_now() returns timestamptz language sql as 'select now()'",
        "alter function durable.durable_now() rename to durable_then",
        "drop function durable.durable_now()",
        "alter table durable.deliveries disable trigger guard_delivery",
        "drop trigger guard_journal on durable.journal",
        "create function durable.mine() returns int language sql as 'select 1'",
        "set session_replication_role = replica",
        "truncate durable.journal",
    ],
)
def test_a_role_that_does_not_own_the_schema_can_fake_neither_time_nor_guards(conn, runtime_role, sql):
    conn.execute(text(f"set local role {runtime_role}"))
    code, _ = refused(conn, sql)
    assert code == "42501"


def test_a_role_that_owns_nothing_can_do_all_the_work(engine, runtime_role, kind, make, row, clock):
    from sqlalchemy import create_engine

    from durable_core.claims.claim import Holder
    from durable_core.database.connections import Database
    from durable_core.deliveries import operate, sweep
    from durable_core.deliveries.attempt import Outcome, Worker, claim_one, perform

    with engine.begin() as tx:
        tx.execute(text(f"grant usage on all sequences in schema public to {runtime_role}"))
    theirs = create_engine(engine.url.set(username=runtime_role, password="only for this test"))
    try:
        database = Database(theirs)
        made = make(state="dead")
        with theirs.begin() as tx:
            operate.redrive(tx, made.id, by="dana", reason="fixed")
            assert claim_one(tx, kind, made.id, Holder()) is not None
        clock.advance(31)
        assert sweep.reap(database) == 1
        worker = Worker(database)
        done = perform(worker, kind, made.id)
        assert done.outcome is Outcome.SENT, done.error_message
        worker.heartbeat.stop()
        clock.advance(15 * 24 * 3600)
        assert sweep.prune(database) == 1
    finally:
        theirs.dispose()
