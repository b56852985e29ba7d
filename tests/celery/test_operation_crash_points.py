"""
Operations whose worker is killed, or frozen past its lease, at every point around the call; and whose provider is.

| held | where the process is | what it comes to |
| --- | --- | --- |
| precheck | nothing is claimed | issued later, once |
| claim | inside the claim's statement, which comes about | outcome unknown |
| before | claimed, the call not made | outcome unknown |
| after | the other side has accepted, its answer not recorded | found by its key, or outcome unknown |
| record | inside the record's statement, which comes about | recorded, polled by others |
| poll | the other side is being asked | asked again |
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from durable_core import OperationKind, operations
from durable_core.operations.read import Operation
from tests.celery.conftest import Nodes
from tests.celery.nodes import wait_until
from tests.celery.remote import Remote, await_answer, provider_process, remote_worker
from tests.celery.world import World

ENDED = ("succeeded", "failed")

HELD_IN_SQL = (
    # The claim of fence 1, and the record of the ids, wait inside their statements for whoever holds the row's lock.
    """
    create function wait_inside() returns trigger language plpgsql as $$
    begin
        if new.fence = 1 and (
            (old.state = 'queued' and new.arguments ->> 'held' = 'claim')
            or (old.external_ids is null and new.external_ids is not null and new.arguments ->> 'held' = 'record')
        ) then
            perform pg_advisory_xact_lock_shared(hashtext('remote'));
        end if;
        return new;
    end $$
    """,
    "create trigger wait_inside before update on durable.operations for each row execute function wait_inside()",
)


@pytest.fixture
def kinds_of_remote() -> Iterator[Remote]:
    kinds = Remote()
    yield kinds
    kinds.forget()


class Scene:
    def __init__(self, world: World) -> None:
        self.world = world

    def start(self, kind: OperationKind, held: str = "") -> str:
        with self.world.engine.begin() as tx:
            ref = kind.start(tx, held, by="dana")
        self.send(kind, ref.id)
        return ref.id

    def send(self, kind: OperationKind, row_id: str) -> None:
        """A hint by hand; as often as a broker may bring one."""
        self.world.send(kind.name, row_id, queue="remote")

    def row(self, row_id: str) -> Operation:
        with self.world.engine.connect() as tx:
            return operations.get(tx, row_id)

    def moves(self, row_id: str) -> list[str]:
        return [line.move for line in self.world.lines(row_id)]

    def ended(self, row_id: str) -> Operation:
        wait_until(lambda: self.row(row_id).state in ENDED, f"{row_id} ends", 60)
        return self.row(row_id)

    def waits_in_sql(self, count: int) -> None:
        wait_until(lambda: self.world.waits_in("advisory") >= count, "statements wait inside the database")


@pytest.fixture
def scene(world: World) -> Iterator[Scene]:
    with world.engine.begin() as tx:
        for statement in HELD_IN_SQL:
            tx.execute(text(statement))
    yield Scene(world)
    with world.engine.begin() as tx:
        tx.execute(text("drop trigger wait_inside on durable.operations"))
        tx.execute(text("drop function wait_inside()"))


UNKNOWN, DONE = ("failed", "OUTCOME_UNKNOWN"), ("succeeded", None)

KILLED = {
    # held: (what comes of it without `find`, and with it, and how often it was issued)
    "precheck": (DONE, DONE, 1),
    "claim": (UNKNOWN, UNKNOWN, 0),
    "before": (UNKNOWN, UNKNOWN, 0),
    "after": (UNKNOWN, DONE, 1),
    "record": (DONE, DONE, 1),
    "poll": (DONE, DONE, 1),
}


def test_wherever_a_worker_is_lost_the_call_is_made_once_at_most(
    scene: Scene, nodes: Nodes, kinds_of_remote: Remote, tmp_path: Any
) -> None:
    """All points at once: half of the rows in a worker whose children are killed, two in one that is frozen."""
    world = scene.world
    with provider_process(tmp_path) as (provider, process):
        victims = remote_worker(nodes, "victims", provider.url, "-Q", "durable.remote", "-c", str(2 * len(KILLED) + 2))
        victims.ready()
        with world.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as holder:
            holder.execute(text("select pg_advisory_lock(hashtext('remote'))"))
            pair = {"plain": kinds_of_remote.plain, "found": kinds_of_remote.found}
            rows = {(held, name): scene.start(kind, held) for held in KILLED for name, kind in pair.items()}
            frozen = {name: scene.start(kind, "after") for name, kind in pair.items()}
            for (held, name), row_id in rows.items():
                if held not in ("claim", "record"):
                    world.held_at(row_id)
                scene.send(pair[name], row_id)  # the broker brings it once more, to whoever has a slot free
            sleepers = {world.held_at(row_id) for row_id in frozen.values()}
            scene.waits_in_sql(4)
            for pid in sleepers:
                os.kill(pid, signal.SIGSTOP)
            for pid in victims.children() - sleepers:
                os.kill(pid, signal.SIGKILL)
            holder.execute(text("select pg_advisory_unlock_all()"))
        came = {}
        for (held, name), row_id in rows.items():
            row = scene.ended(row_id)
            came[held, name] = ((row.state, row.error_code), provider.issued_under(f"{row.kind}:{row_id}"))
        wanted = {}
        for held, (plain, found, issued) in KILLED.items():
            wanted[held, "plain"], wanted[held, "found"] = (plain, issued), (found, issued)
        assert came == wanted

        # The frozen ones lost their rows to the reaper. Their answers come too late, and change nothing.
        before = {name: scene.ended(row_id) for name, row_id in frozen.items()}
        assert {name: (row.state, row.error_code) for name, row in before.items()} == {"plain": UNKNOWN, "found": DONE}
        for row_id in frozen.values():
            world.open(row_id)
        for pid in sleepers:
            os.kill(pid, signal.SIGCONT)
        for row_id in frozen.values():
            wait_until(lambda row_id=row_id: "refused" in scene.moves(row_id), "its late answer is refused")
        assert {name: scene.row(row_id) for name, row_id in frozen.items()} == before

        # The provider is killed while it is polled, and comes back.
        last = scene.start(kinds_of_remote.plain)
        wait_until(lambda: scene.row(last).external_ids, "its ids are known")
        process.kill()
        wait_until(lambda: scene.row(last).error_code == "POLL_FAILED", "a poll fails")
        process.start()
        await_answer(provider)
        assert scene.ended(last).state == "succeeded"
        for row_id in (*rows.values(), *frozen.values(), last):
            key = f"{scene.row(row_id).kind}:{row_id}"
            assert provider.issued_under(key) <= 1
            assert scene.moves(row_id).count("take") == 1
