"""What the ready kinds read from the environment, in an app that is told of its servers by it."""

from __future__ import annotations

import os

from durable_core.database.environment import SMTP_VARIABLE
from durable_core.errors import NotInstalled
from durable_core.ready.email import Smtp


def smtp_from_environment() -> Smtp:
    """
    The mail server that DURABLE_SMTP_URL names; for `email.declare`, which reads it at each attempt.

    So an app that only enqueues, or only posts webhooks, needs none. Raises NotInstalled when it is not set.
    """
    url = os.environ.get(SMTP_VARIABLE)
    if not url:
        raise NotInstalled(f"set {SMTP_VARIABLE}, for example smtp://user:…@mail.internal:587?from=shop@example.com")
    return Smtp.from_url(url)
