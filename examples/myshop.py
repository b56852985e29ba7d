"""The shop of the examples and of the documentation: a model, an engine and a mail client, as you have your own."""

from __future__ import annotations

import os
import uuid

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

engine = create_engine(os.environ["DURABLE_DATABASE_URL"])
"""postgresql+psycopg://…: durable work needs psycopg 3."""

broker_url = os.environ["DURABLE_REDIS_URL"]

mail_url = os.environ.get("DURABLE_SMTP_URL", "smtp://127.0.0.1:1025?from=shop@shop.example")
warehouse_url = os.environ.get("SHOP_WAREHOUSE_URL", "https://warehouse.example/orders")
in_development = not warehouse_url.startswith("https://")


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"

    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]
    sent_as: Mapped[str | None]


Base.metadata.create_all(engine)


class Mailer:
    """Stands for anything outside the database. It remembers what it was asked for under each key."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}

    def send(self, invoice_id: int, *, idempotency_key: str) -> str:
        """The id of the message; the same key gives the same message again."""
        return self.sent.setdefault(idempotency_key, f"<{uuid.uuid4()}@shop.example>")


mailer = Mailer()
