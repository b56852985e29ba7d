"""`notify.send` to the targets of `DURABLE_NOTIFY_TARGETS`, read at each attempt."""

from __future__ import annotations

from durable_core.ready import notify
from durable_core.ready.environment import targets_from_environment

send = notify.declare(targets_from_environment)
