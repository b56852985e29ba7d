"""
A Celery app with durable work. `celery -A celery_app worker` runs it, `celery -A celery_app beat` drives the sweeps.

`python celery_app.py` is a client: it commits an invoice and its delivery together.
"""

from celery import Celery
from myshop import Invoice, broker_url, engine, mailer
from sqlalchemy.orm import Session

from durable_core import Step, delivery
from durable_core.celery_binding import install

app = Celery("celery_app", broker=broker_url)
app.conf.durable_engine = engine
durable = install(app)


@delivery("invoice.send", queue="mail")
def send_invoice(step: Step, invoice_id: int) -> str:
    """Send the invoice, and note in the same transaction as the receipt that it was sent."""
    message_id = mailer.send(invoice_id, idempotency_key=step.key)
    step.session.get_one(Invoice, invoice_id).sent_as = message_id
    return message_id


def main() -> None:
    with Session(engine) as session, session.begin():
        invoice = Invoice(total=120)
        session.add(invoice)
        session.flush()
        ref = send_invoice.enqueue(session, invoice.id)
    # A short script may end before the thread that publishes hints has begun. Losing the hint
    # would cost a second, until the next dispatch.
    durable.carrier.flush(5)
    print(ref.id)


if __name__ == "__main__":
    main()
