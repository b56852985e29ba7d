"""`email.send` by the SMTP server of `DURABLE_SMTP_URL`, read at each attempt: an app that only enqueues needs none."""

from __future__ import annotations

import os

from durable_core.errors import NotInstalled
from durable_core.ready import email


def smtp() -> email.Smtp:
    url = os.environ.get("DURABLE_SMTP_URL")
    if not url:
        raise NotInstalled("set DURABLE_SMTP_URL, for example smtp://user:…@mail.internal:587?from=shop@example.com")
    return email.Smtp.from_url(url)


send = email.declare(smtp)
