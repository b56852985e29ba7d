"""A look that the database cannot answer in time ends with a sentence, whatever the command."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Connection, Engine, text

from durable_core.cli import database as room
from durable_core.database import looking
from durable_core.testing import Made
from tests.cli.conftest import error_of

Run = Callable[..., Result]

ROWS = """
    insert into durable.deliveries (id, kind, queue, priority, arguments, digest, state, due_at, hint_at, fence,
        settled_fence, attempts, max_attempts, max_interruptions, created_at, finished_at)
    select gen_random_uuid(), 'test.slow', 'durable', 5, '{}', repeat('0', 64), 'sent', now(), now(), 1, 1, 1, 5, 20,
        now(), now()
    from generate_series(1, 30000)"""

LOOKS = [
    ("status",), ("queues",), ("kinds",), ("errors", "list"), ("journal",), ("find", "a-key"), ("why", "a-key"),
    ("deliveries", "list"),
]  # fmt: skip


@pytest.fixture
def locked(engine: Engine, make: Callable[..., Made]) -> Iterator[None]:
    """Somebody has both tables locked, as a migration has; nobody waits for that longer than a look gets."""
    make(key="a-key")
    with engine.connect() as connection, connection.begin():
        connection.execute(text("lock table durable.deliveries, durable.journal in access exclusive mode"))
        yield


@pytest.mark.parametrize("look", LOOKS, ids=" ".join)
def test_a_look_at_a_locked_table_ends_in_time_with_a_sentence(
    durable: Run, locked: None, monkeypatch: pytest.MonkeyPatch, look: tuple[str, ...]
) -> None:
    monkeypatch.setattr(room, "READ_SECONDS", 0.3)
    result = durable(*look, "--json")
    assert (result.exit_code, error_of(result)) == (1, "STATEMENT_TIMEOUT")
    assert result.stderr.startswith("durable: the database did not answer within 0.3 s")
    assert "Nothing was changed" in result.stderr


def test_a_page_that_takes_too_long_says_how_many_there_are_by_estimate(
    durable: Run, engine: Engine, other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page waits for a lock, which is gone by the time that the planner is asked."""
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text(ROWS))
        tx.execute(text("analyze durable.deliveries"))
    monkeypatch.setattr(room, "READ_SECONDS", 0.3)
    real = looking.run
    for line, about in ((("--kind", "test.slow"), "30,000"), (("--kind", "test.slow", "--state", "dead"), "1")):
        with other_engine.connect() as locking:
            locking.execute(text("lock table durable.deliveries in access exclusive mode"))
            asked: list[object] = []

            def bound(
                *given: Any, asked: list[object] = asked, locking: Connection = locking, **parameters: Any
            ) -> Any:
                asked.append(given)
                if len(asked) == 2:
                    locking.rollback()
                return real(*given, **parameters)

            monkeypatch.setattr(looking, "run", bound)
            result = durable("deliveries", "list", *line, "--json")
        assert (result.exit_code, error_of(result)) == (1, "STATEMENT_TIMEOUT")
        assert f"estimate of how many there are: about {about}, by the planner" in result.stderr
