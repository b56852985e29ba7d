"""What our pages in Flower are made of: hints read from events, looks that are bounded, addresses of brokers."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.events.state import Task
from flower.utils import broker

from durable_core.celery_binding.flower import look, words
from durable_core.celery_binding.flower.hints import Hint, format_task, hint_of
from durable_core.celery_binding.flower.pages import BrokerPage
from durable_core.celery_binding.settings import Settings
from durable_core.errors import DefinitionError

ID = "01a227e1-8921-7001-a2c4-ace8f4971791"


def task(**known: Any) -> Task:
    kwargs = repr({"kind": "mail.send", "id": ID, "attempt": 3})
    return Task(**{"uuid": ID, "name": "mail.send", "kwargs": kwargs, "args": "()", **known})


def test_a_hint_is_told_from_other_tasks() -> None:
    assert hint_of(task()) == Hint("mail.send", ID, 3)


@pytest.mark.parametrize(
    "kwargs",
    [
        None,
        "",
        "{}",
        "{'id': 41}",
        "not python",
        "[" * 500,
        repr({"kind": "mail.send", "id": ID, "attempt": 3, "address": "dana@example.org"}),
        repr({"kind": "other", "id": ID, "attempt": 3}),
        repr({"kind": "mail.send", "id": "<script>", "attempt": 3}),
        repr({"kind": "mail.send", "id": ID, "attempt": "<script>"}),
        repr({"kind": "mail.send", "id": ID, "attempt": True}),
        repr({"kind": "mail.send", "id": ID, "attempt": 10**2000}),
    ],
)
def test_a_task_that_is_no_hint_stays_as_it_is(kwargs: object) -> None:
    other = task(kwargs=kwargs, state="SUCCESS", result="'x'")
    assert hint_of(other) is None
    shown = format_task(other)
    assert (shown.args, shown.kwargs, shown.result) == ("()", kwargs, "'x'")


@pytest.mark.parametrize(
    ("state", "event", "said"),
    [
        ("SUCCESS", {"result": "'claim lost'"}, "claim lost"),
        ("RETRY", {"exception": "DeliveryRetried('snoozed until 2026: NOT_YET')"}, "snoozed until 2026: NOT_YET"),
        ("FAILURE", {"exception": "DeliveryEnded('dead: ValueError')"}, "dead: ValueError"),
        ("FAILURE", {"exception": "NotRegistered('mail.send')"}, "NotRegistered('mail.send')"),
        ("STARTED", {}, None),
    ],
)
def test_a_hint_says_in_a_word_how_it_ended(state: str, event: dict[str, str], said: str | None) -> None:
    shown = format_task(task(state=state, **event))
    assert (shown.kwargs, shown.result) == (f"attempt 3 of mail.send {ID}", said)


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """What looks wait for that hang; they are let go at the end, and all are free again."""
    go = threading.Event()
    yield go
    go.set()
    for _ in range(look.AT_ONCE):
        assert look._free.acquire(timeout=10)
    look._free.release(look.AT_ONCE)


def test_looks_that_hang_are_given_up_and_do_not_heap_up(
    hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "ANSWER_SECONDS", 0.05)

    async def all_of_them() -> None:
        for _ in range(look.AT_ONCE):
            with pytest.raises(TimeoutError):
                await look.aside(hung.wait)
        with pytest.raises(look.Busy):
            await look.aside(hung.wait)

    asyncio.run(all_of_them())


def test_a_look_that_ends_makes_room_and_what_it_raises_is_raised() -> None:
    def fail() -> None:
        raise LookupError

    async def all_of_them() -> None:
        for _ in range(2 * look.AT_ONCE):
            assert await look.aside(lambda: 41) == 41
            with pytest.raises(LookupError):
                await look.aside(fail)

    asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("url", "meant", "host", "port", "database"),
    [
        ("durable-redis://:p%40w@broker:7000/3", broker.Redis, "broker", 7000, 3),
        ("durable-redis://broker:6379//", broker.Redis, "broker", 6379, 0),
        ("durable-rediss://:p%40w@broker:7000/3", broker.RedisSsl, "broker", 7000, 3),
        ("durable-sentinel://:p%40w@broker:26379/3", broker.RedisSentinel, "broker", 26379, 3),
        ("redis://:p%40w@broker:7000/3", broker.Redis, "broker", 7000, 3),
    ],
)
def test_the_broker_page_asks_the_server_that_the_guarded_url_names(
    url: str, meant: type, host: str, port: int, database: int
) -> None:
    page: Any = BrokerPage.__new__(BrokerPage)
    page.application = SimpleNamespace(broker_uri_with_password=url)
    page.prepare()
    # As Flower does next, in all its releases.
    asked = broker.Broker(
        page.application.broker_uri_with_password,
        broker_options={"master_name": "main", "global_keyprefix": "staging:"}, broker_use_ssl=False,
    )  # fmt: skip

    assert type(asked) is meant
    assert (asked.host, asked.port, asked.vhost) == (host, port, database)
    assert asked.password == ("p@w" if "@" in url else None)
    assert (asked.broker_prefix, tuple(asked.priority_steps)) == ("staging:", (0, 3, 6, 9))


def test_the_setting_that_lets_pages_tell_the_payload_is_true_or_false_and_no_text() -> None:
    app = Celery("shop")
    assert Settings.of(app).flower_payload is False
    app.conf.durable_flower_payload = True
    assert Settings.of(app).flower_payload is True
    app.conf.durable_flower_payload = "false"
    with pytest.raises(DefinitionError, match="durable_flower_payload='false': give True or False"):
        Settings.of(app)


def test_instants_are_for_people() -> None:
    at = datetime(2026, 11, 30, 13, 5, 9, 999, tzinfo=UTC)
    assert words.instant(at.astimezone()) == "2026-11-30 13:05:09 UTC"
