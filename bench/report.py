"""One table of a run, and beside each limit what this run has to say to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bench.arithmetic import median, paired_ratio
from bench.round_trips import Counted
from bench.rounds import BASE, MEMORY_BASE, OURS, Turn
from bench.tables import markdown, number, verdict

CPU_LIMIT, TRIPS_LIMIT, ENQUEUE_LIMIT, IDLE_LIMIT = 1.7, 3, 1, 3.0

COLUMNS: tuple[tuple[str, Callable[[Turn], float | None], int], ...] = (
    ("worker CPU ms", lambda turn: turn.worker_cpu_ms, 2),
    ("Postgres CPU ms", lambda turn: turn.postgres_cpu_ms, 2),
    ("CPU ms", lambda turn: turn.cpu_ms, 2),
    ("per second", lambda turn: turn.per_second, 0),
    ("statements", lambda turn: turn.statements, 2),
    ("transactions", lambda turn: turn.transactions, 2),
    ("WAL bytes", lambda turn: turn.wal_bytes, 0),
    ("p50 ms", lambda turn: turn.p50_ms, 1),
    ("p99 ms", lambda turn: turn.p99_ms, 1),
    ("idle statements/s", lambda turn: turn.idle_statements_per_second, 2),
    ("child USS MB", lambda turn: turn.child_uss and turn.child_uss / 1e6, 1),
)


def of(turns: Sequence[Turn], name: str) -> list[Turn]:
    """One candidate's turns in the order of the rounds."""
    return sorted((turn for turn in turns if turn.candidate == name), key=lambda turn: turn.round)


def ratio(turns: Sequence[Turn], name: str) -> float | None:
    """CPU per delivery against plain Celery with one INSERT, round by round."""
    mine, base = ([turn for turn in of(turns, one) if turn.cpu_ms is not None] for one in (name, BASE))
    if [turn.round for turn in mine] != [turn.round for turn in base]:
        return None
    return paired_ratio([turn.cpu_ms for turn in mine], [turn.cpu_ms for turn in base])


def table(turns: Sequence[Turn]) -> str:
    """Medians over the rounds, per delivery, in Markdown."""
    names = list(dict.fromkeys(turn.candidate for turn in turns))
    head = ["candidate", *(name for name, _, _ in COLUMNS[:3]), f"of {BASE!r}", *(name for name, _, _ in COLUMNS[3:])]
    rows = []
    for name in names:
        cells = [number(median(read(turn) for turn in of(turns, name)), digits) for _, read, digits in COLUMNS]
        rows.append([name, *cells[:3], number(ratio(turns, name), 2), *cells[3:]])
    return markdown([head, *rows])


def verdicts(turns: Sequence[Turn], counted: Sequence[Counted]) -> list[str]:
    """Each limit beside what this run measured; a limit that was not looked at is left out."""
    said = []
    cpu = ratio(turns, OURS)
    if cpu is not None:
        said.append(verdict(f"CPU of {OURS} / CPU of {BASE}", cpu, CPU_LIMIT, 2))
    idle = median(turn.idle_statements_per_second for turn in of(turns, OURS))
    if idle is not None:
        said.append(verdict("idle statements/s", idle, IDLE_LIMIT, 2))
    trips = {one.act: len(one.trips) for one in counted}
    for act, count in trips.items():
        if act.startswith("claim to commit, handler: no database"):
            said.append(verdict(f"round trips, {act}", count, TRIPS_LIMIT, 0))
        if act.startswith("the same with an enqueue"):
            more = count - trips["the caller's transaction: one INSERT"]
            said.append(verdict(f"round trips more, {act}", more, ENQUEUE_LIMIT, 0))
    mine, base = (median(turn.child_uss for turn in of(turns, name)) for name in (OURS, MEMORY_BASE.name))
    if mine and base:
        said.append(f"{'':7} USS of a child: {(mine - base) / 1e6:+.1f} MB against {MEMORY_BASE.name}")
    return said


def idle_by(turns: Iterable[Turn]) -> str:
    """Whose statements those of the idle time are."""
    rows = [["candidate", "statement", "per second"]]
    for turn in turns:
        by = sorted(turn.idle_by.items(), key=lambda item: -item[1])
        rows += [[turn.candidate, name, f"{rate:.2f}"] for name, rate in by]
    return markdown(rows)


def round_trips(counted: Iterable[Counted]) -> str:
    rows = [["act", "round trips", "one by one"]]
    for one in counted:
        shown = "; ".join(" + ".join(trip) or "(no statement)" for trip in one.trips)
        rows.append([one.act, str(len(one.trips)), shown])
    return markdown(rows)
