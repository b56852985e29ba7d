"""The guarded transport over a real Valkey: what is no hint never reaches Celery, and other queues pass unchanged."""

import base64
import contextlib
import json
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue
from kombu.exceptions import OperationalError
from redis import exceptions

import tasks
from durable_core.celery_binding import transport
from durable_core.celery_binding.publish import CeleryCarrier, broker_queue
from durable_core.celery_binding.transport import GuardedTransport, Refused, guarded, rebuilt
from durable_core.local.services import Addresses
from durable_core.wakes import Hint

pytestmark = pytest.mark.serial

transport.register()


def message(
    task: str = "mail.send", row_id: Any = "01a227e1-8921-7001-a2c4-ace8f4971791", **over: Any
) -> dict[str, Any]:
    body = json.dumps([[], {"id": row_id}, {"callbacks": None}])
    return {
        "body": base64.b64encode(body.encode()).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": task, "id": str(uuid.uuid4()), "kwargsrepr": "{'attempt': 3}", "eta": "2999-01-01"},
        "properties": {"delivery_tag": "x", "priority": 3, "reply_to": "elsewhere", "correlation_id": "y"},
        **over,
    }


NOTHING_MORE = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def body(*content: Any) -> str:
    return base64.b64encode(json.dumps(content).encode()).decode()


def test_a_hint_is_made_anew_from_its_kind_and_id_alone() -> None:
    made = rebuilt(message(), "durable.mail")

    assert json.loads(base64.b64decode(made["body"]))[:2] == [[], {"id": "01a227e1-8921-7001-a2c4-ace8f4971791"}]
    assert made["headers"]["eta"] is None
    assert made["headers"]["timelimit"] == [None, None]
    assert made["headers"]["kwargsrepr"] == repr(
        {"kind": "mail.send", "id": "01a227e1-8921-7001-a2c4-ace8f4971791", "attempt": 3}
    )
    assert made["properties"]["reply_to"] == ""
    assert made["properties"]["delivery_tag"] != "x"
    assert made["properties"]["priority"] == 3


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        "text",
        None,
        message(headers=None),
        message(properties=3),
        message(body=7),
        message(body="not base64!"),
        message(body=body(1, 2, 3)),
        message(body=body([], {"id": "01a227e1-8921-7001-a2c4-ace8f4971791"})),
        message(body=body(["x"], {"id": "01a227e1-8921-7001-a2c4-ace8f4971791"}, {})),
        message(body=body([], {"id": "01a227e1-8921-7001-a2c4-ace8f4971791", "more": 1}, {})),
        message(body=base64.b64encode(b"[" * 100_000).decode()),
        message(body=base64.b64encode(b"[" * 1_500).decode()),
        message(row_id=41),
        message(row_id="../../etc"),
        message(row_id=None),
        message(task="os.system\nFAKE LOG LINE"),
        message(task=""),
        message(headers={"task": "mail.send", "id": "x" * 65}),
        message(headers={"task": ["mail.send"], "id": "x"}),
        message(task="durable.other"),
        message(task="celery.backend_cleanup", body=body([], {}, {})),
    ],
    ids=range(22),
)
def test_what_is_no_hint_is_refused_whatever_is_wrong_with_it(damaged: Any) -> None:
    with pytest.raises(Refused):
        rebuilt(damaged, "durable.mail")


def test_a_sweep_passes_without_a_row() -> None:
    made = rebuilt(message(task="durable.reap", body=body([], {}, {})), "durable.control")

    assert made["headers"]["task"] == "durable.reap"
    assert json.loads(base64.b64decode(made["body"]))[:2] == [[], {}]


@pytest.fixture
def valkey(services: Addresses) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(services.redis_url) as client:
        yield client
        client.flushdb()


@pytest.fixture
def broker(services: Addresses, valkey: redis.Redis) -> Iterator[Connection]:
    with Connection(guarded(services.redis_url)) as connection:
        yield connection


def drained(connection: Connection, queue: Queue, expected: int) -> list[Any]:
    """The bodies that a consumer of this queue is given."""
    got: list[Any] = []
    with connection.Consumer(queue, callbacks=[lambda payload, msg: (got.append(payload), msg.ack())], accept=["json"]):
        while len(got) < expected:
            connection.drain_events(timeout=5)
        with contextlib.suppress(TimeoutError):
            while True:
                connection.drain_events(timeout=0.3)
    return got


def test_raw_garbage_is_dropped_and_the_hints_around_it_arrive(
    broker: Connection, valkey: redis.Redis, services: Addresses
) -> None:
    app = Celery("producer", broker=guarded(services.redis_url))
    first, last = (Hint("mail.send", str(uuid.uuid4()), "mail", 0) for _ in range(2))
    CeleryCarrier(app).publish([first])
    garbage = [b"", b"\xff\xfe", b"{", b"[" * 200_000, b"null", b'"text"', b'{"body": 1}', b"x" * 1_000_000]
    for item in garbage:
        valkey.lpush("durable.mail", item)
    CeleryCarrier(app).publish([last])
    before = sum(transport.dropped.values())

    got = drained(broker, broker_queue("mail"), expected=2)

    assert [kwargs for _, kwargs, _ in got] == [{"id": first.id}, {"id": last.id}]
    assert sum(transport.dropped.values()) - before == len(garbage)


def test_drops_of_one_reason_are_all_counted_and_few_of_them_logged(caplog: pytest.LogCaptureFixture) -> None:
    guard = transport._GuardedDeliveries()
    before = transport.dropped["not an object"]
    with caplog.at_level(logging.ERROR, "durable.transport"):
        for _ in range(2 * 1000):
            guard._deliver("secret-text", "durable.mail")

    assert transport.dropped["not an object"] - before == 2000
    said = [vars(record) for record in caplog.records if record.message == "broker_message_dropped"]
    assert 2 <= len(said) <= transport.SAMPLED + 2
    assert {(facts["queue"], facts["reason"]) for facts in said} == {("durable.mail", "not an object")}
    assert said[-1]["count"] % 1000 == 0, "the last of them tells how many there were"
    assert "secret-text" not in repr(said)


def test_what_the_broker_refuses_is_told_with_its_reason_not_with_the_message(
    valkey: redis.Redis, services: Addresses
) -> None:
    carrier = CeleryCarrier(Celery("producer", broker=guarded(services.redis_url)))
    valkey.config_set("maxmemory", "1")
    try:
        with pytest.raises(OperationalError, match="maxmemory") as refused:
            carrier.publish([hint(), hint()])
    finally:
        valkey.config_set("maxmemory", "0")
    assert "LPUSH" not in str(refused.value)


def test_a_worker_takes_a_refusal_of_the_server_for_a_lost_connection(broker: Connection) -> None:
    """Celery ends a worker for any other error of its broker: READONLY, OOM, MISCONF."""
    for refusal in (exceptions.ReadOnlyError(), exceptions.OutOfMemoryError(), exceptions.ResponseError("MISCONF")):
        assert isinstance(refusal, broker.connection_errors)
    for url in ("rediss://example", "sentinel://example"):
        assert exceptions.ResponseError in Connection(guarded(url)).connection_errors


@contextlib.contextmanager
def consumed(connection: Connection, queue: Queue, prefetch: int = 0) -> Iterator[list[Any]]:
    """The messages that a consumer has been given and has not acknowledged."""
    got: list[Any] = []
    with connection.Consumer(queue, callbacks=[lambda _, message: got.append(message)], accept=["json"]) as consumer:
        consumer.qos(prefetch_count=prefetch)
        yield got


def more(connection: Connection) -> None:
    """What comes within a moment."""
    with contextlib.suppress(TimeoutError):
        while True:
            connection.drain_events(timeout=0.3)


def test_redis_keeps_no_copy_of_a_hint_that_is_not_acknowledged_yet(
    broker: Connection, valkey: redis.Redis, services: Addresses
) -> None:
    own = Queue("users.own", routing_key="users.own")
    with broker.Producer() as producer:
        producer.publish({"any": "thing"}, routing_key="users.own", declare=[own])
    CeleryCarrier(Celery("producer", broker=guarded(services.redis_url))).publish([hint()])
    with consumed(broker, broker_queue("mail")) as got:
        more(broker)
        assert (len(got), valkey.hlen("unacked")) == (1, 0)
        got[0].ack()
    with broker.clone() as another, consumed(another, own) as others:
        more(another)
        assert (len(others), valkey.hlen("unacked")) == (1, 1)
        others[0].ack()
        assert valkey.hlen("unacked") == 0


def test_a_consumer_is_given_another_hint_once_it_has_acknowledged_one(broker: Connection, services: Addresses) -> None:
    CeleryCarrier(Celery("producer", broker=guarded(services.redis_url))).publish([hint() for _ in range(3)])
    with consumed(broker, broker_queue("mail"), prefetch=1) as got:
        for number in range(1, 4):
            more(broker)
            assert len(got) == number
            got[-1].ack()


def test_a_hint_that_was_not_begun_goes_back_when_its_consumer_closes(valkey: redis.Redis, services: Addresses) -> None:
    sent = [hint() for _ in range(2)]
    CeleryCarrier(Celery("producer", broker=guarded(services.redis_url))).publish(sent)
    with Connection(guarded(services.redis_url)) as closing, consumed(closing, broker_queue("mail")) as got:
        more(closing)
        got[0].ack()
    with Connection(guarded(services.redis_url)) as next_one:
        assert drained(next_one, broker_queue("mail"), expected=1) == [[[], {"id": sent[1].id}, NOTHING_MORE]]


def test_a_hint_that_is_rejected_goes_back_if_it_is_to_be_queued_again(broker: Connection, services: Addresses) -> None:
    carrier = CeleryCarrier(Celery("producer", broker=guarded(services.redis_url)))
    carrier.publish([hint(), hint()])
    with consumed(broker, broker_queue("mail"), prefetch=2) as got:
        more(broker)
        assert carrier.depths(["mail"]) == {"mail": 0}
        got[0].reject()
        assert carrier.depths(["mail"]) == {"mail": 0}
        got[1].requeue()
        assert carrier.depths(["mail"]) == {"mail": 1}


def test_a_consumer_closes_though_redis_takes_nothing_back(
    valkey: redis.Redis, services: Addresses, caplog: pytest.LogCaptureFixture
) -> None:
    CeleryCarrier(Celery("producer", broker=guarded(services.redis_url))).publish([hint()])
    with caplog.at_level(logging.INFO, "durable.transport"):
        try:
            with Connection(guarded(services.redis_url)) as closing, consumed(closing, broker_queue("mail")):
                more(closing)
                valkey.config_set("maxmemory", "1")
        finally:
            valkey.config_set("maxmemory", "0")
    assert [record.hints for record in caplog.records if record.message == "hints_not_given_back"] == [1]


def test_messages_of_other_queues_pass_unchanged(broker: Connection) -> None:
    queue = Queue("users.own", routing_key="users.own")
    with broker.Producer() as producer:
        producer.publish({"any": ["thing", 1]}, routing_key="users.own", declare=[queue])

    assert drained(broker, queue, expected=1) == [{"any": ["thing", 1]}]


def test_a_hint_carries_no_more_than_a_kind_an_id_and_its_attempt(valkey: redis.Redis, services: Addresses) -> None:
    hint = Hint("mail.send", str(uuid.uuid4()), "mail", 0, attempt=2)
    CeleryCarrier(Celery("producer", broker=services.redis_url)).publish([hint])

    (item,) = valkey.lrange("durable.mail", 0, -1)

    sent = json.loads(item)
    assert json.loads(base64.b64decode(sent["body"]))[:2] == [[], {"id": hint.id}]
    assert sent["headers"]["id"] == hint.id
    assert sent["headers"]["kwargsrepr"] == repr({"kind": "mail.send", "id": hint.id, "attempt": 2})


def connections_made(valkey: redis.Redis) -> int:
    stats: Any = valkey.info("stats")
    return int(stats["total_connections_received"])


def hint(queue: str = "mail") -> Hint:
    return Hint("mail.send", str(uuid.uuid4()), queue, 5)


def test_a_thread_that_asks_and_publishes_again_and_again_keeps_one_connection(
    valkey: redis.Redis, services: Addresses
) -> None:
    carrier = CeleryCarrier(Celery("producer", broker=guarded(services.redis_url)))
    assert carrier.depths(["mail"]) == {"mail": 0}
    before = connections_made(valkey)

    for published in range(10):
        assert carrier.depths(["mail"]) == {"mail": published}
        carrier.publish([hint()])

    assert connections_made(valkey) == before


def test_a_connection_that_the_broker_closed_is_replaced(valkey: redis.Redis, services: Addresses) -> None:
    carrier = CeleryCarrier(Celery("producer", broker=guarded(services.redis_url)))
    for asked in range(3):
        assert carrier.depths(["mail"]) == {"mail": asked}
        valkey.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert carrier.publish([hint()]) == 1


def test_after_an_error_the_next_publish_has_a_connection_of_its_own(valkey: redis.Redis, services: Addresses) -> None:
    carrier = CeleryCarrier(Celery("producer", broker=guarded(services.redis_url)))
    carrier.publish([hint()])
    before = connections_made(valkey)

    with pytest.raises(LookupError):
        carrier.publish(one_and_then_an_error())
    carrier.publish([hint()])

    assert connections_made(valkey) > before
    assert carrier.depths(["mail"])["mail"] in (2, 3), "what went before the error may have gone out"


def one_and_then_an_error() -> Iterator[Hint]:
    yield hint()
    raise LookupError


PARENT_AND_CHILD = """
import os, sys, uuid
from celery import Celery
from durable_core.celery_binding.publish import CeleryCarrier
from durable_core.celery_binding import transport
from durable_core.wakes import Hint

transport.register()
carrier = CeleryCarrier(Celery("producer", broker=transport.guarded(sys.argv[1])))
hint = lambda: Hint("mail.send", str(uuid.uuid4()), "mail", 0)
carrier.publish([hint()])
child = os.fork()
for _ in range(50):
    carrier.publish([hint()])
    assert carrier.depths(["mail"])["mail"] > 0
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_speak_on_its_parents_connection(valkey: redis.Redis, services: Addresses) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PARENT_AND_CHILD, services.redis_url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (ran.returncode, ran.stderr) == (0, "")
    assert valkey.llen("durable.mail") == 101


def test_many_hints_reach_their_own_queues_in_order(valkey: redis.Redis, services: Addresses) -> None:
    hints = [Hint("mail.send", str(uuid.uuid4()), ("mail", "web")[n % 2], 0) for n in range(250)]
    CeleryCarrier(Celery("producer", broker=guarded(services.redis_url))).publish(hints)

    for queue in ("mail", "web"):
        lying = [json.loads(item)["headers"]["id"] for item in valkey.lrange(f"durable.{queue}", 0, -1)]
        assert lying[::-1] == [hint.id for hint in hints if hint.queue == queue]


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [("redis://example:6380/2", "example", 6380), ("redis://:pw@127.0.0.1:7000/0", "127.0.0.1", 7000)],
)
def test_the_guarded_url_reaches_the_same_server_through_the_guard(url: str, host: str, port: int) -> None:
    connection = Connection(guarded(url))

    assert isinstance(connection.transport, GuardedTransport)
    assert (connection.hostname, connection.port) == (host, port)


def test_the_secure_scheme_checks_the_certificate() -> None:
    connection = Connection(guarded("rediss://example:6380/0"))

    assert isinstance(connection.transport, transport.GuardedSecureTransport)
    assert connection.ssl["ssl_cert_reqs"].name == "CERT_REQUIRED"


def test_the_deployable_app_uses_the_guarded_transport() -> None:
    assert tasks.app.conf.broker_url.startswith("durable-redis")
    assert isinstance(tasks.app.connection_for_read().transport, GuardedTransport)
