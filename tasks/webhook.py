"""`webhook.post`: one HTTP POST with an `Idempotency-Key`."""

from __future__ import annotations

from durable_core.ready import webhook

post = webhook.declare()
