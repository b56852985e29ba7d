"""Whatever a user can meet is in the reference: each command, option, setting, error, variable, column and metric."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from sqlalchemy import Engine, text

from durable_core import document_refusals, errors, refusals
from durable_core.cli import exits
from durable_core.cli import page as commands
from durable_core.cli.main import main as durable_command
from durable_core.documents import MOST_BYTES, http, problems, writes
from durable_core.errors import DurableError
from tests.examples.pages import ROOT, Page, page, pages, words
from tests.examples.test_pages import settings_read

PACKAGE = ROOT / "durable_core"
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
ERRORS = page("docs/reference/errors.md")
PROBLEMS = page("docs/reference/problems.md")
RUNBOOK = page("docs/runbook.md")
ALERTS = (
    "DurableQueueLate", "DurableSweeperStalled", "DurableNoWorkers", "DurableDeadLetters", "DurableLeaseExpirations",
    "DurablePausedTooLong", "DurablePlanWaiting", "DurableSchemaMismatch",
)  # fmt: skip


def cells(shown: Page, first_heading: str) -> list[str]:
    """Every code span in the first column of all tables that begin with this heading."""
    return [word for row in shown.table(first_heading) for word in words(row[0])]


# --- commands -----------------------------------------------------------------------------------


def test_the_page_of_the_commands_is_what_the_commands_say() -> None:
    assert commands.DOCS.read_text(encoding="utf-8") == commands.commands_page(), "run `make docs`"


def every_command(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if not command.hidden:
            yield f"{path} {name}", command
            if isinstance(command, click.Group):
                yield from every_command(command, f"{path} {name}")


def test_every_command_and_every_option_is_on_that_page() -> None:
    text = commands.DOCS.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (durable [\w -]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    everywhere = text.split("## durable ")[0]
    for path, command in every_command(durable_command, "durable"):
        assert path in sections, path
        assert command.help, f"{path} says nothing of itself"
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert any(f"`{option.opts[-1]}" in place for place in (sections[path], everywhere)), (
                    f"{path} {option.opts}"
                )
                assert option.help, f"{path} {option.opts} says nothing of itself"


def test_the_exit_codes_are_those_of_the_code() -> None:
    shown = {words(row[1])[0]: int(row[0]) for row in page("docs/reference/exit-codes.md").table("code")}
    assert shown == {name: value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}


# --- settings and variables ---------------------------------------------------------------------


def test_every_setting_is_in_the_reference_with_its_type_and_default() -> None:
    rows = {words(row[0])[0]: row for row in page("docs/reference/settings.md").table("setting")}
    assert set(rows) == settings_read()
    assert all(row[1] and row[3] for row in rows.values())


OURS_ALONE = {"DURABLE_OWNER", "DURABLE_UP"}
"""Marks that our processes leave for each other; nobody sets them."""


def test_every_variable_that_is_read_is_in_the_reference() -> None:
    found = (
        {
            name
            for path, source in SOURCES.items()
            if "demo" not in path.relative_to(PACKAGE).parts
            for name in re.findall(r'"(DURABLE_[A-Z_]*[A-Z])"', source)
        }
        - OURS_ALONE
        - {error.reason for error in all_errors()}
    )
    found |= set(re.findall(r"\$\{(DURABLE_[A-Z_]+)", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
    shown = set(cells(page("docs/reference/environment.md"), "variable"))
    assert found <= shown, f"not in the reference: {sorted(found - shown)}"
    assert {name for name in shown if name.startswith("DURABLE_")} <= found


# --- problems over HTTP -------------------------------------------------------------------------


def test_every_problem_is_in_the_reference_with_its_status() -> None:
    shown = {words(row[0])[0]: int(row[1]) for row in PROBLEMS.table("problem")}
    assert shown == {reason: kind.status for reason, kind in problems.KINDS.items()}
    assert f"`{problems.TYPES}`" in PROBLEMS.text


def test_every_problem_that_the_source_raises_has_its_kind_and_every_kind_is_raised() -> None:
    raised = "".join(source for path, source in SOURCES.items() if path.parent.name == "documents")
    named = {word for call in re.findall(r"Problem\(\s*([^,]+),", raised) for word in re.findall(r'"([a-z-]+)"', call)}
    named |= set(re.findall(r'"(refused|not-signed-in|forbidden|unavailable|internal)"', raised))
    assert named == set(problems.KINDS)


def test_the_numbers_of_documents_over_http_are_those_of_the_code() -> None:
    shown = " ".join(page("docs/howto/documents.md").text.split())
    assert f"given up at {http.MOST_BODY:,} bytes: {MOST_BYTES:,} of content" in shown
    assert f"{writes.MOST_WRITES.removesuffix('/minute')} writes a minute" in shown


# --- errors -------------------------------------------------------------------------------------


HOMES = {errors.__name__, refusals.__name__, document_refusals.__name__}
"""Where the errors stand that callers meet; those of the command line have a table of their own."""


def all_errors(root: type[DurableError] = DurableError) -> list[type[DurableError]]:
    return [root, *(found for kind in root.__subclasses__() for found in all_errors(kind))]


def test_every_exception_is_in_the_reference_with_its_reason() -> None:
    shown = {words(row[0])[0]: words(row[1])[0] for row in ERRORS.table("exception")}
    own = {error.__name__: error.reason for error in all_errors() if error.__module__ in HOMES}
    assert shown == own


def test_every_reason_of_a_command_is_in_the_reference() -> None:
    """Those of errors anywhere in the package, and those that `exits` makes of errors of others."""
    found = set()
    for path, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found |= set(class_reason(node))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Failure":
                found |= {value.value for value in node.args[1:2] if isinstance(value, ast.Constant)}
        assert path
    shown = {word for row in ERRORS.table("reason") for word in words(row[0])}
    shown |= {words(row[1])[0] for row in ERRORS.table("exception")}
    assert found <= shown, f"not in the reference: {sorted(found - shown)}"


def class_reason(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        value = line.value if isinstance(line, ast.Assign | ast.AnnAssign) else None
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        named = isinstance(target, ast.Name) and target.id == "reason" and isinstance(value, ast.Constant)
        if named and value.value and value.value.isupper():
            yield value.value


def test_every_code_that_lands_on_a_row_is_in_the_reference() -> None:
    """The constants that the code and its SQL know, and those that the ready kinds give up or retry with."""
    found = set()
    for path, source in SOURCES.items():
        found |= set(re.findall(r'code="([A-Z_]+)"', source))
        if "ready" in path.parts:
            found |= set(re.findall(r'(?:GiveUp|Retry|Snooze)\([^)]*?code="([A-Z_]+)"', source, re.DOTALL))
    for path in PACKAGE.rglob("*.sql"):
        found |= set(
            re.findall(r"'((?:WORKER|CLAIM|CHILD)_[A-Z_]+|TIMEOUT|SHUTDOWN|INFRASTRUCTURE)'", path.read_text())
        )
    contract = {word for row in page("docs/contracts/deliveries.md").table("code") for word in words(row[0])}
    shown = set(cells(ERRORS, "code"))
    assert found | contract <= shown, f"not in the reference: {sorted((found | contract) - shown)}"


# --- tables -------------------------------------------------------------------------------------

COLUMNS = """
    select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, col_description(c.oid, a.attnum),
           obj_description(c.oid)
    from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = 'durable'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
      and not exists (select from pg_depend d where d.objid = c.oid and d.deptype = 'e')
    order by 1, a.attnum
"""
OF_THE_TEST_CLOCK = {"test_clock"}


def test_the_tables_are_those_of_a_migrated_database_and_of_its_comments(engine: Engine) -> None:
    with engine.connect() as tx:
        live = [row for row in tx.execute(text(COLUMNS)).all() if row[0] not in OF_THE_TEST_CLOCK]
    schema = page("docs/reference/schema.md").text
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", schema, re.MULTILINE | re.DOTALL))
    assert set(sections) == {row[0] for row in live}
    for table, section in sections.items():
        shown = re.findall(r"^\| `(\w+)` \| ([^|]+?)(, may be empty)? \| (.+?) \|$", section, re.MULTILINE)
        wanted = [row for row in live if row[0] == table]
        assert [(name, kind, not empty) for name, kind, empty, _ in shown] == [
            (name, short(kind), required) for _, name, kind, required, _, _ in wanted
        ], table
        for (*_, said), (_, name, _, _, comment, _) in zip(shown, wanted, strict=True):
            assert comment is None or comment.replace("<", "&lt;") == said, f"{table}.{name}"
        comment = wanted[0][5]
        assert table == "schema_version" or comment is None or comment in section, table


def short(kind: str) -> str:
    return kind.replace("timestamp with time zone", "timestamptz").replace("character varying", "varchar")


# --- metrics and alerts -------------------------------------------------------------------------


def metrics() -> set[str]:
    """The names that whatever speaks to prometheus_client gives to its metrics; none before there is an exporter."""
    rooms = {path.parent for path, source in SOURCES.items() if "prometheus_client" in source} - {PACKAGE}
    inside = [ast.parse(source) for path, source in SOURCES.items() if rooms & {path.parent, *path.parents}]
    texts = [
        node.value
        for tree in inside
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    known = settings_read() | {"durable_core", "durable_now"}
    return {word for word in texts if re.fullmatch(r"durable_[a-z_]+", word)} - known


def test_every_metric_is_in_the_documentation() -> None:
    told = "\n".join(shown.text for shown in pages())
    missing = sorted(name for name in metrics() if not re.search(rf"`{name}(?:_total|_info)?\b", told))
    assert missing == []


def alert_names() -> set[str]:
    """Those that were agreed on, and those of the rules that are shipped."""
    shipped = [
        rule["alert"]
        for path in (ROOT / "docs" / "monitoring").glob("*.y*ml")
        for group in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("groups", [])
        for rule in group["rules"]
        if "alert" in rule
    ]
    return {*ALERTS, *shipped}


def test_every_alert_has_its_section_in_the_runbook() -> None:
    headings = set(re.findall(r"^### (\w+)$", RUNBOOK.text, re.MULTILINE))
    assert alert_names() <= headings, sorted(alert_names() - headings)


# --- crash points -------------------------------------------------------------------------------


def test_every_crash_point_names_a_test_that_is_there() -> None:
    named = [words(row[-1])[0] for row in page("docs/explanation/crash-points.md").table("lost")]
    assert len(named) == 15
    files = ["tests/celery/test_crash_points.py", "tests/core/test_attempt.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    there = [line.split("::", 1)[1] for line in done.stdout.splitlines() if "::" in line]
    for name in named:
        assert any(one == name or one.startswith(f"{name}[") for one in there), name


@pytest.mark.parametrize("name", ["docs/reference/commands.md", "docs/state_machines.md"])
def test_a_page_that_is_written_by_a_program_says_so(name: str) -> None:
    (program,) = re.findall(r"^Written by `python -m ([\w.]+)`", page(name).text, re.MULTILINE)
    assert Path(ROOT, *program.split(".")).with_suffix(".py").exists()
