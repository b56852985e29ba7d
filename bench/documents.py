"""
Saving documents: how many a second, beside the least that a compare-and-swap costs.

The least is pgbench with a bare `UPDATE … WHERE version`: no revision, no guard, no Python. Between the two stands our
own statement, run by pgbench.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import create_engine, make_url

from bench import pgbench
from bench.arithmetic import median, paired_ratio
from bench.measure import PACKAGE, Reading, Server, driver_url
from bench.tables import markdown, number
from bench.writers import COLLECTION, KEEP, Writers, writers
from durable_core.arguments import canonical
from durable_core.database.migrate import migrate
from durable_core.database.statements import Statements
from durable_core.testing import create_database, drop_database

DATABASE = "bench_documents"
CONTENT_BYTES = 2_000
SAVES, ROUNDS = 1_000, 3
SPREAD = 1_000
PGBENCH_TIMES = 2
"""pgbench makes more of them: it is faster, and would be done before there is much to measure."""

BARE, STATEMENT, OURS = "bare `UPDATE … WHERE version`, pgbench", "our statement alone, pgbench", "`Documents.save`"
CANDIDATES = (BARE, STATEMENT, OURS)

TABLES = """
create table bare (id uuid primary key, content jsonb not null, version bigint not null) with (fillfactor = 70)
"""
FILL_BARE = """
insert into bare (id, content, version)
select cast(lpad(to_hex(n), 32, '0') as uuid), cast(%(content)s as jsonb), 0
from generate_series(cast(%(first)s as bigint), %(last)s) n
"""
FILL_DOCUMENTS = """
insert into durable.documents (id, collection, owner, content, version, saved_by, source, created_at, saved_at)
select cast(lpad(to_hex(n), 32, '0') as uuid), %(collection)s, 'bench', cast(%(content)s as jsonb), 0, 'bench', 'user',
    now(), now()
from generate_series(cast(%(first)s as bigint), %(last)s) n
"""
COUNT = """
select cast(sum(version) as bigint) from {table}
where id between cast(lpad(to_hex(cast(%(first)s as bigint)), 32, '0') as uuid)
    and cast(lpad(to_hex(cast(%(last)s as bigint)), 32, '0') as uuid)
"""

ID = "cast(lpad(to_hex(cast(:document as bigint)), 32, '0') as uuid)"
CONSTANTS = {
    "cast(:id as uuid)": ID,
    ":owner": "null",
    ":collection": f"'{COLLECTION}'",
    ":keep": str(KEEP),
    ":by": "'bench'",
    ":source": "'user'",
    ":save_id": "gen_random_uuid()",
    ":why": "null",
    ":expected": "cast(:expected as bigint)",
}
UPDATE = f"""
update bare set content = cast(:content as jsonb), version = version + 1
where id = {ID} and version = cast(:expected as bigint)"""
# Each client has documents of its own, and saves them in turn.
OWN = r"""
\set n :n + 1
\set document :first + :client_id * :width + mod(:n, :width)
\set expected :n / :width
"""
# All have the one. A bare update that finds another version does not say which, so it is read before each.
SHARED_BARE = r"""
\set document :first
select version as expected from bare where id = {id} \gset
"""
# Our statement says which version there was: the one it was made from, or the one that it lost against.
SHARED_NEXT = r"""
\set expected case when :was = :expected then :expected + 1 else :was end
"""


@dataclass(frozen=True)
class Workload:
    """Who saves what: so many writers, each its own share of the documents, or all of them the one."""

    name: str
    writers: int
    documents: int

    @property
    def shared(self) -> bool:
        return self.documents < self.writers

    @property
    def width(self) -> int:
        """Documents of one writer."""
        return max(1, self.documents // self.writers)


WORKLOADS = (
    Workload("one document, 1 writer", 1, 1),
    Workload("one document, 4 writers", 4, 1),
    Workload(f"{SPREAD:,} documents, 4 writers", 4, SPREAD),
)


@dataclass(frozen=True)
class Measured:
    """One candidate's turn at one workload, each figure per save where the name says nothing else."""

    workload: str
    candidate: str
    round: int
    per_second: float
    conflicts: float
    statements: float
    transactions: float
    wal_bytes: float

    def as_line(self) -> dict[str, Any]:
        return {"record": "documents", **asdict(self)}


def content() -> dict[str, Any]:
    """Prose of two kilobytes: words that come again, as in what people write."""
    drawn = random.Random(8)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randint(2, 9))) for _ in range(300)]
    prose = " ".join(drawn.choices(words, k=CONTENT_BYTES))
    made = {"title": "A page", "edit": 0, "text": ""}
    return made | {"text": prose[: CONTENT_BYTES - len(canonical(made))]}


def run(
    server_url: str, folder: Path, *, saves: int = SAVES, rounds: int = ROUNDS, say: Callable[[str], None] = print
) -> list[Measured]:  # fmt: skip
    """All of it, on a database of its own: each workload by each candidate, the other way every second round."""
    made = create_database(server_url, DATABASE)
    url = make_url(made).render_as_string(hide_password=False)
    engine = create_engine(url)
    migrate(engine)
    engine.dispose()
    with psycopg.connect(driver_url(url), autocommit=True) as connection:
        connection.execute(TABLES)
    server = Server(server_url)
    # Only once: the documents of each turn are rows on new pages, so no whole pages are in its WAL.
    server.checkpoint()
    found = []
    try:
        with writers(max(one.writers for one in WORKLOADS), url, content()) as ready:
            bench = _Bench(server, url, folder, ready)
            for number_of_round in range(rounds):
                for workload in WORKLOADS:
                    for candidate in CANDIDATES[:: 1 if number_of_round % 2 == 0 else -1]:
                        found.append(one := bench.turn(workload, candidate, number_of_round, saves))
                        say(f"round {number_of_round}: {workload.name}: {candidate}: {one.per_second:.0f} saves/s")
    finally:
        server.close()
        drop_database(server_url, DATABASE)
    return found


class _Bench:
    """A turn of one candidate, on documents of its own, and what Postgres counted of it."""

    def __init__(self, server: Server, url: str, folder: Path, ready: Writers) -> None:
        self._server, self._url, self._folder, self._writers = server, url, folder, ready
        self._first = 1

    def turn(self, workload: Workload, candidate: str, round_number: int, saves: int) -> Measured:
        """So many attempts together. Raises AssertionError where the rows tell of other saves than their writers."""
        first, last = self._first, self._first + workload.documents - 1
        self._first = last + 1
        table = "bare" if candidate == BARE else "durable.documents"
        with psycopg.connect(driver_url(self._url), autocommit=True) as connection:
            connection.execute(
                FILL_BARE if candidate == BARE else FILL_DOCUMENTS,
                {"first": first, "last": last, "content": canonical(content()), "collection": COLLECTION},
            )
            connection.execute("vacuum analyze bare, durable.documents, durable.document_revisions")
        self._server.wait_until_left(DATABASE)
        each = (saves if candidate == OURS else saves * PGBENCH_TIMES) // workload.writers
        if candidate == OURS:
            seconds, told, before, after, transactions = self._by_the_package(workload, first, each)
        else:
            told = None
            seconds, before, after, transactions = self._by_pgbench(workload, candidate, first, each)
        with psycopg.connect(driver_url(self._url), autocommit=True) as connection:
            row = connection.execute(COUNT.format(table=table).encode(), {"first": first, "last": last}).fetchone()
        self._server.wait_until_left(DATABASE)
        assert row is not None
        (done,) = row
        assert told in (None, done), f"{candidate}: {done} saves in the rows, {told} by the writers"
        attempts = each * workload.writers
        assert done == attempts or (workload.shared and 0 < done < attempts), f"{candidate}: {done} of {attempts} saved"
        return Measured(
            workload.name,
            candidate,
            round_number,
            per_second=done / seconds,
            conflicts=(attempts - done) / done,
            statements=(after.statements - before.statements) / done,
            transactions=transactions / done,
            wal_bytes=(after.wal - before.wal) / done,
        )

    def _by_the_package(self, workload: Workload, first: int, each: int) -> tuple[float, int, Reading, Reading, int]:
        """Seconds, saves as the writers count them, what was counted before and after, and transactions."""
        step = 0 if workload.shared else workload.width
        self._writers.warm(workload.writers)
        before, transactions = self._read()
        ends = self._writers.save([(first + nth * step, workload.width, each) for nth in range(workload.writers)])
        # Before they leave: what is counted of them are their saves.
        after = self._server.read(DATABASE, [], None)
        self._writers.leave(workload.writers)
        self._server.wait_until_left(DATABASE)
        seconds = max(end.ended for end in ends) - min(end.began for end in ends)
        saved = sum(end.saves for end in ends)
        return seconds, saved, before, after, self._server.transactions(DATABASE) - transactions

    def _by_pgbench(
        self, workload: Workload, candidate: str, first: int, each: int
    ) -> tuple[float, Reading, Reading, int]:
        """The same without the saves: pgbench does not know which of its statements changed a row."""
        path = self._folder / "save.sql"
        path.write_text(script(workload, candidate))
        variables = {
            "n": -1, "first": first, "width": workload.width, "expected": 0, "content": canonical(content()),
        }  # fmt: skip
        before, transactions = self._read()
        rate = pgbench.run(make_url(self._url), path, clients=workload.writers, each=each, variables=variables)
        self._server.wait_until_left(DATABASE)
        after, then = self._read()
        return workload.writers * each / rate, before, after, then - transactions

    def _read(self) -> tuple[Reading, int]:
        return self._server.read(DATABASE, [], None), self._server.transactions(DATABASE)


def script(workload: Workload, candidate: str) -> str:
    """What each client of pgbench runs again and again."""
    ours = pgbench.filled(Statements(PACKAGE / "documents" / "save.sql").save, CONSTANTS)
    if not workload.shared:
        return f"{OWN}{UPDATE if candidate == BARE else ours};\n"
    if candidate == BARE:
        return f"{SHARED_BARE.format(id=ID)}{UPDATE};\n"
    return f"\\set document :first\n{ours} \\gset\n{SHARED_NEXT}"


COLUMNS = (
    ("saves a second", "per_second", 0),
    ("conflicts", "conflicts", 2),
    ("statements", "statements", 2),
    ("transactions", "transactions", 2),
    ("WAL bytes", "wal_bytes", 0),
)


def of(found: Iterable[Measured], workload: str, candidate: str) -> list[Measured]:
    """In the order of the rounds."""
    return sorted(
        (one for one in found if (one.workload, one.candidate) == (workload, candidate)), key=lambda one: one.round
    )


def ratio(found: Sequence[Measured], workload: str, candidate: str) -> float | None:
    """Saves a second against the bare update, round by round."""
    mine, base = (of(found, workload, name) for name in (candidate, BARE))
    return paired_ratio([one.per_second for one in mine], [one.per_second for one in base])


def table(found: Sequence[Measured]) -> str:
    """Medians over the rounds, in Markdown."""
    head = ["saving 2 kB", "by", COLUMNS[0][0], "of the bare update", *(name for name, _, _ in COLUMNS[1:])]
    rows = []
    for workload in dict.fromkeys(one.workload for one in found):
        for candidate in CANDIDATES:
            turns = of(found, workload, candidate)
            cells = [number(median(getattr(one, field) for one in turns), digits) for _, field, digits in COLUMNS]
            rows.append([workload, candidate, cells[0], number(ratio(found, workload, candidate), 2), *cells[1:]])
    return markdown([head, *rows])
