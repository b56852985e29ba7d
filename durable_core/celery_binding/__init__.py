"""The one door to Celery. `install(app)` is all a host calls."""

from durable_core.celery_binding.durable import Durable
from durable_core.celery_binding.install import install, installed

__all__ = ["Durable", "install", "installed"]
