"""A small app: orders, a confirmation for each, and the Celery app that carries it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable_core import Retry, Step, delivery
from durable_core.celery_binding import install
from durable_core.celery_binding.environment import broker_url_from_environment, engine_from_environment


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    confirmed: Mapped[int] = mapped_column(default=0)


app = Celery("shop", broker=broker_url_from_environment())
app.conf.update(
    durable_engine=engine_from_environment,
    # Short, so that a test sees a killed worker's delivery again within seconds.
    durable_lease_seconds=float(os.environ.get("SHOP_LEASE_SECONDS", "30")),
    durable_heartbeat_seconds=float(os.environ.get("SHOP_HEARTBEAT_SECONDS", "8")),
    worker_prefetch_multiplier=1,
)
install(app)


@delivery("order.confirm", queue="mail", max_attempts=3)
def confirm(step: Step, order_id: int, *, copy: bool = False) -> str:
    email = step.session.get_one(Order, order_id).email
    if email == "later@example.org":
        raise Retry("the mailbox is full", after=600)
    if "@" not in email:
        raise ValueError(f"{email!r} is no address")
    step.session.get_one(Order, order_id).confirmed += 1
    return f"to {email}"


@delivery("order.pack")
def pack(step: Step, order_id: int, gate: str) -> int:
    """Waits for a file, as a slow machine would keep it waiting."""
    while not Path(gate).exists():
        time.sleep(0.05)
    step.session.get_one(Order, order_id).confirmed += 1
    return step.fence


def place_order(session: Session, email: str) -> int:
    """The code under test: an order and its confirmation, in the caller's transaction."""
    order = Order(email=email)
    session.add(order)
    session.flush()
    confirm.options(key=f"order:{order.id}").enqueue(session, order.id)
    return order.id
