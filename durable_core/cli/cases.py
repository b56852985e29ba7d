"""`durable cases`: cases and their journals as the database has them. `case_acts` has what needs the types' code."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from durable_core.cases import survey
from durable_core.cases.cases import Cases
from durable_core.cases.journal import Entry, EntryKind, Head
from durable_core.cases.postgres import PostgresTransaction
from durable_core.cli import exits
from durable_core.cli.case_acts import COMMANDS
from durable_core.cli.case_words import as_json_option, at, case_argument, key_option, named_case
from durable_core.cli.database import reading
from durable_core.cli.output import Output, instant, note, span
from durable_core.cli.where import Where, options
from durable_core.deliveries.read import MOST_PER_PAGE
from durable_core.deliveries.read import now as clock
from durable_core.errors import NotFound


@click.group()
def cases() -> None:
    """Look at cases, execute a step of one, check and replay their journals, take in events, migrate their states."""


_limit = click.option(
    "--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many."
)


@cases.command("list")
@options
@click.option("--type", "case_type", metavar="NAME", help="Only of this type.")
@click.option("--dormant", is_flag=True, help="Those too that were ended.")
@_limit
@click.option("--after", metavar="ID", help="The last id of the page before.")
@as_json_option
@click.pass_obj
def list_(where: Where, case_type: str | None, dormant: bool, limit: int, after: str | None, as_json: bool) -> None:
    """Cases, newest first, a page at a time, without their states. CLAIMED BY is the step that has the case now."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = clock(connection)
        found = survey.page(connection, case_type=case_type, dormant=dormant, after=after, limit=limit)
    more = found[-1].id if len(found) == limit else None
    if as_json:
        out.answer({"cases": found, "next_after": more})
        return
    out.table(
        ("ID", "TYPE", "SEQ", "ENTRIES", "AGE", "CHANGED", "CLAIMED BY", "ENDED"),
        [
            (
                one.id, one.case_type, one.seq, one.entries, _since(one.created_at, now), _since(one.updated_at, now),
                _claimed(one, now), None if one.ended_at is None else instant(one.ended_at),
            )
            for one in found
        ],
    )  # fmt: skip
    if more:
        note(f"there may be more: --after {more}")


@cases.command()
@options
@case_argument
@click.option("--state", "with_state", is_flag=True, help="Its state too; it may hold personal data.")
@as_json_option
@click.pass_obj
def show(where: Where, case_id: str, with_state: bool, as_json: bool) -> None:
    """One case: how often it was committed, who has it now, its head, and what other systems call it."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = clock(connection)
        row_id = named_case(connection, case_id)
        stored = PostgresTransaction(connection)
        case, claim = stored.case(row_id), stored.claim(row_id)
        if case is None:
            raise NotFound("case", row_id)
        correlations = Cases(database, []).correlations(connection, row_id)
    state = json.loads(case.state) if with_state else None
    facts = {
        "id": case.id, "case_type": case.case_type, "seq": case.seq, "entries": case.journal_count,
        "head": f"{case.journal_count}:{case.journal_head}", "created_at": case.created_at,
        "updated_at": case.updated_at, "ended_at": case.ended_at,
    }  # fmt: skip
    if as_json:
        more: dict[str, Any] = {"state": state} if with_state else {}
        out.answer({**facts, "claim": claim, "correlations": correlations, **more})
        return
    out.facts(
        [
            ("id", case.id),
            ("type", case.case_type),
            ("commits", str(case.seq)),
            ("created", f"{instant(case.created_at)} ({_since(case.created_at, now)} ago)"),
            ("changed", f"{instant(case.updated_at)} ({_since(case.updated_at, now)} ago)"),
            ("ended", None if case.ended_at is None else instant(case.ended_at)),
            (
                "claimed",
                None
                if claim is None
                else f"by {claim.step}{f' for {claim.scope_key}' if claim.scope_key else ''}, attempt {claim.attempt}, "
                f"{_lease(claim.expires_at, now)}; execution {claim.execution_id}",
            ),
            ("head", f"{case.journal_count}:{case.journal_head}"),
            ("state", None if state is None else json.dumps(state, ensure_ascii=False, sort_keys=True)),
        ]
    )
    if correlations:
        out.line()
        out.table(
            ("SYSTEM", "EXTERNAL ID", "STEP", "KEY"),
            [(one.system, one.external_id, one.step, one.scope_key) for one in correlations],
        )


@cases.command()
@options
@case_argument
@click.option("--step", help="Only of this step.")
@key_option
@click.option(
    "--entry", "entries", multiple=True, type=click.Choice([str(kind) for kind in EntryKind]), help="Only these."
)
@_limit
@click.option("--after", type=click.IntRange(0), default=0, metavar="NUMBER", help="The last entry of the page before.")
@click.option(
    "--payload", is_flag=True, help="Actor, input, guard, state, delta and error too; may hold personal data."
)
@as_json_option
@click.pass_obj
def journal(
    where: Where, case_id: str, step: str | None, scope_key: str | None, entries: tuple[str, ...], limit: int,
    after: int, payload: bool, as_json: bool,
) -> None:  # fmt: skip
    """The entries of a case, oldest first, a page at a time, without their payloads."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        found = Cases(database, []).journal(
            connection, named_case(connection, case_id), step=step, scope_key=scope_key, after=after, limit=limit,
            kinds=[EntryKind(entry) for entry in entries] or None,
        )  # fmt: skip
    more = found[-1].number if len(found) == limit else None
    if as_json:
        out.answer({"entries": [_entry(one, payload=payload) for one in found], "next_after": more})
        return
    out.table(
        ("NO", "AT", "ENTRY", "STEP", "KEY", "ATTEMPT", "SEQ", "EXECUTION", "ERASED BY"),
        [
            (
                one.number, instant(one.recorded_at), str(one.entry), one.step, one.scope_key, one.attempt, one.seq,
                one.execution_id, one.erased_by,
            )
            for one in found
        ],
    )  # fmt: skip
    if payload:
        for one in found:
            out.line(json.dumps(_entry(one, payload=True), ensure_ascii=False, default=str))
    if more is not None:
        note(f"there may be more: --after {more}")


@cases.command()
@options
@case_argument
@click.option("--head", metavar="NUMBER:CHAIN", help="The head as `show` said it some time ago, kept elsewhere.")
@as_json_option
@click.pass_obj
def verify(where: Where, case_id: str, head: str | None, as_json: bool) -> int:
    """
    Whether the journal of a case is whole: no entry edited, missing or moved. Exit 6 where it is not.

    Without a head that was kept elsewhere, an end that was cut off together with the case's own head does not show. A
    journal that was sealed with a key needs -A, for the app has it.
    """
    out = Output(as_json)
    kept = None if head is None else _head(head)
    with where.database() as (database, _), reading(database) as (connection, _):
        found = Cases(database, []).verify(connection, named_case(connection, case_id), head=kept)
    if as_json:
        out.answer({**asdict(found), "ok": found.ok, "head": f"{found.head.number}:{found.head.chain}"})
    else:
        for fault in found.faults:
            out.line(f"entry {fault.number}: {fault.problem} ({fault.kind})")
        erased = f", {found.erased} erased" if found.erased else ""
        unkeyed = f", {found.unkeyed} without a key" if found.unkeyed < found.entries or not found.entries else ""
        out.line(f"{found.entries} entries{erased}{unkeyed}: {'whole' if found.ok else 'NOT whole'}")
    return exits.OK if found.ok else exits.UNHEALTHY


@cases.command("dead-letters")
@options
@click.option("--system", help="Only of this system.")
@click.option("--case", "case_id", metavar="ID", help="Only for this case.")
@click.option("--reason", help="Only for this reason, such as unrouted or step-not-available.")
@_limit
@click.option("--after", metavar="ID", help="The last id of the page before.")
@click.option("--payload", is_flag=True, help="The events too, as they came; they may hold personal data.")
@as_json_option
@click.pass_obj
def dead_letters(
    where: Where, system: str | None, case_id: str | None, reason: str | None, limit: int, after: str | None,
    payload: bool, as_json: bool,
) -> None:  # fmt: skip
    """Events that became no execution, newest first, with the reason."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = clock(connection)
        row_id = None if case_id is None else named_case(connection, case_id)
        found = Cases(database, []).dead_letters(
            connection, system=system, case_id=row_id, reason=reason, after=after, limit=limit
        )
    more = found[-1].id if len(found) == limit else None
    if as_json:
        shown = [{name: value for name, value in vars(one).items() if payload or name != "event"} for one in found]
        out.answer({"dead_letters": shown, "next_after": more})
        return
    out.table(
        ("ID", "AGE", "SYSTEM", "EXTERNAL ID", "TYPE", "REASON", "CASE", "STEP", "DETAIL"),
        [
            (
                one.id, _since(one.received_at, now), one.system, one.external_id, one.type, one.reason, one.case_id,
                one.step, one.detail,
            )
            for one in found
        ],
    )  # fmt: skip
    if payload:
        for one in found:
            out.line(json.dumps({"id": one.id, "event": one.event}, ensure_ascii=False))
    if more:
        note(f"there may be more: --after {more}")


PAYLOAD = ("actor", "input", "guard", "state", "delta", "error")


def _entry(entry: Entry, *, payload: bool) -> dict[str, Any]:
    names = (
        "number", "id", "execution_id", "request_id", "entry", "attempt", "step", "scope_key", "as_of", "seq",
        "dormancy", "recorded_at", "erased_at", "erased_by", "chain", *(PAYLOAD if payload else ()),
    )  # fmt: skip
    return {name: getattr(entry, name) for name in names}


def _head(text: str) -> Head:
    number, _, chain = text.partition(":")
    if not number.isdigit() or len(chain) != 64:
        raise click.BadParameter("a head is NUMBER:CHAIN, as `durable cases show` says it.", param_hint="--head")
    return Head(int(number), chain)


def _since(at: datetime, now: datetime) -> str:
    return span((now - at).total_seconds())


def _lease(expires_at: datetime, now: datetime) -> str:
    seconds = (expires_at - now).total_seconds()
    return f"its lease ends in {span(seconds)}" if seconds > 0 else f"its lease ended {span(-seconds)} ago"


def _claimed(one: survey.Line, now: datetime) -> str | None:
    if one.claimed_step is None or one.claimed_until is None:
        return None
    lapsed = " (lapsed)" if one.claimed_until <= now else ""
    return f"{at(one.claimed_step, one.claimed_scope_key)}{lapsed}"


for command in COMMANDS:
    cases.add_command(command)
