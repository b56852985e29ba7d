"""A type of cases for the tests of what comes from outside: a parcel that other systems speak of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from durable_core import kinds
from durable_core.cases.cases import Cases
from durable_core.cases.declare import Attempts, CaseType, Scope, Unmet
from durable_core.cases.memory import MemoryStore
from durable_core.database.connections import Database
from durable_core.deliveries.declare import registry

_names = (f"parcel_{number}" for number in itertools.count(1))


class Parcel(BaseModel):
    places: list[str] = []
    items: dict[str, bool] = {}
    lost: bool = False


class Seen(BaseModel):
    place: str


class Desk:
    """A type of parcels, its cases in one store, and what its handlers do when a test says so."""

    def __init__(self, where: Any, **how: Any) -> None:
        self.where = where
        self.type = parcel(self)
        self.cases = Cases(where, [self.type], **how)
        self.ran: list[Any] = []
        self.act: Callable[[Parcel, Any], object] = lambda state, ctx: None

    @property
    def in_memory(self) -> bool:
        return isinstance(self.where, MemoryStore)

    @contextmanager
    def tx(self) -> Iterator[Any]:
        """A transaction as its user has one; committed at its end."""
        if self.in_memory:
            with self.where.transaction() as transaction:
                yield transaction
        else:
            engine = self.where.engine if isinstance(self.where, Database) else self.where
            with Session(engine) as session, session.begin():
                yield session

    def made(self, *names: str, step: str | None = "scan", scope_key: str | None = None, **state: Any) -> str:
        """A case, and what the carrier calls it."""
        with self.tx() as tx:
            case = self.cases.create(tx, self.type, Parcel(**state))
            for name in names:
                self.cases.correlate(tx, case.id, "carrier", name, step=step, scope_key=scope_key)
        return case.id

    def case(self, case_id: str) -> Any:
        with self.tx() as tx:
            return self.cases.get(tx, case_id)

    def entries(self, case_id: str) -> list[str]:
        with self.tx() as tx:
            return [str(entry.entry) for entry in self.cases.journal(tx, case_id)]

    def dead(self, **which: Any) -> list[Any]:
        with self.tx() as tx:
            return self.cases.dead_letters(tx, **which)

    def forget(self) -> None:
        kinds.case_types.remove(self.type.name)
        registry.remove(self.type.delivery_kind)
        registry.remove("case-event")


def parcel(desk: Desk) -> CaseType[Parcel]:
    made = CaseType(next(_names), state=Parcel)

    def not_lost(state: Parcel) -> bool | Unmet:
        return not state.lost or Unmet("it is lost")

    def is_carrier(state: Parcel, actor: Any) -> bool:
        return bool(actor.get("system") == "carrier")

    @made.step("scan", requires={"not lost": not_lost}, permits={"is the carrier": is_carrier}, input=Seen)
    def scan(state: Parcel, ctx: Any) -> Parcel:
        """Note a place."""
        desk.ran.append(ctx)
        state.places.append(ctx.input.place)
        desk.act(state, ctx)
        return state

    @made.step("deliver", scope=Scope(select=lambda state: list(state.items), key=str), retry=Attempts(limit=1))
    def deliver(state: Parcel, ctx: Any) -> Parcel:
        """Hand over one item of it."""
        desk.ran.append(ctx)
        state.items[ctx.scope_key] = True
        desk.act(state, ctx)
        return state

    @made.step("tell", retry=Attempts(limit=1))
    def tell(state: Parcel, ctx: Any) -> Parcel:
        """For whatever a test has it do."""
        desk.ran.append(ctx)
        desk.act(state, ctx)
        return state

    return made


def events(engine: Engine) -> list[Any]:
    """The rows of the inbox."""
    with engine.connect() as connection:
        return list(connection.execute(text("select * from durable.case_events order by id")))
