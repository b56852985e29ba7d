"""`python -m bench`: all candidates in turn, round after round, on servers of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEFAULT = {"jobs": 1000, "rounds": 3, "steady": 6.0, "idle": 20.0, "entries": 100_000, "saves": 1000}
QUICK = {"jobs": 200, "rounds": 1, "steady": 2.0, "idle": 0.0, "entries": 10_000, "saves": 200}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description="What one delivery costs beside plain Celery: CPU, statements, WAL, time to start, memory.",
    )
    made.add_argument("--quick", action="store_true", help="one small round without the idle time; about two minutes")
    made.add_argument("--jobs", type=int, help=f"deliveries measured per candidate and round ({DEFAULT['jobs']})")
    made.add_argument("--rounds", type=int, help=f"rounds, every second one in reverse order ({DEFAULT['rounds']})")
    made.add_argument("--steady", type=float, help=f"seconds at 50 a second ({DEFAULT['steady']:g}; 0 leaves it out)")
    made.add_argument("--idle", type=float, help=f"seconds at rest, once ({DEFAULT['idle']:g}; 0 leaves it out)")
    made.add_argument("--entries", type=int, help=f"of the journal of a long case ({DEFAULT['entries']}; 0: no cases)")
    made.add_argument("--saves", type=int, help=f"of documents, per turn ({DEFAULT['saves']}; 0: no documents)")
    made.add_argument("--cases", action="store_true", help="only what executing a step of a case costs")
    made.add_argument("--documents", action="store_true", help="only what saving a document costs")
    made.add_argument("--json", type=Path, metavar="FILE", help="also append every measure to FILE, a JSON line each")
    return made


def sizes_of(asked: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, and the default or quick size of the rest."""
    base = QUICK if asked.quick else DEFAULT
    return {name: value if (given := getattr(asked, name)) is None else given for name, value in base.items()}


def main() -> int:
    sizes = sizes_of(parsed := parser().parse_args())
    with tempfile.TemporaryDirectory(prefix="durable-bench-") as temporary:
        run = _cases if parsed.cases else _documents if parsed.documents else _run
        return run(Path(temporary), sizes, parsed.json)


def _cases(folder: Path, asked: dict[str, Any], lines: Path | None) -> int:
    from bench import stack

    with stack.servers(folder / "servers") as addresses:
        stack.environment(addresses, folder / "marks")
        from bench import cases

        found = cases.run(addresses.database_url, entries=asked["entries"])
    _append(lines, found)
    print(cases.table(found), end="\n\n")
    print("\n".join(cases.verdicts(found)))
    return 0


def _documents(folder: Path, asked: dict[str, Any], lines: Path | None) -> int:
    from bench import stack

    with stack.servers(folder / "servers") as addresses:
        stack.environment(addresses, folder / "marks")
        from bench import documents

        load = os.getloadavg()[0]
        found = documents.run(addresses.database_url, folder, saves=asked["saves"], rounds=asked["rounds"], say=_say)
    _append(lines, found)
    print(documents.table(found), end="\n\n")
    print(_loads(load))
    return 0


def _loads(began: float) -> str:
    return f"load average when it began: {began:.2f}, {os.getloadavg()[0]:.2f} now; of a busy machine only ratios count"


def _append(lines: Path | None, found: Iterable[Any]) -> None:
    if lines is not None:
        with lines.open("a") as out:
            for one in found:
                out.write(json.dumps(one.as_line()) + "\n")


def _run(folder: Path, asked: dict[str, Any], lines: Path | None) -> int:
    from bench import stack

    with stack.servers(folder / "servers") as addresses:
        stack.environment(addresses, folder / "marks")
        # Only now: the candidates read their addresses when they are imported.
        from bench import cases, documents, measure, report, round_trips, rounds, sql

        sizes = rounds.Sizes(
            jobs=asked["jobs"], warm_up=max(20, asked["jobs"] // 10), rounds=asked["rounds"],
            steady_seconds=asked["steady"], idle_seconds=asked["idle"],
        )  # fmt: skip
        _say(f"{sizes.rounds} rounds of {sizes.jobs} deliveries on {measure.cores()} cores, {_versions()}")
        load = os.getloadavg()[0]
        counted = round_trips.count(addresses.database_url)
        bench = rounds.Bench(addresses, folder, sizes)
        turns: list[rounds.Turn] = []
        resting: list[rounds.Turn] = []
        try:
            for number in range(sizes.rounds):
                order = rounds.CANDIDATES if number % 2 == 0 else rounds.CANDIDATES[::-1]
                for candidate in order:
                    turns.append(_told(bench.turn(candidate, number)))
                turns.append(_told(sql.run(bench.server, folder, number, sizes.jobs)))
            turns.append(_told(bench.turn(rounds.MEMORY_BASE, 0)))
            if sizes.idle_seconds:
                ours = next(candidate for candidate in rounds.CANDIDATES if candidate.name == rounds.OURS)
                resting.append(_told(bench.rest(ours)))
        finally:
            bench.close()
        turns += resting
        costs = cases.run(addresses.database_url, entries=asked["entries"]) if asked["entries"] else []
        saved: list[documents.Measured] = []
        if asked["saves"]:
            saved = documents.run(
                addresses.database_url, folder, saves=asked["saves"], rounds=asked["rounds"], say=_say
            )  # fmt: skip
        _append(lines, (*counted, *turns, *costs, *saved))
    # In the order in which they are declared, whichever order the last round had.
    names = [*(c.name for c in rounds.CANDIDATES), sql.NAME, rounds.MEMORY_BASE.name]
    turns.sort(key=lambda turn: names.index(turn.candidate))
    print(report.table(turns), end="\n\n")
    print(report.round_trips(counted), end="\n\n")
    if resting:
        print(report.idle_by(resting), end="\n\n")
    if costs:
        print(cases.table(costs), end="\n\n")
    if saved:
        print(documents.table(saved), end="\n\n")
    print("\n".join([*report.verdicts(turns, counted), *cases.verdicts(costs)]))
    print(_loads(load))
    return 0


def _told(turn: Any) -> Any:
    shown = {name: value for name, value in turn.as_line().items() if isinstance(value, float)}
    _say(f"round {turn.round}: {turn.candidate}: " + ", ".join(f"{name} {value:.4g}" for name, value in shown.items()))
    return turn


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("durable-core", "celery", "sqlalchemy", "psycopg"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
