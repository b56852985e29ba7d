"""`durable plans`: what is proposed, as a person has to see it before saying yes; and yes, no, and what came of it."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Connection

from durable_core import kinds
from durable_core import plans as core
from durable_core.claims import journal
from durable_core.cli.acts import Duration
from durable_core.cli.database import reading, writing
from durable_core.cli.find import one_row
from durable_core.cli.output import Output, instant, note, span
from durable_core.cli.where import Where, options
from durable_core.deliveries.read import now as clock
from durable_core.errors import NotFound
from durable_core.plans.read import MOST_PER_PAGE
from durable_core.plans.rows import Plan, StepOf, lines_of
from durable_core.plans.why import reasons_of
from durable_core.refusals import StalePlan
from durable_core.states import PlanState

if TYPE_CHECKING:
    from durable_core.celery_binding import Durable

SHORTEST_DIGEST = 12
"""Characters of a digest that name it on the command line: fewer would be guessed, or found, too easily."""
SHOWN_RATIONALE = 1000
STEP_LINES = 4
"""Of a step below its kind: around a change in one of them the diff shows so many, and the kind is among them."""
JOURNAL_LINES = 200


@click.group()
def plans() -> None:
    """What is proposed: look at it, approve or reject it, read what came of it, and propose what makes up for it."""


_by = click.option("--by", required=True, help="Who acts; kept in the journal.")
_why = click.option("--reason", help="Why; kept in the journal.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")


@plans.command("list")
@options
@click.option("--state", type=click.Choice([state.value for state in PlanState]), help="Only in this state.")
@click.option("--origin", help="Only of this origin.")
@click.option("--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many.")
@click.option("--after", metavar="ID", help="The last id of the page before.")
@_json
@click.pass_obj
def list_(where: Where, state: str | None, origin: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """Plans, newest first, a page at a time, without what is in them."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = clock(connection)
        found = core.page(connection, state=state, origin=origin, after=after, limit=limit)
    more = found[-1].id if len(found) == limit else None
    if as_json:
        out.answer({"plans": [one.as_json(arguments=False) for one in found], "next_after": more})
        return
    out.table(
        ("ID", "STATE", "STEPS", "RISK", "PROPOSED BY", "AGE", "EXPIRES", "REASON"),
        [
            (
                one.id, one.state.value, len(one.steps), one.risk, one.proposed_by,
                span((now - one.created_at).total_seconds()), _expires(one, now), one.reason,
            )
            for one in found
        ],
    )  # fmt: skip
    if more:
        note(f"there may be more: --after {more}")


@plans.command()
@options
@click.argument("plan_id", metavar="ID")
@click.option("--diff", "differs", is_flag=True, help="What is other than in the proposal of its origin before it.")
@_json
@click.pass_obj
def show(where: Where, plan_id: str, differs: bool, as_json: bool) -> None:
    """
    One plan as it is to be approved: every step with its arguments, secrets masked, then the rest.

    Characters that steer a terminal or turn the direction of writing are shown by their numbers, and ends of lines as
    signs: nothing in a text can hide a step. Any beginning of its id will do, of 8 characters at least.
    """
    out = Output(as_json)
    with where.database() as (database, durable), reading(database) as (connection, _):
        if durable is not None:
            _learn_secrets(durable)
        now = clock(connection)
        plan = core.get(connection, _named(connection, plan_id))
        before = core.previous(connection, plan.id)
        why = [f"{one.says}." for one in reasons_of(connection, plan)]
        lines = journal.read(connection, plan.id, limit=JOURNAL_LINES)
    diff = _diff(before, plan)
    if as_json:
        complete = len(lines) < JOURNAL_LINES
        since = {"previous": None if before is None else before.id, "diff": diff}
        out.answer({**plan.as_json(), "why": why, **since, "journal": lines, "journal_complete": complete})
        return
    for line in _steps(plan):
        out.line(line)
    out.line()
    if differs:
        _print_diff(out, before, diff)
    out.facts(_facts(plan, now, why))
    if lines:
        out.line()
        out.table(
            ("AT", "MOVE", "FROM", "TO", "STEP", "BY", "REASON"),
            [(instant(n.at), n.move, n.from_state, n.to_state, n.attempt, n.by, n.reason) for n in lines],
        )
    if plan.state is PlanState.PENDING and plan.expires_at > now:
        note(
            f"to approve what is shown: durable plans approve {plan.id} --by YOU "
            f"--digest {plan.digest[:SHORTEST_DIGEST]}"
        )


@plans.command()
@options
@click.argument("plan_id", metavar="ID")
@click.option(
    "--digest", required=True, metavar="TEXT",
    help=f"The digest that `show` said, or its first {SHORTEST_DIGEST} characters or more.",
)  # fmt: skip
@_by
@_why
@_json
@click.pass_obj
def approve(where: Where, plan_id: str, digest: str, by: str, reason: str | None, as_json: bool) -> None:
    """Approve a plan as its digest says it: workers carry it out. Exit 5 when it is another, or decided, or expired."""
    if len(digest) < SHORTEST_DIGEST:
        raise click.UsageError(
            f"--digest takes {SHORTEST_DIGEST} characters at least: copy it from `durable plans show`."
        )
    with where.database() as (database, _), writing(database) as connection:
        plan = core.get(connection, _named(connection, plan_id))
        if not plan.digest.startswith(digest.lower()):
            raise StalePlan(plan.id)
        core.approve(connection, plan.id, by=by, digest=plan.digest, reason=reason)
    _told(as_json, plan.id, "approved")


@plans.command()
@options
@click.argument("plan_id", metavar="ID")
@_by
@_why
@_json
@click.pass_obj
def reject(where: Where, plan_id: str, by: str, reason: str | None, as_json: bool) -> None:
    """Say no to a pending plan. Exit 5 when it is decided or expired."""
    with where.database() as (database, _), writing(database) as connection:
        row_id = _named(connection, plan_id)
        core.reject(connection, row_id, by=by, reason=reason)
    _told(as_json, row_id, "rejected")


@plans.command()
@options
@click.argument("plan_id", metavar="ID")
@_by
@click.option("--reason", required=True, help="Why; kept in the journal.")
@_json
@click.pass_obj
def release(where: Where, plan_id: str, by: str, reason: str, as_json: bool) -> None:
    """Let the sweeps see a plan again that one failed on and held back. Mend the cause first."""
    with where.database() as (database, _), writing(database) as connection:
        row_id = _named(connection, plan_id)
        core.release(connection, row_id, by=by, reason=reason)
    _told(as_json, row_id, "released")


@plans.command()
@options
@click.argument("plan_id", metavar="ID")
@_by
@click.option("--expires", type=Duration(), help="How long it may be approved, such as 1h; 15 minutes if not given.")
@_json
@click.pass_obj
def compensate(where: Where, plan_id: str, by: str, expires: float | None, as_json: bool) -> None:
    """
    Propose what makes up for the done steps of a plan, last first. Nothing is undone until that is approved and run.

    Needs -A, for the code says how each step is made up for. Steps for which it does not are listed.
    """
    out = Output(as_json)
    with where.database() as (database, durable):
        if durable is not None:
            durable.app.loader.import_default_modules()
        with writing(database) as connection:
            how: dict[str, Any] = {} if expires is None else {"expires": expires}
            made = core.compensate(connection, _named(connection, plan_id), by=by, **how)
    if as_json:
        left = [{"step": line.step, "kind": line.kind, "label": line.label} for line in made.not_compensated]
        out.answer({"proposed": None if made.plan is None else made.plan.as_json(), "not_compensated": left})
        return
    if made.plan is None:
        out.line("nothing is proposed: no done step has a compensation")
    else:
        out.line(f"proposed {made.plan.id}, to be approved as any plan: durable plans show {made.plan.id}")
    for line in made.not_compensated:
        out.line(f"not compensated: step {line.step + 1}, {line.label or line.kind}")


@plans.command()
@options
@click.argument("plan_id", metavar="ID")
@click.option("--output", "outputs", is_flag=True, help="What the steps returned, too; it may hold personal data.")
@_json
@click.pass_obj
def report(where: Where, plan_id: str, outputs: bool, as_json: bool) -> None:
    """What became of each step: done, failed, conflict or not run."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        told = core.report(connection, _named(connection, plan_id))
    if as_json:
        facts = asdict(told)
        for line in facts["lines"] if not outputs else ():
            del line["output"]
        out.answer({**facts, "text": told.text})
        return
    for text in told.text.splitlines():
        out.line(text)
    for line in told.lines if outputs else ():
        if line.output is not None:
            out.line(f"  {line.step + 1}. returned {json.dumps(line.output, ensure_ascii=False)}")


def _told(as_json: bool, row_id: str, outcome: str) -> None:
    out = Output(as_json)
    if as_json:
        out.answer({"id": row_id, "outcome": outcome})
    else:
        out.line(f"{row_id} {outcome}")


def _named(connection: Connection, text: str) -> str:
    """The id of the one plan that this text names. Raises NothingFound, Ambiguous, and NotFound for what is no plan."""
    found = one_row(connection, text)
    if found.what != "plan":
        raise NotFound("plan", found.id)
    return found.id


def _learn_secrets(durable: Durable) -> None:
    """Load the app's task modules, as a worker does: their kinds say which arguments are secret."""
    try:
        durable.app.loader.import_default_modules()
    except Exception as error:  # whatever the host's modules raise while they load
        note(f"the app's modules did not load ({type(error).__name__}): secrets are known by their names alone")


# --- words about a plan --------------------------------------------------------------------------


def _steps(plan: Plan) -> list[str]:
    """Each step in a line or more, from the payload alone."""
    shown = [f"{len(plan.steps)} steps:" if len(plan.steps) > 1 else "1 step:"]
    for step, line in zip(plan.steps, lines_of(plan.steps, plan.receipts), strict=True):
        ran = "" if plan.state in (PlanState.PENDING, PlanState.APPROVED) else f"   [{line.became}]"
        first, *rest = _words(step)
        shown += [f"{line.step + 1}. {first}{ran}", *(f"     {words}" for words in rest)]
    return shown


def _words(step: StepOf) -> list[str]:
    """What a step says: its kind first, which is the code that will run, and its proposer's words after that."""
    words = [step.kind]
    words.append(f"arguments: {json.dumps(step.shown_arguments, ensure_ascii=False, sort_keys=True)}")
    words.append(f"target: {_target(step)}")
    if step.label is not None:
        words.append(f"its proposer calls it: {step.label}")
    if step.rationale is not None:
        words.append(f"and says why: {_cut(step.rationale)}")
    return words


def _target(step: StepOf) -> str:
    """What the step was reviewed against, and whose word it is that this is what it writes to."""
    target, kind = step.target, kinds.plan_steps.find(step.kind)
    if target is None:
        return "none was reviewed, so none is compared"
    named = "" if target.name is None else f", which its proposer calls {target.name}"
    loose = kind is not None and kind.changes.of_arguments is None
    unsure = "; nothing ties it to the arguments, so compare them" if loose else ""
    return f"{target.kind} {target.id} at version {target.version}{named}{unsure}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_RATIONALE else f"{text[:SHOWN_RATIONALE]}… ({len(text):,} characters in all)"


def _facts(plan: Plan, now: datetime, why: list[str]) -> list[tuple[str, str | None]]:
    age = span((now - plan.created_at).total_seconds())
    return [
        ("id", plan.id),
        ("state", plan.state.value + (", in flight" if plan.in_flight else "")),
        *(("why" if one is why[0] else "and", one) for one in why),
        ("why", plan.error_message.split("\n", 1)[0] if plan.error_message else None),
        ("reason", plan.reason),
        ("held", plan.held_reason),
        ("waits for", "a worker that knows the kind of its next step" if plan.waiting_for else None),
        ("risk", plan.risk),
        ("scopes", ", ".join(plan.scopes) or "none"),
        ("proposed", f"by {plan.proposed_by}, {instant(plan.created_at)} ({age} ago)"),
        ("origin", plan.origin),
        ("rationale", None if plan.rationale is None else _cut(plan.rationale)),
        ("compensates", plan.compensates),
        ("expires", _expires(plan, now) or None),
        ("approved", None if plan.approved_at is None else f"by {plan.approved_by}, {instant(plan.approved_at)}"),
        (
            "rejected",
            None if plan.rejected_by is None else f"by {plan.rejected_by}: {plan.rejected_reason or 'no reason'}",
        ),
        ("finished", None if plan.finished_at is None else instant(plan.finished_at)),
        ("approval", _approval(plan)),
        ("digest", plan.digest),
    ]


def _expires(plan: Plan, now: datetime) -> str:
    if plan.state not in (PlanState.PENDING, PlanState.APPROVED):
        return ""
    seconds = (plan.expires_at - now).total_seconds()
    return f"in {span(seconds)}" if seconds > 0 else f"{span(-seconds)} ago"


def _diff(before: Plan | None, plan: Plan) -> list[str] | None:
    """
    The steps and grants of this plan beside those of the one before it, as a unified diff; None without one.

    Steps have no numbers here, or one more at the top would change them all.
    """
    if before is None:
        return None
    old, new = _steps_alone(before), _steps_alone(plan)
    return list(difflib.unified_diff(old, new, fromfile=before.id, tofile=plan.id, lineterm="", n=STEP_LINES))


def _steps_alone(plan: Plan) -> list[str]:
    lines = [f"risk: {plan.risk}", f"scopes: {', '.join(plan.scopes) or 'none'}", f"approval: {_approval(plan)}"]
    for step in plan.steps:
        first, *rest = _words(step)
        lines += [f"step {first}", *(f"     {words}" for words in rest)]
    return lines


def _approval(plan: Plan) -> str:
    return "its proposer may approve it" if plan.self_approval else "by somebody else than its proposer"


def _print_diff(out: Output, before: Plan | None, diff: list[str] | None) -> None:
    if before is None:
        out.line("no other proposal of its origin came before it")
    elif not diff:
        out.line(f"its steps, scopes, risk and approval are those of {before.id}, the proposal before it")
    for line in diff or ():
        out.line(line)
    out.line()
