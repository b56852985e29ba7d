"""What Flower sees: how each delivery ended, found by the row's id, and nothing of what it carries."""

import time
from datetime import UTC, datetime

from tests.celery.nodes import wait_until
from tests.celery.shop import Shop
from tests.celery.world import Events, Traffic, World, everything_in, mentions

CANARY = "canary-4f1d9c0b7e"


def test_the_first_hint_goes_by_the_row_s_id_and_says_kind_id_and_attempt(world: World, shop_kinds: Shop) -> None:
    with Events(world.app) as events:
        row_id = world.commit_for_its_own_hint(shop_kinds.order)
        received = events.wait_for("task-received", row_id)
        succeeded = events.wait_for("task-succeeded", row_id)

    assert received["name"] == "shop.order"
    assert received["kwargs"] == repr({"kind": "shop.order", "id": row_id, "attempt": 1})
    assert received["args"] == "()"
    assert succeeded["result"] == "'sent'"


def test_a_hint_that_finds_nothing_succeeds_and_says_so(world: World, shop_kinds: Shop) -> None:
    row_id = world.commit(shop_kinds.order)
    world.sent(row_id)
    with Events(world.app) as events:
        task_id = world.app.send_task(
            "shop.order", kwargs={"id": row_id}, queue="durable.durable", ignore_result=True
        ).id
        succeeded = events.wait_for("task-succeeded", task_id)

    assert succeeded["result"] == "'nothing to do'"
    assert len(world.executions(row_id)) == 1


def test_a_failed_attempt_is_a_retry_and_no_message_with_an_eta_is_sent(world: World, shop_kinds: Shop) -> None:
    with Events(world.app) as events, Traffic(world.broker) as traffic:
        row_id = world.commit_for_its_own_hint(shop_kinds.retried, "done")
        retried = events.wait_for("task-retried", row_id)
        (row,) = world.sent(row_id)

    assert "RETRY_ASKED" in retried["exception"]
    assert (row.attempts, row.failures, row.result) == (2, 1, "done")
    # The second hint is another task: dispatch sent it when the row was due.
    assert [event["type"] for event in events.of(row_id)].count("task-received") == 1
    assert not any('"eta": "' in command for command in traffic.commands)


def test_a_snooze_is_a_retry_that_says_until_when(world: World, shop_kinds: Shop) -> None:
    """Its work is still to be done: a success would say that it is."""
    with Events(world.app) as events:
        row_id = world.commit_for_its_own_hint(shop_kinds.snoozed, "done")
        retried = events.wait_for("task-retried", row_id)
        (row,) = world.sent(row_id)
        (put_off,) = world.lines(row_id)

    assert put_off.facts is not None
    due = datetime.fromisoformat(put_off.facts["due_at"]).astimezone(UTC)
    assert f"'snoozed until {due:%Y-%m-%dT%H:%M:%S}Z: NOT_THERE_YET'" in retried["exception"]
    assert (row.attempts, row.snoozes, row.failures, row.result) == (2, 1, 0, "done")
    assert not {"task-succeeded", "task-failed"} & {event["type"] for event in events.of(row_id)}


def test_a_delivery_given_up_is_a_failure(world: World, shop_kinds: Shop) -> None:
    with Events(world.app) as events:
        row_id = world.commit_for_its_own_hint(shop_kinds.hopeless, "nobody@example.org")
        failed = events.wait_for("task-failed", row_id)

    assert "NO_RECIPIENT" in failed["exception"]
    (row,) = world.finished(row_id)
    assert (row.state, row.attempts, row.error_code) == ("failed", 1, "NO_RECIPIENT")


def test_no_payload_reaches_the_broker(world: World, shop_kinds: Shop) -> None:
    """Neither in a message, nor in an event, nor in any key, whatever becomes of the delivery."""
    with Events(world.app) as events, Traffic(world.broker) as traffic:
        seen = [
            world.commit_for_its_own_hint(shop_kinds.order, CANARY),
            world.commit_for_its_own_hint(shop_kinds.retried, CANARY),
            world.commit_for_its_own_hint(shop_kinds.hopeless, CANARY),
            world.commit_for_its_own_hint(shop_kinds.snoozed, CANARY),
        ]
        world.commit(shop_kinds.order, CANARY, queue="unread-canary")
        world.finished(*seen)
        ends = ("task-succeeded", "task-retried", "task-failed", "task-retried")
        for row_id, end in zip(seen, ends, strict=True):
            events.wait_for(end, row_id)
        wait_until(lambda: world.broker.depth("unread-canary") > 0, "one stays in its queue")
        time.sleep(0.1)
        kept = everything_in(world.broker)

    heard = [str(event) for event in events.seen]
    for texts in (traffic.commands, kept):
        assert mentions("shop.order", texts), "the search would find a word that is there"
    assert mentions(seen[0], traffic.commands), "also inside a message's body"
    assert not mentions(CANARY, traffic.commands)
    assert not mentions(CANARY, kept)
    assert not mentions(CANARY, heard)
