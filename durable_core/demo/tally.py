"""
What came of it, counted: the shop's own orders against rows, effects, journal, the sinks' files and the workers' logs.

The orders table says what was promised; nothing that the deliveries say of themselves is
taken for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from durable_core.database.statements import beside
from durable_core.database.transactions import Row, run
from durable_core.demo.shop import expected_key
from durable_core.states import TERMINAL

_statements = beside(__file__)

CHANNELS = ("email", "webhook")


@dataclass(frozen=True)
class Call:
    """One call that a sink accepted."""

    channel: str
    order: int
    key: str


@dataclass
class Evidence:
    """Everything that is counted."""

    orders: list[Row]
    deliveries: list[Row]
    effects: list[Row]
    journal: list[Row]
    calls: list[Call]
    events: Counter[str]
    placed: list[int]
    """Orders whose COMMIT the shop saw succeed."""

    @staticmethod
    def gathered(connection: Connection, sinks: Iterable[Path], logs: Iterable[Path], placed: list[int]) -> Evidence:
        return Evidence(
            orders=run(connection, _statements.orders),
            deliveries=run(connection, _statements.deliveries),
            effects=run(connection, _statements.effects),
            journal=run(connection, _statements.journal),
            calls=[Call(line["channel"], line["order"], line["key"]) for path in sinks for line in json_lines(path)],
            events=Counter(str(line.get("event")) for path in logs for line in json_lines(path)),
            placed=placed,
        )


@dataclass
class Tally:
    """The figures. Those of `broken` must be zero."""

    accepted: int = 0
    """Calls promised: two for each committed order."""
    sent: int = 0
    failed: int = 0
    dead: int = 0
    lost: int = 0
    """Promised calls that never will be made, or are said to be made and were not."""
    missing_calls: int = 0
    """Promised calls that no sink has, whatever the row says."""
    lost_database_effects: int = 0
    doubled_database_effects: int = 0
    effects_apart_from_receipt: int = 0
    """Effects under another fence, or in another transaction, than the receipt of their delivery."""
    phantoms: int = 0
    """Deliveries or calls for what was rolled back."""
    doubled_external_calls: int = 0
    """Calls beyond the first. The contract allows them, under one and the same key."""
    calls_with_another_key: int = 0
    rescued: int = 0
    """Deliveries that lost a worker and were sent all the same."""
    retried: int = 0
    """Failed attempts that were followed by another."""
    refused_stale_writes: int = 0
    """Writes of owners that had lost their row, as the workers' logs tell."""
    examples: list[str] = field(default_factory=list)

    BROKEN = (
        "lost", "missing_calls", "lost_database_effects", "doubled_database_effects", "effects_apart_from_receipt",
        "phantoms", "calls_with_another_key",
    )  # fmt: skip

    @property
    def broken(self) -> dict[str, int]:
        """What must not be, and is."""
        return {name: getattr(self, name) for name in self.BROKEN if getattr(self, name)}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def _say(self, sentence: str) -> None:
        if len(self.examples) < 20:
            self.examples.append(sentence)


def counted(evidence: Evidence) -> Tally:
    """Count. Pure: the same evidence gives the same tally."""
    tally = Tally()
    rows = {row["id"]: row for row in evidence.deliveries}
    effects: dict[str, list[Row]] = {}
    for effect in evidence.effects:
        effects.setdefault(effect["delivery_id"], []).append(effect)
    calls: dict[tuple[str, int], list[Call]] = {}
    for call in evidence.calls:
        calls.setdefault((call.channel, call.order), []).append(call)
    promised = {(channel, order["number"]): order[channel] for order in evidence.orders for channel in CHANNELS}
    tally.accepted = len(promised)
    for number in sorted(set(evidence.placed) - {order["number"] for order in evidence.orders}):
        tally.lost += len(CHANNELS)
        tally._say(f"order {number} was committed and is not there")

    states = Counter(row["state"] for row in evidence.deliveries)
    tally.sent, tally.failed, tally.dead = states["sent"], states["failed"], states["dead"]
    for (channel, number), delivery_id in promised.items():
        made = calls.get((channel, number), [])
        what = f"order {number}, {channel} {delivery_id}"
        _judge_row(tally, what, rows.get(delivery_id), bool(made), effects.get(delivery_id, []))
        if not made:
            tally.missing_calls += 1
        key = expected_key(channel, delivery_id)
        tally.doubled_external_calls += max(len(made) - 1, 0)
        for call in made:
            if call.key != key:
                tally.calls_with_another_key += 1
                tally._say(f"{what}: called with {call.key}")

    wanted = set(promised.values())
    for row_id in sorted((rows.keys() | effects.keys()) - wanted):
        tally.phantoms += 1
        tally._say(f"delivery {row_id} belongs to no order")
    for channel, number in sorted(calls.keys() - promised.keys()):
        tally.phantoms += 1
        tally._say(f"order {number} was never placed and its {channel} was called")

    _count_the_journal(tally, evidence.journal, rows)
    tally.refused_stale_writes = evidence.events["stale_write_refused"]
    return tally


def _judge_row(tally: Tally, what: str, row: Row | None, called: bool, effects: list[Row]) -> None:
    tally.doubled_database_effects += max(len(effects) - 1, 0)
    if len(effects) > 1:
        tally._say(f"{what}: {len(effects)} effects")
    if row is None:
        tally.lost += 1
        tally._say(f"{what}: there is no such row")
        return
    if row["state"] not in TERMINAL:
        tally.lost += 1
        tally._say(f"{what}: still {row['state']} ({row['error_code']})")
        return
    if row["state"] != "sent":
        if effects:
            tally.effects_apart_from_receipt += len(effects)
            tally._say(f"{what}: {row['state']}, and has an effect")
        return
    if not called:
        tally.lost += 1
        tally._say(f"{what}: sent, and no sink has it")
    if not effects:
        tally.lost_database_effects += 1
        tally._say(f"{what}: sent, and its effect is not there")
    for effect in effects:
        if (effect["fence"], effect["xid"]) != (row["settled_fence"], row["xid"]):
            tally.effects_apart_from_receipt += 1
            tally._say(f"{what}: effect of fence {effect['fence']}, receipt of fence {row['settled_fence']}")


def _count_the_journal(tally: Tally, journal: list[Row], rows: Mapping[str, Row]) -> None:
    rescued = {line["row_id"] for line in journal if line["move"] in ("reap", "release")}
    tally.rescued = sum(1 for row_id in rescued if row_id in rows and rows[row_id]["state"] == "sent")
    tally.retried = sum(1 for line in journal if line["move"].startswith("fail") and line["to_state"] == "pending")


def progress(connection: Connection) -> Row:
    """How many deliveries are sent and how many are open."""
    return run(connection, _statements.progress)[0]


def unfinished(connection: Connection) -> str:
    """What is still open, in a few words."""
    rows = run(connection, _statements.unfinished)
    return "; ".join(f"{row['rows']} {row['kind']} {row['state']} ({row['error_code'] or 'no error'})" for row in rows)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file. A line that a kill cut short, or that a library wrote as text, is passed over."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return found
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
