"""
Plans: steps that somebody proposes, a person approves as they are shown, and workers carry out one by one, each once.

`propose`, `approve`, `reject`, `get`, `report`, `list`, `compensate`, `release`, `journal`, `previous` (their async
forms begin with an a) and `reasons`: each takes the caller's transaction first. `planned` names a step by its kind.
"""

from durable_core.deliveries.why import Because
from durable_core.plans.compensate import Compensated, acompensate, compensate
from durable_core.plans.declare import Planned, planned
from durable_core.plans.operate import aapprove, approve, areject, arelease, reject, release
from durable_core.plans.propose import apropose, propose
from durable_core.plans.read import aget, ajournal, apage, aprevious, areport, get, journal, page, previous, report
from durable_core.plans.rows import Became, Line, Plan, Receipt, Report, StepOf
from durable_core.plans.target import Target
from durable_core.plans.why import reasons

list = page
"""`plans.list(tx, ...)`: a page of plans, newest first."""
alist = apage

__all__ = [
    "Became", "Because", "Compensated", "Line", "Plan", "Planned", "Receipt", "Report", "StepOf", "Target", "aapprove",
    "acompensate", "aget", "ajournal", "alist", "apage", "approve", "aprevious", "apropose", "areject", "arelease",
    "areport", "compensate", "get", "journal", "list", "page", "planned", "previous", "propose", "reasons", "reject",
    "release", "report",
]  # fmt: skip
