"""`async def` handlers: a loop of their own, an AsyncSession on the attempt's one transaction."""

import asyncio

import pytest
from sqlalchemy import text

from durable_core import Retry
from durable_core.deliveries.attempt import Outcome, perform
from durable_core.deliveries.declare import AsyncStep
from durable_core.errors import StepTransactionOwned
from tests.conftest import effects_of

INSERT = text("insert into effects (row_id, fence, note) values (:id, :fence, 'async')")


def insert(step: AsyncStep) -> tuple[object, dict[str, object]]:
    return INSERT, {"id": step.id, "fence": step.fence}


def test_an_async_handlers_work_commits_with_its_receipt(declare, make, worker, engine, row):
    async def handler(step: AsyncStep, n: int = 0) -> int:
        await asyncio.sleep(0)
        await step.session.execute(*insert(step))
        return 41 + n

    kind = declare(handler)
    made = make(kind, {"n": 1})

    assert perform(worker, kind, made.id).outcome is Outcome.SENT

    assert effects_of(engine, made.id) == [(1, "async")]
    assert row(made.id).result == 42


def test_an_async_handler_that_raises_leaves_nothing_behind(declare, make, worker, engine, row):
    async def handler(step: AsyncStep) -> None:
        await step.session.execute(*insert(step))
        raise Retry("later", after=60)

    kind = declare(handler)
    made = make(kind)

    assert perform(worker, kind, made.id).outcome is Outcome.RETRY

    assert effects_of(engine, made.id) == []
    assert row(made.id).failures == 1


@pytest.mark.parametrize("call", ["commit", "rollback", "close"])
def test_an_async_handler_may_not_end_the_attempts_transaction(declare, make, worker, engine, call):
    refused = []

    async def handler(step: AsyncStep) -> None:
        await step.session.execute(*insert(step))
        try:
            await getattr(step.session, call)()
        except StepTransactionOwned as error:
            refused.append(error.call)

    kind = declare(handler)
    made = make(kind)

    assert perform(worker, kind, made.id).outcome is Outcome.SENT

    assert refused == [call]
    assert effects_of(engine, made.id) == [(1, "async")]


def test_in_commit_serves_an_async_handler_too(declare, make, worker, engine):
    async def handler(step: AsyncStep) -> None:
        step.in_commit(lambda session: session.execute(*insert(step)))

    kind = declare(handler)
    made = make(kind)

    assert perform(worker, kind, made.id).outcome is Outcome.SENT

    assert effects_of(engine, made.id) == [(1, "async")]


def test_a_plain_handler_may_use_the_connection_without_the_orm(declare, make, worker, engine):
    kind = declare(lambda step: step.connection.execute(*insert(step)).rowcount)
    made = make(kind)

    assert perform(worker, kind, made.id).outcome is Outcome.SENT

    assert effects_of(engine, made.id) == [(1, "async")]
