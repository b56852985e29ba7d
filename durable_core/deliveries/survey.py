"""How many deliveries of each queue and kind are in each state, as far as a bounded look can tell. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from durable_core.database.statements import beside
from durable_core.database.transactions import Row, Transaction, checked, run
from durable_core.deliveries.read import COUNT_LIMIT
from durable_core.states import DeliveryState

_statements = beside(__file__)

MOST_PENDING = 20_000
"""So many due rows and so many later ones are read over all queues, an equal share of each."""

LEAST_SHARE = 100

GIVEN_UP = (DeliveryState.FAILED, DeliveryState.DEAD)
DONE = (DeliveryState.SENT, DeliveryState.CANCELED, DeliveryState.EXPIRED)


@dataclass(frozen=True)
class Count:
    """
    How many there are. `at_least` says that the look ended before all were counted.

    The rows that were read are then the ones longest due, the ones due next, or the ones that ended last.
    """

    rows: int = 0
    at_least: bool = False

    def __add__(self, other: Count) -> Count:
        return Count(self.rows + other.rows, self.at_least or other.at_least)


@dataclass(frozen=True)
class Cell:
    """
    The deliveries of one kind in one queue. `retrying` ones are due or later, and have failed before.

    Of a kind of another contract there are the `steps` of plans, or the `operations`, that wait for a worker.
    """

    queue: str
    kind: str
    due: Count = Count()
    later: Count = Count()
    retrying: Count = Count()
    processing: Count = Count()
    failed: Count = Count()
    dead: Count = Count()
    sent: Count = Count()
    canceled: Count = Count()
    expired: Count = Count()
    steps: Count = Count()
    operations: Count = Count()
    oldest_due_at: datetime | None = None
    last_finished_at: datetime | None = None


COUNTS = ("due", "later", "retrying", "processing", "failed", "dead", "sent", "canceled", "expired",
          "steps", "operations")  # fmt: skip


@dataclass(frozen=True)
class Line:
    """The same of one queue over its kinds, or of one kind over its queues."""

    name: str
    counts: dict[str, Count]
    oldest_due_at: datetime | None
    last_finished_at: datetime | None
    others: list[str] = field(default_factory=list)
    """The kinds that were seen in this queue, or the queues in which this kind was seen."""


@dataclass(frozen=True)
class Survey:
    """What was seen. `cut` holds, for each count, the queues of which not all was read; None is all queues."""

    cells: list[Cell]
    cut: dict[str, set[str | None]]

    def __add__(self, other: Survey) -> Survey:
        """What was seen of two contracts."""
        both = {*self.cut, *other.cut}
        cut = {name: self.cut.get(name, set()) | other.cut.get(name, set()) for name in both}
        return Survey([*self.cells, *other.cells], cut)

    def by_queue(self, also: Iterable[str] = ()) -> list[Line]:
        """A line for each queue that has any row, and for those named besides, by name."""
        return self._lines(lambda cell: cell.queue, lambda cell: cell.kind, also, of_queue=True)

    def by_kind(self, also: Iterable[str] = ()) -> list[Line]:
        """The same for each kind."""
        return self._lines(lambda cell: cell.kind, lambda cell: cell.queue, also, of_queue=False)

    def _lines(
        self, name: Callable[[Cell], str], other: Callable[[Cell], str], also: Iterable[str], *, of_queue: bool
    ) -> list[Line]:
        cells: dict[str, list[Cell]] = {one: [] for one in also}
        for cell in self.cells:
            cells.setdefault(name(cell), []).append(cell)
        return [self._line(one, cells[one], other, of_queue) for one in sorted(cells)]

    def _line(self, name: str, cells: list[Cell], other: Callable[[Cell], str], of_queue: bool) -> Line:
        counts = {}
        for count in COUNTS:
            total = sum((getattr(cell, count) for cell in cells), Count())
            cut = self.cut.get(count, set())
            unseen = bool(cut & {name, None}) if of_queue else bool(cut)
            counts[count] = Count(total.rows, unseen)
        due = [cell.oldest_due_at for cell in cells if cell.oldest_due_at is not None]
        done = [cell.last_finished_at for cell in cells if cell.last_finished_at is not None]
        others = sorted({other(cell) for cell in cells})
        return Line(name, counts, min(due, default=None), max(done, default=None), others)


def survey(tx: Transaction) -> Survey:
    """
    Count by queue, kind and state. What is read is bounded, whatever the backlog.

    Of what waits: MOST_PENDING due rows and as many later ones, shared out among the queues. Of what ended: the newest
    COUNT_LIMIT that are done with, as many failed ones and as many dead ones that are not discarded. All that runs.
    """
    tx = checked(tx)
    queues = [row["queue"] for row in run(tx, _statements.queues)]
    share = max(LEAST_SHARE, min(COUNT_LIMIT, MOST_PENDING // max(1, len(queues))))
    found: dict[tuple[str, str], dict[str, object]] = {}
    cut: dict[str, set[str | None]] = {}

    def at(row: dict[str, object]) -> dict[str, object]:
        return found.setdefault((str(row["queue"]), str(row["kind"])), {})

    read: dict[tuple[str, str], int] = {}
    for row in map(dict, run(tx, _statements.waiting, queues=queues, share=share)):
        what = "due" if row["is_due"] else "later"
        cell = at(row)
        cell[what] = Count(row["rows"])
        cell["retrying"] = _count(cell, "retrying") + Count(row["retrying"])
        if row["is_due"]:
            cell["oldest_due_at"] = row["oldest_due_at"]
        read[row["queue"], what] = read.get((row["queue"], what), 0) + row["rows"]
    for (queue, what), rows in read.items():
        if rows >= share:
            cut.setdefault(what, set()).add(queue)
            cut.setdefault("retrying", set()).add(queue)
    for row in map(dict, run(tx, _statements.running)):
        at(row)["processing"] = Count(row["rows"])
    for row in map(dict, run(tx, _statements.given_up, count_limit=COUNT_LIMIT)):
        _ended(at(row), row)
        read[row["state"], "ended"] = read.get((row["state"], "ended"), 0) + row["rows"]
    done = 0
    for row in map(dict, run(tx, _statements.done, count_limit=COUNT_LIMIT)):
        _ended(at(row), row)
        done += row["rows"]
    cut.update({state.value: {None} for state in GIVEN_UP if read.get((state.value, "ended"), 0) >= COUNT_LIMIT})
    if done >= COUNT_LIMIT:
        cut.update({state.value: {None} for state in DONE})
    cells = [Cell(queue, kind, **facts) for (queue, kind), facts in found.items()]  # type: ignore[arg-type]
    return Survey(cells, cut)


def waiting_in(count: str, rows: Iterable[Row], share: int) -> Survey:
    """A survey of one count, from its rows by queue and kind; of a queue no more than its share was read."""
    cells, read = [], Counter[str]()
    for row in rows:
        facts: dict[str, Any] = {count: Count(row["rows"])}
        cells.append(Cell(row["queue"], row["kind"], **facts))
        read[row["queue"]] += row["rows"]
    return Survey(cells, {count: {queue for queue, rows in read.items() if rows >= share}})


def _ended(cell: dict[str, object], row: dict[str, Any]) -> None:
    cell[row["state"]] = Count(row["rows"])
    last = cell.get("last_finished_at")
    cell["last_finished_at"] = max(last, row["last"]) if isinstance(last, datetime) else row["last"]


def _count(cell: dict[str, object], name: str) -> Count:
    value = cell.get(name)
    return value if isinstance(value, Count) else Count()
