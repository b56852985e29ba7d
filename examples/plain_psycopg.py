"""Enqueue on a psycopg connection. It has no commit hook, so the program says itself when it has committed."""

import os

import psycopg
from celery_app import durable, send_invoice

import durable_core


def main() -> None:
    url = os.environ["DURABLE_DATABASE_URL"].replace("+psycopg", "")
    with psycopg.connect(url) as connection:
        with connection.transaction():
            row = connection.execute("insert into invoices (total) values (120) returning id").fetchone()
            assert row is not None
            ref = send_invoice.enqueue(connection, row[0])
        # Now it is committed. Without this call the next dispatch would find the row, about a second later.
        print("hints:", durable_core.wake())
    durable.carrier.flush(5)
    print(ref.id)


if __name__ == "__main__":
    main()
