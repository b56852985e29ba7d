"""
Several transactions, one act at a time, in an order that the test names: every order, or a sample of them.

Each actor has a connection and a thread. An act is begun only when the actor's act before has ended,
and the next actor's turn comes when it has ended too, or when the database says that it waits for a lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

from sqlalchemy import Engine, text

Act = Callable[[], Any]
PATIENCE = 30.0
"""Seconds after which a test is told that an act neither ended nor waits."""


def orders(*lengths: int) -> list[tuple[int, ...]]:
    """Every order in which actors 0, 1, ... can come to their acts, of which they have so many."""

    def rest(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not any(left):
            yield ()
        for actor, acts in enumerate(left):
            if acts:
                for later in rest((*left[:actor], acts - 1, *left[actor + 1 :])):
                    yield (actor, *later)

    return list(rest(lengths))


class Interleaver:
    """Plays acts in an order. `with Interleaver(engine, 2) as stage: stage.play(order, acts_of_0, acts_of_1)`."""

    def __init__(self, watching: Engine, actors: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(actors)]
        self._watch = watching.connect().execution_options(isolation_level="AUTOCOMMIT")

    def __enter__(self) -> Interleaver:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown()
        self._watch.close()

    def play(self, order: Sequence[int], *actors: tuple[int, Sequence[Act]]) -> int:
        """
        Let each actor, a backend's pid and its acts, come to its next act as the order says; how often one waited.

        What an act raises is raised here, after all have ended.
        """
        todo = [list(acts) for _, acts in actors]
        begun: list[Future[Any]] = []
        last: dict[int, Future[Any]] = {}
        waits = 0
        for actor in order:
            if actor in last:
                last[actor].exception(PATIENCE)
            last[actor] = self._threads[actor].submit(todo[actor].pop(0))
            begun.append(last[actor])
            waits += not self._ended(last[actor], actors[actor][0])
        for act in begun:
            act.exception(PATIENCE)
        for act in begun:
            act.result()
        return waits

    def _ended(self, act: Future[Any], pid: int) -> bool:
        """True when it has ended, False when it waits for a lock."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                act.exception(0.002)
            except TimeoutError:
                if self._watch.scalar(text("select cardinality(pg_blocking_pids(:pid))"), {"pid": pid}):
                    return False
            else:
                return True
        raise TimeoutError(f"backend {pid} neither ended its act nor waits for a lock")


class Patient(Interleaver):
    """
    Lets the others go on while one waits for a lock: its turns come when it has it.

    Before each turn whoever waited has either ended its act or waits on, so an order comes to one end and no other.
    """

    def play(self, order: Sequence[int], *actors: tuple[int, Sequence[Act]]) -> int:
        todo = [list(acts) for _, acts in actors]
        last: dict[int, Future[Any]] = {}
        waits, turns = 0, list(order)
        while turns:
            ready = [n for n, actor in enumerate(turns) if actor not in last or last[actor].done()]
            if not ready:  # all that are left wait, for one that has no further turn: it has ended
                last[turns[0]].exception(PATIENCE)
                continue
            actor = turns.pop(ready[0])
            last[actor] = self._threads[actor].submit(todo[actor].pop(0))
            waits += not self._ended(last[actor], actors[actor][0])
            for other, act in last.items():
                self._ended(act, actors[other][0])
                if act.done():
                    act.result()
        for act in last.values():
            act.result(PATIENCE)
        return waits


def sample(all_orders: Sequence[tuple[int, ...]], most: int, seed: int) -> Sequence[tuple[int, ...]]:
    """At most so many of them, the same for the same seed."""
    return all_orders if len(all_orders) <= most else Random(seed).sample(all_orders, most)
