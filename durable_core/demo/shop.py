"""The example shop: orders, and for each an e-mail and a webhook enqueued in the order's own transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from durable_core import celery_binding, kinds
from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE
from durable_core.database.migrate import migrate
from durable_core.database.statements import beside, current_schema
from durable_core.database.transactions import run
from durable_core.deliveries.declare import DeliveryKind, Step, delivery
from durable_core.demo import supplier
from durable_core.errors import DurableError
from durable_core.ready import email, webhook
from durable_core.ready.email import Smtp
from durable_core.ready.webhook import Webhooks
from durable_core.retry import Backoff

_statements = beside(__file__)

EMAIL, WEBHOOK = "shop.email", "shop.webhook"
MAIL_QUEUE, WEBHOOK_QUEUE = "mail", "webhooks"
SENDER_DOMAIN = "shop.example"
FIRST_ROLLED_BACK = 1_000_000
"""Orders that are rolled back on purpose have numbers from here on, so that a call for one betrays itself."""

LEASE_SECONDS, HEARTBEAT_SECONDS = 3.0, 1.0
SWEEPS = {"dispatch": 0.5, "reap": 1.0}
QUICK = Backoff(base=0.5, factor=2.0, cap=4.0)
ATTEMPTS = 10


class DatabaseInUse(DurableError):
    """The durable schema holds deliveries of somebody else's."""

    reason = "DATABASE_IN_USE"

    def __str__(self) -> str:
        return (
            f"the schema {self.args[0]!r} of this database holds deliveries that are not the demo's: "
            f"point {DATABASE_VARIABLE} at another database, or unset it."
        )


@dataclass(frozen=True)
class Place:
    """Where everything is, as the processes of the demo hand it on in their environment."""

    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    mail_port: int
    web_port: int
    supplier_port: int = 0

    def environment(self) -> dict[str, str]:
        return {
            DATABASE_VARIABLE: self.database_url,
            REDIS_VARIABLE: self.redis_url,
            "DURABLE_DEMO_MAIL_PORT": str(self.mail_port),
            "DURABLE_DEMO_WEB_PORT": str(self.web_port),
            "DURABLE_DEMO_SUPPLIER_PORT": str(self.supplier_port),
        }

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place:
        return Place(
            database_url=environment[DATABASE_VARIABLE],
            redis_url=environment[REDIS_VARIABLE],
            mail_port=int(environment["DURABLE_DEMO_MAIL_PORT"]),
            web_port=int(environment["DURABLE_DEMO_WEB_PORT"]),
            supplier_port=int(environment["DURABLE_DEMO_SUPPLIER_PORT"]),
        )


@dataclass(frozen=True)
class Kinds:
    email: DeliveryKind[..., Any]
    webhook: DeliveryKind[..., Any]


def declare(place: Place) -> Kinds:
    """The shop's two kinds. The e-mail writes its effect in the commit, the webhook in the step's session."""
    smtp = Smtp("127.0.0.1", f"Shop <orders@{SENDER_DOMAIN}>", port=place.mail_port, timeout=10.0)
    webhooks = Webhooks(private_targets=True)  # the sink is on this machine

    @delivery(EMAIL, queue=MAIL_QUEUE, max_attempts=ATTEMPTS, backoff=QUICK, timeout=60.0)
    def confirm_order(step: Step, order: int, to: str) -> dict[str, Any]:
        sent = email.send(smtp, step, to=to, subject=f"Order {order}", text="Thank you. It is on its way.")
        step.in_commit(lambda session: _effect(session, step, "email", order))
        return sent

    @delivery(WEBHOOK, queue=WEBHOOK_QUEUE, max_attempts=ATTEMPTS, backoff=QUICK, timeout=60.0)
    def tell_warehouse(step: Step, order: int) -> dict[str, Any]:
        url = f"http://127.0.0.1:{place.web_port}/orders"
        called = webhook.post(webhooks, step, url=url, body={"order": order})
        _effect(step.session, step, "webhook", order)
        return called

    return Kinds(confirm_order, tell_warehouse)


def declared(place: Place) -> Kinds:
    """The kinds for a process that only enqueues: those of an earlier demo in it serve again."""
    mail, call = kinds.deliveries.find(EMAIL), kinds.deliveries.find(WEBHOOK)
    return Kinds(mail, call) if mail is not None and call is not None else declare(place)


def forget() -> None:
    """Undeclare the kinds; for tests."""
    for name in (EMAIL, WEBHOOK):
        kinds.deliveries.remove(name)
    kinds.operations.remove(supplier.RESTOCK)


def _effect(session: Session, step: Step, channel: str, order: int) -> None:
    run(session, _statements.effect, delivery_id=step.id, fence=step.fence, channel=channel, order_number=order)


def expected_key(channel: str, delivery_id: str) -> str:
    """What every call of this delivery carries: a `Message-ID` or an `Idempotency-Key`."""
    if channel == "email":
        return f"<{EMAIL}.{delivery_id}@{SENDER_DOMAIN}>"
    return f"{WEBHOOK}:{delivery_id}"


def celery_app(place: Place, engine: Engine | None = None) -> Celery:
    """The shop's Celery app with its durable work, used by its workers and by the process that takes orders."""
    app = Celery("shop", broker=place.redis_url, set_as_current=engine is None)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        task_ignore_result=True,
        durable_engine=engine or create_engine(place.database_url),
        durable_lease_seconds=LEASE_SECONDS,
        durable_heartbeat_seconds=HEARTBEAT_SECONDS,
        durable_sweep_intervals=SWEEPS,
        durable_shutdown_grace=5.0,
    )
    celery_binding.install(app)
    return app


def prepare(engine: Engine) -> None:
    """
    A migrated durable schema without deliveries, and a new `shop` schema.

    What an earlier demo left goes. Raises DatabaseInUse, with nothing changed, where there
    are deliveries of other kinds.
    """
    with engine.begin() as connection:
        if run(connection, _statements.is_durable)[0]["here"]:
            if run(connection, _statements.strangers, kinds=[EMAIL, WEBHOOK])[0]["here"]:
                raise DatabaseInUse(current_schema())
            if run(connection, _statements.leftovers)[0]["here"]:
                # The guards refuse to delete what is unfinished, rightly; so the schema goes as a whole.
                connection.execute(text(f'drop schema "{current_schema()}" cascade'))
        for statement in (
            _statements.drop_shop,
            _statements.create_shop,
            _statements.create_orders,
            _statements.create_effects,
        ):
            run(connection, statement)
    migrate(engine)


class Rollback(Exception):
    """The shop changes its mind about an order, on purpose."""


@dataclass
class Shop:
    """Takes orders. What it saw committed, rolled back and answered as a duplicate, by its own account."""

    engine: Engine
    kinds: Kinds
    placed: list[int] = field(default_factory=list)
    rolled_back: list[int] = field(default_factory=list)
    duplicates: int = 0
    created_twice: int = 0

    def order(self, number: int, *, roll_back: bool = False) -> None:
        """One order, its e-mail and its webhook in one transaction: all three, or none when it is rolled back."""
        try:
            with Session(self.engine) as session, session.begin():
                mail, call = self._enqueue(session, number)
                run(
                    session, _statements.order, number=number, customer=f"customer-{number}@example.com",
                    email_delivery=mail.id, webhook_delivery=call.id,
                )  # fmt: skip
                if roll_back:
                    raise Rollback
        except Rollback:
            self.rolled_back.append(number)
        else:
            self.placed.append(number)

    def order_again(self, number: int) -> None:
        """The customer's second click: the same keys in a transaction of its own, which must find the first rows."""
        with Session(self.engine) as session, session.begin():
            for ref in self._enqueue(session, number):
                self.duplicates += 1
                self.created_twice += ref.created

    def _enqueue(self, session: Session, number: int) -> tuple[Any, Any]:
        key = f"order:{number}"
        mail = self.kinds.email.options(key=key).enqueue(session, number, f"customer-{number}@example.com")
        return mail, self.kinds.webhook.options(key=key).enqueue(session, number)
