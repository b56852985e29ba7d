"""How many steps of plans wait for a worker in each queue, as far as a bounded look can tell. Reads only."""

from __future__ import annotations

from durable_core.database.statements import beside
from durable_core.database.transactions import Transaction, checked, run
from durable_core.deliveries.survey import Survey, waiting_in

_statements = beside(__file__)

SHARE = 1000
"""So many are counted in each queue."""


def survey(tx: Transaction) -> Survey:
    """Those of approved plans, and of plans between two steps; a pause or a hold may keep them."""
    return waiting_in("steps", run(checked(tx), _statements.waiting, share=SHARE), SHARE)
