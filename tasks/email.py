"""`email.send` by the SMTP server of `DURABLE_SMTP_URL`, read at each attempt: an app that only enqueues needs none."""

from __future__ import annotations

from durable_core.ready import email
from durable_core.ready.environment import smtp_from_environment

send = email.declare(smtp_from_environment)
