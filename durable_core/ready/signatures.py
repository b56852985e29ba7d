"""
Signatures as Standard Webhooks has them: over the id, the time and the body, by every key that is active.

The hole: the time is this worker's. A receiver refuses one that is more than five minutes off, so a
worker whose clock is wrong signs in vain; it is the one clock of a worker that matters to anybody.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from standardwebhooks import Webhook

from durable_core.ready.named import one_or_more

ID, TIMESTAMP, SIGNATURE = "Webhook-Id", "Webhook-Timestamp", "Webhook-Signature"
HEADERS = (ID, TIMESTAMP, SIGNATURE)
PREFIX = "whsec_"
SHORTEST_KEY = 24
"""Bytes; the least that the specification allows."""


def problem_of(keys: str | Sequence[str]) -> str | None:
    """What is wrong with the keys, none of which is quoted; None where all can sign."""
    if not one_or_more(keys):
        return "it has no key"
    for key in one_or_more(keys):
        text = key.removeprefix(PREFIX)
        try:
            length = len(base64.b64decode(text + "=" * (-len(text) % 4), validate=True))
        except (binascii.Error, ValueError):
            return f"a key is {PREFIX} and base64"
        if length < SHORTEST_KEY:
            return f"a key has at least {SHORTEST_KEY} bytes"
    return None


def headers(keys: str | Sequence[str], delivery_key: str, body: str) -> Mapping[str, str]:
    """
    The three headers of one call, with a signature for each key: during a rotation the old one too.

    The id is the same for all calls of a delivery; the time, and so the signatures, are not.
    """
    # The dot divides id, time and body in what is signed, so an id holds none.
    message_id = delivery_key.replace(".", "_")
    now = datetime.now(UTC)
    signed = [Webhook(key).sign(message_id, now, body) for key in one_or_more(keys)]
    return {ID: message_id, TIMESTAMP: str(int(now.timestamp())), SIGNATURE: " ".join(signed)}
