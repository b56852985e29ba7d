"""
Whether the schema is what its migrations make: tables, columns, indexes, constraints, functions and triggers.

What they make is written down in `schema.json`, revision by revision, from a schema that was migrated for it. The
catalog alone is read, so a role without any right on the tables sees as much.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from durable_core.database.migrate import check
from durable_core.database.statements import beside, current_schema
from durable_core.database.transactions import Transaction, run
from durable_core.doctor.findings import Finding, Reason, found, well
from durable_core.errors import SchemaAhead, SchemaBehind

_statements = beside(__file__)

FINGERPRINT = Path(__file__).with_suffix(".json")

COMPARED_ON = (17, 18)
"""Releases of Postgres on which the definitions are known to read as written down. Others may print them otherwise."""

MOST_NAMED = 20
"""So many objects that differ are told one by one."""

Objects = Mapping[str, str]
"""Definitions by what and name: `index deliveries_due`. They say `durable.` for the schema, whatever it is called."""

_QUALIFIED = re.compile(r'"durable"\.|\bdurable\.')


@dataclass(frozen=True)
class Catalog:
    """What is there. `faults` are objects that are there and do nothing: an invalid index, a disabled trigger."""

    objects: Objects
    faults: Mapping[str, str]
    release: int
    quoted: str
    """The schema's name as the catalog writes it."""


@dataclass(frozen=True)
class Names:
    """The tables and functions that migrations make; whatever else lies in the schema is the host's."""

    tables: list[str]
    functions: list[str]


def names(objects: Iterable[str]) -> Names:
    split = [name.split(" ", 1) for name in objects]
    return Names(
        sorted(of for what, of in split if what == "table"),
        sorted({of.split("(", 1)[0] for what, of in split if what == "function"}),
    )


@lru_cache
def our_names() -> Names:
    """Those of every revision that this code knows."""
    return names({name for changes in written_down().values() for name in changes})


def catalog(tx: Transaction, only: Names | None = None) -> Catalog:
    """What the schema holds: all of it, or these tables and functions with what belongs to them."""
    schema = current_schema()
    (about,) = run(tx, _statements.about, schema=schema)
    rows = run(
        tx, _statements.objects, schema=schema, tables=only and only.tables, functions=only and only.functions
    )  # fmt: skip
    return Catalog(
        {_named(row): row["definition"] for row in rows},
        {_named(row): row["fault"] for row in rows if row["fault"]},
        int(about["version"]) // 10_000,
        about["quoted"],
    )


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['what']} {row['name']}"


@lru_cache
def written_down() -> dict[str, dict[str, str | None]]:
    """By revision, what it adds and changes; null for what it takes away."""
    written: dict[str, dict[str, str | None]] = json.loads(FINGERPRINT.read_text(encoding="utf-8"))
    return written


def expected(revision: str) -> Objects | None:
    """What a schema at this revision has; None for a revision of newer code."""
    if revision not in written_down():
        return None
    objects: dict[str, str] = {}
    for at, changes in sorted(written_down().items()):
        for name, definition in changes.items():
            if definition is None:
                objects.pop(name, None)
            else:
                objects[name] = definition
        if at == revision:
            break
    return objects


def in_this_schema(definition: str, quoted: str) -> str:
    """A definition as written down, with the schema's own name. The way back would take aliases for the schema."""

    def qualified(match: re.Match[str]) -> str:
        # Where a migration wrote it, it is quoted; where the catalog prints it, only a name that must be.
        return f'"{quoted.strip(chr(34))}".' if match[0].startswith('"') else f"{quoted}."

    return _QUALIFIED.sub(qualified, definition)


def revision(connection: Connection) -> Iterator[Finding]:
    """Whether this code may run on the schema at all."""
    try:
        at = check(connection)
    except SchemaBehind as error:
        yield found("revision", Reason.SCHEMA_BEHIND, str(error), "durable migrate")
    except SchemaAhead as error:
        yield found("revision", Reason.SCHEMA_AHEAD, str(error), "deploy the version that migrated it, or a newer one")
    else:
        yield well("revision", f'schema "{current_schema()}" is at {at}')


def drift(connection: Connection) -> Iterator[Finding]:
    """Object by object, what is missing, differs, does nothing, or was added to what is ours."""
    at = check(connection)
    wanted = expected(at)
    if wanted is None:
        yield found(
            "drift", Reason.SCHEMA_NEWER, f"revision {at} is newer than this code, which does not know its objects",
            "run the doctor of the version that migrated it",
        )  # fmt: skip
        return
    there = catalog(connection, names(wanted))
    findings = list(_differences(wanted, there))
    yield from findings[:MOST_NAMED]
    if len(findings) > MOST_NAMED:
        rest = ", ".join(finding.observed.split(" is ", 1)[0] for finding in findings[MOST_NAMED:])
        yield found("drift", findings[MOST_NAMED].reason, f"and {len(findings) - MOST_NAMED} more: {rest}", _REMAKE)
    if not findings:
        yield well("drift", f"{len(wanted)} objects are as the migrations make them")


_REMAKE = "make it again as `durable migrate --sql` prints it"


def _differences(wanted: Objects, there: Catalog) -> Iterator[Finding]:
    for name, definition in wanted.items():
        what, of = name.split(" ", 1)
        if name not in there.objects:
            yield found("drift", Reason.SCHEMA_MISSING, f"{name} is missing", _REMAKE)
            continue
        if _same(in_this_schema(definition, there.quoted)) != _same(there.objects[name]):
            yield _differs(what, name, there)
        if name in there.faults:
            yield _does_nothing(what, of, name, there)
    for name in there.objects:
        what, of = name.split(" ", 1)
        if name not in wanted and not _goes_with_another(what, of, there):
            yield found(
                "drift", Reason.SCHEMA_EXTRA, f"{name} is there, and no migration made it",
                f"drop it, or keep it where you know why: it takes part in every claim ({there.objects[name][:80]})",
            )  # fmt: skip


def _differs(what: str, name: str, there: Catalog) -> Finding:
    if what == "options":
        table = name.split(" ", 1)[1]
        return found(
            "drift", Reason.TABLE_OPTIONS_DIFFER, f"the storage options of {table} are {there.objects[name] or 'none'}",
            f"alter table {there.quoted}.{table} set (…) as `durable migrate --sql` prints it",
        )  # fmt: skip
    if name == "function durable_now()" and "test_clock" in there.objects[name]:
        return found(
            "drift", Reason.SCHEMA_DIFFERS, "function durable_now() is the movable clock of a test database",
            "durable_core.testing.MovableClock(engine).uninstall()",
        )  # fmt: skip
    if there.release not in COMPARED_ON:
        return found(
            "drift", Reason.SCHEMA_UNVERIFIED,
            f"{name} does not read as on PostgreSQL {COMPARED_ON[-1]}; {there.release} may only print it so",
            f"compare it with `durable migrate --sql`: {there.objects[name][:120]}",
        )  # fmt: skip
    return found("drift", Reason.SCHEMA_DIFFERS, f"{name} is not what the migrations make", _REMAKE)


def _does_nothing(what: str, of: str, name: str, there: Catalog) -> Finding:
    if what == "trigger":
        table, trigger = of.split(".", 1)
        return found(
            "drift", Reason.TRIGGER_DISABLED, f"{name} is disabled: the database refuses nothing that is illegal",
            f"alter table {there.quoted}.{table} enable trigger {trigger}",
        )  # fmt: skip
    return found(
        "drift", Reason.INDEX_INVALID, f"{name} is invalid, and serves no look", f"reindex index {there.quoted}.{of}"
    )


def _goes_with_another(what: str, of: str, there: Catalog) -> bool:
    """Whether an object that no migration made is told already: the index of a constraint."""
    return what == "index" and any(one.startswith("constraint ") and one.endswith(f".{of}") for one in there.objects)


def _same(definition: str) -> str:
    """White space is no difference: who runs the printed SQL by hand may have lost some."""
    return " ".join(definition.split())


def as_written(objects: Mapping[str, Objects]) -> str:
    """`schema.json`, from what each revision has, the oldest first."""
    written: dict[str, dict[str, str | None]] = {}
    before: Objects = {}
    for at, there in sorted(objects.items()):
        changed: dict[str, str | None] = {n: d for n, d in sorted(there.items()) if before.get(n) != d}
        written[at] = changed | {name: None for name in sorted(before) if name not in there}
        before = there
    return json.dumps(written, indent=1, ensure_ascii=False) + "\n"
