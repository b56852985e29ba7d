"""Entries of a journal without a database: sealed as the journal seals them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from durable_core.cases.guards import address, evaluate
from durable_core.cases.journal import GENESIS, Draft, Entry, EntryKind, Head, Payload, Seal

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Journal:
    """The journal of one case, its entries one second apart."""

    def __init__(self, case_id: str = "case") -> None:
        self.case_id = case_id
        self.entries: list[Entry] = []

    def add(
        self, entry: EntryKind | str, execution: str = "e1", *, attempt: int = 1, step: str = "sign",
        scope_key: str | None = None, as_of: datetime | None = None, seq: int | None = None,
        dormancy: str | None = None, request_id: str | None = None, **payload: Any,
    ) -> Entry:  # fmt: skip
        draft = Draft(
            id=str(uuid4()), execution_id=execution, request_id=request_id, entry=EntryKind(entry), attempt=attempt,
            step=step, scope_key=scope_key, as_of=as_of, seq=seq, dormancy=dormancy,
            payload=Payload(**{name: json.dumps(value) for name, value in payload.items()}),
        )  # fmt: skip
        head = Head(len(self.entries), self.entries[-1].chain if self.entries else GENESIS)
        at = NOON + timedelta(seconds=len(self.entries))
        self.entries.append(Seal().sealed(draft, self.case_id, head, at))
        return self.entries[-1]

    def claim(self, case_type, state, *, step="sign", scope_key=None, actor=None, as_of=NOON, execution="e1") -> Entry:
        """The entry of a claim as the lifecycle writes it, by this definition."""
        stored, seen = case_type.dump(state), case_type.actor_of(actor)
        loaded = case_type.load(stored)
        at = address(case_type, loaded, step, scope_key)
        guard = evaluate(at.step, loaded, actor=seen.value, element=at.element, key=at.key, as_of=as_of)
        return self.add(
            "claimed", execution, step=step, scope_key=scope_key, as_of=guard.as_of, actor=seen.json,
            guard=guard.to_json(), state=stored,
        )  # fmt: skip


def erased(entry: Entry) -> Entry:
    """The same entry after a person's data was erased from it."""
    return replace(entry, payload=Payload(), salt=None, erased_at=NOON, erased_by="dana")
