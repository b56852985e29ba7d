"""The environment variables that say where the servers are, for every program here that is not told by its app."""

from __future__ import annotations

DATABASE_VARIABLE = "DURABLE_DATABASE_URL"
REDIS_VARIABLE = "DURABLE_REDIS_URL"
SCHEMA_VARIABLE = "DURABLE_SCHEMA"
SMTP_VARIABLE = "DURABLE_SMTP_URL"
