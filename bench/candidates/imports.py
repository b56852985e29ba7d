"""Plain Celery that also imports SQLAlchemy and psycopg, for the memory of its children alone."""

import psycopg  # noqa: F401  (what it takes is what is measured)
import sqlalchemy.orm  # noqa: F401

from bench.candidates.plain import app, send_all, sender

__all__ = ["app", "send_all", "sender"]
