"""What other systems call a case: registered, looked up by name, and listed."""

from __future__ import annotations

from typing import Any

from durable_core.arguments import Unfit, check
from durable_core.cases.memory import MemoryTransaction, copied
from durable_core.cases.postgres import PostgresTransaction, correlation_of
from durable_core.cases.read import checked_after, checked_id
from durable_core.cases.store import Correlation, NewCorrelation, StoreTransaction, misnamed
from durable_core.database.statements import beside
from durable_core.database.transactions import run
from durable_core.errors import InvalidOption
from durable_core.refusals import CaseNotFound

_statements = beside(__file__)

MOST_PER_PAGE = 1000


def correlate(
    transaction: StoreTransaction, case_id: str, system: str, external_id: str, *, step: str | None,
    scope_key: str | None, metadata: Any,
) -> Correlation:  # fmt: skip
    """Register a name. Raises CaseNotFound and InvalidOption, with nothing written."""
    row_id = checked_id(case_id)
    named: dict[str, Any] = {"system": system, "external_id": external_id, "scope_key": scope_key, "step": step}
    wrong = misnamed(**named)
    if wrong is not None:
        raise InvalidOption("correlate", *wrong)
    try:
        check(metadata)
    except Unfit as unfit:
        raise InvalidOption("correlate", "metadata", str(unfit)) from None
    if transaction.case(row_id) is None:
        raise CaseNotFound(row_id)
    return transaction.correlate(NewCorrelation(case_id=row_id, metadata=metadata, **named))


def of_case(transaction: StoreTransaction, case_id: str, *, after: str | None, limit: int) -> list[Correlation]:
    """The names of a case, a page at a time. Raises CaseNotFound and InvalidOption."""
    if not 1 <= limit <= MOST_PER_PAGE:
        raise InvalidOption("correlations", "limit", f"a page has 1 to {MOST_PER_PAGE} correlations")
    row_id, after = checked_id(case_id), checked_after("correlations", after)
    if transaction.case(row_id) is None:
        raise CaseNotFound(row_id)
    if isinstance(transaction, MemoryTransaction):
        mine = [copied(one) for one in transaction.store.correlations.values() if one.case_id == row_id]
        return [one for one in sorted(mine, key=lambda one: one.id) if after is None or one.id > after][:limit]
    assert isinstance(transaction, PostgresTransaction)
    rows = run(transaction.tx, _statements.of_case, case_id=row_id, after=after, limit=limit)
    return [correlation_of(row) for row in rows]
