"""What a worker does at its start, in its children, and for messages it does not know. No more."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from contextlib import suppress
from typing import Any

from celery import signals

from durable_core import kinds
from durable_core.celery_binding.children import ChildWatch
from durable_core.celery_binding.durable import Durable
from durable_core.celery_binding.publish import broker_queue
from durable_core.celery_binding.rescue import Rescue
from durable_core.celery_binding.tasks import check_names
from durable_core.claims.claim import OWNER_VARIABLE
from durable_core.database.migrate import check
from durable_core.database.poolers import refuse_unsafe_pooler
from durable_core.database.transactions import said
from durable_core.deliveries.attempt import wait_for_handler
from durable_core.deliveries.read import checked_id
from durable_core.errors import DurableError, NotFound
from durable_core.operations import attempt as operations
from durable_core.plans import attempt as plans
from durable_core.sweeps import CONTROL_QUEUE

log = logging.getLogger("durable.worker")


def connect(durable: Durable) -> None:
    """Connect this app's worker signals, once; a process may hold several apps, so each asks whether it is meant."""
    app = durable.app
    watches: list[ChildWatch] = []
    rescues: list[Rescue] = []
    unchecked: list[str] = []

    def draw_owner(instance: Any = None, **_: Any) -> None:
        if instance is None or instance.app is app:
            # The parent draws it and its children inherit it, spawned ones through the environment.
            os.environ[OWNER_VARIABLE] = secrets.token_hex(8)

    def consume_ours(instance: Any = None, **_: Any) -> None:
        """Without -Q, also read the sweeps' queue and those of the kinds declared here."""
        if instance is None or instance.app is not app:
            return
        queues = app.amqp.queues
        if getattr(queues, "_consume_from", None) is not None:
            return  # -Q names the queues; the operator decided
        names = {kind.queue for kind in kinds.known()}
        for queue in (broker_queue(name) for name in sorted(names)):
            queues.select_add(queue)
        queues.select_add(broker_queue(CONTROL_QUEUE.removeprefix("durable.")))

    def refuse_wrong_schema(sender: Any = None, **_: Any) -> None:
        if getattr(sender, "app", app) is not app:
            return
        try:
            check_names(durable)
            with durable.database.engine.connect() as connection:
                check(connection)
            refuse_unsafe_pooler(durable.database)
        except DurableError as error:
            raise SystemExit(f"durable: {error}") from None
        except Exception as error:
            # A database that is away says nothing about its schema, and workers must outlive such a time.
            unchecked.append(said(error))

    def remark_unchecked(instance: Any = None, **_: Any) -> None:
        """Once Celery has set its log up: a line before that has neither a time nor its facts, whatever the format."""
        while instance is not None and instance.app is app and unchecked:
            error = unchecked.pop()
            log.warning("schema_not_checked", extra={"error": error})
            # Celery's own format hides the facts, and a wrong password is seen here first.
            sys.stderr.write(f"durable: this worker waits for its database, and has not seen its schema: {error}\n")

    def read_ahead(sender: Any = None, **_: Any) -> None:
        """Before the fork, what each child would import and build at its first delivery, out of that one's time."""
        if getattr(sender, "app", app) is app:
            for kind in kinds.deliveries:
                with suppress(Exception):  # what is wrong with a handler's annotations is told by its first attempt
                    kind.signature.model  # noqa: B018

    def in_a_child(**_: Any) -> None:
        durable.after_fork()
        for rescue in rescues:  # the parent's, whose thread is not here
            rescue.after_fork()

    def watch_children(sender: Any = None, **_: Any) -> None:
        controller = getattr(sender, "controller", None)
        if getattr(sender, "app", None) is app and controller is not None:
            watch = ChildWatch(durable, controller.pool)
            if watch.start():
                watches.append(watch)

    def watch_sweeps(sender: Any = None, **_: Any) -> None:
        if getattr(sender, "app", None) is app:
            rescues.append(Rescue(durable))
            rescues[-1].start()

    def look_at_prefetch(sender: Any = None, **_: Any) -> None:
        """A hint that waits behind a long handler keeps its row waiting, until dispatch hints that one again."""
        controller = getattr(sender, "controller", None)
        if getattr(sender, "app", None) is app and controller is not None and controller.prefetch_multiplier != 1:
            log.warning("prefetch_hoards_hints", extra={"worker_prefetch_multiplier": controller.prefetch_multiplier})

    def begin_grace(sender: Any = None, **_: Any) -> None:
        # In a signal handler: no more than a note for the watching thread.
        for watch in watches:
            watch.shutting_down()

    def stop_beating(**_: Any) -> None:
        while watches:
            watches.pop().stop()
        while rescues:
            rescues.pop().stop()
        durable.stop()

    def remark_unknown(message: Any = None, name: str | None = None, **_: Any) -> None:
        """A hint of a kind that this worker does not know: say so on the row, for people."""
        try:
            row_id = message.payload[1].get("id")
            checked = checked_id(row_id)
            for wait in (wait_for_handler, plans.wait_for_handler, operations.wait_for_handler):
                if wait(durable.database, str(name), checked):
                    return
        except NotFound:
            return
        except Exception:
            log.warning("unknown_kind_not_remarked", extra={"kind": str(name)[:200]}, exc_info=True)

    for signal, receiver in (
        (signals.celeryd_init, draw_owner),
        (signals.celeryd_after_setup, consume_ours),
        (signals.celeryd_after_setup, remark_unchecked),
        (signals.worker_init, refuse_wrong_schema),
        (signals.worker_init, read_ahead),
        (signals.worker_process_init, in_a_child),
        (signals.worker_ready, watch_children),
        (signals.worker_ready, watch_sweeps),
        (signals.worker_ready, look_at_prefetch),
        (signals.worker_shutting_down, begin_grace),
        (signals.worker_process_shutdown, stop_beating),
        (signals.worker_shutdown, stop_beating),
        (signals.task_unknown, remark_unknown),
    ):
        signal.connect(receiver, weak=False, dispatch_uid=f"durable-{id(app)}-{receiver.__name__}")
