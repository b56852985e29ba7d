"""
How many hints each contract may add to a queue that several share, of which the broker tells the depth alone.

A row whose hint lies in its queue needs no other, but nobody sees whose hints lie there. So where
all that waits is counted, a contract adds what is missing: a queue that holds as many messages as
rows either lacks none, or holds some that are good for nothing, and a worker takes those out. Where
another contract has more rows than are counted, the depth says nothing about this one. Then its
rows are hinted `unsure`, ever more seldom; and so are a few rows behind more than a few messages.
Of a few behind a few one more hint does no harm: those are hinted as if they were missing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from sqlalchemy import Connection

UNSURE_ROOM = 500
"""Most rows of a queue that one sweep hints unsure."""

FEW = 10
"""
So few rows of a contract in a queue are hinted whatever lies there: what others left may lie long.

Unsure, where more messages than so few lie there.
"""


class Counted(Protocol):
    """A contract, as those see it whose hints lie in the same queues."""

    def due(self, connection: Connection, cap: int, queues: Collection[str] | None = None) -> Mapping[str, int]:
        """How many rows wait for a worker in each queue, or in each of these; of at most `cap` looked at."""


@dataclass(frozen=True)
class Share:
    """What one contract may add to one queue."""

    room: int
    """So many hints."""
    empty: bool = False
    """Nothing lies there, so whatever was hinted is lost: there is no need to wait for its time."""
    unsure: bool = False
    """Nobody can tell whether a hint is missing: each that is added doubles the time to its next, without end."""


def allot(
    depths: Mapping[str, int], own: Mapping[str, int], others: Sequence[Mapping[str, int]], cap: int
) -> dict[str, Share]:
    """
    The share of a contract in each queue where rows of its `own` wait; each count is of at most `cap` rows.

    Together the contracts bring a queue to the number of its rows that wait, and beyond it only where several saw the
    same one missing, to twice that at most; and by what they hint unsure.
    """
    found = {}
    for queue, rows in own.items():
        theirs = [other.get(queue, 0) for other in others]
        uncounted = any(one >= cap for one in theirs)
        depth = depths.get(queue, 0)
        missing = max(min(rows, cap) - max(depth - sum(theirs), 0), 0)
        if not missing and (uncounted or rows <= FEW):
            found[queue] = Share(min(rows, UNSURE_ROOM), unsure=not rows or depth > FEW)
        else:
            found[queue] = Share(missing, empty=not depth)
    return found


def as_written(some: Mapping[str, Share]) -> str:
    """For a statement, as one JSON parameter."""
    return json.dumps([{"queue": queue, **asdict(share)} for queue, share in some.items()])
