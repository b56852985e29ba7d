"""What the server is, what our role may do there, and who is in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from sqlalchemy import Connection

from durable_core.database import looking as bounds
from durable_core.database.connections import Database
from durable_core.database.poolers import behind_pooler, refuse_unsafe_pooler
from durable_core.database.statements import beside, current_schema
from durable_core.database.transactions import DATABASE_ERRORS, Row, run, said
from durable_core.deliveries.stuck import stuck
from durable_core.doctor.findings import Check, Finding, Reason, found, or_well, well
from durable_core.doctor.schema import drift, our_names, revision
from durable_core.errors import UnsafePooler

_statements = beside(__file__)

ROOM = "database"
LOOK_SECONDS = 3.0
"""No statement of a look runs longer, or waits longer for a lock."""

OLDEST_SERVER = 150_000
SKEW_SECONDS = 2.0
LONG_SECONDS = 60.0
MOST_NAMED = 10
LEAST_DEAD_ROWS = 50_000
"""Fewer dead versions of rows slow nothing down, whatever their share."""


def looking(database: Database) -> AbstractContextManager[Connection]:
    """One short transaction that cannot write, every statement of it bounded; also where the server says nothing."""
    return bounds.looking(database, statement_seconds=LOOK_SECONDS, answer_seconds=LOOK_SECONDS)


def inside(database: Database, look: Callable[[Connection], Iterable[Finding]]) -> Callable[[], list[Finding]]:
    """The look, in such a transaction of its own."""

    def _look() -> list[Finding]:
        with looking(database) as connection:
            return list(look(connection))

    return _look


def checks(
    database: Database, *, grace_seconds: float, assumed_grace: str = "", assumed_connection: str = ""
) -> list[Check]:
    """
    The checks of the server and the schema; those behind `revision` need a schema that this code knows.

    The two that are assumed say why the grace is a default, and why the connection is not the app's.
    """

    def of_statements(name: str, look: Callable[[Connection], Iterable[Finding]]) -> Check:
        return Check(name, ROOM, inside(database, look))

    return [
        Check("database", ROOM, lambda: reachable(database), gate=True),
        of_statements("server", server),
        of_statements("role", role),
        Check("revision", ROOM, inside(database, revision), gate=True),
        of_statements("drift", drift),
        of_statements("clock", clock),
        Check("pooler", ROOM, lambda: pooler(database, assumed_connection)),
        of_statements("transactions", transactions),
        of_statements("stuck", lambda connection: stuck_holders(connection, grace_seconds, assumed_grace)),
        of_statements("vacuum", vacuum),
    ]


def reachable(database: Database) -> Iterator[Finding]:
    """Whether anybody answers."""
    try:
        with looking(database):
            pass
    except DATABASE_ERRORS as error:
        yield found(
            "database", Reason.DATABASE_UNREACHABLE, f"the database does not answer: {said(error)}",
            "see that the server runs, and that address, user and password are right",
        )  # fmt: skip
    else:
        yield well("database", "it answers")


def server(connection: Connection) -> list[Finding]:
    """The release, and the settings under which our promises hold."""
    (row,) = run(connection, _statements.server)
    return or_well(_of_server(row), "server", f"PostgreSQL {row['version']}, a primary that writes")


def _of_server(row: Row) -> Iterator[Finding]:
    if row["number"] < OLDEST_SERVER:
        yield found(
            "server", Reason.SERVER_TOO_OLD, f"this is PostgreSQL {row['version']}", "move to PostgreSQL 15 or newer"
        )
    if row["recovering"]:
        yield found(
            "server", Reason.ON_A_REPLICA, "this server is a replica, or is recovering",
            "connect to the primary: add target_session_attrs=read-write to the address",
        )  # fmt: skip
    elif row["read_only"] == "on":
        yield found(
            "server", Reason.READ_ONLY, "transactions are read-only here by default",
            f"alter role {row['role']} reset default_transaction_read_only, or the same of the database",
        )  # fmt: skip
    if row["replication_role"] == "replica":
        yield found(
            "server", Reason.GUARDS_OFF, "session_replication_role is replica: no guard of ours fires",
            f"alter role {row['role']} reset session_replication_role, or the same of the database",
        )  # fmt: skip
    if row["synchronous_commit"] == "off":
        yield found(
            "server", Reason.SYNCHRONOUS_COMMIT_OFF,
            "synchronous_commit is off: a server that crashes may lose what it acknowledged",
            f"alter role {row['role']} set synchronous_commit = on, or the same of the database",
        )  # fmt: skip
    if row["fsync"] == "off":
        yield found(
            "server", Reason.FSYNC_OFF, "fsync is off: a machine that crashes may lose the whole database",
            "set fsync = on in postgresql.conf and reload",
        )  # fmt: skip
    if row["autovacuum"] == "off":
        yield found(
            "server", Reason.AUTOVACUUM_OFF, "autovacuum is off: claims become slower and slower",
            "set autovacuum = on in postgresql.conf and reload",
        )  # fmt: skip


def role(connection: Connection) -> Iterator[Finding]:
    """Whether the role has the rights it needs, and none that undo the guards."""
    schema, ours = current_schema(), our_names()
    (row,) = run(connection, _statements.role, schema=schema, tables=ours.tables)
    lacks = run(connection, _statements.lacks, schema=schema, tables=ours.tables, functions=ours.functions)
    if lacks:
        yield found(
            "role", Reason.ROLE_LACKS_RIGHTS,
            f"role {row['name']} lacks {', '.join(one['what'] for one in lacks)}",
            "; ".join(one["fix"] for one in lacks),
        )  # fmt: skip
    if row["superuser"]:
        yield found(
            "role", Reason.ROLE_SUPERUSER, f"role {row['name']} is a superuser: no guard holds it",
            "create role app login; let a role that owns the tables migrate, and the application use this one",
        )  # fmt: skip
    elif row["owns"]:
        yield found(
            "role", Reason.ROLE_OWNS_TABLES, f"role {row['name']} owns our tables: it could drop a guard",
            "let a role that owns the tables migrate, and the application use another",
        )  # fmt: skip
    elif not lacks:
        yield well("role", f"role {row['name']} may do what it needs, and no more")


def clock(connection: Connection) -> Iterator[Finding]:
    """How far the clock of this machine is from the database's, which decides."""
    asked_at = datetime.now(UTC)
    (row,) = run(connection, _statements.clock)
    answered_at = datetime.now(UTC)
    # The database's instant lies somewhere between the two of ours: what the way took is no skew.
    ahead = (row["now"] - answered_at).total_seconds()
    behind = (asked_at - row["now"]).total_seconds()
    skew = max(ahead, behind, 0.0)
    if skew > SKEW_SECONDS:
        side = "ahead of" if ahead > 0 else "behind"
        yield found(
            "clock", Reason.CLOCK_SKEW, f"the database's clock is {skew:.1f} s {side} that of this machine",
            "let both machines follow one time server: timedatectl set-ntp true",
        )  # fmt: skip
    else:
        yield well("clock", f"within {SKEW_SECONDS:g} s of the database's")


def pooler(database: Database, assumed: str = "") -> Iterator[Finding]:
    """Whether a pooler stands between, and mixes up prepared statements."""
    try:
        refuse_unsafe_pooler(database)
    except UnsafePooler as error:
        yield found(
            "pooler", Reason.POOLER_UNSAFE, str(error).split(": make", 1)[0],
            'create_engine(…, connect_args={"prepare_threshold": None})', assumed=assumed,
        )  # fmt: skip
    else:
        stands = behind_pooler(database)
        safe = "a pooler, and no prepared statement that it could mix up" if stands else "none"
        yield well("pooler", safe, assumed=assumed)


def transactions(connection: Connection) -> list[Finding]:
    """Who holds a transaction open so long that vacuum cannot clean, nor a migration get its lock."""
    sessions = run(connection, _statements.sessions, older_seconds=LONG_SECONDS, most=MOST_NAMED)
    prepared = run(connection, _statements.prepared, older_seconds=LONG_SECONDS, most=MOST_NAMED)
    hidden = sessions[0]["hidden"]
    unseen = f"; {hidden} of other roles hide theirs, which pg_read_all_stats would show" if hidden else ""
    return or_well(
        [*(_session(row) for row in sessions if row["pid"] is not None), *map(_prepared, prepared)],
        "transactions", f"none is older than {LONG_SECONDS:g} s{unseen}",
    )  # fmt: skip


def _session(row: Row) -> Finding:
    idle = str(row["state"]).startswith("idle in transaction")
    who = f"session {row['pid']} of {row['role']} ({row['program'] or 'no name'})"
    return found(
        "transactions", Reason.IDLE_IN_TRANSACTION if idle else Reason.LONG_TRANSACTION,
        f"{who} {'idles in' if idle else 'is in'} one transaction since {row['seconds']:.0f} s",
        f"mend that program, or end its session: select pg_terminate_backend({row['pid']})",
    )  # fmt: skip


def _prepared(row: Row) -> Finding:
    return found(
        "transactions", Reason.PREPARED_TRANSACTION,
        f"prepared transaction {row['gid']!r} of {row['role']} is undecided since {row['seconds']:.0f} s",
        f"decide it: commit prepared {row['quoted']}, or rollback prepared {row['quoted']}",
    )  # fmt: skip


def stuck_holders(connection: Connection, grace_seconds: float, assumed: str = "") -> list[Finding]:
    """Processes stopped inside their commit, with their row's lock."""
    rows = stuck(connection, grace_seconds=grace_seconds)[:MOST_NAMED]
    return [_stuck(row, assumed) for row in rows] or [
        well("stuck", "nobody keeps a row locked past its deadline and a lease", assumed=assumed)
    ]


def _stuck(row: Row, assumed: str) -> Finding:
    if row["commits"]:
        return found(
            "stuck", Reason.COMMIT_WAITS_FOR_STANDBY,
            f"the commit of {row['kind']} {row['id']} waits for a synchronous standby (session {row['pid']})",
            "bring the standby back, or take it out of synchronous_standby_names and reload", assumed=assumed,
        )  # fmt: skip
    return found(
        "stuck", Reason.STUCK_IN_COMMIT,
        f"session {row['pid']} keeps {row['kind']} {row['id']} locked past its deadline: its process hangs",
        f"select pg_terminate_backend({row['pid']}), or grant pg_signal_backend to our role", assumed=assumed,
    )  # fmt: skip


def vacuum(connection: Connection) -> list[Finding]:
    """Tables with more dead versions of rows than rows."""
    schema = current_schema()
    rows = run(
        connection, _statements.vacuum, schema=schema, tables=our_names().tables, least=LEAST_DEAD_ROWS
    )  # fmt: skip
    return or_well(
        (
            found(
                "vacuum", Reason.VACUUM_BEHIND,
                f"{row['table']} has {row['dead']} dead versions beside {row['live']} rows",
                f"end what holds vacuum back (see transactions), then: vacuum analyze {schema}.{row['table']}",
            )
            for row in rows
        ),
        "vacuum", "it keeps up",
    )  # fmt: skip
