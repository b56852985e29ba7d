"""A row that a sweep failed on is held back, and seen again once an operator says so."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from durable_core import IllegalMove, NotFound, deliveries
from durable_core.database.connections import Database
from durable_core.deliveries import sweep
from durable_core.testing import Made, MovableClock


@pytest.fixture
def held(database: Database, make: Callable[..., Made], engine: Engine, clock: MovableClock) -> Made:
    """A lapsed row that reap was made to fail on by a trigger of the host's, gone since."""
    made = make(state="processing")
    with engine.begin() as connection:
        connection.execute(
            text(
                "create function stumble() returns trigger language plpgsql as "
                "$$ begin if new.state = 'pending' then raise exception 'stumbled'; end if; return new; end $$; "
                "create trigger stumble before update on durable.deliveries "
                "for each row execute function stumble()"
            )
        )
    clock.advance(seconds=31)
    assert sweep.reap(database) == 0
    with engine.begin() as connection:
        connection.execute(text("drop trigger stumble on durable.deliveries; drop function stumble()"))
    return made


def test_a_held_row_is_left_alone_until_it_is_released(
    database: Database, held: Made, row: Any, engine: Engine
) -> None:
    assert "stumbled" in row(held.id).held_reason
    assert sweep.reap(database) == 0

    with engine.begin() as connection:
        deliveries.release(connection, held.id, by="dana", reason="the trigger is gone")

    assert sweep.reap(database) == 1
    assert row(held.id).state == "pending"


def test_releasing_is_journalled_with_who_and_why(held: Made, lines: Any, engine: Engine) -> None:
    with engine.begin() as connection:
        deliveries.release(connection, held.id, by="dana", reason="the trigger is gone")

    assert [(line.move, line.by, line.reason) for line in lines(held.id)][-1:] == [
        ("unhold", "dana", "the trigger is gone")
    ]


def test_a_row_that_is_not_held_or_not_there_is_refused(make: Callable[..., Made], engine: Engine) -> None:
    made = make(state="pending")
    with engine.begin() as connection:
        with pytest.raises(IllegalMove):
            deliveries.release(connection, made.id, by="dana", reason="why not")
        with pytest.raises(NotFound):
            deliveries.release(connection, "01a227e1-8921-7001-a2c4-ace8f4971791", by="dana", reason="why not")
