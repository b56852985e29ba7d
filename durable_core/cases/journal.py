"""
The entries of a case's journal, and the chain that holds them together.

Each entry has a digest over its payload (salted, so that an erased one cannot be guessed from it), one over what
stays of it, and a chain over the entry before. An entry edited, missing or moved breaks the chain.
The hole: who can write past the guards can compute all of it anew, unless a key is set that they do not have; and a
tail cut off together with the head of the case shows only to somebody who kept the head.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

from durable_core.arguments import canonical
from durable_core.cases.delta import applied
from durable_core.errors import DefinitionError

GENESIS: Final = "0" * 64
"""The chain before the first entry."""


class EntryKind(StrEnum):
    """What an entry of the journal tells."""

    CLAIMED = "claimed"
    ATTEMPT_FAILED = "attempt-failed"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"


class Payload(NamedTuple):
    """What a person's data may be in, as JSON texts; erased as a whole."""

    actor: str | None = None
    input: str | None = None
    guard: str | None = None
    state: str | None = None
    delta: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An entry that is about to be appended: its place in the journal is not known yet."""

    id: str
    execution_id: str
    request_id: str | None
    entry: EntryKind
    attempt: int
    step: str
    scope_key: str | None
    as_of: datetime | None = None
    seq: int | None = None
    dormancy: str | None = None
    payload: Payload = field(default=Payload(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Entry(Draft):
    """
    One entry, as it stands in the journal of its case.

    `number` counts the entries of the case from 1. `actor`, `input`, `guard`, `state`, `delta` and `error` are the
    values of its payload: None where its kind carries none, or where they were erased.
    """

    case_id: str
    number: int
    ordinal: int = 0
    recorded_at: datetime
    salt: str | None = field(repr=False)
    payload_digest: str = field(repr=False)
    digest: str = field(repr=False)
    chain: str
    keyed: bool
    erased_at: datetime | None = None
    erased_by: str | None = None

    @cached_property
    def actor(self) -> Any:
        return _value(self.payload.actor)

    @cached_property
    def input(self) -> Any:
        return _value(self.payload.input)

    @cached_property
    def guard(self) -> Any:
        return _value(self.payload.guard)

    @cached_property
    def state(self) -> Any:
        return _value(self.payload.state)

    @cached_property
    def delta(self) -> Any:
        return _value(self.payload.delta)

    @cached_property
    def error(self) -> Any:
        return _value(self.payload.error)


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


class Head(NamedTuple):
    """How far a journal went at some time: kept elsewhere, it shows that nothing before was cut off or written anew."""

    number: int
    chain: str


_key: bytes | Callable[[], bytes | str | None] | None = None


def use_key(key: bytes | str | Callable[[], bytes | str | None] | None) -> None:
    """Name the key of this process's journals, or say who knows it. One process seals with one key."""
    global _key
    _key = key if callable(key) else _bytes(key)


def current_key() -> bytes | None:
    """The key that `use_key` named; a function is asked once, when the first entry needs it."""
    global _key
    if callable(_key):
        _key = _bytes(_key())
    return _key


def _bytes(key: bytes | str | None) -> bytes | None:
    if key is None:
        return None
    if not isinstance(key, bytes | str) or not key:
        raise DefinitionError("durable_journal_key is a text or bytes, at least one of them.")
    return key.encode() if isinstance(key, str) else key


@dataclass(frozen=True)
class Seal:
    """Computes digests and chains: HMAC-SHA-256 with a key, SHA-256 without."""

    key: bytes | None = field(default=None, repr=False)

    def sealed(self, draft: Draft, case_id: str, after: Head, recorded_at: datetime) -> Entry:
        """The entry behind `after`, with a fresh salt."""
        salt = secrets.token_hex(16)
        number, payload_digest = after.number + 1, payload_digest_of(salt, draft.payload)
        digest = self.digest(_plain(draft, case_id, number, recorded_at, payload_digest))
        return Entry(
            **vars(draft), case_id=case_id, number=number, recorded_at=recorded_at, salt=salt,
            payload_digest=payload_digest, digest=digest, chain=self.chained(after.chain, digest),
            keyed=self.key is not None,
        )  # fmt: skip

    def digest(self, text: str) -> str:
        if self.key is None:
            return hashlib.sha256(text.encode()).hexdigest()
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()

    def chained(self, before: str, digest: str) -> str:
        return self.digest(before + digest)

    def digest_of(self, entry: Entry) -> str:
        """What the digest of this entry has to be."""
        return self.digest(_plain(entry, entry.case_id, entry.number, entry.recorded_at, entry.payload_digest))


def payload_digest_of(salt: str, payload: Payload) -> str:
    """Over the texts as they are stored. Without a salt an erased payload of few possible values could be guessed."""
    return hashlib.sha256((salt + canonical(list(payload))).encode()).hexdigest()


def _plain(draft: Draft, case_id: str, number: int, recorded_at: datetime, payload_digest: str) -> str:
    return canonical(
        [
            case_id, number, draft.id, draft.execution_id, draft.request_id, str(draft.entry), draft.attempt,
            draft.step, draft.scope_key, _instant(draft.as_of), draft.seq, draft.dormancy, _instant(recorded_at),
            payload_digest,
        ]
    )  # fmt: skip


def _instant(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="microseconds")


class FaultKind(StrEnum):
    """What `verify` finds wrong."""

    EDITED = "edited"
    MISSING = "missing"
    REORDERED = "reordered"
    UNKEYED = "unkeyed"
    HEAD = "head"
    STATE = "state"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a journal; `number` is the entry at which it shows."""

    number: int
    kind: FaultKind
    problem: str


@dataclass(frozen=True)
class Verified:
    """What a look at every entry of a journal came to; `unkeyed` ones anybody with the database could have written."""

    case_id: str
    entries: int
    erased: int
    unkeyed: int
    head: Head
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


class Verifier:
    """Sees the entries of one journal in the order of their numbers, then says what is wrong with it."""

    def __init__(self, case_id: str, key: bytes | None, saved: Head | None = None) -> None:
        self._case_id, self._key, self._saved = case_id, key, saved
        self._last, self._ordinal = Head(0, GENESIS), 0
        self._entries = self._erased = self._unkeyed = self._keyed = self._completed = 0
        self._faults: list[Fault] = []
        self._claimed: Entry | None = None
        self._state: str | None = None
        """The state of the case at the entry seen last, by claims and deltas; None where that cannot be told."""
        self._ended_at: datetime | None = None

    def see(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._see(entry)

    def _see(self, entry: Entry) -> None:
        self._entries += 1
        self._erased += entry.erased_at is not None
        found = len(self._faults)
        expected = self._last.number + 1
        if entry.number != expected:
            self._fault(entry.number, FaultKind.MISSING, f"entries {expected} to {entry.number - 1} are missing")
        elif entry.ordinal < self._ordinal:
            self._fault(entry.number, FaultKind.REORDERED, "it was written before the one that it follows")
        if entry.keyed:
            self._keyed += 1
        else:
            self._unkeyed += 1
            if self._keyed:
                self._fault(entry.number, FaultKind.UNKEYED, "it has no key, and entries before it have one")
        self._see_digests(entry, follows=entry.number == expected)
        if self._saved is not None and self._saved.number == entry.number and self._saved.chain != entry.chain:
            self._fault(entry.number, FaultKind.HEAD, "its chain is not the one that was saved")
        self._see_state(entry, sound=len(self._faults) == found)
        self._last, self._ordinal = Head(entry.number, entry.chain), entry.ordinal

    def _see_state(self, entry: Entry, *, sound: bool) -> None:
        """A claim has the state that the last commit made; one that was edited between the two shows here."""
        if entry.entry == EntryKind.CLAIMED:
            self._claimed = entry if entry.erased_at is None else None
            if not sound:
                self._state = None
            elif self._claimed is not None:
                state = canonical(entry.state)
                if self._state not in (None, state):
                    self._fault(entry.number, FaultKind.STATE, "its state is not what the commit before it had made")
                self._state = state
        elif entry.entry == EntryKind.COMPLETED:
            self._completed += 1
            self._state = self._made(entry) if sound else None
            if entry.dormancy == "reopened":
                self._ended_at = None
            elif entry.dormancy == "ended":
                self._ended_at = self._ended_at or entry.recorded_at

    def _made(self, completed: Entry) -> str | None:
        """What a commit has made of the state that its claim has."""
        claimed = self._claimed
        if claimed is None or claimed.execution_id != completed.execution_id or completed.erased_at is not None:
            return None
        try:
            return canonical(applied(claimed.state, completed.delta))
        except (KeyError, IndexError, TypeError, ValueError):
            return None  # an edited claim, which is a fault of its own

    def _see_digests(self, entry: Entry, *, follows: bool) -> None:
        if entry.keyed and self._key is None:
            # Without the key its own digest cannot be told from a forged one; its payload can.
            self._fault(entry.number, FaultKind.UNKEYED, "it was sealed with a key, which is not set here")
            return
        seal = Seal(self._key if entry.keyed else None)
        if entry.salt is None:
            payload = entry.erased_at is not None and entry.payload == Payload()
        else:
            payload = payload_digest_of(entry.salt, entry.payload) == entry.payload_digest
        if not payload or not hmac.compare_digest(seal.digest_of(entry), entry.digest):
            self._fault(entry.number, FaultKind.EDITED, "it is not as it was written")
        elif follows and not hmac.compare_digest(seal.chained(self._last.chain, entry.digest), entry.chain):
            self._fault(entry.number, FaultKind.REORDERED, "it was not written behind the entry before it")

    def _fault(self, number: int, kind: FaultKind, problem: str) -> None:
        self._faults.append(Fault(number, kind, problem))

    def end(
        self, head: Head, seq: int, state: str, ended_at: datetime | None, *, beyond: int | None = None
    ) -> Verified:
        """
        What is wrong, seen against what the case itself says: its head, its count of commits, its state, its dormancy.

        `beyond` is an entry that lies past its head.
        """
        if self._state is not None and self._state != canonical(json.loads(state)):
            self._fault(head.number, FaultKind.STATE, "the state of the case is not what its last commit made of it")
        if not self._faults and ended_at != self._ended_at:
            # Of a journal that is whole: one edited entry would be told twice.
            self._fault(head.number, FaultKind.STATE, "the case is not dormant since when its journal says")
        if beyond is not None:
            self._fault(beyond, FaultKind.HEAD, "it lies behind the last entry that the case counts")
        if head.number > self._last.number:
            missing = f"entries {self._last.number + 1} to {head.number} are missing"
            self._fault(head.number, FaultKind.MISSING, missing)
        elif head != self._last:
            self._fault(head.number, FaultKind.HEAD, "the case names another entry as its last")
        if self._saved is not None and self._saved.number > self._last.number:
            self._fault(self._saved.number, FaultKind.MISSING, "the entry whose chain was saved is missing")
        if seq != self._completed:
            problem = f"the case counts {seq} commits and its journal {self._completed}"
            self._fault(head.number, FaultKind.HEAD, problem)
        return Verified(
            self._case_id, self._entries, self._erased, self._unkeyed, self._last, tuple(self._faults)
        )  # fmt: skip
