"""Whatever lies in our queues, a worker goes on: what is no hint is dropped, and the hints around it are served."""

import base64
import copy
import json
import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from durable_core.celery_binding.publish import CeleryCarrier
from durable_core.wakes import Hint
from tests.celery.conftest import Nodes
from tests.celery.nodes import wait_until
from tests.celery.shop import Shop
from tests.celery.world import World

pytestmark = pytest.mark.serial

MUTATIONS = 260
WRONG: list[Any] = [
    None, 0, -1, 10**30, 1.5, True, "", "x" * 5_000, "\x00", "\ud800", [], {}, [[]], {"a": {}}, ["a", "b"],
    "not base64!", "bnVsbA==", "2999-01-01T00:00:00", "../../etc/passwd", "a\nFAKE LOG LINE",
]  # fmt: skip
RAW = [b"", b"\xff\xfe", b"{", b"null", b"[]", b'"text"', b"[" * 200_000, b"x" * 2_000_000, b'{"body": 1}']


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a message."""
    if here:
        yield here
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*here, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*here, index))


def mutated(message: dict[str, Any], dice: random.Random) -> bytes:
    """One field of the envelope, or of the body inside, is wrong or gone."""
    forged = copy.deepcopy(message)
    if dice.random() < 0.3:
        body = json.loads(base64.b64decode(forged["body"]))
        place(body, dice)
        forged["body"] = base64.b64encode(json.dumps(body).encode()).decode()
    else:
        place(forged, dice)
    return json.dumps(forged).encode()


def place(value: Any, dice: random.Random) -> None:
    path = dice.choice(list(paths(value)))
    for step in path[:-1]:
        value = value[step]
    if isinstance(value, dict) and dice.random() < 0.2:
        del value[path[-1]]
    else:
        value[path[-1]] = dice.choice(WRONG)


def test_no_forged_or_damaged_message_stops_or_wedges_a_worker(
    world: World, nodes: Nodes, shop_kinds: Shop, seed: int
) -> None:
    worker = nodes.worker("fuzzed", "-Q", "durable.forged", "-c", "2")
    worker.ready()
    before = worker.children()
    dice = random.Random(seed)
    with redis.Redis.from_url(world.broker.container.host_url) as client:
        # A true hint of a row that is nowhere, as the model of what is forged.
        CeleryCarrier(world.app).publish([Hint("shop.quick", str(uuid.uuid4()), "model", 0)])
        model = json.loads(client.lrange("durable.model", 0, -1)[0])
        client.delete("durable.model")
        rows = []
        for number in range(MUTATIONS):
            client.lpush("durable.forged", mutated(model, dice))
            if number % 50 == 0:
                rows.append(world.commit(shop_kinds.quick, queue="forged"))
        for item in RAW:
            client.lpush("durable.forged", item)
        rows.append(world.commit(shop_kinds.quick, queue="forged"))

        world.sent(*rows)
        assert worker.children() == before, "no child died, and the worker is the same"
        assert world.counts("effects") == dict.fromkeys(rows, 1)

    # What a worker leaves behind must not stop the next one, nor what came meanwhile.
    worker.kill("SIGKILL")
    with redis.Redis.from_url(world.broker.container.host_url) as client:
        for _ in range(MUTATIONS):
            client.lpush("durable.forged", mutated(model, dice))
        for item in RAW:
            client.lpush("durable.forged", item)
    row_id = world.commit(shop_kinds.quick, queue="forged")
    second = nodes.worker("next", "-Q", "durable.forged", "-c", "1")
    second.ready()
    pids = (second.process.pid, second.children())
    world.sent(row_id, world.commit(shop_kinds.quick, queue="forged"))
    wait_until(lambda: world.broker.depth("forged") == 0, "all is read")
    assert (second.process.pid, second.children()) == pids
    assert second.process.status == "running"
    said = second.process.logs().decode()
    assert 0 < said.count("broker_message_dropped") < MUTATIONS, "drops are told, but not each"
