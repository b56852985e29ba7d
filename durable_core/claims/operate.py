"""
What a person does to rows, whatever their contract: one act on one or several, with who and why.

Each contract's `operate.sql` names a statement per act. It takes ids, `by` and `reason`, skips what others hold, and
answers with each row: `done`, or `busy`, or the state that it `was` in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from durable_core.arguments import clean_text
from durable_core.database.statements import Statement
from durable_core.database.transactions import Row, Transaction, checked, run
from durable_core.errors import IllegalMove, InvalidOption, NotFound, RowBusy

log = logging.getLogger("durable.operate")

HELD_BACK = "held back"
"""What a row `was` that a sweep holds back, where nobody would act on it before it is released."""


def _nothing(_tx: Transaction, _done: list[Row]) -> None:
    """Of an act after which nobody need be told."""


@dataclass(frozen=True)
class Act:
    """One act: its statement, what it is called once it is done, the states it leaves, and of which contract."""

    name: str
    done: str
    needed: str
    states: tuple[StrEnum, ...]
    statement: Statement
    what: str = "delivery"
    then: Callable[[Transaction, list[Row]], None] = _nothing
    """Who is hinted of the rows that were done, after the commit."""


def act_on(tx: Transaction, act: Act, row_id: str, *, by: str, reason: str, **more: object) -> None:
    """One act on one row. Raises NotFound, IllegalMove, RowBusy, and InvalidOption without a name and a reason."""
    rows = act_on_each(tx, act, [checked_id(row_id, act.what)], by=by, reason=reason, **more)
    if not rows:
        raise NotFound(act.what, row_id)
    if not rows[0]["done"]:
        raise refusal(act, rows[0])


def act_on_each(
    tx: Transaction, act: Act, row_ids: Sequence[str], *, by: str, reason: str, **more: object
) -> list[Row]:
    """
    One act on several rows in one statement: each row with `done`, or `busy`, or the state that it `was` in.

    Rows that are not there come back as nothing.
    """
    rows = run(
        checked(tx), act.statement, ids=list(row_ids), by=who_or_why(act.name, "by", by),
        reason=who_or_why(act.name, "reason", reason), **more,
    )  # fmt: skip
    done = [row for row in rows if row["done"]]
    if done:
        facts = {"row_id": done[0]["id"]} if len(row_ids) == 1 else {}
        log.info("operator_action", extra={"act": act.name, "actor": by, "rows": len(done), **facts})
    act.then(tx, done)
    return rows


def refusal(act: Act, row: Row) -> RowBusy | IllegalMove:
    """Why an act was not done to this row."""
    if row["busy"]:
        return RowBusy(act.name, row["id"], act.what)
    needed = "released first" if row["was"] == HELD_BACK else act.needed
    return IllegalMove(act.name, row["id"], row["was"], needed, act.what)


def checked_id(row_id: str, what: str) -> str:
    """A row's id in its one spelling. Raises NotFound for what cannot be an id."""
    try:
        return str(UUID(row_id))
    except (ValueError, AttributeError, TypeError):
        raise NotFound(what, str(row_id)[:60]) from None


def who_or_why(act: str, option: str, text: object, kept: str = "the journal") -> str:
    """Who acts (`by`, 200 characters at most) or why (1,000), as it is kept. Raises InvalidOption for none."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidOption(act, option, f"say who acts and why; both are kept in {kept}")
    return clean_text(text, 200 if option == "by" else 1000)
