"""
`notify.send`: one notification by Apprise to a target that the settings name, sent at least once.

The hole: Apprise carries no key, so nobody can know a repeat for one. A repeat follows where an answer
is lost, and where one name has several targets: when one of them fails, all of them are told again. So
give each target a name, and enqueue a delivery for each, where a repeat hurts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from durable_core.deliveries.declare import DeliveryKind, Step, delivery
from durable_core.deliveries.options import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE
from durable_core.errors import DefinitionError, GiveUp, NotInstalled, Retry
from durable_core.ready.bounded import Bounded
from durable_core.ready.email import OneLine
from durable_core.ready.named import Named, found, known, one_or_more
from durable_core.retry import Backoff

KIND = "notify.send"
EXTRA = "the package apprise; install durable-core[notify]"

Importance = Literal["info", "success", "warning", "failure"]
Targets = Named[str | Sequence[str]]
"""Apprise URLs by name, `{"ops": "slack://…"}`, several for one name too; or a function that returns these."""

_calls = Bounded("durable-notify")


def _some_text(text: str) -> str:
    if not text.strip():
        raise ValueError("a notification says something")
    return text


Body = Annotated[str, AfterValidator(_some_text)]


def is_installed() -> bool:
    """Whether Apprise is there; it is an extra, and imported at the first attempt."""
    return importlib.util.find_spec("apprise") is not None


def declare(
    targets: Targets,
    *,
    name: str = KIND,
    queue: str = DEFAULT_QUEUE,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    backoff: Backoff | None = None,
    timeout: float = 60.0,
    total_timeout: float = 30.0,
) -> DeliveryKind[..., dict[str, Any]]:
    """
    Declare the kind `notify.send`: `to` (the name of a target), `body`, `title`, `type`.

    An Apprise URL holds its token, so it stands in `targets` and never in a payload. They are trusted:
    where a URL leads is not judged. A name they do not hold is refused at enqueue, where `targets` is
    no function. Raises NotInstalled without the extra, DefinitionError for a target that is no URL.
    """
    if not is_installed():
        raise NotInstalled(EXTRA)
    if total_timeout <= 0:
        raise DefinitionError("notify: a total_timeout is more than 0 seconds.")
    for target, urls in {} if callable(targets) else targets.items():
        if not one_or_more(urls) or not all("://" in url for url in one_or_more(urls)):
            raise DefinitionError(f"notify: the target {target!r} is one Apprise URL, or a list of them.")

    def send_notification(
        step: Step, to: str, body: Body, title: OneLine = "", type: Importance = "info"
    ) -> dict[str, Any]:
        return send(targets, step, to=to, body=body, title=title, type=type, total_timeout=total_timeout)

    # A type of this very declaration, which no annotation in the source could name.
    send_notification.__annotations__["to"] = Annotated[str, known(targets, "target")]
    return delivery(name, queue=queue, max_attempts=max_attempts, backoff=backoff, timeout=timeout)(send_notification)


def send(
    targets: Targets,
    step: Step,
    *,
    to: str,
    body: str,
    title: str = "",
    type: Importance = "info",
    total_timeout: float = 30.0,
) -> dict[str, Any]:
    """
    Notify from inside a handler; `{"sent": n}` once every target of the name took it.

    A target that did not raises Retry, `NOTIFY_FAILED`, or `NOTIFY_PARTLY` when another took it. Apprise
    says whether, and not why: its reasons are in its own log. A name without a target gives up,
    `UNKNOWN_TARGET`, as does a URL that it cannot read, `BAD_TARGET`, before any is told. Each target has
    its share of `total_timeout`; one that takes longer is not waited for, and may have been told.
    """
    urls = found(targets, to)
    if urls is None:
        raise GiveUp(f"the settings have no target named {to!r}", code="UNKNOWN_TARGET")
    import apprise

    services = [_service(url, to) for url in one_or_more(urls)]
    if not services:
        raise GiveUp(f"the target {to!r} has no URL", code="BAD_TARGET")
    failed = []
    for scheme, service in services:
        if step.cancelled:
            raise Retry("the attempt was over before all targets were told", code="TIMEOUT")
        tell = partial(service.notify, body=body, title=title, notify_type=apprise.NotifyType(type))
        why = _told(tell, total_timeout / len(services))
        if why is not None:
            failed.append(f"{scheme}: {why}")
    if failed:
        raise Retry(
            f"{len(failed)} of {len(services)} targets of {to!r} did not take it ({'; '.join(failed)})",
            code="NOTIFY_FAILED" if len(failed) == len(services) else "NOTIFY_PARTLY",
        )
    return {"sent": len(services)}


def _service(url: str, to: str) -> tuple[str, Any]:
    """What Apprise makes of a URL, and its scheme, which is all of it that may be shown."""
    import apprise

    asset = apprise.AppriseAsset(app_id="durable-core", app_desc="durable-core", async_mode=False)
    service = apprise.Apprise.instantiate(url, asset=asset)
    if service is None:
        raise GiveUp(f"a URL of the target {to!r} is none that Apprise can read", code="BAD_TARGET")
    return url.split("://", 1)[0], service


def _told(tell: partial[bool], seconds: float) -> str | None:
    """Why a target did not take it; None when it did. An exception's text may hold the target's token."""
    try:
        taken = _calls.within(seconds, tell)
    except TimeoutError:
        return "no answer in time"
    except Exception as broken:  # a plugin's own code may raise anything
        return type(broken).__name__
    return None if taken else "Apprise says no, and why in its log"
