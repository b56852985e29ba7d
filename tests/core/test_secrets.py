"""A secret argument is stored, handed to its handler, and shown masked wherever arguments are shown."""

from typing import Any

from sqlalchemy import Engine, text

from durable_core import Secret, Step, deliveries, enqueue_by_name
from durable_core.deliveries.attempt import Worker, perform
from durable_core.deliveries.declare import delivery, registry


def test_a_secret_is_masked_wherever_it_is_shown_and_reaches_the_handler(engine: Engine, worker: Worker) -> None:
    """The hole is asserted too: the row has it in the clear."""
    given: list[str] = []

    @delivery("test.secretive")
    def secretive(step: Step, user: int, note: Secret[str]) -> None:
        given.append(note)

    try:
        new = secretive.options().new(7, "hunter2")
        with engine.begin() as tx:
            ref = secretive.enqueue(tx, 7, "hunter2")
        with engine.connect() as tx:
            row = deliveries.get(tx, ref.id)
            stored = tx.scalar(text("select arguments ->> 'note' from durable.deliveries"))
        shown = [repr(new), repr(row), str(row), str(row.as_json())]
        assert not [one for one in shown if "hunter2" in one]
        assert row.as_json()["arguments"] == {"user": 7, "note": "***"}
        assert (row.arguments["note"], stored) == ("hunter2", "hunter2")
        perform(worker, secretive, ref.id)
        assert given == ["hunter2"]
    finally:
        registry.remove("test.secretive")


def test_a_claim_does_not_show_its_arguments(engine: Engine, worker: Worker, caplog: Any) -> None:
    seen: list[str] = []

    @delivery("test.secretive")
    def secretive(step: Step, note: Secret[str]) -> None:
        seen.append(repr(step._claim))
        raise ValueError("no")

    try:
        with engine.begin() as tx:
            ref = secretive.enqueue(tx, "hunter2")
        with caplog.at_level("DEBUG"):
            perform(worker, secretive, ref.id)
        with engine.connect() as tx:
            kept = deliveries.get(tx, ref.id).error_message
    finally:
        registry.remove("test.secretive")
    assert seen
    assert "hunter2" not in f"{seen} {caplog.text} {[vars(one) for one in caplog.records]} {kept}"


def test_where_the_code_is_elsewhere_the_name_decides(engine: Engine) -> None:
    with engine.begin() as tx:
        ref = enqueue_by_name(tx, "elsewhere.login", {"user": 7, "apiKey": "hunter2", "body": {"password": "hunter2"}})
    with engine.connect() as tx:
        row = deliveries.get(tx, ref.id)
    assert row.shown_arguments == {"user": 7, "apiKey": "***", "body": {"password": "***"}}
