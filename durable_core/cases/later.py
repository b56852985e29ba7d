"""
Cases through Celery: an execution that is asked for in a transaction is a delivery of the kind `case.<type>`.

So it has a hint, a lease, retries of what the machine room did, and a place in `why`, `find` and Flower. Its id is the
id of the request: what was committed for it is never executed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from durable_core import kinds
from durable_core.cases.declare import CaseType
from durable_core.cases.ingest import Ingested
from durable_core.database.connections import Database
from durable_core.database.transactions import Transaction
from durable_core.deliveries.declare import DeliveryKind, Step, database_of, delivery, registry
from durable_core.deliveries.options import Options
from durable_core.deliveries.read import get, now
from durable_core.deliveries.rows import Ref
from durable_core.errors import GiveUp, InvalidArguments, Snooze
from durable_core.refusals import CaseBusy, CaseClaimLost, CaseRefused, InvalidState, UnknownCaseType, UnknownStep

log = logging.getLogger("durable.run")

EVENT_KIND = "case-event"
"""The kind that brings an event to its end whose process was lost. A dash: no case type has a kind of this name."""

LEAST_SNOOZE, MOST_SNOOZE = 1.0, 5.0
"""Seconds for which a request waits for a busy case. Most executions are over long before their lease."""

UNKNOWN_SECONDS = 10.0
"""How long an event or a request waits for a worker that knows type and step: in a rolling deploy there is one."""

MOST_WAITS = 360
"""So often a request is put off, an hour's worth, before what its worker does not know is what nobody knows."""


class Carried(Protocol):
    """What a worker needs of the cases of one type (`Cases`)."""

    def carry_out(
        self, case_id: str, step: str, *, scope_key: str | None, actor: Any, input: Any, request_id: str
    ) -> dict[str, Any]:
        """Execute a step for a request; what its delivery is to keep. Raises what `Cases.execute` raises."""
        ...

    def resume(self, event_id: str, tries: int) -> Ingested | None: ...

    def on(self, database: Database) -> Carried:
        """The same on the database of a worker."""
        ...


_carried: dict[str, Carried] = {}
"""By the name of a case type."""


def carry(case_type: CaseType[Any], cases: Carried) -> None:
    """Have workers of this process carry out what is asked of cases of this type. Of several the last one is asked."""
    if kinds.case_types.find(case_type.name) is not case_type:
        return  # a definition beside the one that this process knows by the name
    _carried[case_type.name] = cases
    if registry.find(EVENT_KIND) is None:
        delivery(EVENT_KIND)(_resume)
    known = registry.find(case_type.delivery_kind)
    if known is not None and known.queue == case_type.queue:
        return
    if known is not None:
        registry.remove(known.name)
    execute = _executing(case_type.name)
    for step in case_type.steps.values():
        # Where the pool spawns its children they import the modules of their tasks: that of the steps, not this one.
        execute.__module__ = step.__module__
        break
    delivery(case_type.delivery_kind, queue=case_type.queue)(execute)


def known_types() -> list[str]:
    """The names of the case types that this process can carry out."""
    return sorted(_carried)


def known() -> list[Carried]:
    """The cases of this process, each once."""
    return list({id(cases): cases for cases in _carried.values()}.values())


def kind_of(case_type: CaseType[Any]) -> DeliveryKind[..., Any]:
    """The kind of the requests of this type."""
    kind: DeliveryKind[..., Any] = registry.get(case_type.delivery_kind)
    return kind


def request(
    tx: Transaction, case_type: CaseType[Any], case_id: str, step: str, *, scope_key: str | None, actor: Any,
    input: Any, options: Options,
) -> Ref:  # fmt: skip
    """Write the request. What can be said of it now is refused now; the guard is asked when it is carried out."""
    declared = case_type.steps.get(step)
    assert declared is not None
    who = case_type.actor_of(actor)
    if not who.whole:
        raise InvalidArguments(case_type.delivery_kind, "actor", "it is no JSON, and could not be carried")
    return (
        kind_of(case_type)
        .options(**options)
        .enqueue(
            tx, case_id=case_id, step_name=step, scope_key=scope_key, actor=who.json,
            input=declared.dump_input(declared.load_input(input)),
        )
    )  # fmt: skip


def resumed(tx: Transaction, case_type: str, event_id: str, tries: int) -> Ref:
    """Have an event brought to its end by a worker of the type's queue. By its key the sweep finds the delivery."""
    kind = registry.get(EVENT_KIND)
    known = kinds.case_types.find(case_type)
    options: Options = {"key": f"{event_id}:{tries}"}
    if known is not None:
        options["queue"] = known.queue
    ref: Ref = kind.options(**options).enqueue(tx, case_type=case_type, event_id=event_id, tries=tries)
    return ref


def _executing(type_name: str) -> Callable[..., dict[str, Any]]:
    def execute(
        step: Step, case_id: str, step_name: str, scope_key: str | None = None, actor: Any = None, input: Any = None
    ) -> dict[str, Any]:
        """Execute a step of a case, as it was asked for."""
        database = database_of(step)
        try:
            return (
                _carried[type_name]
                .on(database)
                .carry_out(case_id, step_name, scope_key=scope_key, actor=actor, input=input, request_id=step.id)
            )
        except CaseBusy as busy:
            with database.autocommit() as connection:
                left = (busy.expires_at - now(connection)).total_seconds()
            raise Snooze(min(max(left, LEAST_SNOOZE), MOST_SNOOZE), str(busy), code=busy.reason) from None
        except CaseClaimLost as lost:
            # Nothing was committed, and the request still stands; perhaps the one who took over was its redelivery.
            raise Snooze(LEAST_SNOOZE, str(lost), code=lost.reason) from None
        except (UnknownStep, UnknownCaseType, InvalidState) as unknown:
            # Whoever asked knew the step: in a rolling deploy another worker does, and reads the state.
            with database.autocommit() as connection:
                waits = get(connection, step.id).snoozes
            if waits >= MOST_WAITS:
                raise GiveUp(str(unknown), code=unknown.reason) from unknown
            raise Snooze(UNKNOWN_SECONDS, str(unknown), code=unknown.reason) from None
        except CaseRefused as refused:
            raise GiveUp(str(refused), code=refused.reason) from refused

    return execute


def _resume(step: Step, case_type: str, event_id: str, tries: int) -> str:
    """Bring an event of another system to its end that was left pending."""
    if case_type not in _carried:
        raise Snooze(UNKNOWN_SECONDS, f"case type {case_type!r} is not known to this worker", code="UNKNOWN_HANDLER")
    ended = _carried[case_type].on(database_of(step)).resume(event_id, tries)
    return "nothing to do" if ended is None else ended.status
