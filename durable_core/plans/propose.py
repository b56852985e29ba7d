"""Proposing a plan in the caller's own transaction: what is proposed is checked whole, and frozen under a digest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from uuid_utils.compat import uuid7

from durable_core import kinds
from durable_core.arguments import INT64, Unfit, by_name, canonical, check, digest
from durable_core.claims.operate import who_or_why
from durable_core.database.statements import beside
from durable_core.database.transactions import (
    AsyncTransaction,
    Steps,
    Transaction,
    acarried,
    achecked,
    carried,
    checked,
)
from durable_core.deliveries.options import seconds_of
from durable_core.errors import IllegalMove, InvalidArguments, InvalidOption
from durable_core.plans.declare import Planned
from durable_core.plans.read import aget, get
from durable_core.plans.rows import Plan
from durable_core.plans.target import Target, is_word, reader_of
from durable_core.refusals import Issue, PlanRefused

_statements = beside(__file__)

MOST_STEPS = 10
DEFAULT_EXPIRES = timedelta(minutes=15)
RISKS = ("low", "medium", "high")
LONGEST_RATIONALE = 5000
LONGEST_ORIGIN = 1000


def propose(
    tx: Transaction,
    steps: Sequence[Planned],
    *,
    by: str,
    scopes: Iterable[str] = (),
    expires: float | timedelta = DEFAULT_EXPIRES,
    origin: str | None = None,
    risk: str = "medium",
    rationale: str | None = None,
    self_approval: bool | None = None,
) -> Plan:
    """
    Write one pending plan in the caller's transaction: it commits or vanishes with the caller's rows.

    What it says is frozen here: steps, arguments with their defaults, reviewed targets, granted scopes; its `digest` is
    what an approval names. It can be approved and started for as long as `expires` (seconds or timedelta). `origin` is
    the conversation or account that it belongs to. With `self_approval=False` its proposer may not approve it; left
    open, that is so where the risk is high. Raises PlanRefused with all that is wrong with the steps, and InvalidOption
    for the rest; both write nothing.
    """
    drawn = draw_up(steps, by=by, scopes=scopes, expires=expires, origin=origin, risk=risk, rationale=rationale,
                    self_approval=self_approval)  # fmt: skip
    carried(checked(tx), drawn.written())
    return get(tx, drawn.id)


async def apropose(
    tx: AsyncTransaction,
    steps: Sequence[Planned],
    *,
    by: str,
    scopes: Iterable[str] = (),
    expires: float | timedelta = DEFAULT_EXPIRES,
    origin: str | None = None,
    risk: str = "medium",
    rationale: str | None = None,
    self_approval: bool | None = None,
) -> Plan:
    """As `propose`, in an async transaction."""
    drawn = draw_up(steps, by=by, scopes=scopes, expires=expires, origin=origin, risk=risk, rationale=rationale,
                    self_approval=self_approval)  # fmt: skip
    await acarried(achecked(tx), drawn.written())
    return await aget(tx, drawn.id)


@dataclass(frozen=True)
class Drawn:
    """A plan to be: checked, not yet written."""

    id: str
    parameters: dict[str, object]

    def written(self) -> Steps[None]:
        rows = yield _statements.propose, {"id": self.id, **self.parameters}
        if not rows:
            of = str(self.parameters["compensates"])
            raise IllegalMove("compensate", of, "compensated by another plan", "without one", "plan")


def draw_up(
    steps: Sequence[Planned], *, by: str, scopes: Iterable[str], expires: float | timedelta, origin: str | None,
    risk: str, rationale: str | None, self_approval: bool | None, compensates: str | None = None,
) -> Drawn:  # fmt: skip
    """Check and freeze a proposal. Raises as `propose` does."""
    by = who_or_why("propose", "by", by)
    granted = _scopes(scopes)
    seconds = seconds_of("propose", "expires", expires)
    if seconds < 1:
        raise InvalidOption("propose", "expires", "a person needs a second at least to approve it")
    if risk not in RISKS:
        raise InvalidOption("propose", "risk", f"it is one of {', '.join(RISKS)}")
    if origin is not None and not (is_text(origin, LONGEST_ORIGIN) and len(origin.encode()) <= LONGEST_ORIGIN):
        raise InvalidOption("propose", "origin", "it is text of 1 to 1,000 bytes without control characters")
    if rationale is not None and not is_text(rationale, LONGEST_RATIONALE, lines=True):
        raise InvalidOption("propose", "rationale", f"it is text of 1 to {LONGEST_RATIONALE:,} characters")
    if self_approval is not None and not isinstance(self_approval, bool):
        raise InvalidOption("propose", "self_approval", "it is True, False or None")
    may = risk != "high" if self_approval is None else self_approval
    frozen = _frozen(steps)
    consent = {
        "steps": frozen, "scopes": granted, "risk": risk, "rationale": rationale, "expires_seconds": seconds,
        "origin": origin, "by": by, "self_approval": may, "compensates": compensates,
    }  # fmt: skip
    return Drawn(
        str(uuid7()),
        {
            "origin": origin, "risk": risk, "rationale": rationale, "steps": canonical(frozen),
            "step_count": len(frozen), "digest": digest(canonical(consent)), "scopes": granted, "self_approval": may,
            "by": by, "compensates": compensates, "kind": frozen[0]["kind"], "queue": frozen[0]["queue"],
            "expires_seconds": seconds,
        },
    )  # fmt: skip


def _scopes(scopes: Iterable[str]) -> list[str]:
    if isinstance(scopes, str) or not isinstance(scopes, Iterable):
        raise InvalidOption("propose", "scopes", f"they are a set of names; got {type(scopes).__name__}")
    granted = list(scopes)
    for scope in granted:
        if not is_word(scope):
            raise InvalidOption("propose", "scopes", "a scope is text of 1 to 200 characters")
    return sorted(set(granted))


def _frozen(steps: object) -> list[dict[str, Any]]:
    """The steps as they are kept. Raises PlanRefused with all that is wrong with them."""
    given = list(steps) if isinstance(steps, Sequence) and not isinstance(steps, str | bytes) else None
    if given is None:
        raise PlanRefused((Issue(None, f"steps are a list of kind.planned(...); got {type(steps).__name__}"),))
    issues = []
    if not given:
        issues.append(Issue(None, "it has no step"))
    if len(given) > MOST_STEPS:
        issues.append(Issue(None, f"it has {len(given)} steps, and {MOST_STEPS} are the most"))
    frozen = []
    for index, planned in enumerate(given):
        wrong: list[str] = []
        frozen.append(_frozen_step(planned, wrong))
        issues += [Issue(index, problem) for problem in wrong]
    if issues:
        raise PlanRefused(tuple(issues))
    return frozen


def _frozen_step(planned: object, wrong: list[str]) -> dict[str, Any]:
    if not isinstance(planned, Planned):
        wrong.append(f"a step is made by kind.planned(...); got {type(planned).__name__}")
        return {}
    kind = kinds.plan_steps.find(planned.kind) if isinstance(planned.kind, str) else None
    wrong.extend(_wrong_texts(planned))
    if kind is None:
        wrong.extend(_wrong_target(planned.target, None))
        wrong.append(f"no step {str(planned.kind)[:200]!r} is declared in this process")
        return {}
    arguments: str | None = None
    try:
        kwargs = by_name(kind.name, planned.kwargs)
        # Its own text again: what is kept is what was checked, whatever the caller does to its lists from now on.
        arguments = kind.signature.pack(planned.args, kwargs, whole=True)
    except InvalidArguments as refused:
        wrong.append(refused.what)
    except NameError as missing:
        wrong.append(f"a type in its signature is not declared: {missing}")
    target, problem = kind.changes.reviewed(arguments, planned.target, planned.version)
    wrong.extend(_wrong_target(target, kind.changes.kind) if problem is None else (problem,))
    return {
        "kind": kind.name, "queue": kind.queue, "label": planned.label,
        "arguments": None if arguments is None else json.loads(arguments),
        "rationale": planned.rationale,
        "target": None if not isinstance(target, Target)
        else {"kind": target.kind, "id": target.id, "version": target.version, "name": target.name},
    }  # fmt: skip


def _wrong_texts(planned: Planned) -> Iterator[str]:
    if planned.label is not None and not is_text(planned.label, 200):
        yield "its label is text of 1 to 200 characters on one line"
    if planned.rationale is not None and not is_text(planned.rationale, LONGEST_RATIONALE, lines=True):
        yield f"its rationale is text of 1 to {LONGEST_RATIONALE:,} characters"


def _wrong_target(target: object, wanted: str | None) -> Iterator[str]:
    if target is None:
        if wanted is not None:
            yield f"it changes a {wanted}, and no reviewed target is given"
        return
    if not isinstance(target, Target):
        yield f"a target is a Target(...); got {type(target).__name__}"
        return
    if wanted is not None and target.kind != wanted:
        yield f"it changes a {wanted}, and its target is a {str(target.kind)[:200]}"
    elif not isinstance(target.kind, str) or reader_of(target.kind) is None:
        yield f"no target_version({str(target.kind)[:200]!r}) is declared in this process"
    for name, value in (("id", target.id), ("version", target.version)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value in INT64
        if not whole and not is_text(value, 200):
            yield f"its target's {name} is a whole number or text of 1 to 200 characters"
    if target.name is not None and not is_text(target.name, 200):
        yield "its target's name is text of 1 to 200 characters on one line"


def is_text(text: object, longest: int, *, lines: bool = False) -> bool:
    """
    Text that a row can keep: not empty, bounded, no control characters but, where it may have lines, their ends.

    Characters that only look odd, such as those that turn the direction of writing, are kept: whoever shows it makes
    them visible.
    """
    if not isinstance(text, str) or not text.strip() or len(text) > longest:
        return False
    try:
        check(text)
    except Unfit:
        return False
    return not any(ord(c) < 32 and not (lines and c in "\n\t") for c in text)
