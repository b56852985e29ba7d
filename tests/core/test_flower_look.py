"""The one look that a page in Flower takes at the database: a snapshot, read-only, bounded, and no burden to a host."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from durable_core import deliveries, operations
from durable_core.celery_binding.flower import look as looking
from durable_core.celery_binding.flower import words
from durable_core.celery_binding.flower.look import READ_SECONDS, look
from durable_core.database.connections import Database
from durable_core.deliveries import Cause
from durable_core.deliveries.read import Delivery
from durable_core.deliveries.why import why
from durable_core.errors import NotFound
from durable_core.testing import Made
from tests.relay import Relay

UNKNOWN = "01a227e1-8921-7001-a2c4-ace8f4971791"

Make = Callable[..., Made]


def test_a_look_has_the_row_what_it_waits_for_and_its_journal(database: Database, engine: Engine, make: Make) -> None:
    row_id = make(countdown=60).id
    with engine.begin() as connection:
        deliveries.reschedule(connection, row_id, by="dana", reason="later", countdown=120)
    seen = look(database, row_id)

    assert seen.row.id == row_id
    assert [wait.cause for wait in seen.waits] == [Cause.NOT_DUE]
    assert [(line.move, line.by, line.reason) for line in seen.lines] == [("reschedule", "dana", "later")]
    assert timedelta(seconds=100) < seen.row.due_at - seen.now <= timedelta(seconds=120)
    with pytest.raises(NotFound):
        look(database, UNKNOWN)


def test_an_operation_is_told_in_a_sentence_without_what_the_other_side_calls_it(
    database: Database, engine: Engine, reset: Any, start: Any, look: Any, remote: Any, clock: Any
) -> None:
    ref = start(reset)
    assert "waits for a worker to issue it" in str(looking.look(database, ref.id))
    look(reset, ref.id)
    clock.advance(seconds=60)
    told = str(looking.look(database, ref.id))
    assert re.match(rf"Operation {ref.id} of {reset.name} is running: its next poll is late by \d+s: ", told)
    assert remote.ids()[0] not in told
    with engine.begin() as tx:
        operations.cancel(tx, ref.id, by="dana", reason="no")
    assert "is canceled" in str(looking.look(database, ref.id))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("pending", "it waits for a free worker that reads queue durable."),
        ("processing", "Running for "),
        ("sent", "Done at 20"),
        ("failed", "Given up for good at 20"),
        ("dead", "Its budget was spent at 20"),
        ("canceled", "Canceled at 20"),
        ("expired", "Expired at 20"),
    ],
)
def test_every_state_has_its_words(database: Database, make: Make, state: str, says: str) -> None:
    seen = look(database, make(state=state).id)

    (reason,) = words.reasons(seen, payload=False)
    assert says in reason.says
    told = dict(words.facts(seen, payload=False))
    assert told["Attempts"].endswith(" of 5")
    assert ("Lease until" in told) == (state == "processing")
    assert ("Finished" in told) == (state not in ("pending", "processing"))


def test_the_page_and_the_command_say_the_same_but_for_what_a_customer_wrote(
    database: Database, engine: Engine, make: Make
) -> None:
    first = make(ordering_key="order of anna", state="processing").id
    row_id = make(ordering_key="order of anna").id
    hold = text("update durable.deliveries set held_reason = 'RaiseException: refuses anna' where id = :id")
    with engine.begin() as connection:
        connection.execute(hold, {"id": row_id})
    seen = look(database, row_id)
    command = why(seen.row, seen.waits, seen.now, seen.lines)
    assert len(command) == 2

    def page(payload: bool) -> list[str]:
        told = words.reasons(seen, payload=payload)
        assert [reason.other for reason in told] == [None, first]
        return [f"{reason.says}{reason.other or ''}{reason.after}" for reason in told]

    assert page(payload=True) == [sentence[0].upper() + sentence[1:] for sentence in command]
    assert page(payload=False) == [
        "Held back by a sweep that failed on it (RaiseException); "
        f"release it with `durable deliveries release {row_id}`.",
        f"Behind delivery {first} of the same ordering key, which is processing.",
    ]


def test_a_lease_that_lapsed_is_no_running_handler(database: Database, make: Make, clock: Any) -> None:
    row_id = make(state="processing").id
    clock.advance(seconds=45)

    (reason,) = words.reasons(look(database, row_id), payload=False)
    assert "whose lease lapsed 1" in reason.says
    assert "the next reap takes it back" in reason.says


@pytest.mark.parametrize(
    ("remark", "says"),
    [("handler", "does not know kind"), ("arguments", "do not fit the handler of the last worker that took it")],
)
def test_what_a_worker_found_wrong_is_told(
    database: Database, engine: Engine, make: Make, remark: str, says: str
) -> None:
    row_id = make().id
    with engine.begin() as connection:
        connection.execute(
            text("update durable.deliveries set waiting_for = :remark where id = :id"), {"remark": remark, "id": row_id}
        )
    (reason,) = words.reasons(look(database, row_id), payload=False)
    assert says in reason.says


def test_a_look_cannot_write_and_no_statement_of_it_runs_long(
    database: Database, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_id = make().id
    found: dict[str, object] = {}

    def asks(connection: Connection, row: Delivery) -> list[object]:
        for name in ("transaction_read_only", "transaction_isolation", "statement_timeout"):
            found[name] = connection.scalar(text(f"show {name}"))
        with pytest.raises(DBAPIError, match="read-only transaction"), connection.begin_nested():
            connection.execute(text("update durable.deliveries set hint_at = hint_at"))
        return []

    monkeypatch.setattr(looking, "waits_of", asks)
    look(database, row_id)
    assert found == {
        "transaction_read_only": "on",
        "transaction_isolation": "repeatable read",
        "statement_timeout": f"{READ_SECONDS:g}s",
    }


def test_a_look_needs_no_connection_of_the_hosts_pool_and_leaves_none_open(engine: Engine, make: Make) -> None:
    row_id = make().id
    full = create_engine(
        engine.url, pool_size=1, max_overflow=0, pool_timeout=1, connect_args={"application_name": "flower's look"}
    )
    try:
        with full.connect() as connection:
            assert look(Database(full), row_id).row.id == row_id
            ours = text("select count(*) from pg_stat_activity where application_name = 'flower''s look'")
            end = time.monotonic() + 10
            while connection.scalar(ours) != 1:  # a session ends a moment after it is told to
                assert time.monotonic() < end, "a session was left behind"
                connection.rollback()
                time.sleep(0.05)
    finally:
        full.dispose()


def test_a_look_waits_for_nobody(database: Database, engine: Engine, make: Make) -> None:
    row_id = make().id
    with engine.begin() as connection:
        connection.execute(text("select from durable.deliveries where id = :id for update"), {"id": row_id})
        assert look(database, row_id).row.id == row_id


def test_a_database_that_falls_silent_in_the_middle_of_a_look_is_given_up(
    engine: Engine, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_id = make().id
    monkeypatch.setattr(looking, "READ_SECONDS", 1.0)
    relay = Relay(str(engine.url.host), int(engine.url.port or 5432))
    through = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    relay.silence_before(b"transaction_read_only")
    raised: list[type] = []

    def looks() -> None:
        try:
            look(Database(through), row_id)
        except OperationalError as error:
            raised.append(type(error))

    thread = threading.Thread(target=looks, daemon=True)
    thread.start()
    # The bound, and the second in which it is noticed; three times that.
    thread.join(6)
    relay.close()

    assert raised == [OperationalError]
