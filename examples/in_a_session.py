"""Enqueue inside a SQLAlchemy Session: with the rows, with a key, and not at all after a rollback."""

from celery_app import send_invoice
from myshop import Invoice, engine
from sqlalchemy.orm import Session

from durable_core import IdempotencyConflict, NotFound, deliveries


def main() -> None:
    with Session(engine) as session, session.begin():
        session.add(invoice := Invoice(total=120))
        session.flush()
        named = send_invoice.options(key=f"invoice:{invoice.id}")
        first = named.enqueue(session, invoice.id)
        again = named.enqueue(session, invoice.id)
        assert first.created
        assert not again.created
        assert again.id == first.id

        # The same key for something else is refused, and the transaction lives on.
        try:
            named.enqueue(session, invoice.id + 1)
        except IdempotencyConflict as conflict:
            print(conflict.reason)

    with Session(engine) as session:
        never = send_invoice.options(countdown=60).enqueue(session, 7)
        session.rollback()
        try:
            deliveries.get(session, never.id)
        except NotFound as gone:
            print(gone.reason)

    with Session(engine) as session:
        print(deliveries.get(session, first.id).state)


if __name__ == "__main__":
    main()
