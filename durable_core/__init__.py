"""Durable work for teams that already run Celery and Postgres."""

from durable_core import deliveries
from durable_core.deliveries.declare import AsyncStep, DeliveryKind, Step, delivery
from durable_core.deliveries.enqueue import enqueue_by_name, enqueue_many
from durable_core.deliveries.rows import Ref
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
from durable_core.retry import Backoff
from durable_core.secrets import Secret
from durable_core.states import DeliveryState
from durable_core.wakes import wake

__version__ = "0.1.0"

__all__ = [
    "AsyncStep",
    "Backoff",
    "ClaimLost",
    "DefinitionError",
    "DeliveryKind",
    "DeliveryState",
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
    "Ref",
    "Retry",
    "RowBusy",
    "SchemaAhead",
    "SchemaBehind",
    "Secret",
    "Snooze",
    "Step",
    "StepTransactionOwned",
    "UnknownHandler",
    "UnsupportedTransaction",
    "deliveries",
    "delivery",
    "enqueue_by_name",
    "enqueue_many",
    "wake",
]  # fmt: skip
