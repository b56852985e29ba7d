"""
`durable-redis://`: kombu's Redis transport, with a guard before our own queues.

One damaged or forged message stops a stock Celery 5.7 worker, and some return to the queue
to stop the next one. Here a message of a queue of ours is read down to a kind and an id and
its envelope made anew; what cannot be read so is dropped and counted, and its row is hinted
again by dispatch. Queues of others pass unchanged, but for items that are no JSON at all.

The hole: whoever can write to Redis can still hint rows early, which costs a claim that finds
nothing, or fill its memory.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import ssl
from collections import Counter
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as stock
from kombu.utils.uuid import uuid
from redis.exceptions import RedisError, ResponseError

from durable_core.arguments import clean_text
from durable_core.celery_binding.publish import QUEUE_PREFIX
from durable_core.deliveries.read import checked_id
from durable_core.errors import DefinitionError, NotFound
from durable_core.kinds import checked_name
from durable_core.sweeps import SWEEPS

log = logging.getLogger("durable.transport")

SCHEMES = {
    "durable-redis": "GuardedTransport",
    "durable-rediss": "GuardedSecureTransport",
    "durable-sentinel": "GuardedSentinelTransport",
}

LONGEST_BODY = 4096
"""Characters of a message's body; a hint takes about 200."""

SAMPLED = 20
"""Of each reason, the first so many drops are logged one by one, and then every thousandth."""

dropped: Counter[str] = Counter()
"""Messages dropped in this process, by reason."""

_TASK_ID = re.compile(r"[A-Za-z0-9-]{1,64}\Z")
_ATTEMPT = re.compile(r"'attempt': (\d{1,6})\b")
_SWEEP_TASKS = frozenset(sweep.task for sweep in SWEEPS)


class Refused(ValueError):
    """A message that is no hint and no sweep. The text is a reason from a fixed set, never the broker's data."""


class Rebuilt(dict[str, Any]):
    """An envelope that we made: nothing in a message can claim to be one."""


def rebuilt(message: object, queue: str) -> Rebuilt:
    """The envelope of a hint or a sweep, made anew from the little we believe. Raises Refused."""
    if not isinstance(message, dict):
        raise Refused("not an object")
    headers, properties, body = message.get("headers"), message.get("properties"), message.get("body")
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise Refused("no headers or properties")
    task, task_id = headers.get("task"), headers.get("id")
    if not isinstance(task, str) or not isinstance(task_id, str) or not _TASK_ID.match(task_id):
        raise Refused("no task or id")
    row_id = _row_id(body)
    if row_id is None and task not in _SWEEP_TASKS:
        raise Refused("no row")
    if row_id is not None:
        try:
            checked_name(task)
        except DefinitionError:
            raise Refused("no kind") from None
    return _envelope(task, task_id, row_id, queue, _attempt(headers), _priority(properties))


def _row_id(body: object) -> str | None:
    """The row that the body names; None for the empty body of a sweep. Raises Refused."""
    if not isinstance(body, str) or len(body) > LONGEST_BODY:
        raise Refused("no body, or one too long")
    try:
        content = json.loads(base64.b64decode(body, validate=True))
        args, kwargs, _ = content
    except (ValueError, TypeError, RecursionError):
        raise Refused("the body is no hint") from None
    if args not in ([], ()) or not isinstance(kwargs, dict) or set(kwargs) - {"id"}:
        raise Refused("the body has other arguments")
    if "id" not in kwargs:
        return None
    try:
        return checked_id(kwargs["id"])
    except NotFound:
        raise Refused("the id is none") from None


def _attempt(headers: dict[str, Any]) -> int:
    shown = headers.get("kwargsrepr")
    found = _ATTEMPT.search(shown[:500]) if isinstance(shown, str) else None
    return int(found.group(1)) if found else 1


def _priority(properties: dict[str, Any]) -> int:
    priority = properties.get("priority")
    return priority if type(priority) is int and 0 <= priority <= 9 else 0


def _envelope(task: str, task_id: str, row_id: str | None, queue: str, attempt: int, priority: int) -> Rebuilt:
    kwargs = {} if row_id is None else {"id": row_id}
    shown = {} if row_id is None else {"kind": task, "id": row_id, "attempt": attempt}
    body = json.dumps([[], kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    envelope = {
        "body": base64.b64encode(body.encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py", "task": task, "id": task_id, "root_id": task_id, "parent_id": None, "group": None,
            "retries": 0, "timelimit": [None, None], "eta": None, "expires": None, "argsrepr": "()",
            "kwargsrepr": repr(shown), "origin": "", "ignore_result": True,
        },
        "properties": {
            "correlation_id": task_id, "reply_to": "", "delivery_mode": 2, "priority": priority,
            "delivery_info": {"exchange": "", "routing_key": queue}, "body_encoding": "base64",
            # A new one: the tag of a forged message may be that of one still unacknowledged.
            "delivery_tag": uuid(),
        },
    }  # fmt: skip
    return Rebuilt(envelope)


def _drop(reason: str, queue: str) -> None:
    dropped[reason] += 1
    if (count := dropped[reason]) <= SAMPLED or count % 1000 == 0:
        log.error("broker_message_dropped", extra={"queue": clean_text(queue, 100), "reason": reason, "count": count})


class _GuardedDeliveries:
    """Mixed into kombu's Transport: nothing of our queues reaches Celery but what `rebuilt` made."""

    connection_errors = (*stock.Transport.connection_errors, ResponseError)
    """What a worker outlives. READONLY after a failover, OOM over the memory limit or MISCONF on a full disk pass, as a
    lost connection does; on a stock worker each ends the main process."""

    failed_in_delivery = False

    def _deliver(self, message: Any, queue: str) -> None:
        if queue and queue.startswith(QUEUE_PREFIX):
            try:
                message = rebuilt(message, queue)
            except Refused as refused:
                _drop(str(refused), queue)
                return
        self.failed_in_delivery = True
        super()._deliver(message, queue)  # type: ignore[misc]
        self.failed_in_delivery = False


class _GuardedReading:
    """Mixed into kombu's Channel: an item that is no JSON is dropped, on whatever queue it lay."""

    def _brpop_read(self, **options: Any) -> Any:
        connection = self.connection  # type: ignore[attr-defined]
        connection.failed_in_delivery = False
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except (ValueError, RecursionError) as error:
            if connection.failed_in_delivery:
                raise
            _drop("not JSON", type(error).__name__)
            return True

    def close(self) -> None:
        """
        Close, whatever the socket says.

        Stock kombu (5.7) reads it once more, stops half-way when it is broken, and comes back to the
        channel without its connection: with one message received and not yet begun, that ends the worker.
        """
        if self._in_poll:  # type: ignore[attr-defined]
            try:
                self._brpop_read()
            except (Empty, *self.connection_errors):  # type: ignore[attr-defined]
                pass  # nothing came, or the broker is gone: either way there is nothing left to read
        super().close()  # type: ignore[misc]


def _is_ours(message: Any) -> bool:
    """Of a queue of ours, as `rebuilt` made it."""
    return isinstance(message._raw, Rebuilt)


class GuardedQoS(stock.QoS):
    """
    Counts what a consumer may still be given, and keeps no copy of a hint in Redis until it is acknowledged.

    That copy, which is for workers that die, costs two transactions in Redis for each message; the row of a lost hint
    is hinted again by dispatch, and a lost sweep by beat. Messages of other queues are kept as ever.
    """

    channel: Any
    _delivered: Any
    _flush: Any

    def append(self, message: Any, delivery_tag: str) -> None:
        if _is_ours(message):
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Celery logs a refusal and goes on: a message that stayed in the count would keep a slot empty for ever."""
        if self._holds_ours(delivery_tag):
            virtual.QoS.ack(self, delivery_tag)
            return
        try:
            super().ack(delivery_tag)
        except BaseException:
            virtual.QoS.ack(self, delivery_tag)
            raise

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not self._holds_ours(delivery_tag):
            super().reject(delivery_tag, requeue)
            return
        if requeue:
            self._give_back([self._delivered[delivery_tag]], leftmost=True)
        virtual.QoS.ack(self, delivery_tag)

    def restore_unacked(self, client: Any = None) -> Any:
        """At a shutdown: what was received and not begun goes back at once, to a worker that has a slot for it."""
        self._flush()
        ours = [tag for tag, message in self._delivered.items() if _is_ours(message)]
        self._give_back([self._delivered.pop(tag) for tag in ours])
        return super().restore_unacked(client)

    def _holds_ours(self, delivery_tag: str) -> bool:
        message = self._delivered.get(delivery_tag)
        return message is not None and _is_ours(message)

    def _give_back(self, messages: list[Any], leftmost: bool = False) -> None:
        if not messages:
            return
        channel = self.channel
        try:
            with channel.conn_or_acquire() as client, client.pipeline() as pipe:
                for message in messages:
                    queue = message.delivery_info["routing_key"]
                    channel._do_restore_message(message._raw, "", queue, pipe, leftmost)
                pipe.execute()
        except (RedisError, OSError):
            log.info("hints_not_given_back", extra={"hints": len(messages)})  # dispatch hints their rows


class GuardedChannel(_GuardedReading, stock.Channel):
    QoS = GuardedQoS


class GuardedTransport(_GuardedDeliveries, stock.Transport):  # type: ignore[misc]
    """`durable-redis://`"""

    Channel = GuardedChannel


class GuardedSecureTransport(GuardedTransport):
    """`durable-rediss://`: TLS, the server's certificate checked unless the URL says otherwise."""

    def __init__(self, client: Any, *args: Any, **kwargs: Any) -> None:
        if not client.ssl:
            client.ssl = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
        super().__init__(client, *args, **kwargs)


class GuardedSentinelChannel(_GuardedReading, stock.SentinelChannel):
    QoS = GuardedQoS


class GuardedSentinelTransport(_GuardedDeliveries, stock.SentinelTransport):  # type: ignore[misc]
    """`durable-sentinel://`"""

    Channel = GuardedSentinelChannel


def register() -> None:
    """Make the URL schemes known to kombu. No '+' in them: kombu splits a scheme there."""
    for scheme, name in SCHEMES.items():
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{name}"


def guarded(url: str) -> str:
    """The URL of a Redis broker with the guard before it; other brokers' URLs as they are."""
    for scheme in ("redis", "rediss", "sentinel"):
        if url.startswith(f"{scheme}://"):
            return f"durable-{url}"
    return url


def is_guarded(transport: object) -> bool:
    """Whether this transport is one of ours."""
    return isinstance(transport, _GuardedDeliveries)
