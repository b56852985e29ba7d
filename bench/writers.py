"""Processes that save documents at once, each by the package as a host calls it: a Session, a save, a commit."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from durable_core import Documents
from durable_core.document_refusals import VersionConflict

COLLECTION = "bench.page"
KEEP = 50
WARM_UP = 10
"""Until every statement is prepared and what is asked once per connection has been asked."""


@dataclass(frozen=True)
class Done:
    """When a writer began and ended, and how many of its attempts were saves; the rest were conflicts."""

    began: float
    ended: float
    saves: int


class _Writer:
    """What one of the processes does when it is told to."""

    def __init__(self, url: str, content: dict[str, Any]) -> None:
        self._engine = create_engine(url, pool_size=1)
        self._content = content
        self._documents = Documents(COLLECTION, keep=KEEP)

    def warm(self) -> None:
        with Session(self._engine) as session, session.begin():
            document = self._documents.create(session, self._content, owner="bench", by="bench")
        self.save(UUID(document.id).int, 1, WARM_UP)
        with self._engine.connect() as connection:
            # Else Postgres counts the transactions of the warm-up some time later, among those that are measured.
            connection.execute(text("select pg_stat_force_next_flush()"))
            connection.commit()

    def save(self, first: int, width: int, attempts: int) -> Done:
        """One attempt after another on these documents, in turn; a conflict names the version of the next."""
        documents = [str(UUID(int=first + nth)) for nth in range(width)]
        versions, saves = [0] * width, 0
        began = time.monotonic()
        for n in range(attempts):
            nth = n % width
            try:
                with Session(self._engine) as session, session.begin():
                    saved = self._documents.save(
                        session, documents[nth], self._content | {"edit": n}, expected_version=versions[nth],
                        save_id=uuid4(), by="bench",
                    )  # fmt: skip
            except VersionConflict as conflict:
                versions[nth] = conflict.current_version
            else:
                versions[nth] = saved.version
                saves += 1
        return Done(began, time.monotonic(), saves)

    def leave(self) -> None:
        self._engine.dispose()


def _serve(pipe: Connection, url: str, content: dict[str, Any]) -> None:
    writer = _Writer(url, content)
    try:
        for act, *arguments in iter(pipe.recv, None):
            pipe.send(getattr(writer, act)(*arguments))
    except EOFError:
        pass  # the bench has failed, and says so itself


class Writers:
    """Processes of their own, for one would have to wait for its own lock on the interpreter."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def warm(self, count: int) -> None:
        self._all("warm", [()] * count)

    def save(self, shares: list[tuple[int, int, int]]) -> list[Done]:
        """As many writers as there are shares, at once. Raises EOFError where one of them has failed."""
        return self._all("save", shares)

    def leave(self, count: int) -> None:
        self._all("leave", [()] * count)

    def _all(self, act: str, shares: list[Any]) -> list[Any]:
        told = list(zip(self._pipes, shares, strict=False))
        for pipe, share in told:
            pipe.send((act, *share))
        return [pipe.recv() for pipe, _ in told]


@contextmanager
def writers(count: int, url: str, content: dict[str, Any]) -> Iterator[Writers]:
    """So many, started anew: nothing of this process is in them, and what they import is imported once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes, processes = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, url, content), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield Writers(pipes)
        for pipe in pipes:
            pipe.send(None)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            process.kill()
