"""For your own log lines: the ids of the delivery that is being carried out. No handler or format is set up here."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

FIELDS = ("delivery_id", "kind", "attempt", "max_attempts", "fence")
"""What `ContextFilter` adds to a record."""

_running: ContextVar[Mapping[str, object] | None] = ContextVar("durable_running", default=None)


class ContextFilter(logging.Filter):
    """
    Adds `delivery_id`, `kind`, `attempt`, `max_attempts` and `fence` to every record that is logged inside an attempt.

    Outside of one they are None, so that a format may name them. What a record has of its own stays. Put it on a
    handler: a filter on a logger does not see the records of the loggers below it. The hole: a thread that a handler
    starts has no context of its attempt, unless it is started by `contextvars.copy_context().run`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        facts = ids()
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, facts.get(name))
        return True


def ids() -> Mapping[str, object]:
    """The FIELDS of the attempt that runs here; empty outside of one."""
    return _running.get() or {}


@contextmanager
def attempting(**facts: object) -> Iterator[None]:
    """An attempt inside: its FIELDS, for the lines that are logged meanwhile."""
    token = _running.set(facts)
    try:
        yield
    finally:
        _running.reset(token)
