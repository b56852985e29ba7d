"""`durable documents`: documents and their histories as the database has them; one restored, one deleted."""

from __future__ import annotations

import difflib
import json
import sys
from typing import Any

import click
from sqlalchemy import Connection

from durable_core.arguments import canonical
from durable_core.cli.database import reading, writing
from durable_core.cli.find import one_row
from durable_core.cli.output import Output, instant, note, span
from durable_core.cli.where import Where, options
from durable_core.database.transactions import carried
from durable_core.deliveries.read import now as clock
from durable_core.document_refusals import UnknownDocument
from durable_core.documents import read, save
from durable_core.documents.read import EVERYTHING, MOST_PER_PAGE, Scope
from durable_core.documents.rows import Document, Revision

SHOWN_BY = "durable documents show"


@click.group()
def documents() -> None:
    """Look at documents and what they were, compare two versions, restore one, delete a document."""


_document = click.argument("document_id", metavar="ID")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
_limit = click.option(
    "--limit", type=click.IntRange(1, MOST_PER_PAGE), default=50, show_default=True, help="At most so many."
)
_by = click.option("--by", required=True, help="Who acts; kept in the history of the document.")
_why = click.option("--reason", required=True, help="Why; kept in the history of the document.")
_yes = click.option("--yes", is_flag=True, help="Do not ask.")
_expected = click.option(
    "--expected-version", "expected", type=click.IntRange(0, 2**63 - 1), metavar="VERSION",
    help="Only if it is still at this version; that of now if not given.",
)  # fmt: skip
VERSION = click.IntRange(0, 2**63 - 1)


@documents.command("list")
@options
@click.option("--collection", metavar="NAME", help="Only of this collection.")
@click.option("--owner", help="Only of this owner.")
@click.option("--deleted", is_flag=True, help="Those too that were deleted.")
@_limit
@click.option("--after", metavar="ID", help="The last id of the page before.")
@_json
@click.pass_obj
def list_(
    where: Where, collection: str | None, owner: str | None, deleted: bool, limit: int, after: str | None, as_json: bool
) -> None:  # fmt: skip
    """Documents, newest first, a page at a time, without what is in them."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        now = clock(connection)
        found = carried(connection, read.listed(Scope(collection, owner, deleted), after, limit))
    more = found[-1].id if len(found) == limit else None
    if as_json:
        out.answer({"documents": [one.as_json(content=False) for one in found], "next_after": more})
        return
    out.table(
        ("ID", "COLLECTION", "OWNER", "VERSION", "SAVED", "BY", "SOURCE", "DELETED"),
        [
            (
                one.id, one.collection, one.owner, one.version, span((now - one.saved_at).total_seconds()),
                one.saved_by, one.source, None if one.deleted_at is None else instant(one.deleted_at),
            )
            for one in found
        ],
    )  # fmt: skip
    if more:
        note(f"there may be more: --after {more}")


@documents.command()
@options
@_document
@click.option("--version", "version", type=VERSION, help="As it was at this version, with its content.")
@click.option("--content", "with_content", is_flag=True, help="Its content too; it may hold personal data.")
@_json
@click.pass_obj
def show(where: Where, document_id: str, version: int | None, with_content: bool, as_json: bool) -> None:
    """One document: whose it is, at which version, who saved it and when. A deleted one is shown, too."""
    out = Output(as_json)
    told: Document | Revision
    with where.database() as (database, _), reading(database) as (connection, _):
        row_id = _named(connection, document_id)
        document = told = carried(connection, read.got(EVERYTHING, row_id))
        if version is not None:
            told = carried(connection, read.at_version(EVERYTHING, row_id, version))
    with_content = with_content or version is not None
    if as_json:
        out.answer({**document.as_json(content=False), **told.as_json(content=with_content)})
        return
    ended = None if document.deleted_at is None else instant(document.deleted_at)
    out.facts(
        [
            ("id", document.id),
            ("collection", document.collection),
            ("owner", document.owner),
            ("version", str(told.version)),
            ("saved", f"{instant(told.saved_at)} by {told.saved_by} ({told.source})"),
            ("because", told.why),
            ("created", instant(document.created_at)),
            ("deleted", ended),
        ]
    )
    for line in _lines(told) if with_content else ():
        out.line(line)


@documents.command()
@options
@_document
@_limit
@click.option("--before", type=VERSION, metavar="VERSION", help="Only versions below this one.")
@_json
@click.pass_obj
def history(where: Where, document_id: str, limit: int, before: int | None, as_json: bool) -> None:
    """The versions of a document, newest first, without what is in them. ENDED BY says what came after."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        row_id = _named(connection, document_id)
        found = carried(connection, read.past(EVERYTHING, row_id, limit, before, contents=False))
    more = found[-1].version if len(found) == limit else None
    if as_json:
        out.answer({"versions": [one.as_json(content=False) for one in found], "next_before": more})
        return
    out.table(
        ("VERSION", "SAVED", "BY", "SOURCE", "ENDED BY", "REASON"),
        [(one.version, instant(one.saved_at), one.saved_by, one.source, one.reason, one.why) for one in found],
    )
    if more is not None:
        note(f"there may be more: --before {more}")


@documents.command()
@options
@_document
@click.argument("one", type=VERSION)
@click.argument("other", type=VERSION, required=False)
@_json
@click.pass_obj
def diff(where: Where, document_id: str, one: int, other: int | None, as_json: bool) -> None:
    """What is other at the version OTHER than at ONE, line by line of their JSON; the newest version if not given."""
    out = Output(as_json)
    with where.database() as (database, _), reading(database) as (connection, _):
        row_id = _named(connection, document_id)
        if other is None:
            other = carried(connection, read.got(EVERYTHING, row_id)).version
        sides = [carried(connection, read.at_version(EVERYTHING, row_id, version)) for version in (one, other)]
    named = [f"version {side.version}, {instant(side.saved_at)} by {side.saved_by}" for side in sides]
    old, new = map(_lines, sides)
    lines = list(difflib.unified_diff(old, new, named[0], named[1], lineterm=""))
    if as_json:
        out.answer({"id": row_id, "versions": [side.version for side in sides], "diff": lines})
        return
    for line in lines or ["no difference"]:
        out.line(line)


@documents.command()
@options
@_document
@click.argument("version", type=VERSION)
@_expected
@_by
@_why
@_yes
@_json
@click.pass_obj
def restore(
    where: Where, document_id: str, version: int, expected: int | None, by: str, reason: str, yes: bool, as_json: bool
) -> None:  # fmt: skip
    """
    Save what a document was at VERSION as its next version; what it is now stays in its history.

    Nothing is compared with the collection's model, for its code is not here. Exit 5 when somebody saved meanwhile.
    """
    with where.database() as (database, _):
        with reading(database) as (connection, _):
            document = _live(connection, document_id)
            found = carried(connection, read.at_version(EVERYTHING, document.id, version))
        _ask(f"Restore version {version} of {document.collection} {document.id}, which is at {document.version}?", yes)
        with writing(database, shown_by=SHOWN_BY) as connection:
            # How many revisions stay is the collection's to say: the next save of the app lets the others go.
            done = carried(
                connection,
                save.saved(
                    Scope(document.collection), None, document.id, canonical(found.content),
                    document.version if expected is None else expected, None, by, "user", reason,
                ),
            )  # fmt: skip
    _told(as_json, document.id, "restored", done.version)


@documents.command()
@options
@_document
@_expected
@_by
@_why
@_yes
@_json
@click.pass_obj
def delete(
    where: Where, document_id: str, expected: int | None, by: str, reason: str, yes: bool, as_json: bool
) -> None:  # fmt: skip
    """Delete a document for good; what it was stays in its history. Exit 5 when somebody saved meanwhile."""
    with where.database() as (database, _):
        with reading(database) as (connection, _):
            document = _live(connection, document_id)
        _ask(f"Delete {document.collection} {document.id} of {document.owner}, at version {document.version}?", yes)
        at = document.version if expected is None else expected
        with writing(database, shown_by=SHOWN_BY) as connection:
            carried(connection, save.deleted(Scope(document.collection), None, document.id, at, by, reason))
    _told(as_json, document.id, "deleted", document.version)


def _named(connection: Connection, text: str) -> str:
    """The id of the one document that this text names. Raises NothingFound, Ambiguous and UnknownDocument."""
    found = one_row(connection, text)
    if found.what != "document":
        raise UnknownDocument(found.id)
    return found.id


def _live(connection: Connection, text: str) -> Document:
    return carried(connection, read.got(Scope(None), _named(connection, text)))


def _lines(of: Document | Revision) -> list[str]:
    return json.dumps(of.content, ensure_ascii=False, indent=2, sort_keys=True).splitlines()


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("without a terminal to ask on, --yes is needed.")
    click.confirm(question, abort=True, err=True)


def _told(as_json: bool, row_id: str, outcome: str, version: int) -> None:
    out = Output(as_json)
    facts: dict[str, Any] = {"id": row_id, "outcome": outcome, "version": version}
    if as_json:
        out.answer(facts)
    else:
        out.line(f"{row_id} {outcome} at version {version}")
