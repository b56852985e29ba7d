"""
A flowerconfig, as `tasks` and `durable up` give it to Flower; your own takes from it what it wants.

Importing it adds our pages to Flower's. The names are Flower's own options; the command line wins over them.
"""

from durable_core.celery_binding.flower.hints import format_task
from durable_core.celery_binding.flower.pages import register

__all__ = ["address", "format_task", "persistent", "read_only", "tasks_columns"]

address = "127.0.0.1"
"""Whoever reaches a Flower without a login reads all of it."""

read_only = True
"""Nobody revokes a task, sends one or shuts a worker down from a web page. What is to be done about a delivery is done
by `durable`, which writes down who and why."""

persistent = False
"""Flower would keep what it saw in a pickle. The rows are the history."""

tasks_columns = "name,uuid,state,result,kwargs,received,runtime,worker"
"""The usual ones, and what `format_task` writes: which delivery a later hint was of, and how it ended."""

register()
