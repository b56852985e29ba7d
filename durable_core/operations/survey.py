"""How many operations wait for their call, or their next poll, in each queue, as far as a bounded look can tell."""

from __future__ import annotations

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.survey import Survey, waiting_in

_statements = beside(__file__)

SHARE = 1000
"""So many are counted in each queue."""


def survey(tx: Transaction) -> Survey:
    """Those that nobody has just now, due or not."""
    return waiting_in("operations", run(checked(tx), _statements.waiting, share=SHARE), SHARE)
