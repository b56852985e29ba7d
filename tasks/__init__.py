"""The deployable app: `celery -A tasks worker`, `celery -A tasks beat`."""

from tasks.app import app

__all__ = ["app"]
