"""Deliveries in a wanted state, reached by legal moves only: the guards of the database judge every one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from durable_core.claims.claim import Claim, Holder
from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.attempt import claim_one
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.read import Delivery, get
from durable_core.deliveries.rows import Ref
from durable_core.states import TERMINAL, DeliveryState

_statements = beside(__file__)

_UNCLAIMED = {DeliveryState.CANCELED, DeliveryState.EXPIRED}
_ERRORS = {DeliveryState.FAILED: "GAVE_UP", DeliveryState.DEAD: "WORKER_ERROR"}


@dataclass(frozen=True)
class Made:
    """A delivery made for a test. `claim` is the one it was, or still is, processed under."""

    id: str
    claim: Claim | None = None

    @property
    def held(self) -> Claim:
        """The claim of a row that was claimed."""
        assert self.claim is not None, f"delivery {self.id} was never claimed"
        return self.claim


def make_delivery(
    tx: Transaction,
    kind: DeliveryKind[..., Any],
    arguments: Mapping[str, object] | None = None,
    *,
    state: str = "pending",
    holder: Holder | None = None,
    **options: Any,
) -> Made:
    """
    A delivery of this kind in this state, in the caller's transaction; `options` as in `kind.options`.

    A row that is to have been claimed must be due. Raises ValueError for an unknown state.
    """
    wanted = DeliveryState(state)
    row_id = kind.options(**options).enqueue(tx, **(arguments or {})).id
    if wanted is DeliveryState.PENDING:
        return Made(row_id)
    claim = None if wanted in _UNCLAIMED else claim_one(checked(tx), kind, row_id, holder or Holder())
    if claim is None and wanted not in _UNCLAIMED:
        raise ValueError(f"delivery {row_id} is not due, so it cannot be {wanted}")
    if wanted is not DeliveryState.PROCESSING:
        raised = int(wanted is DeliveryState.CANCELED)
        run(
            checked(tx), _statements.end,
            id=row_id, state=wanted.value, raised=raised, error_code=_ERRORS.get(wanted),
        )  # fmt: skip
    return Made(row_id, claim)


def wait_for(
    engine: Engine, delivery: Ref | Made | str, *, state: str | None = None, seconds: float = 30.0
) -> Delivery:
    """
    The committed row, once somebody else has ended it, or brought it to this state. Looks twenty times a second.

    A state that it passed through between two looks is not seen. Raises TimeoutError, with what the row is instead;
    and NotFound for one that was not committed.
    """
    row_id = delivery if isinstance(delivery, str) else delivery.id
    wanted = TERMINAL if state is None else {DeliveryState(state)}
    end = time.monotonic() + seconds
    while True:
        with engine.connect() as connection:
            row = get(connection, row_id)
        if row.state in wanted:
            return row
        if time.monotonic() > end:
            last = f", last error: {row.error_message}" if row.error_message else ""
            raise TimeoutError(
                f"not within {seconds:g} s: {row.kind} {row_id} {' or '.join(sorted(wanted))}; it is {row.state}{last}"
            )
        time.sleep(0.05)


def settle_down(engine: Engine, *, seconds: float = 5.0) -> bool:
    """
    Take every pending delivery away from the workers, past the guards, and wait for those that run to end.

    False when some still run after so long. A test database only, as its superuser.
    """
    with engine.begin() as connection:
        run(connection, _statements.past_the_guards)
        run(connection, _statements.withdraw)
    end = time.monotonic() + seconds
    while True:
        with engine.connect() as connection:
            if not run(connection, _statements.running):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
