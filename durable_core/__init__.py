"""Durable work for teams that already run Celery and Postgres."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from durable_core import deliveries, operations, plans
    from durable_core.cases.cases import Cases
    from durable_core.cases.clock import VirtualClock
    from durable_core.cases.conditions import Scope, Unmet, any_of
    from durable_core.cases.context import CaseContext
    from durable_core.cases.declare import CaseType
    from durable_core.cases.event import Event
    from durable_core.cases.memory import MemoryStore
    from durable_core.cases.policy import Attempts
    from durable_core.deliveries.declare import AsyncStep, DeliveryKind, Step, delivery
    from durable_core.deliveries.enqueue import enqueue_by_name, enqueue_many
    from durable_core.deliveries.rows import Ref
    from durable_core.document_refusals import (
        ContentTooLarge,
        DocumentRefused,
        InvalidContent,
        SaveIdReused,
        UnknownDocument,
        UnknownRevision,
        VersionConflict,
    )
    from durable_core.documents.declare import Documents
    from durable_core.documents.rows import Document, Revision, Saved
    from durable_core.errors import (
        ClaimLost,
        DefinitionError,
        DurableError,
        EffectEscaped,
        GiveUp,
        IdempotencyConflict,
        IllegalMove,
        InvalidArguments,
        InvalidOption,
        KeyInFlight,
        KeyTaken,
        NotFound,
        Retry,
        RowBusy,
        SchemaAhead,
        SchemaBehind,
        Snooze,
        StepTransactionOwned,
        UnknownHandler,
        UnsupportedTransaction,
    )
    from durable_core.operations.declare import OperationKind, OperationStep, operation
    from durable_core.operations.start import OperationRef
    from durable_core.operations.statuses import ExternalStatus, Issued, Poll
    from durable_core.plans.declare import PlanStep, StepKind, plan_step
    from durable_core.plans.rows import Plan
    from durable_core.plans.target import Target, target_version
    from durable_core.refusals import (
        BadScopeKey,
        CaseBusy,
        CaseClaimLost,
        CaseNotFound,
        CaseRefused,
        ExecutionFailed,
        InvalidInput,
        InvalidState,
        Issue,
        Misfit,
        NotConfigured,
        OperationInFlight,
        PlanExpired,
        PlanRefused,
        SelfApproval,
        StalePlan,
        StepNotAvailable,
        TargetsUnresolved,
        UnknownCaseType,
        UnknownStep,
    )
    from durable_core.retry import Backoff
    from durable_core.secrets import Secret
    from durable_core.states import DeliveryState, OperationState, PlanState
    from durable_core.wakes import wake

__version__ = "0.1.0"

__all__ = [
    "AsyncStep",
    "Attempts",
    "Backoff",
    "BadScopeKey",
    "CaseBusy",
    "CaseClaimLost",
    "CaseContext",
    "CaseNotFound",
    "CaseRefused",
    "CaseType",
    "Cases",
    "ClaimLost",
    "ContentTooLarge",
    "DefinitionError",
    "DeliveryKind",
    "DeliveryState",
    "Document",
    "DocumentRefused",
    "Documents",
    "DurableError",
    "EffectEscaped",
    "Event",
    "ExecutionFailed",
    "ExternalStatus",
    "GiveUp",
    "IdempotencyConflict",
    "IllegalMove",
    "InvalidArguments",
    "InvalidContent",
    "InvalidInput",
    "InvalidOption",
    "InvalidState",
    "Issue",
    "Issued",
    "KeyInFlight",
    "KeyTaken",
    "MemoryStore",
    "Misfit",
    "NotConfigured",
    "NotFound",
    "OperationInFlight",
    "OperationKind",
    "OperationRef",
    "OperationState",
    "OperationStep",
    "Plan",
    "PlanExpired",
    "PlanRefused",
    "PlanState",
    "PlanStep",
    "Poll",
    "Ref",
    "Retry",
    "Revision",
    "RowBusy",
    "SaveIdReused",
    "Saved",
    "SchemaAhead",
    "SchemaBehind",
    "Scope",
    "Secret",
    "SelfApproval",
    "Snooze",
    "StalePlan",
    "Step",
    "StepKind",
    "StepNotAvailable",
    "StepTransactionOwned",
    "Target",
    "TargetsUnresolved",
    "UnknownCaseType",
    "UnknownDocument",
    "UnknownHandler",
    "UnknownRevision",
    "UnknownStep",
    "Unmet",
    "UnsupportedTransaction",
    "VersionConflict",
    "VirtualClock",
    "any_of",
    "deliveries",
    "delivery",
    "enqueue_by_name",
    "enqueue_many",
    "operation",
    "operations",
    "plan_step",
    "plans",
    "target_version",
    "wake",
]  # fmt: skip

_NAMES = {
    "durable_core.deliveries.declare": (
        "AsyncStep",
        "DeliveryKind",
        "Step",
        "delivery",
    ),
    "durable_core.deliveries.enqueue": (
        "enqueue_by_name",
        "enqueue_many",
    ),
    "durable_core.deliveries.rows": ("Ref",),
    "durable_core.document_refusals": (
        "ContentTooLarge",
        "DocumentRefused",
        "InvalidContent",
        "SaveIdReused",
        "UnknownDocument",
        "UnknownRevision",
        "VersionConflict",
    ),
    "durable_core.documents.declare": ("Documents",),
    "durable_core.documents.rows": (
        "Document",
        "Revision",
        "Saved",
    ),
    "durable_core.errors": (
        "ClaimLost",
        "DefinitionError",
        "DurableError",
        "EffectEscaped",
        "GiveUp",
        "IdempotencyConflict",
        "IllegalMove",
        "InvalidArguments",
        "InvalidOption",
        "KeyInFlight",
        "KeyTaken",
        "NotFound",
        "Retry",
        "RowBusy",
        "SchemaAhead",
        "SchemaBehind",
        "Snooze",
        "StepTransactionOwned",
        "UnknownHandler",
        "UnsupportedTransaction",
    ),
    "durable_core.plans.declare": ("PlanStep", "StepKind", "plan_step"),
    "durable_core.plans.target": ("Target", "target_version"),
    "durable_core.plans.rows": ("Plan",),
    "durable_core.refusals": (
        "BadScopeKey",
        "CaseBusy",
        "CaseClaimLost",
        "CaseNotFound",
        "CaseRefused",
        "ExecutionFailed",
        "InvalidInput",
        "InvalidState",
        "Issue",
        "Misfit",
        "NotConfigured",
        "OperationInFlight",
        "PlanExpired",
        "PlanRefused",
        "SelfApproval",
        "StalePlan",
        "StepNotAvailable",
        "TargetsUnresolved",
        "UnknownCaseType",
        "UnknownStep",
    ),
    "durable_core.retry": ("Backoff",),
    "durable_core.secrets": ("Secret",),
    "durable_core.states": ("DeliveryState", "OperationState", "PlanState"),
    "durable_core.operations.declare": (
        "OperationKind",
        "OperationStep",
        "operation",
    ),
    "durable_core.operations.start": ("OperationRef",),
    "durable_core.operations.statuses": (
        "ExternalStatus",
        "Issued",
        "Poll",
    ),
    "durable_core.wakes": ("wake",),
    "durable_core.cases.cases": ("Cases",),
    "durable_core.cases.clock": ("VirtualClock",),
    "durable_core.cases.conditions": (
        "Scope",
        "Unmet",
        "any_of",
    ),
    "durable_core.cases.context": ("CaseContext",),
    "durable_core.cases.declare": ("CaseType",),
    "durable_core.cases.event": ("Event",),
    "durable_core.cases.memory": ("MemoryStore",),
    "durable_core.cases.policy": ("Attempts",),
}
"""Where each name comes from. Each is imported when it is first asked for: a container that asks every ten seconds
whether its worker lives does not import SQLAlchemy for it."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        # `import durable_core` has always been enough for durable_core.deliveries.
        module = f"{__name__}.{name}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
