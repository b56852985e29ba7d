"""A row that the host's own database objects will not let go: what a sweep must get past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, text


@contextmanager
def poisoned(
    engine: Engine,
    row_id: str,
    event: str,
    when: str = "true",
    *,
    says: str = "host says no",
    table: str = "deliveries",
) -> Iterator[None]:
    """While this lasts, a trigger of the host's raises at this event (`update`, `delete`) of this row."""
    name = f"poison_{row_id.replace('-', '')[-12:]}"
    with engine.begin() as tx:
        tx.execute(text(
            f"create function {name}() returns trigger language plpgsql as $$ begin raise '{says}'; end $$;"
            f"create trigger {name} before {event} on durable.{table} for each row"
            f" when (old.id = '{row_id}' and {when}) execute function {name}()"
        ))  # fmt: skip
    try:
        yield
    finally:
        with engine.begin() as tx:
            tx.execute(text(f"drop function {name}() cascade"))
