"""
The app that these tests run: kinds whose handlers can be held inside, and two counters.

`executions` counts what was begun, on a connection of its own, as an external call would be; `effects` counts
what was committed with a receipt. Neither has a unique constraint that could hide a second one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from celery import Celery
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session, sessionmaker

from durable_core import Backoff, GiveUp, Retry, Snooze, Step, delivery
from durable_core.database.connections import raw
from durable_core.deliveries.declare import DeliveryKind, registry
from tests.celery import points

LEASE, HEARTBEAT, DISPATCH, REAP = 3.0, 1.0, 0.5, 1.0
"""Seconds; a tenth of the defaults, so that a rescue is seen within seconds."""

HOLD_SECONDS = 90.0
"""A held handler gives up after so long, for the test that held it is gone."""

TABLES = (
    """
    create table executions (
        id bigint generated always as identity, row_id text, fence bigint, key text, attempt int, pid int,
        at timestamptz default clock_timestamp())
    """,
    """
    create table effects (
        id bigint generated always as identity, row_id text, fence bigint, note text, pid int,
        backend int default pg_backend_pid(), at timestamptz default clock_timestamp())
    """,
    # COMMIT itself waits in this trigger, for whoever holds the advisory lock of the row.
    """
    create function wait_inside_commit() returns trigger language plpgsql as $$
    begin
        perform pg_advisory_xact_lock_shared(hashtext(new.row_id));
        return null;
    end $$
    """,
    """
    create constraint trigger wait_inside_commit after insert on effects
    deferrable initially deferred for each row when (new.note = 'held in commit' and new.fence = 1)
    execute function wait_inside_commit()
    """,
)


@lru_cache(maxsize=1)
def engine() -> Engine:
    """The shop's database, made at first use."""
    connect_args = json.loads(os.environ.get("SHOP_CONNECT_ARGS", "{}"))
    return create_engine(os.environ["SHOP_DATABASE_URL"], pool_pre_ping=True, connect_args=connect_args)


class ShopSession(Session):
    """The host's own session class, with an event of the host's after its commits."""


@event.listens_for(ShopSession, "after_commit", propagate=True)
def _hold_after_commit(session: Session) -> None:
    if gate := session.info.pop("hold_after_commit", None):
        hold(gate)


@lru_cache(maxsize=1)
def sessions() -> sessionmaker[Session]:
    return sessionmaker(engine(), class_=ShopSession)


def configure(app: Celery) -> None:
    """The settings that the shop's workers, its beat and its web process share."""
    app.conf.update(
        durable_sessionmaker=sessions,
        durable_lease_seconds=float(os.environ.get("SHOP_LEASE", LEASE)),
        durable_heartbeat_seconds=float(os.environ.get("SHOP_HEARTBEAT", HEARTBEAT)),
        durable_sweep_intervals={"dispatch": DISPATCH, "reap": REAP},
        durable_shutdown_grace=float(os.environ.get("SHOP_GRACE", "25")),
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
        task_send_sent_event=True,
        task_ignore_result=True,
        accept_content=["json"],
        broker_connection_retry_on_startup=True,
        broker_transport_options={"socket_timeout": 10, "socket_connect_timeout": 5, "health_check_interval": 5},
    )


# --- what handlers do ------------------------------------------------------------------------------


def call_outside(step: Step) -> None:
    """The external call: counted the moment it is made, whatever becomes of the attempt."""
    with engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(
            text(
                "insert into executions (row_id, fence, key, attempt, pid)"
                " values (:row_id, :fence, :key, :attempt, :pid)"
            ),
            {"row_id": step.id, "fence": step.fence, "key": step.key, "attempt": step.attempt, "pid": os.getpid()},
        )


def write_effect(session: Session, step: Step, note: str) -> None:
    """The effect: a row that commits with the receipt."""
    session.execute(
        text("insert into effects (row_id, fence, note, pid) values (:row_id, :fence, :note, :pid)"),
        {"row_id": step.id, "fence": step.fence, "note": note, "pid": os.getpid()},
    )


def hold(gate: str) -> None:
    """Say "I am here" and wait until the test opens the gate, or kills us."""
    folder = Path(os.environ["SHOP_GATES"])
    (folder / f"{gate}.reached").write_text(str(os.getpid()))
    end = time.monotonic() + HOLD_SECONDS
    while not (folder / f"{gate}.open").exists() and time.monotonic() < end:
        time.sleep(0.02)


def pause(row_id: str, point: str) -> None:
    """Held at this point if the test asked for it, once: whoever comes by later goes through."""
    try:
        (Path(os.environ["SHOP_GATES"]) / f"{row_id}.{point}.asked").unlink()
    except FileNotFoundError:
        return
    hold(f"{row_id}.{point}")


# --- the kinds -------------------------------------------------------------------------------------


def order(step: Step, note: str = "") -> str:
    """The ordinary case: a call outside, then an effect in the step's session."""
    call_outside(step)
    write_effect(step.session, step, note)
    return "taken"


def quick(step: Step) -> None:
    """The better form after a call outside: the effect is written inside the commit."""
    call_outside(step)
    step.in_commit(lambda session: write_effect(session, step, "in commit"))


def slow(step: Step, seconds: float) -> None:
    call_outside(step)
    time.sleep(seconds)
    write_effect(step.session, step, "slow")


def held(step: Step, at: str, form: str = "session") -> None:
    """Held at one point of its first attempt: claimed, calling, in commit, after commit. Later ones go through."""
    first = step.fence == 1
    if first and at == "claimed":
        hold(step.id)
    call_outside(step)
    if first and at == "calling":
        hold(step.id)
    if form == "in_commit":
        step.in_commit(lambda session: write_effect(session, step, f"held {at}"))
        return
    write_effect(step.session, step, f"held {at}")
    if first and at == "after commit":
        step.session.info["hold_after_commit"] = step.id


def stuck(step: Step) -> None:
    """Longer than its kind's timeout."""
    call_outside(step)
    time.sleep(HOLD_SECONDS)


def retried(step: Step, message: str) -> str:
    call_outside(step)
    if step.attempt == 1:
        raise Retry("the other side is busy", after=0.1)
    return message


def snoozed(step: Step, message: str) -> str:
    """Not ready at its first claim."""
    call_outside(step)
    if step.fence == 1:
        raise Snooze(0.1, message, code="NOT_THERE_YET")
    return message


def hopeless(step: Step, address: str) -> None:
    call_outside(step)
    raise GiveUp("no such address", code="NO_RECIPIENT")


def point(step: Step, at: str, sink: str = "") -> object:
    """
    Comes by every point of an attempt at which a test may hold it. What `at` names happens on the way, the first time.

    The points outside the handler are in `points.py`.
    """
    first = step.fence == 1
    pause(step.id, "K6")
    call_outside(step)
    if sink:
        with urlopen(Request(sink, data=b"{}", headers={"Idempotency-Key": step.key}), timeout=HOLD_SECONDS):
            pass
    pause(step.id, "K7")
    if first and at.startswith("K16"):
        points.end_the_heartbeat()
        points.say_when_cancelled(step)
        pause(step.id, "K16")
    pause(step.id, "settle")
    if first and at.startswith("K15"):
        raise Retry("the other side is busy", after=0.1)
    if at == "K8":
        step.in_commit(lambda session: write_effect(session, step, at))
        return object()  # which cannot be stored, and is warned of before the commit begins
    if first and at == "Z2 ended":
        step.session.execute(text("set local idle_in_transaction_session_timeout = '1s'"))
    write_effect(step.session, step, at)
    pause(step.id, "Z2")
    if at in ("K11", "K14"):
        registry.get("shop.order").options(key=f"after {step.id}").enqueue(step.session, "follow-up")
    if first and at == "K14":
        step.session.info["hold_after_commit"] = f"{step.id}.K14"
    return None


def flooded(step: Step) -> None:
    """Its first attempt asks for more than it reads: the database waits until it takes the rest."""
    call_outside(step)
    if step.fence == 1:
        with raw(step.connection).cursor() as cursor:
            for _ in cursor.stream("select repeat('x', 1000) from generate_series(1, 300000)"):
                hold(step.id)
    write_effect(step.session, step, "flooded")


def plain(step: Step, note: str = "") -> None:
    """Nothing but its effect: no connection beside the step's own."""
    write_effect(step.session, step, note)


def patient(step: Step, seconds: float) -> None:
    """Asks at its first attempt to be run again after so long."""
    call_outside(step)
    if step.attempt == 1:
        raise Retry("later", after=seconds)
    write_effect(step.session, step, "patient")


KINDS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("order", order, {}),
    ("quick", quick, {}),
    ("slow", slow, {}),
    ("held", held, {}),
    ("brief", held, {"timeout": 8.0}),
    ("stuck", stuck, {"timeout": 1.5, "backoff": Backoff(base=600, factor=2, cap=3600)}),
    ("retried", retried, {}),
    ("snoozed", snoozed, {}),
    ("hopeless", hopeless, {"queue": "mail"}),
    ("later", order, {}),
    ("point", point, {}),
    ("flooded", flooded, {"timeout": 6.0}),
    ("plain", plain, {}),
    ("patient", patient, {}),
    ("renamed", order, {"formerly": ("shop.former",)}),
)


class Shop:
    """The declared kinds, as attributes."""

    order: DeliveryKind[..., Any]
    quick: DeliveryKind[..., Any]
    slow: DeliveryKind[..., Any]
    held: DeliveryKind[..., Any]
    brief: DeliveryKind[..., Any]
    stuck: DeliveryKind[..., Any]
    retried: DeliveryKind[..., Any]
    snoozed: DeliveryKind[..., Any]
    hopeless: DeliveryKind[..., Any]
    later: DeliveryKind[..., Any]
    point: DeliveryKind[..., Any]
    flooded: DeliveryKind[..., Any]
    plain: DeliveryKind[..., Any]
    patient: DeliveryKind[..., Any]
    renamed: DeliveryKind[..., Any]

    def __init__(self, without: Iterable[str] = ()) -> None:
        self.declared: list[str] = []
        for name, handler, terms in KINDS:
            if name in without:
                continue
            kind: DeliveryKind[..., Any] = delivery(f"shop.{name}", **terms)(handler)
            setattr(self, name, kind)
            self.declared.append(kind.name)

    def forget(self) -> None:
        """Take the kinds out of the registry: other tests of this process have kinds of their own."""
        for name in self.declared:
            registry.remove(name)
