"""What users of Celery type first on a kind is answered with what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from durable_core.errors import NotATask

CELERYS = frozenset(
    {"delay", "delay_on_commit", "apply_async", "apply_async_on_commit", "apply", "s", "si", "signature", "subtask"}
)
"""The ways of sending a Celery task, or of making it part of something that is sent."""


class NoTask:
    """
    Something that is enqueued, and that people may take for a Celery task.

    To `hasattr`, to who asks for one with a default and to a type checker it has none of these names.
    """

    # Hidden from type checkers: to them a class with this has every name there is.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in CELERYS:
                kind = self.__dict__.get("kind", self)
                raise NotATask(kind.name, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
