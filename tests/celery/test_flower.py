"""The real Flower over HTTP, beside real workers: it finds deliveries, shows each one, and tells strangers nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from durable_core import deliveries, kinds, operation, wakes
from durable_core.local import Addresses
from tests.celery.conftest import Nodes
from tests.celery.flower import Flower, started
from tests.celery.nodes import Broker, ShopWorker, wait_until
from tests.celery.shop import Shop
from tests.celery.world import World
from tests.relay import Relay

CANARY = "canary-7d20c5"
LOGIN = ("dana", "a-long-password")
UNKNOWN = "01a227e1-8921-7001-a2c4-ace8f4971791"
TELLING = """
from durable_core.celery_binding.flower.config import *
from tests.celery.shop_app import app

app.conf.durable_flower_payload = True
"""
"""A flowerconfig of a user's own, who lets his pages tell the payload."""
HOLD = (
    "update durable.deliveries set held_reason = :why where id = :id",
    "insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason)"
    " values (:id, 'delivery', 'hold', 'pending', 'pending', 0, :why)",
)
"""What a sweep writes that failed on a row."""


@pytest.fixture(scope="module")
def environment(shop_environment: dict[str, str], celery_broker: Broker) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLOWER_", "DURABLE_"))}
    return {**kept, **shop_environment, "CELERY_BROKER_URL": celery_broker.url}


@pytest.fixture(scope="module")
def flower(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    """Flower with the shipped flowerconfig and nothing else."""
    with started(tmp_path_factory.mktemp("flower"), environment) as running:
        yield running


@pytest.fixture
def hearing(world: World, flower: Flower) -> Flower:
    """The same, once it hears the workers."""
    flower.hears()
    return flower


@pytest.fixture(scope="module")
def relay(shop_engine: Engine) -> Iterator[Relay]:
    """What the closed Flower reaches the database by."""
    between = Relay(str(shop_engine.url.host), int(shop_engine.url.port or 5432))
    yield between
    between.close()


@pytest.fixture(scope="module")
def closed(
    environment: dict[str, str], relay: Relay, shop_engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flower]:
    """Flower with a login, under a prefix, which may tell the payload."""
    folder = tmp_path_factory.mktemp("closed")
    (folder / "flowerconfig.py").write_text(TELLING)
    through = shop_engine.url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    its_own = {**environment, "FLOWER_BASIC_AUTH": ":".join(LOGIN), "SHOP_DATABASE_URL": through}
    with started(folder, its_own, conf=None, prefix="/flower", login=LOGIN) as running:
        yield running


# --- finding ----------------------------------------------------------------------------------------


def test_the_search_finds_a_delivery_by_its_id_and_by_its_kind(world: World, shop_kinds: Shop, hearing: Flower) -> None:
    row_id = world.commit_for_its_own_hint(shop_kinds.retried, "done")
    world.sent(row_id)
    retried, sent = hearing.ended(row_id, "RETRY", "SUCCESS")

    assert (retried["uuid"], retried["name"]) == (row_id, "shop.retried")
    assert retried["kwargs"] == f"attempt 1 of shop.retried {row_id}"
    assert retried["result"] == "will be tried again (attempt 1 of 5): RETRY_ASKED"
    assert sent["uuid"] != row_id, "a later hint is a task of its own"
    assert sent["kwargs"] == f"attempt 2 of shop.retried {row_id}"
    assert (sent["result"], sent["args"]) == ("sent", "")
    for by_kind in ("shop.retried", "name:shop.retried"):
        assert row_id in [hint["uuid"] for hint in hearing.search(by_kind)]
    assert hearing.search(UNKNOWN) == []


def test_a_task_leads_to_the_delivery_it_was_a_hint_of_and_other_tasks_lead_nowhere(
    world: World, shop_kinds: Shop, hearing: Flower
) -> None:
    row_id = world.commit_for_its_own_hint(shop_kinds.retried, "done")
    world.sent(row_id)
    _, later = hearing.ended(row_id, "RETRY", "SUCCESS")

    for task_id in (row_id, later["uuid"]):
        shown = hearing.get(f"/task/{task_id}")
        assert shown.status == 200
        assert f'href="/delivery/{row_id}"' in shown.source
    sweep = hearing.search("durable.dispatch")[0]
    shown = hearing.get(f"/task/{sweep['uuid']}")
    assert shown.status == 200
    assert "/delivery/" not in shown.source
    assert "Unknown task" in hearing.get(f"/task/{UNKNOWN}").text


def test_a_kind_that_the_worker_does_not_know_is_a_failure_and_its_delivery_waits(
    world: World, shop_kinds: Shop, hearing: Flower, nodes: Nodes
) -> None:
    nodes.worker("blind", "-Q", "durable.blind", "--pool", "solo", environment={"SHOP_WITHOUT": "later"}).ready()
    row_id = world.commit(shop_kinds.later, queue="blind")

    def failed() -> list[dict[str, Any]]:
        return [hint for hint in hearing.search(row_id) if hint["state"] == "FAILURE"]

    hint = wait_until(failed, "Flower shows that it failed")[0]
    assert hint["result"] == "NotRegistered('shop.later')"
    shown = hearing.delivery(row_id)
    assert "a worker that was told of it does not know kind shop.later: deploy its code there." in shown.text
    assert f'href="/delivery/{row_id}"' in hearing.get(f"/task/{hint['uuid']}").source


# --- one delivery -------------------------------------------------------------------------------------


def test_a_delivery_that_is_done_shows_its_row_and_its_journal(world: World, shop_kinds: Shop, flower: Flower) -> None:
    row_id = world.commit(shop_kinds.retried, "done")
    world.sent(row_id)
    shown = flower.delivery(row_id)

    assert shown.status == 200
    assert "no-store" in shown.headers["cache-control"]
    for told in ("shop.retried", row_id, "sent", "Attempts 2 of 5", "Queue durable, priority 5", "RETRY_ASKED"):
        assert told in shown.text, told
    assert "its handler returned and its receipt was committed" in shown.text
    assert "fail processing pending 1 1" in shown.text, "the line of its journal"


def test_a_delivery_given_up_says_by_what_it_leaves(world: World, shop_kinds: Shop, flower: Flower) -> None:
    row_id = world.commit(shop_kinds.hopeless, "nobody@example.org")
    world.finished(row_id)
    shown = flower.delivery(row_id)

    assert "Given up for good at " in shown.text
    assert f"(NO_RECIPIENT); it leaves only by `durable deliveries redrive {row_id}`." in shown.text


def test_a_delivery_that_runs_says_where_and_since_when(world: World, shop_kinds: Shop, flower: Flower) -> None:
    row_id = world.commit(shop_kinds.held, "claimed")
    pid = world.held_at(row_id)
    shown = flower.delivery(row_id)

    assert "processing" in shown.text
    assert f"in process {pid} on " in shown.text
    assert "Lease until" in shown.text
    world.open(row_id)
    world.sent(row_id)


def test_a_delivery_that_waits_says_all_it_waits_for(world: World, shop_kinds: Shop, flower: Flower) -> None:
    ahead = world.prepare(shop_kinds.order, queue="unread", ordering_key="line", expires=1800)
    row_id = world.commit(shop_kinds.order, queue="unread", ordering_key="line", countdown=120, expires=1800)
    with world.engine.begin() as connection:
        connection.execute(
            text("update durable.deliveries set attempts = 1, snoozes = 1 where id = :id"), {"id": ahead}
        )
        deliveries.pause(connection, "queue", "unread", by="dana", reason="the printer is on fire")
    try:
        shown = flower.delivery(row_id)
    finally:
        with world.engine.begin() as connection:
            deliveries.resume(connection, "queue", "unread", by="dana")

    assert "Queue unread is paused by dana (the printer is on fire), until somebody resumes it" in shown.text
    assert f"Behind delivery {ahead} of the same ordering key, which" in shown.text
    assert f'href="/delivery/{ahead}"' in shown.source
    assert "It is not due before 1m" in shown.text
    assert "It expires in 29m" in shown.text


def test_the_page_of_an_operation_says_where_it_is(world: World, flower: Flower) -> None:
    kind = operation("flower.reset", queue="nobody")(lambda step: [])
    kind.poll(lambda step, ids: {})
    try:
        with Session(world.engine) as session, session.begin():
            ref = kind.start(session, by="dana")
        shown = flower.delivery(ref.id)
    finally:
        kinds.operations.remove(kind.name)
    assert shown.status == 200
    assert f"Operation {ref.id} of flower.reset is queued" in shown.text


def test_an_id_of_nothing_is_said_to_be_none(world: World, flower: Flower, closed: Flower) -> None:
    for unknown in (UNKNOWN, "not-an-id", "%3Cscript%3E"):
        for asked in (flower, closed):
            shown = asked.delivery(unknown)
            assert shown.status == 404
            assert "there is no delivery" in shown.text
            assert 'data-reason="NOT_FOUND"' in shown.source
            assert "<script>" not in shown.source.split("<main", 1)[1].split("</main>")[0]


# --- what is not shown --------------------------------------------------------------------------------


def test_no_payload_is_shown_anywhere(world: World, shop_kinds: Shop, hearing: Flower) -> None:
    seen = [
        world.commit_for_its_own_hint(shop_kinds.order, CANARY),
        world.commit_for_its_own_hint(shop_kinds.retried, CANARY),
        world.commit_for_its_own_hint(shop_kinds.hopeless, CANARY),
        world.commit(shop_kinds.order, CANARY, key=CANARY, ordering_key=CANARY, queue="unread"),
    ]
    world.finished(*seen[:3])
    held = world.commit(shop_kinds.order, CANARY, queue="unread")
    with world.engine.begin() as connection:
        for sql in HOLD:
            connection.execute(text(sql), {"id": held, "why": f"RaiseException: refuses {CANARY}"})
    pages = [hearing.delivery(row_id) for row_id in [*seen, held]]
    for row_id in seen[:3]:
        wait_until(lambda row_id=row_id: hearing.search(row_id), "Flower heard of it")
        pages.append(hearing.get(f"/task/{row_id}"))
    pages.append(hearing.get("/tasks"))
    pages.append(hearing.get("/metrics"))

    assert {page.status for page in pages} == {200}
    assert "Arguments not shown here" in pages[0].text
    assert "Key not shown here Ordering key not shown here" in pages[3].text
    assert "Held back by a sweep that failed on it (RaiseException);" in pages[4].text
    assert not [page for page in pages if CANARY in page.source]
    assert CANARY not in str([hint for row_id in seen for hint in hearing.search(row_id)])
    assert not [row_id for row_id in seen if row_id in pages[-1].source], "metrics name kinds and no row"


def test_with_the_setting_the_payload_is_told_but_for_its_secrets(
    world: World, shop_kinds: Shop, closed: Flower
) -> None:
    closed.hears()
    row_id = world.commit(shop_kinds.hopeless, CANARY, key=f"key {CANARY}")
    world.finished(row_id)
    wait_until(lambda: closed.search(row_id), "Flower heard of it")
    with Session(world.engine) as session, session.begin():
        named = deliveries.enqueue_by_name(session, "shop.elsewhere", {"note": CANARY, "password": "s3cret"}).id
    shown, secret = closed.delivery(row_id), closed.delivery(named)

    assert f'"address": "{CANARY}"' in shown.text
    assert f"Key key {CANARY}" in shown.text
    assert "no such address" in shown.text, "the text of its error"
    assert CANARY in secret.text
    assert "s3cret" not in secret.source
    for heard in (closed.get("/api/tasks"), closed.get(f"/task/{row_id}")):
        assert row_id in heard.source
        assert CANARY not in heard.source, "what came by messages never carries it"


def test_whatever_a_row_holds_is_shown_as_text(world: World, shop_kinds: Shop, closed: Flower) -> None:
    evil = "<script>alert(1)</script>"
    row_id = world.commit(shop_kinds.order, evil, key=evil, ordering_key=evil, queue="unread")
    with world.engine.begin() as connection:
        deliveries.reschedule(connection, row_id, by=evil, reason=evil, countdown=60)
        deliveries.pause(connection, "queue", "unread", by=evil, reason=evil)
        # No command of ours writes such a kind; whoever has the table can.
        connection.execute(text("alter table durable.deliveries disable trigger guard_delivery"))
        connection.execute(
            text("update durable.deliveries set kind = :x, error_code = :x, error_message = :x where id = :id"),
            {"x": evil, "id": row_id},
        )
        connection.execute(text("alter table durable.deliveries enable trigger guard_delivery"))
    try:
        shown = closed.delivery(row_id)
    finally:
        with world.engine.begin() as connection:
            deliveries.resume(connection, "queue", "unread", by="dana")

    assert shown.status == 200
    assert "<script>alert" not in shown.source
    assert shown.text.count(evil) >= 8


# --- who may look -------------------------------------------------------------------------------------


def test_a_stranger_is_told_nothing(world: World, shop_kinds: Shop, closed: Flower) -> None:
    row_id = world.commit(shop_kinds.order)
    world.sent(row_id)
    paths = [
        f"/delivery/{row_id}",
        f"/delivery/{UNKNOWN}",
        "/delivery/x",
        f"/task/{row_id}",
        "/tasks",
        "/broker",
        "/metrics",
    ]

    for path in paths:
        refused = closed.get(path, stranger=True)
        assert (refused.status, refused.source) == (401, "Access denied"), path
    assert closed.delivery(row_id).status == 200
    assert "flower_" in closed.get("/metrics").source
    closed.hears()
    told = world.commit_for_its_own_hint(shop_kinds.order)
    world.sent(told)
    closed.ended(told, "SUCCESS")
    assert f'href="/flower/delivery/{told}"' in closed.get(f"/task/{told}").source, "behind its prefix"


def test_nothing_is_asked_of_the_database_for_a_stranger(
    world: World, shop_kinds: Shop, closed: Flower, relay: Relay
) -> None:
    row_id = world.commit(shop_kinds.order)
    world.sent(row_id)
    cut = relay.cut_before(b"\x00")

    assert closed.get(f"/delivery/{row_id}", stranger=True).status == 401
    assert not cut.done
    assert closed.delivery(row_id).status == 503
    assert cut.done, "a look would have met it"


def test_where_people_log_in_elsewhere_a_stranger_is_sent_there(
    world: World, shop_kinds: Shop, environment: dict[str, str], tmp_path: Path
) -> None:
    row_id = world.commit(shop_kinds.order)
    world.sent(row_id)
    by_mail = (
        "--auth=dana@example.org", "--auth_provider=flower.views.auth.GoogleAuth2LoginHandler",
        "--oauth2_key=key", "--oauth2_secret=secret", "--oauth2_redirect_uri=http://127.0.0.1/login",
    )  # fmt: skip
    with started(tmp_path, environment, *by_mail) as flower:
        for path in (f"/delivery/{row_id}", f"/delivery/{UNKNOWN}", "/broker", "/metrics"):
            sent_away = flower.get(path)
            assert (sent_away.status, sent_away.source) == (302, ""), path
            assert sent_away.headers["location"].startswith("/login?")


def test_flower_listens_on_loopback_and_changes_nothing(closed: Flower, flower: Flower) -> None:
    assert flower.addresses() == closed.addresses() == {"127.0.0.1"}
    assert closed.post(f"/api/task/revoke/{UNKNOWN}") == 403
    assert closed.post("/api/task/send-task/shop.order") == 403
    assert flower.post(f"/api/task/revoke/{UNKNOWN}") == 401


# --- without its database -----------------------------------------------------------------------------


@pytest.mark.parametrize(("ill", "said"), [("cut", "OperationalError"), ("silent", "TimeoutError")])
def test_a_database_that_does_not_answer_is_said_in_a_sentence(
    ill: str, said: str, world: World, shop_kinds: Shop, closed: Flower, relay: Relay
) -> None:
    row_id = world.commit(shop_kinds.order)
    world.sent(row_id)
    # Of a connection's first message each holds a zero byte.
    (relay.cut_before if ill == "cut" else relay.silence_before)(b"\x00")
    shown = closed.delivery(row_id)

    assert shown.status == 503
    assert f"the database did not answer ({said})" in shown.text
    assert 'data-reason="NO_ANSWER"' in shown.source
    assert str(relay.port) not in shown.source
    assert closed.delivery(row_id).status == 200, "the next look has a connection of its own"


def test_a_schema_that_the_code_does_not_know_is_said_with_what_mends_it(
    world: World, shop_kinds: Shop, flower: Flower
) -> None:
    row_id = world.commit(shop_kinds.order)
    world.sent(row_id)
    with world.engine.begin() as connection:
        connection.execute(text("alter table durable.schema_version rename to hidden"))
    try:
        shown = flower.delivery(row_id)
    finally:
        with world.engine.begin() as connection:
            connection.execute(text("alter table durable.hidden rename to schema_version"))

    assert shown.status == 503
    assert "durable migrate" in shown.text


# --- the broker ---------------------------------------------------------------------------------------


def test_the_broker_page_counts_the_hints_of_every_priority(
    world: World, hearing: Flower, celery_worker: ShopWorker
) -> None:
    celery_worker.also_reads("counted")

    def known() -> bool:
        hearing.get("/workers", refresh=1)
        return "durable.counted" in hearing.get("/broker").source

    wait_until(known, "Flower knows of the queue")
    celery_worker.reads_no_more("counted")
    wait_until(lambda: "durable.counted" not in celery_worker.queues(), "nobody reads it")
    hints = [wakes.Hint("shop.order", UNKNOWN, "counted", priority) for priority in (0, 1, 4, 7, 9)]
    world.durable.carrier.publish(hints)
    try:
        shown = hearing.get("/broker")
    finally:
        world.broker.lose("counted")

    assert shown.status == 200
    assert "durable-redis://" in shown.text
    assert "durable.counted 5" in shown.text
    password = world.broker.url.split(":")[2].split("@")[0]
    assert password not in shown.source


# --- the deployable app -------------------------------------------------------------------------------


def test_the_deployable_app_brings_its_configuration_along(services: Addresses, engine: Engine, tmp_path: Path) -> None:
    """`celery -A tasks flower`, from any folder."""
    made = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLOWER_")},
        "DURABLE_DATABASE_URL": engine.url.render_as_string(hide_password=False),
        "DURABLE_REDIS_URL": services.redis_url,
    }
    with started(tmp_path, made, app="tasks", conf=None) as flower:
        assert flower.delivery(UNKNOWN).status == 404
        assert flower.get("/broker").status == 200
        assert flower.addresses() == {"127.0.0.1"}


def test_an_app_without_durable_work_is_told_what_is_missing(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("from celery import Celery\napp = Celery('bare')\n")
    with started(tmp_path, environment, app="bare") as flower:
        shown = flower.delivery(UNKNOWN)
        assert shown.status == 503
        assert "call durable_core.celery_binding.install(app)" in shown.text
        assert flower.get("/broker").status == 200, "a broker's own URL as before"
