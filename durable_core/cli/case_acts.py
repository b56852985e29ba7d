"""`durable cases` where the code of the types is needed: what can be done, doing it, and asking again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource

from durable_core.cases.event import Event
from durable_core.cases.replay import Replayed
from durable_core.cli import exits
from durable_core.cli.case_words import Document, as_json_option, at, case_argument, key_option, named_case, of_the_app
from durable_core.cli.database import reading
from durable_core.cli.output import Output, instant, note
from durable_core.cli.where import Where, options
from durable_core.database.migrate import check


@click.command()
@options
@case_argument
@click.option("--actor", type=Document(), help="Who would act, as JSON; null, nobody in particular, if not given.")
@click.option("--blocked", is_flag=True, help="Also what cannot be done now.")
@as_json_option
@click.pass_obj
def affordances(where: Where, case_id: str, actor: Any, blocked: bool, as_json: bool) -> None:
    """What this actor could do with a case now: advice, and no reservation. Needs -A."""
    out = Output(as_json)
    with where.database() as (database, durable):
        known = of_the_app(database, durable)
        with reading(database) as (connection, _):
            found = known.affordances(connection, named_case(connection, case_id), actor=actor, blocked=blocked)
    if as_json:
        out.answer({"affordances": [one.to_json() for one in found]})
        return
    out.table(
        ("STEP", "KEY", "AVAILABLE", "UNMET"),
        [
            (one.step, one.scope_key, "yes" if one.available else "no", "; ".join(map(str, one.evaluation.unmet)))
            for one in found
        ],
    )


@click.command()
@options
@case_argument
@click.argument("step")
@key_option
@click.option("--actor", type=Document(), help="Who would act, as JSON. Without it only `requires` is asked.")
@as_json_option
@click.pass_obj
def explain(where: Where, case_id: str, step: str, scope_key: str | None, actor: Any, as_json: bool) -> None:
    """Every condition of a step: whether it holds now, and why not. Needs -A."""
    out = Output(as_json)
    given = click.get_current_context().get_parameter_source("actor")
    who = {} if given is ParameterSource.DEFAULT else {"actor": actor}
    with where.database() as (database, durable):
        known = of_the_app(database, durable)
        with reading(database) as (connection, _):
            found = known.explain(connection, named_case(connection, case_id), step, scope_key=scope_key, **who)
    if as_json:
        out.answer(found.to_json())
        return
    out.facts(
        [
            ("possible", "yes" if found.possible else "no"),
            ("permitted", _said(found.permitted)),
            ("as of", instant(found.as_of)),
        ]
    )
    out.line()
    out.table(
        ("SECTION", "CONDITION", "HOLDS", "REASON"),
        [
            line
            for one in found.conditions
            for line in (
                (one.section, one.name, _said(one.ok), one.reason),
                *((one.section, f"  or {arm.name}", _said(arm.ok), arm.reason) for arm in one.arms),
            )
        ],
    )


@click.command()
@options
@case_argument
@click.argument("step")
@key_option
@click.option("--actor", type=Document(), required=True, help="Who acts, as JSON; the journal keeps it.")
@click.option("--input", "given", type=Document(), help="The step's input, as JSON, @file, or - for stdin.")
@as_json_option
@click.pass_obj
def execute(
    where: Where, case_id: str, step: str, scope_key: str | None, actor: Any, given: Any, as_json: bool
) -> None:
    """
    Execute a step in this process, guard and all. Exit 5 when it is refused, 1 when it failed. Needs -A.

    Its handler runs here, with the app's own code: what it calls outside is called from this machine.
    """
    out = Output(as_json)
    with where.database() as (database, durable):
        known = of_the_app(database, durable)
        with reading(database) as (connection, _):
            row_id = named_case(connection, case_id)
        done = known.execute(row_id, step, scope_key=scope_key, actor=actor, input=given)
    facts = {
        "case_id": done.case_id, "execution_id": done.execution_id, "step": done.step, "scope_key": done.scope_key,
        "attempts": done.attempts, "seq": done.seq, "ended_at": done.ended_at, "changes": len(done.delta or ()),
    }  # fmt: skip
    if as_json:
        out.answer(facts)
    else:
        out.line(
            f"{done.case_id} {at(done.step, done.scope_key)} committed as {done.seq}: {len(done.delta or ())} changes, "
            f"execution {done.execution_id}"
        )


@click.command()
@options
@case_argument
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, show_default=True, help="At most so many claims.")
@click.option("--after", type=click.IntRange(0), default=0, metavar="NUMBER", help="The last one of the page before.")
@as_json_option
@click.pass_obj
def replay(where: Where, case_id: str, limit: int, after: int, as_json: bool) -> int:
    """
    Ask today's guards about what each claim saw. Exit 6 where one answers otherwise: the definitions have drifted.

    What today's definitions do not have any more is told, and is no error. Needs -A.
    """
    out = Output(as_json)
    with where.database() as (database, durable):
        known = of_the_app(database, durable)
        with reading(database) as (connection, _):
            found = known.replay(connection, named_case(connection, case_id), after=after, limit=limit)
    other = [one for one in found if not one.matches]
    if as_json:
        out.answer({"replayed": [_replayed(one) for one in found], "matching": len(found) - len(other)})
    else:
        for one in other:
            why = one.problem or "; ".join(str(drift) for drift in one.drift)
            out.line(f"entry {one.number}, {at(one.step, one.scope_key)}: {why}")
        out.line(f"{len(found)} claims asked again: {len(found) - len(other)} match")
        if len(found) == limit:
            note(f"there may be more: --after {found[-1].number}")
    return exits.UNHEALTHY if any(one.drift for one in other) else exits.OK


@click.command()
@options
@click.argument("event", type=Document())
@as_json_option
@click.pass_obj
def ingest(where: Where, event: Any, as_json: bool) -> int:
    """
    Take in an event, as JSON: system, external_id, type; perhaps payload, event_id, step, scope_key, key. Needs -A.

    The same event again is a duplicate, unless it became a dead letter of case-busy or execution-failed: that is run
    again. So the way to redeliver a dead letter is to bring it once more. Exit 5 where it becomes a dead letter.
    """
    out = Output(as_json)
    said = Event.of(event)
    with where.database() as (database, durable), database.autocommit() as connection:
        check(connection)
        done = of_the_app(database, durable).ingest(said)
    if as_json:
        out.answer(asdict(done))
    else:
        why = f": {done.reason}, {done.detail}" if done.reason else ""
        was = f" of one that was {done.was}" if done.was else ""
        out.line(f"{done.id} {done.status}{was}{why}")
    return exits.CONFLICT if done.status == "dead-lettered" else exits.OK


@click.command()
@options
@click.argument("case_type", metavar="TYPE")
@click.argument("name")
@click.option("--transform", required=True, metavar="MODULE:FUNCTION", help="What makes the new state of the old one.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Only these cases.")
@click.option("--dormant", is_flag=True, help="Those too that were ended.")
@click.option("--limit", type=click.IntRange(1), help="At most so many now; the same command goes on with the rest.")
@click.option("--dry-run", is_flag=True, help="Try the function on each state, and write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask; needed without a terminal.")
@as_json_option
@click.pass_obj
def migrate(
    where: Where, case_type: str, name: str, transform: str, ids: tuple[str, ...], dormant: bool, limit: int | None,
    dry_run: bool, yes: bool, as_json: bool,
) -> int:  # fmt: skip
    """
    Take the cases of a type through a function of their state, given as JSON; what it returns is validated as ever.

    Each case is claimed and committed as by a step `migrate:NAME`, whose completed entry marks it: broken off, the same
    command goes on with the rest, and once done it finds nothing. Exit 5 where some were left as they were. Needs -A.
    """
    out = Output(as_json)
    with where.database() as (database, durable):
        known = of_the_app(database, durable)
        function = _imported(transform)
        if not dry_run and not yes:
            _ask(f"migrate the cases of type {case_type!r} by {transform}?")
        with _bar(as_json) as progress:
            done = known.migrate(
                case_type, name, function, ids=list(ids) or None, ended=dormant, limit=limit, dry_run=dry_run,
                progress=progress,
            )  # fmt: skip
    if as_json:
        out.answer(asdict(done))
    else:
        would = "would be " if dry_run else ""
        out.line(f"{done.scanned} cases: {done.changed} {would}changed, {done.unchanged} {would}marked unchanged")
        for one in done.failed:
            out.line(f"left {one.case_id}: {one.reason}, {one.detail}")
    if done.more:
        note("there are more: the same command goes on with them")
    return exits.CONFLICT if done.failed else exits.OK


def _imported(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as missing:
        raise click.BadParameter(f"{name!r} names nothing: {missing}.", param_hint="--transform") from None
    if not callable(found):
        raise click.BadParameter(f"{name!r} is no function.", param_hint="--transform")
    made: Callable[[Any], Any] = found
    return made


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("without a terminal nobody can be asked: give --yes, or --dry-run to look.")
    click.confirm(question, abort=True, err=True)


@contextmanager
def _bar(as_json: bool) -> Iterator[Callable[[int, int], object] | None]:
    """A bar on stderr where that is a terminal; else nothing is counted."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("migrating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _replayed(one: Replayed) -> dict[str, Any]:
    return {
        "number": one.number, "execution_id": one.execution_id, "step": one.step, "scope_key": one.scope_key,
        "as_of": one.as_of, "matches": one.matches, "drift": [asdict(drift) for drift in one.drift],
        "unasked": one.unasked, "problem": one.problem,
    }  # fmt: skip


def _said(answer: bool | None) -> str:
    return {True: "yes", False: "no", None: "not asked"}[answer]


COMMANDS = (affordances, explain, execute, replay, ingest, migrate)
