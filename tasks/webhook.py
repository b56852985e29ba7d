"""`webhook.post`: one HTTP POST with an `Idempotency-Key`, as the `DURABLE_WEBHOOK_*` variables say."""

from __future__ import annotations

from durable_core.ready import webhook
from durable_core.ready.environment import webhooks_from_environment

post = webhook.declare(webhooks_from_environment)
