"""Who reads which queue: the workers are asked, and may not answer."""

from __future__ import annotations

from typing import Any

from celery import Celery

from durable_core.celery_binding.publish import QUEUE_PREFIX, SOCKET_SECONDS

ANSWER_SECONDS = 1.0
"""How long the answers are waited for; a worker that is busy in one slot answers at once all the same."""


def readers(app: Celery, *, seconds: float = ANSWER_SECONDS) -> dict[str, set[str]] | None:
    """
    The durable queues that each worker reads, by the worker's name; None where the broker does not answer.

    The hole: a worker that is stopped, cut off, or takes no remote control is not in it, and none answering looks like
    none running.
    """
    bounded = {
        "socket_timeout": SOCKET_SECONDS + seconds, "socket_connect_timeout": SOCKET_SECONDS, "max_retries": 0,
    }  # fmt: skip
    try:
        with app.connection_for_write(connect_timeout=SOCKET_SECONDS, transport_options=bounded) as connection:
            connection.ensure_connection(max_retries=1, timeout=int(SOCKET_SECONDS))
            answers: Any = app.control.inspect(timeout=seconds, connection=connection).active_queues()
    except Exception:  # each transport raises its own; whatever it is, nobody was asked
        return None
    return {
        worker: {queue["name"].removeprefix(QUEUE_PREFIX) for queue in queues if queue["name"].startswith(QUEUE_PREFIX)}
        for worker, queues in (answers or {}).items()
    }
