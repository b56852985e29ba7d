"""
Flower beside durable work: a page for each delivery, hints as people read them, and a broker page for our URLs.

Nobody but a flowerconfig imports it, and only it imports Flower: `durable_core.celery_binding.flower.config`.
"""

from pathlib import Path

CONFIGURATION = Path(__file__).with_name("config.py")
"""The shipped flowerconfig, for `--conf` where a folder has none of its own."""
