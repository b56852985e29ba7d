"""
The floor: pgbench runs our own claim and commit, statement by statement as the worker sends them, and nothing else.

Three round trips, as the worker's: the claim; BEGIN, bound and lock; settle and COMMIT. Only what a script of pgbench
cannot do is other: a row's id is made of a counter, and the transaction's id is asked where it is checked.
"""

from __future__ import annotations

import resource
from pathlib import Path

import psycopg
from sqlalchemy import create_engine, make_url

from bench import pgbench
from bench.measure import PACKAGE, Server, driver_url
from bench.rounds import Turn
from bench.stack import CHILDREN
from durable_core.database.migrate import migrate
from durable_core.database.statements import Statements
from durable_core.testing import create_database, drop_database

NAME = "the SQL alone, pgbench"
ROWS_OF_A_CLIENT = 1_000_000

ID = f"lpad(to_hex(cast(:client_id as bigint) * {ROWS_OF_A_CLIENT} + cast(:n as bigint)), 32, '0')"

CONSTANTS = {
    ":kinds": "'{bench.note}'",
    ":max_attempts": "5",
    ":max_interruptions": "20",
    ":owner_pid": "1",
    ":owner_host": "'bench'",
    ":owner": "'bench'",
    ":timeout_seconds": "300",
    ":lease_seconds": "30",
    ":fence": "1",
    ":lock_timeout": "'5s'",
    ":interrupted_as": "array['CLAIM_EXPIRED', 'CHILD_LOST']",
    ":result": "'null'",
    "cast(:id as uuid)": f"cast({ID} as uuid)",
    "cast(:id as text)": ID,
}

INSERT = f"""
insert into durable.deliveries
    (id, kind, queue, arguments, digest, priority, max_attempts, max_interruptions, due_at, hint_at, created_at)
select cast(lpad(to_hex(client * {ROWS_OF_A_CLIENT} + n), 32, '0') as uuid), 'bench.note', 'durable',
    jsonb_build_object('number', n), repeat('0', 64), 5, 5, 20, now(), now(), now()
from generate_series(0, %(clients)s - 1) client, generate_series(1, %(rows)s) n
"""


def script() -> str:
    """What each client of pgbench runs again and again."""
    named = Statements(PACKAGE / "deliveries" / "attempt.sql")
    return "\n".join(
        [
            r"\set n :n + 1",
            f"{pgbench.filled(named.take, CONSTANTS)};",
            f"{pgbench.filled(named.settle_alone, CONSTANTS)};",
            "",
        ]
    )


def run(server: Server, folder: Path, round_number: int, jobs: int) -> Turn:
    """As many claims and commits as the candidates drain, by as many clients as they have children."""
    each = jobs // CHILDREN
    url = create_database(server.url, "bench_sql").render_as_string(hide_password=False)
    engine = create_engine(url)
    migrate(engine)
    engine.dispose()
    with psycopg.connect(driver_url(url), autocommit=True) as connection:
        connection.execute(INSERT, {"clients": CHILDREN, "rows": each})
    server.settle(url)
    path = folder / "claim-and-commit.sql"
    path.write_text(script())
    before, client_before = server.read("bench_sql", [], None), _seconds_of_ended_children()
    pgbench.run(make_url(url), path, clients=CHILDREN, each=each, variables={"n": 0})
    after, client_after = server.read("bench_sql", [], None), _seconds_of_ended_children()
    with psycopg.connect(driver_url(url)) as connection:
        row = connection.execute("select count(*) from durable.deliveries where state = 'sent'").fetchone()
    assert row == (each * CHILDREN,), f"pgbench settled {row} of {each * CHILDREN} rows"
    drop_database(server.url, "bench_sql")
    settled = each * CHILDREN
    return Turn(
        NAME,
        round_number,
        worker_cpu_ms=1e3 * (client_after - client_before) / settled,
        postgres_cpu_ms=1e3 * (after.postgres_seconds - before.postgres_seconds) / settled,
        per_second=settled / (after.at - before.at),
        statements=(after.statements - before.statements) / settled,
        wal_bytes=(after.wal - before.wal) / settled,
    )


def _seconds_of_ended_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
