"""
Periodic deliveries: a kind declared with a cron gets one delivery per slot, however many beats fire.

`schedules`, `pause`, `resume`, `run_now`: each takes the caller's transaction first.
"""

from durable_core.periodic.operate import pause, resume, run_now
from durable_core.periodic.read import Schedule, schedules

__all__ = ["Schedule", "pause", "resume", "run_now", "schedules"]
