"""A PgBouncer of a test's own in transaction mode, and what such a pool keeps of its clients: nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, create_engine, make_url, text

from durable_core.local.server import account_for_servers, free_port
from tests.celery.nodes import wait_until

FOLLOWED = ("application_name", "client_encoding", "DateStyle", "standard_conforming_strings", "TimeZone")
"""What PgBouncer itself keeps apart for each client."""

KEPT = f"""
    select 'setting ' || name || '=' || setting from pg_settings
    where source = 'session' and name not in {FOLLOWED}
    union all select 'prepared statement ' || name from pg_prepared_statements
    union all select 'advisory lock ' || objid from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()
    union all select 'channel ' || channel from pg_listening_channels() as channel"""


def find_pgbouncer() -> str | None:
    """The program, where Debian puts it included; None on a machine without one."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")


class Pooler:
    """
    A PgBouncer before one Postgres: all its databases, one user, so many server connections for each database.

    It refuses startup `options`, as it does by default.
    """

    def __init__(self, server: str | URL, pool_size: int) -> None:
        direct = make_url(server)
        program, self._port = find_pgbouncer(), free_port()
        assert program is not None
        self.pool_size = pool_size
        self.url = direct.set(port=self._port)
        self._folder = Path(tempfile.mkdtemp(prefix="durable-pooler-"))
        account = account_for_servers()  # it refuses to be root, as Postgres does
        users, configuration = self._folder / "users", self._folder / "pgbouncer.ini"
        users.write_text(f'"{direct.username}" "{direct.password}"\n')
        configuration.write_text(
            f"[databases]\n* = host={direct.host} port={direct.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self._port}\nunix_socket_dir =\n"
            f"auth_type = scram-sha-256\nauth_file = {users}\nauth_user = {direct.username}\n"
            # Whoever is no user of the file is asked for in the database itself.
            f"auth_query = SELECT usename, passwd FROM pg_shadow WHERE usename=$1\n"
            f"admin_users = {direct.username}\n"
            f"pool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 500\n"
        )
        for path in (self._folder, users, configuration):
            path.chmod(0o700 if path is self._folder else 0o600)
            if account is not None:
                os.chown(path, account.uid, account.gid)
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, str(configuration)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd="/",
                start_new_session=True, user=account and account.uid, group=account and account.gid,
                extra_groups=[] if account else None,
            )  # fmt: skip
        try:
            wait_until(self._answers, "pgbouncer answers")
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            self.show("version")
        except psycopg.OperationalError:
            return False
        return True

    def show(self, what: str) -> list[dict[str, Any]]:
        """What its own console says: `show("pools")`."""
        with psycopg.connect(
            host="127.0.0.1", port=self._port, user=self.url.username, password=self.url.password, dbname="pgbouncer",
            autocommit=True, connect_timeout=5, row_factory=psycopg.rows.dict_row,
            # Its console speaks the simple protocol alone.
            cursor_factory=psycopg.ClientCursor,
        ) as console:  # fmt: skip
            return console.execute(f"show {what}").fetchall()

    def kept(self, database: str) -> tuple[int, list[str]]:
        """How many server connections to this database it has, and what sessions left behind in them."""
        engine = create_engine(
            self.url.set(database=database), connect_args={"prepare_threshold": None}, pool_size=self.pool_size
        )
        pids, found = set(), []
        # As many transactions at once as it has connections: so each is looked into.
        with ExitStack() as held:
            for _ in range(self.pool_size):
                connection = held.enter_context(engine.connect())
                pids.add(connection.scalar(text("select pg_backend_pid()")))
                found.extend(connection.scalars(text(KEPT)))
        engine.dispose()
        return len(pids), found

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)


# --- `pytest -p tests.faults.pooler` runs tests that know nothing of a pooler through one -----------------

DIRECT = {
    "their host sets something in the startup options, which PgBouncer refuses": (
        "tests/core/test_claim.py::test_claims_run_at_read_committed_whatever_the_host_set",
        "tests/core/test_step_session.py::test_user_code_waits_for_locks_as_its_host_decided_and_we_for_5_seconds",
        "tests/core/test_machine_room.py::test_a_statement_of_ours_that_the_hosts_time_out_ends",
        "tests/core/test_machine_room.py::test_a_time_out_of_the_host_inside_the_session",
        "tests/core/test_machine_room.py::test_a_session_that_its_host_ended_for_idleness",
        "tests/core/test_sweeps.py::test_a_long_overdue_prune_commits_batch_by_batch_survives_a_kill",
        "tests/core/test_sweeps.py::test_a_batch_too_long_for_the_hosts_statement_timeout",
        "tests/core/test_prune.py::test_a_batch_too_long_for_the_hosts_statement_timeout",
        "tests/core/test_documents_over_http.py::test_a_document_that_is_being_changed_is_waited_for_no_longer",
    ),
    "they know a session by the process number that its client was given, which is the pooler's": (
        "tests/core/test_stuck.py::test_a_holder_past_deadline_and_grace_is_ended",
        "tests/core/test_stuck.py::test_the_reap_sweep_does_it_with_the_lease_as_the_grace",
        "tests/core/test_stuck.py::test_a_holder_within_its_deadline_is_left_alone",
        "tests/core/test_stuck.py::test_a_role_that_may_not_end_it",
        "tests/core/test_stuck.py::test_a_holder_that_is_frozen_while_the_server_sends_to_it",
        "tests/races/test_key_orders.py::test_two_callers_of_one_key_in_every_order",
        "tests/races/test_settle_orders.py::test_whatever_the_order_one_owner_settles",
        "tests/races/test_line_orders.py::test_of_a_line_one_at_a_time_and_the_first_that_is_committed",
        "tests/races/test_replace_orders.py::test_a_claim_carries_out_what_its_row_says",
        "tests/races/test_operation_orders.py::test_of_two_acts_at_once_each_is_whole_or_nothing",
        "tests/races/test_operation_orders.py::test_of_two_starts_at_once_one_comes_to_be",
        "tests/races/test_plan_orders.py::test_of_two_acts_at_once_each_is_whole_or_nothing",
        "tests/races/test_plan_races.py::test_whatever_the_order_of_a_step_",
        "tests/races/test_case_races.py::test_in_every_order_",
        "tests/races/test_document_races.py::test_whoever_comes_second_is_judged_by_what_the_first_left",
        "tests/races/test_small_races.py::test_of_two_pauses_at_once",
        "tests/races/test_small_races.py::test_of_two_resumes_at_once",
        "tests/core/test_round_trips.py::test_connections_that_died_while_they_rested",
        "tests/core/test_connections.py::",
    ),
    "it sets a lock timeout for its own session": (
        "tests/races/test_claims.py::test_eight_connections_claim_fifty_rows_each_exactly_once",
    ),
    "they mix up prepared statements themselves": ("tests/core/test_prepared_statements.py::",),
    "it waits until every other session has ended, and the pooler keeps its own": (
        "tests/core/test_sweeps.py::test_a_long_transaction_elsewhere_does_not_make_each_batch_of_prune_read",
        "tests/core/test_testing_kit.py::test_a_database_is_cloned_with_its_rows",
        "tests/core/test_plans.py::test_a_time_limit_fails_the_step_and_leaves_no_connection_behind",
    ),
}
"""What is left out, and why; each is the beginning of a name."""


def pytest_configure() -> None:
    """The one setting that an application gives its engine behind PgBouncer, for every connection of this process."""
    for kind in (psycopg.Connection, psycopg.AsyncConnection):
        kind.connect.__func__.__kwdefaults__["prepare_threshold"] = None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed = tuple(name for names in DIRECT.values() for name in names)
    collected = {item.nodeid.split("::")[0] for item in items}
    for name in listed:
        if name.split("::")[0] in collected and not any(item.nodeid.startswith(name) for item in items):
            raise pytest.UsageError(f"{name} is listed as one that needs direct sessions, and there is none like it.")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid.startswith(listed)])
    items[:] = [item for item in items if not item.nodeid.startswith(listed)]
