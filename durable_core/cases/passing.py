"""Exceptions that end a task or a process, and are no outcome of a handler: a time limit of the task, for one."""

from __future__ import annotations

_passing: tuple[type[BaseException], ...] = ()


def use(*exceptions: type[BaseException]) -> None:
    """Let these pass through executions in this process. Whoever runs tasks says so: the core knows no Celery."""
    global _passing
    _passing = exceptions


def passing() -> tuple[type[BaseException], ...]:
    """Those that pass. What is no `Exception` passes anyway."""
    return _passing
