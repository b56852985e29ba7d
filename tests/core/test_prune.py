"""What ended long ago of plans and operations goes as deliveries do: batch by batch, past what has to stay."""

import pytest
from sqlalchemy import create_engine, text

from durable_core.claims.prune import Prune
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.operations import sweep as operations
from durable_core.plans import sweep as plans
from tests.core.test_query_plans import OPERATIONS, PLANS

CONTRACTS = {"plans": (plans, PLANS, "executed"), "operations": (operations, OPERATIONS, "succeeded")}
ROWS = 40


@pytest.fixture(params=CONTRACTS)
def old(request, engine):
    """The sweeps of a contract, its table, and ids of rows that ended a day ago, the oldest first."""
    contract, insert, state = CONTRACTS[request.param]
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text(insert), {"state": state, "rows": ROWS, "first": 0, "owned": False})
        ended = "update durable.{} set finished_at = created_at - interval '1 day'"
        tx.execute(text(ended.format(request.param)))
        lines = "insert into durable.journal (row_id, contract, move, fence) select id, 'x', 'x', 0 from durable.{}"
        tx.execute(text(lines.format(request.param)))
        ids = [str(one) for one in tx.scalars(text(f"select id from durable.{request.param} order by finished_at"))]
    return contract, request.param, ids


def left(engine, table):
    with engine.connect() as tx:
        rows = {str(one) for one in tx.scalars(text(f"select id from durable.{table}"))}
        lines = {str(one) for one in tx.scalars(text("select row_id from durable.journal"))}
    assert rows == lines, "history goes with its row, and only with it"
    return rows


def test_rows_that_rows_of_the_hosts_still_need_stay_and_keep_no_other(engine, database, old, monkeypatch):
    contract, table, ids = old
    needed_ones = {ids[0], ids[1], ids[7]}
    monkeypatch.setattr(contract, "PRUNE_LIMIT", 2)
    with engine.begin() as tx:
        tx.execute(text(f"create table public.notes (row_id uuid references durable.{table} (id))"))
        tx.execute(text("set local session_replication_role = replica"))
        for needed in needed_ones:  # more than a batch of them, of one instant
            tx.execute(text("insert into public.notes values (:id)"), {"id": needed})
            tx.execute(
                text(f"update durable.{table} set finished_at = now() - interval '9 days' where id = :id"),
                {"id": needed},
            )
    try:
        assert contract.prune_all(database, retention_seconds=3600.0, seconds=20) == ROWS - 3
        assert left(engine, table) == needed_ones
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop table public.notes"))
    assert contract.prune_all(database, retention_seconds=3600.0) == 3


def test_a_batch_too_long_for_the_hosts_statement_timeout_is_pruned_in_smaller_ones(engine, old, monkeypatch):
    contract, table, _ = old
    monkeypatch.setattr(contract, "PRUNE_LIMIT", ROWS)
    with engine.begin() as tx:
        tx.execute(text(
            "create function dawdle() returns trigger language plpgsql as $$ begin perform pg_sleep(0.06); return old;"
            f" end $$; create trigger dawdle before delete on durable.{table} for each row execute function dawdle()"
        ))  # fmt: skip
    own = create_engine(engine.url.update_query_dict({"options": "-c statement_timeout=2s"}))
    try:
        assert contract.prune_all(Database(own), retention_seconds=3600.0, seconds=60) == ROWS
        assert left(engine, table) == set()
    finally:
        own.dispose()
        with engine.begin() as tx:
            tx.execute(text("drop function dawdle() cascade"))


def test_each_batch_goes_on_where_the_one_before_it_ended(engine, database, old, monkeypatch):
    """The dead versions of those before are not read again."""
    contract, _, ids = old
    monkeypatch.setattr(contract, "PRUNE_LIMIT", 10)
    asked, found = [], contract._OLD.batch

    def batch(self, *told):
        asked.append(told[-1].since)
        return found(*told)

    with engine.connect() as tx:
        told = {"retention_seconds": 3600.0, "limit": ROWS, "without": []}
        rows = run(tx, contract._statements.old, since=None, **told)
        assert [row["id"] for row in rows] == ids
        later = run(tx, contract._statements.old, since=rows[10]["finished_at"], **told)
        assert [row["id"] for row in later] == ids[10:]
    monkeypatch.setattr(Prune, "batch", batch)
    assert contract.prune_all(database, retention_seconds=3600.0) == ROWS
    ends = [rows[n]["finished_at"] for n in range(9, ROWS, 10)]
    assert asked == [None, *ends]
