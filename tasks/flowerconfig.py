"""What `celery -A tasks flower` runs with: on loopback, read-only, with a page for each delivery."""

from durable_core.celery_binding.flower.config import address, format_task, persistent, read_only, tasks_columns

__all__ = ["address", "format_task", "persistent", "read_only", "tasks_columns"]
