"""Our pages in Flower, all behind its own login: one delivery, a task's way to it, the broker of our URLs, metrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from flower import urls
from flower.api.tasks import GetQueueLengths
from flower.views import BaseHandler
from flower.views.broker import BrokerView
from flower.views.monitor import Metrics
from flower.views.tasks import TaskView
from sqlalchemy.exc import SQLAlchemyError
from tornado import web

from durable_core.celery_binding.durable import Durable
from durable_core.celery_binding.flower import words
from durable_core.celery_binding.flower.hints import hint_of
from durable_core.celery_binding.flower.look import Busy, Seen, aside, look
from durable_core.celery_binding.install import installed
from durable_core.celery_binding.transport import SCHEMES
from durable_core.deliveries.read import checked_id
from durable_core.errors import DurableError, NotFound
from durable_core.plans.rows import Report

HERE = Path(__file__).parent


class DeliveryPage(BaseHandler):  # type: ignore[misc]  # Flower ships no types
    """`/delivery/<id>`: the row, why it is where it is, and its journal. Nothing is asked before Flower's login is."""

    @web.authenticated
    async def get(self, row_id: str) -> None:
        # A page left in a browser's cache would be read after the log-out.
        self.set_header("Cache-Control", "no-store")
        try:
            checked = checked_id(row_id)
            durable = installed(self.capp)
            seen, payload = await aside(partial(_seen, durable, checked))
            if isinstance(seen, str):
                self._say(200, seen, "OPERATION")
                return
        except NotFound as unknown:
            self._say(404, str(unknown), unknown.reason)
        except DurableError as refused:
            self._say(503, str(refused), refused.reason)
        except Busy:
            self._say(503, "the database has not answered the looks before this one: try again later.", "NO_ANSWER")
        except (SQLAlchemyError, psycopg.Error, OSError, TimeoutError) as error:
            # Not its text, which may name the database's host and user.
            kind = type(getattr(error, "orig", None) or error).__name__
            self._say(503, f"the database did not answer ({kind}): try again, or ask `durable status`.", "NO_ANSWER")
        else:
            if isinstance(seen, Report):
                # Without what its steps said: that is payload.
                more = f"{seen.summary}. `durable plans show {seen.id}` and `durable plans report {seen.id}` say more."
                self._say(200, more, seen.state.value.upper())
                return
            self._show(seen, payload)

    def _show(self, seen: Seen, payload: bool) -> None:
        self.render(
            str(HERE / "delivery.html"), row=seen.row, reasons=words.reasons(seen, payload=payload),
            facts=words.facts(seen, payload=payload), lines=words.journal(seen.lines, payload=payload),
            now=words.instant(seen.now),
        )  # fmt: skip

    def _say(self, status: int, sentence: str, reason: str) -> None:
        self.set_status(status)
        self.render(str(HERE / "notice.html"), sentence=sentence, reason=reason)


def _seen(durable: Durable, row_id: str) -> tuple[Seen | Report | str, bool]:
    # The settings and the engine are the host's code, so they too are read on the thread of the look.
    return look(durable.database, row_id), durable.settings.flower_payload


class TaskPage(TaskView):  # type: ignore[misc]
    """Flower's page of one task, and above it the way to the delivery that the task was a hint of."""

    def render(self, template: str, **shown: Any) -> None:
        if template == "task.html":
            # The task in hand is formatted; what it hinted at is in the one that Flower keeps.
            kept = self.application.events.state.tasks.get(shown["task"].uuid)
            hint = None if kept is None else hint_of(kept)
            if hint is not None:
                template = str(HERE / "task.html")
                shown["hint"] = hint
        super().render(template, **shown)


class _OfOurBroker:
    """Mixed into handlers that ask the broker: Flower knows a Redis URL, and not the one with the guard before it."""

    def prepare(self) -> None:
        super().prepare()  # type: ignore[misc]
        # A cached property, whose value both 2.1 and 2.2 of Flower ask from here.
        app: Any = self.application  # type: ignore[attr-defined]
        app.broker_uri_with_password = unguarded(app.broker_uri_with_password)


def unguarded(url: str) -> str:
    """The Redis URL in one of ours; other brokers' URLs as they are."""
    scheme, _, place = url.partition("://")
    return f"{scheme.removeprefix('durable-')}://{place}" if scheme in SCHEMES else url


class BrokerPage(_OfOurBroker, BrokerView):  # type: ignore[misc]
    """`/broker`"""


class QueueLengths(_OfOurBroker, GetQueueLengths):  # type: ignore[misc]
    """`/api/queues/length`"""


class MetricsPage(Metrics):  # type: ignore[misc]
    """`/metrics`, which Flower leaves open where it has a login: it names kinds and workers."""

    @web.authenticated
    async def get(self) -> None:
        await super().get()


IN_PLACE_OF = {
    TaskView: TaskPage,
    BrokerView: BrokerPage,
    GetQueueLengths: QueueLengths,
    Metrics: MetricsPage,
}


def register() -> None:
    """Put our pages among Flower's, once; before Flower makes its application, as a flowerconfig is read."""
    handlers: list[Any] = urls.handlers
    if any(_class(handler) is DeliveryPage for handler in handlers):
        return
    for place, handler in enumerate(handlers):
        ours = IN_PLACE_OF.get(_class(handler))
        if ours is None:
            continue
        if isinstance(handler, tuple):
            handlers[place] = (handler[0], ours)
        else:
            handlers[place] = web.url(handler.regex.pattern, ours, handler.kwargs, handler.name)
    handlers.insert(0, web.url(r"/delivery/([^/]+)", DeliveryPage, name="delivery"))


def _class(handler: Any) -> Any:
    return handler[1] if isinstance(handler, tuple) else handler.handler_class
