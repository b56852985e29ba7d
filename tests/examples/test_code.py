"""Every Python block of the documentation runs against a real Postgres, and what it enqueues is carried out."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from durable_core.testing import Made
from tests.examples.conftest import Programs
from tests.examples.pages import Page, page, pages

CARRY_OUT = Path(__file__).with_name("carry_out.py")

NOT_DUE_OR_NOT_OURS = {"docs/contracts/deliveries.md": ["invoice.send", "invoice.stamp", "ledger.book"]}
"""Pages that show a delivery which must stay pending: due later, with arguments of another version, kept elsewhere."""

TAKEN_BACK = {"docs/daily.md": ["invoice.print"]}
"""Pages that cancel a delivery."""

STARTED = {"docs/howto/operations.md": ["operation branch.reset issued - -"]}
"""Pages that start operations, and what came of each when a worker was hinted."""

SHOWN = [pytest.param(page, id=page.name) for page in pages() if page.has_python]


def is_a_test(page: Page) -> bool:
    shown = [node.name for node in ast.parse(page.python).body if isinstance(node, ast.FunctionDef)]
    return any(name.startswith("test_") for name in shown)


@pytest.mark.parametrize("page", SHOWN)
def test_the_code_of_a_page_runs(page: Page, programs: Programs) -> None:
    """As one program, in the order of the page; a page of tests runs under pytest."""
    program = programs.directory / "test_page.py"
    program.write_text(page.python, encoding="utf-8")
    if is_a_test(page):
        said = programs.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(program))
        assert f"{page.python.count('def test_')} passed" in said
        return
    said = programs.run(str(CARRY_OUT), str(program))
    ended = [line.split()[1:] for line in said.splitlines() if line.startswith("delivery ")]
    assert [line for line in said.splitlines() if line.startswith("operation ")] == STARTED.get(page.name, [])
    pending = sorted(kind for kind, state, *_ in ended if state == "pending")
    assert pending == NOT_DUE_OR_NOT_OURS.get(page.name, [])
    canceled = sorted(kind for kind, state, *_ in ended if state == "canceled")
    assert canceled == TAKEN_BACK.get(page.name, [])
    assert {state for _, state, *_ in ended} <= {"sent", "pending", "canceled"}, ended
    wrote = any(call in page.python for call in (".enqueue(", ".run_now(", ".execute_later("))
    assert ("sent" in {state for _, state, *_ in ended}) == wrote


def test_every_sql_statement_shown_runs(engine: Engine, make: Callable[..., Made]) -> None:
    """On a delivery that stands for the id left open, in a transaction that is rolled back."""
    made = make(state="processing")
    shown = [block.body for page in pages() for block in page.blocks if block.tag == "sql"]
    assert shown
    with engine.connect() as connection:
        for statement in shown:
            assert connection.execute(text(statement.replace("…", made.id).rstrip(";\n"))).rowcount == 1


def test_every_block_says_what_it_is() -> None:
    """An untagged block would be neither run nor read by these tests."""
    untagged = [f"{page.name}:{block.line}" for page in pages() for block in page.blocks if not block.tag]
    assert untagged == []


def test_the_readme_shows_about_fifteen_lines() -> None:
    shown = ast.parse(page("README.md").python)
    assert len([line for line in ast.unparse(shown).splitlines() if line.strip()]) <= 17
    assert "install(app)" in ast.unparse(shown)
