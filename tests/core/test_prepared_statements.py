"""Prepared statements that a pooler in transaction mode mixed up: the machine room's fault, and no row's."""

import pytest
from sqlalchemy import create_engine, text

from durable_core.database.connections import Database, raw
from durable_core.deliveries.attempt import Outcome, perform


@pytest.fixture
def preparing(engine):
    """An application's engine that prepares all it runs, and whose one session may be anybody's."""
    own = create_engine(engine.url, pool_size=1, max_overflow=0)
    with own.connect() as connection:
        raw(connection).prepare_threshold = 0
    yield own
    own.dispose()


def somebody_elses(connection):
    """Take, as another client of the pooler would have, the names that the driver will give next."""
    taken = {name for (name,) in connection.execute(text("select name from pg_prepared_statements"))}
    for name in {f"_pg3_{n}" for n in range(200)} - taken:
        raw(connection).execute(f'prepare "{name}" as select 1', prepare=False)


def test_a_mixed_up_statement_in_the_commit_repeats_the_attempt_and_counts_as_no_failure(
    preparing, declare, make, make_worker, row, lines
):
    tries = []

    def handler(step):
        tries.append(step.attempt)
        if len(tries) == 1:
            step.in_commit(lambda session: somebody_elses(session.connection()))

    kind = declare(handler, max_attempts=1)
    made = make(kind)
    done = perform(make_worker(on=Database(preparing)), kind, made.id)

    assert done.outcome in (Outcome.SENT, Outcome.INTERRUPTED)
    assert row(made.id).state in ("sent", "pending")
    assert "fail" not in [line.move for line in lines(made.id)]


def test_a_mixed_up_claim_claims_nothing_and_the_row_is_hinted_again(preparing, kind, make, make_worker, row):
    worker, made = make_worker(on=Database(preparing)), make()
    with preparing.connect() as connection:
        somebody_elses(connection)
        connection.commit()

    assert perform(worker, kind, made.id).outcome is Outcome.UNAVAILABLE
    assert (row(made.id).state, row(made.id).attempts) == ("pending", 0)
