"""Executing a step of a case: round trips, time, what a long journal adds, and a listing of a thousand affordances."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

from bench.arithmetic import median
from bench.measure import bare, names_of_statements
from bench.relay import CountingRelay
from bench.tables import markdown, number, verdict
from durable_core.cases.cases import Cases
from durable_core.cases.declare import CaseType, Scope
from durable_core.database.migrate import migrate
from durable_core.testing import create_database, drop_database

DATABASE = "bench_cases"
STATE_BYTES = 10_000
ENTRIES = 100_000
ELEMENTS, SCOPED_STEPS = 200, 5
REPEATS = 200
WARM_UP = 10

TRIPS_LIMIT, TRANSACTIONS_LIMIT, FLAT_LIMIT = 10, 2, 1.5

# The guards of the journal want entries one by one, each with its digest; here only the number of rows counts.
FILL = """
insert into durable.case_journal
    (case_id, number, id, execution_id, entry, attempt, step, as_of, seq, actor, guard, state, delta, salt,
     payload_digest, digest, chain, keyed, recorded_at)
select cast(:case_id as uuid), n, gen_random_uuid(), md5(cast((n + 1) / 2 as text))::uuid,
    case when n % 2 = 1 then 'claimed' else 'completed' end, 1, 'touch', case when n % 2 = 1 then now() end,
    case when n % 2 = 0 then n / 2 end, '"bench"', case when n % 2 = 1 then cast('{}' as json) end,
    case when n % 2 = 1 then cast('{}' as json) end, case when n % 2 = 0 then cast('[]' as json) end, 'salt',
    repeat('1', 64), repeat('2', 64), repeat('3', 64), false, now()
from generate_series(1, :entries) n
"""
HEAD = """
update durable.cases set journal_count = :entries, journal_head = repeat('3', 64), seq = :entries / 2
where id = cast(:case_id as uuid)
"""


@dataclass(frozen=True)
class Cost:
    """One figure, and its limit where there is one."""

    what: str
    value: float
    unit: str
    limit: float | None = None
    trips: tuple[str, ...] = ()

    def as_line(self) -> dict[str, Any]:
        return {"record": "cases", **vars(self)}


def a_type() -> CaseType[Any]:
    """One plain step on ten kilobytes, and five steps for each of two hundred elements, each with two conditions."""
    case_type = CaseType("bench.case", registered=False)
    case_type.step("touch", requires={"open": lambda state: state["open"]})(_touch)
    each = Scope(select=lambda state: state["elements"], key=lambda element: element["id"])
    for nth in range(SCOPED_STEPS):
        case_type.step(
            f"step {nth}",
            scope=each,
            requires={"not done": lambda state, element: not element["done"]},
            permits={"somebody": lambda state, actor: actor is not None},
        )(_touch)
    return case_type


def _touch(state: dict[str, Any], _: Any) -> dict[str, Any]:
    return state | {"touched": state["touched"] + 1}


def a_state(elements: int = 0) -> dict[str, Any]:
    state = {"open": True, "touched": 0, "elements": [{"id": f"e{n}", "done": False} for n in range(elements)]}
    return state | {"text": "x" * max(0, STATE_BYTES - len(str(state)))}


def run(server_url: str, *, entries: int = ENTRIES, repeats: int = REPEATS) -> list[Cost]:
    """All of it, on a database of its own."""
    made = make_url(create_database(server_url, DATABASE))
    direct = create_engine(made)
    migrate(direct)
    relay = CountingRelay(made.host or "127.0.0.1", made.port or 5432)
    counted = create_engine(made.set(host="127.0.0.1", port=relay.port))
    try:
        return [
            *_round_trips(direct, counted, relay),
            *_listing(direct, counted, relay, repeats),
            *_long_journal(direct, entries, repeats),
        ]
    finally:
        counted.dispose()
        direct.dispose()
        relay.close()
        drop_database(server_url, DATABASE)


def _created(engine: Engine, elements: int = 0) -> tuple[Cases, str]:
    cases = Cases(engine, [a_type()])
    with Session(engine) as session, session.begin():
        return cases, cases.create(session, "bench.case", a_state(elements)).id


def _trips(relay: CountingRelay, act: Callable[[], object]) -> tuple[str, ...]:
    names = names_of_statements()
    for _ in range(WARM_UP):
        act()
    relay.trips = []
    act()
    return tuple(" + ".join(names.get(bare(one)) or one.strip()[:40] for one in trip) for trip in relay.trips)


def _round_trips(direct: Engine, counted: Engine, relay: CountingRelay) -> list[Cost]:
    _, case_id = _created(direct)
    cases = Cases(counted, [a_type()])
    trips = _trips(relay, lambda: cases.execute(case_id, "touch", actor="bench"))
    commits = sum(trip.split(" + ").count("COMMIT") for trip in trips)
    what = f"claim to commit, state of {STATE_BYTES // 1000} kB"
    return [
        Cost(f"{what}: round trips", len(trips), "", TRIPS_LIMIT, trips),
        Cost(f"{what}: transactions", commits, "", TRANSACTIONS_LIMIT),
    ]


def _listing(direct: Engine, counted: Engine, relay: CountingRelay, repeats: int) -> list[Cost]:
    _, case_id = _created(direct, ELEMENTS)
    cases = Cases(counted, [a_type()])
    listed: list[int] = []

    def read() -> None:
        with Session(counted) as session, session.begin():
            cases.get(session, case_id)

    def listing() -> None:
        with Session(counted) as session, session.begin():
            listed.append(len(cases.affordances(session, case_id, actor="bench")))

    loads, trips = _trips(relay, read), _trips(relay, listing)
    expected = 1 + ELEMENTS * SCOPED_STEPS
    assert set(listed) == {expected}, listed
    what = f"{expected:,} affordances over {ELEMENTS} elements"
    return [
        Cost(f"{what}: statements beside those of one load", len(trips) - len(loads), "", 0, trips),
        Cost(f"{what}: time", _milliseconds(listing, max(5, repeats // 10)), "ms"),
    ]


def _long_journal(engine: Engine, entries: int, repeats: int) -> list[Cost]:
    short, short_id = _created(engine)
    long, long_id = _created(engine)
    with engine.begin() as connection:
        connection.execute(text("set local session_replication_role = replica"))
        connection.execute(text(FILL), {"case_id": long_id, "entries": entries})
        connection.execute(text(HEAD), {"case_id": long_id, "entries": entries})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("vacuum analyze durable.case_journal"))
    found = []
    for what, act in (
        ("claim to commit", lambda cases, case_id: cases.execute(case_id, "touch", actor="bench")),
        ("get, affordances and a page of the journal", _looked(engine)),
    ):
        # In turn, so that both meet what else the machine does.
        short_ms, long_ms = _in_turn(partial(act, short, short_id), partial(act, long, long_id), repeats)
        found += [
            Cost(f"{what}: time", short_ms, "ms"),
            Cost(f"{what}, {entries:,} entries on the case: time", long_ms, "ms"),
            Cost(f"{what}: ratio of the two", long_ms / short_ms, "", FLAT_LIMIT),
        ]
    return found


def _looked(engine: Engine) -> Callable[[Cases, str], None]:
    def look(cases: Cases, case_id: str) -> None:
        with Session(engine) as session, session.begin():
            cases.get(session, case_id)
            cases.affordances(session, case_id, actor="bench")
            cases.journal(session, case_id, limit=20)

    return look


def _in_turn(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float]:
    ones, others = [], []
    for nth in range(WARM_UP + repeats):
        for act, times in ((one, ones), (other, others)):
            spent = _once(act)
            if nth >= WARM_UP:
                times.append(spent)
    return _median(ones), _median(others)


def _milliseconds(act: Callable[[], object], repeats: int) -> float:
    return _median([_once(act) for _ in range(repeats)])


def _once(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - begun)


def _median(times: list[float]) -> float:
    middle = median(times)
    assert middle is not None
    return middle


def table(costs: Iterable[Cost]) -> str:
    rows = [["executing a step of a case", "measured", "limit"]]
    for cost in costs:
        value = f"{number(cost.value, 2 if cost.unit or cost.value % 1 else 0)} {cost.unit}".strip()
        rows.append([cost.what, value, "" if cost.limit is None else f"{cost.limit:g}"])
    return markdown(rows)


def verdicts(costs: Iterable[Cost]) -> list[str]:
    return [verdict(cost.what, cost.value, cost.limit, 2) for cost in costs if cost.limit is not None]
