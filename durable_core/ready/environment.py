"""What the ready kinds read from the environment, in an app that is told of its servers by it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from durable_core.database.environment import (
    NOTIFY_VARIABLE,
    PRIVATE_TARGETS_VARIABLE,
    SMTP_VARIABLE,
    WEBHOOK_HEADERS_VARIABLE,
    WEBHOOK_SECRETS_VARIABLE,
)
from durable_core.errors import DefinitionError, NotInstalled
from durable_core.ready.email import Smtp
from durable_core.ready.webhook import Webhooks


def smtp_from_environment() -> Smtp:
    """
    The mail server that DURABLE_SMTP_URL names; for `email.declare`, which reads it at each attempt.

    So an app that only enqueues, or only posts webhooks, needs none. Raises NotInstalled when it is not set.
    """
    url = os.environ.get(SMTP_VARIABLE)
    if not url:
        raise NotInstalled(f"set {SMTP_VARIABLE}, for example smtp://user:…@mail.internal:587?from=shop@example.com")
    return Smtp.from_url(url)


def webhooks_from_environment() -> Webhooks:
    """
    How webhooks are posted; for `webhook.declare`, which reads it at each attempt.

    DURABLE_WEBHOOK_PRIVATE_TARGETS=yes lets them reach this machine and its networks, for development.
    DURABLE_WEBHOOK_SECRETS and DURABLE_WEBHOOK_HEADERS are JSON by name: {"billing": ["whsec_…"]},
    {"billing": {"Authorization": "…"}}. Raises DefinitionError, which never quotes them.
    """
    private = os.environ.get(PRIVATE_TARGETS_VARIABLE, "")
    if private not in ("", "yes", "no"):
        raise DefinitionError(f"{PRIVATE_TARGETS_VARIABLE} is yes or no.")
    secrets, headers = _by_name(WEBHOOK_SECRETS_VARIABLE), _by_name(WEBHOOK_HEADERS_VARIABLE)
    for named in secrets.values():
        _check_texts(WEBHOOK_SECRETS_VARIABLE, named)
    for named in headers.values():
        if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
            raise DefinitionError(f"{WEBHOOK_HEADERS_VARIABLE} has for each name an object of headers.")
    return Webhooks(private_targets=private == "yes", secrets=secrets, headers=headers)


def targets_from_environment() -> Mapping[str, Any]:
    """
    The Apprise URLs that DURABLE_NOTIFY_TARGETS has by name, as JSON: {"ops": "mailto://…", "dev": ["…", "…"]}.

    For `notify.declare`, which reads it at each attempt. Raises NotInstalled when it is not set, and
    DefinitionError, which never quotes it.
    """
    if not os.environ.get(NOTIFY_VARIABLE):
        raise NotInstalled(f'set {NOTIFY_VARIABLE}, for example {{"ops": "slack://…"}}')
    targets = _by_name(NOTIFY_VARIABLE)
    for urls in targets.values():
        _check_texts(NOTIFY_VARIABLE, urls)
    return targets


def _by_name(variable: str) -> dict[str, Any]:
    try:
        named = json.loads(os.environ.get(variable) or "{}")
    except ValueError:
        named = None
    if not isinstance(named, dict):
        raise DefinitionError(f"{variable} is a JSON object of names.")
    return named


def _check_texts(variable: str, given: object) -> None:
    several = given if isinstance(given, list) else [given]
    if not several or not all(isinstance(one, str) for one in several):
        raise DefinitionError(f"{variable} has for each name a text, or a list of texts.")
