"""What time alone decides about a plan: it has expired, or was interrupted. Written by a sweep, or as it is read."""

from __future__ import annotations

from durable_core.database.statements import beside
from durable_core.database.transactions import (
    READ_ONLY,
    RELEASE_SAVEPOINT,
    ROLLBACK_TO_SAVEPOINT,
    SAVEPOINT,
    Steps,
    is_infrastructure,
    sqlstate,
)
from durable_core.deliveries.keys import undone

statements = beside(__file__)

HEAL, EXPIRE = "heal", "expire"
NOT_GRANTED = "42501"


def healed(plan_id: str) -> Steps[None]:
    """
    Heal one plan in the caller's transaction, if nobody has its row: a lock says that its holder is alive.

    Inside a savepoint, for a read must not end its caller's transaction where the database refuses. Where its role may
    only read, the plan is not its to heal: the sweep does it.
    """
    yield SAVEPOINT, {}
    try:
        stale = yield statements.stale_one, {"id": plan_id}
        if stale:
            yield statements.heal, {"ids": [row["id"] for row in stale], "move": HEAL}
        overdue = yield statements.overdue_one, {"id": plan_id}
        if overdue:
            yield statements.expire, {"ids": [row["id"] for row in overdue]}
    except Exception as error:
        yield from undone(error, ROLLBACK_TO_SAVEPOINT, RELEASE_SAVEPOINT)
        if sqlstate(error) not in (NOT_GRANTED, READ_ONLY) and not is_infrastructure(error):
            raise
        return
    yield RELEASE_SAVEPOINT, {}
