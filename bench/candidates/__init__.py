"""
What is measured: Celery apps whose one task does the same, and what else differs between them is what they are for.

Each module is what `celery -A` loads, and says how its tasks are sent: within `sender(url)` a function sends one,
`send_all(url, numbers)` sends many before any worker runs.
"""

from __future__ import annotations

import os
import struct
import time
from functools import lru_cache
from typing import Any

BROKER_VARIABLE, MARKS_VARIABLE = "BENCH_BROKER_URL", "BENCH_MARKS"

SETTINGS: dict[str, Any] = {
    "task_ignore_result": True,
    "accept_content": ["json"],
    "broker_connection_retry_on_startup": True,
    "worker_send_task_events": False,
}
"""Every candidate's; events are off everywhere, as they are by Celery's default."""

MARK = struct.Struct("<qd")
"""The number of a task, and when it began by a clock that all processes of a machine share."""


@lru_cache(maxsize=1)
def _marks(pid: int) -> int:
    return os.open(os.environ[MARKS_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def mark(number: int) -> None:
    """The first line of every task: a few microseconds, the same for all, and no database."""
    began = time.monotonic()
    os.write(_marks(os.getpid()), MARK.pack(number, began))


def broker_url() -> str:
    return os.environ[BROKER_VARIABLE]
