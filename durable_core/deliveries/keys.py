"""Deliveries under a key: inserted where it is free, found or renewed where it is taken, all inside one savepoint."""

from __future__ import annotations

import json
from typing import TypeAlias

from uuid_utils.compat import uuid7

from durable_core.arguments import digest
from durable_core.database.statements import Statement, beside
from durable_core.database.transactions import (
    LOCK_TIMEOUT,
    RELEASE_SAVEPOINT,
    ROLLBACK_TO_SAVEPOINT,
    SAVEPOINT,
    Row,
    Steps,
    sqlstate,
)
from durable_core.deliveries.options import NEWEST_WINS, KeyPolicy
from durable_core.deliveries.rows import New, Ref
from durable_core.errors import DurableError, IdempotencyConflict, KeyInFlight, KeyTaken
from durable_core.states import DeliveryState

_statements = beside(__file__)

KEY_WAIT = "50ms"
"""How long an enqueue waits for another open transaction that is writing the same key; design, section 4."""

_TRIES_FOR_A_KEY = 3

_Name: TypeAlias = tuple[str, str]
"""A kind and a key: one intention."""


def write_keyed(keyed: list[tuple[int, New]]) -> Steps[dict[int, Ref]]:
    """
    Insert what is new and read what was there, inside one savepoint.

    The insert waits for a twin that is still uncommitted, so it runs under a lock timeout of
    its own; and every refusal rolls back to the savepoint, so that it writes nothing and
    leaves the caller's transaction as it was. Twins within one call are one row: the first is
    `created`, the others get it back; with other arguments they are refused before any statement,
    unless the newest is to win.
    """
    wanted: dict[_Name, New] = {}
    for _, new in keyed:
        name = (new.kind, str(new.key))
        twin = wanted.get(name)
        if twin is None or new.policy in NEWEST_WINS:
            wanted[name] = new
        elif new.policy is KeyPolicy.RAISE:
            raise KeyTaken(*name, None)
        elif twin.arguments != new.arguments:
            raise IdempotencyConflict(*name, None)
    new_ids = {name: str(uuid7()) for name in wanted}
    yield SAVEPOINT, {}
    try:
        found = yield from _insert_or_find(wanted, new_ids)
    except Exception as error:
        yield from undone(error, ROLLBACK_TO_SAVEPOINT, RELEASE_SAVEPOINT)
        if sqlstate(error) == LOCK_TIMEOUT:
            raise KeyInFlight(*min(wanted), among=len(wanted)) from None
        raise
    yield RELEASE_SAVEPOINT, {}
    refs: dict[int, Ref] = {}
    told: set[_Name] = set()
    for index, new in keyed:
        name = (new.kind, str(new.key))
        if name in found:
            there, wins = found[name], new.policy in NEWEST_WINS
            state = DeliveryState(there["state"])
            refs[index] = Ref(there["id"], new.kind, created=False, state=state, replaced=wins)
        else:
            refs[index] = Ref(new_ids[name], new.kind, created=name not in told)
            told.add(name)
    return refs


def undone(error: Exception, rollback: Statement, release: Statement) -> Steps[None]:
    """
    Roll back to the savepoint and remove it, which a rollback alone does not.

    A refusal promises a transaction that is alive, so there a rollback that fails is the news.
    After any other error, such as a connection that died, the first is, and it is not hidden by a second.
    """
    try:
        yield rollback, {}
        yield release, {}
    except Exception:
        if isinstance(error, DurableError) or sqlstate(error) == LOCK_TIMEOUT:
            raise


def _insert_or_find(wanted: dict[_Name, New], new_ids: dict[_Name, str]) -> Steps[dict[_Name, Row]]:
    """
    Insert under the new ids what is free; the rows of the other names, as their policies want them.

    Raises IdempotencyConflict, KeyTaken, KeyInFlight.
    """
    rows = json.dumps([new.row(new_ids[name]) for name, new in wanted.items()])
    inserted: set[str] = set()
    found: dict[_Name, Row] = {}
    renewed: set[_Name] = set()
    callers_timeout: str | None = None
    for _ in range(_TRIES_FOR_A_KEY):
        (answer,) = yield _statements.insert_keyed, {"rows": rows, "lock_timeout": KEY_WAIT}
        callers_timeout = callers_timeout if callers_timeout is not None else answer["was"]
        inserted.update(answer["inserted"])
        missing = [name for name in wanted if new_ids[name] not in inserted]
        # No row back from the insert: the key is there. A second statement, with a newer
        # snapshot, sees it, unless its row was deleted in between: then the insert is due again.
        found = {}
        if missing:
            keys = json.dumps([{"kind": kind, "key": key} for kind, key in missing])
            there = yield _statements.keyed, {"keys": keys}
            found = {(row["kind"], row["key"]): row for row in there}
        for name, row in sorted(found.items()):
            if wanted[name].policy in NEWEST_WINS and name not in renewed:
                if (yield from _renewed(wanted[name], row)):
                    renewed.add(name)
                else:
                    del found[name]
        if len(found) == len(missing):
            break
    else:
        unseen = [name for name in missing if name not in found]
        raise KeyInFlight(*min(unseen), among=len(unseen))
    yield _statements.restore_bound, {"was": callers_timeout}
    for name, row in found.items():
        if wanted[name].policy is KeyPolicy.RAISE:
            raise KeyTaken(*name, row["id"])
        if name not in renewed and row["digest"] != digest(wanted[name].arguments):
            raise IdempotencyConflict(*name, row["id"])
    return found


def _renewed(new: New, row: Row) -> Steps[bool]:
    """
    Have a waiting row take the new arguments; whether it has.

    One that has begun keeps what it began with, and gives up the key: the next insert finds it free.
    """
    if row["state"] == DeliveryState.PENDING:
        debounced = new.policy is KeyPolicy.DEBOUNCE
        written = yield _statements.replace, {"rows": json.dumps([new.row(row["id"])]), "debounced": debounced}
        return bool(written)
    yield _statements.give_up_key, {"id": row["id"]}
    return False
