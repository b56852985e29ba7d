"""The call of an operation was answered, and its ids cannot be recorded until long after the time of the call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from durable_core import operations
from durable_core.celery_binding.tasks import HARD_LIMIT_GRACE
from tests.celery.conftest import Nodes
from tests.celery.nodes import wait_until
from tests.celery.remote import BRIEF_SECONDS, Remote, provider_process, remote_worker
from tests.celery.world import World

REFUSED = (
    "create table public.away ()",
    # As a server does that is about to end: an error of the machine room.
    """
    create function refuse_the_record() returns trigger language plpgsql as $$
    begin
        if old.external_ids is null and new.external_ids is not null and to_regclass('public.away') is not null then
            raise exception 'away' using errcode = '57P01';
        end if;
        return new;
    end $$
    """,
    "create trigger refuse_the_record before update on durable.operations"
    " for each row execute function refuse_the_record()",
)


@pytest.fixture
def refused(world: World) -> Iterator[None]:
    with world.engine.begin() as tx:
        for statement in REFUSED:
            tx.execute(text(statement))
    yield
    with world.engine.begin() as tx:
        tx.execute(text("drop table if exists public.away"))
        tx.execute(text("drop trigger refuse_the_record on durable.operations"))
        tx.execute(text("drop function refuse_the_record()"))


@pytest.fixture
def kinds_of_remote() -> Iterator[Remote]:
    kinds = Remote()
    yield kinds
    kinds.forget()


@pytest.mark.long
def test_neither_lease_nor_hard_limit_cuts_the_record_of_the_ids_short(
    world: World, refused: None, nodes: Nodes, kinds_of_remote: Remote, tmp_path: Any
) -> None:
    kind = kinds_of_remote.brief
    with provider_process(tmp_path) as (provider, _):
        worker = remote_worker(nodes, "recording", provider.url, "-Q", "durable.remote", "-c", "1")
        worker.ready()
        children = worker.children()
        with world.engine.begin() as tx:
            ref = kind.start(tx, by="dana")
        world.send(kind.name, ref.id, queue="remote")
        key = f"{kind.name}:{ref.id}"
        wait_until(lambda: provider.issued_under(key), "the call is made")
        over = time.monotonic() + BRIEF_SECONDS + HARD_LIMIT_GRACE + 3.0
        wait_until(lambda: time.monotonic() > over, "the time of the call is over, and more", 60)
        with world.engine.connect() as tx:
            row = operations.get(tx, ref.id)
        assert (row.state, row.external_ids) == ("running", None)
        with world.engine.begin() as tx:
            tx.execute(text("drop table public.away"))

        def state() -> str:
            with world.engine.connect() as tx:
                return operations.get(tx, ref.id).state.value

        wait_until(lambda: state() != "running", "it ends", 60)
        assert (state(), provider.issued_under(key)) == ("succeeded", 1)
        assert worker.children() == children, "nobody was killed"
