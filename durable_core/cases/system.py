"""Executions for a system, a sweep or a migration, which has no caller to raise at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from durable_core.cases.passing import passing
from durable_core.cases.request import Executed


@dataclass(frozen=True)
class SystemRun:
    """How an execution ended: `committed` with its `result`, or settled without one by `error`."""

    result: Executed | None = None
    error: Exception | None = None

    @property
    def committed(self) -> bool:
        return self.result is not None

    @property
    def settled(self) -> bool:
        """The other way it can have ended: by a refusal, an error of its handler, or an outage."""
        return self.error is not None


def settled(execute: Callable[[], Executed]) -> SystemRun:
    """
    Execute, and return whatever exception came of it.

    What ends the process or the task is no outcome, and passes.
    """
    try:
        return SystemRun(result=execute())
    except passing():
        raise
    except Exception as error:
        return SystemRun(error=error)
