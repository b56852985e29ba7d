"""
What cannot run behind a pooler is listed where the core runs behind one: it would hang there, an hour later.

Read from the sources: a test that hands process numbers to an interleaver, or gives its host startup options.
"""

import ast
from pathlib import Path

import pytest

from tests.faults.pooler import DIRECT

ROOT = Path(__file__).parents[2]
LISTED = tuple(name for names in DIRECT.values() for name in names)
INTERLEAVERS = {"Patient", "Interleaver"}


def _is_telling(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in INTERLEAVERS
    # As libpq takes them: `-c name=value`.
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("-c ")


def direct(path: Path) -> set[str]:
    """The tests of a file that need sessions of their own, by themselves or by a function of it that they name."""
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    names = {
        name: {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {one.arg for one in node.args.args}
        for name, node in functions.items()
    }
    found = {name for name, node in functions.items() if any(map(_is_telling, ast.walk(node)))}
    while more := {name for name in functions if names[name] & found} - found:
        found |= more
    return {f"{path.relative_to(ROOT)}::{name}" for name in found if name.startswith("test_")}


@pytest.mark.parametrize("folder", ["core", "races"])
def test_what_needs_sessions_of_its_own_is_listed(folder):
    needs = {name for path in (ROOT / "tests" / folder).rglob("test_*.py") for name in direct(path)}
    assert needs, "nothing was found, so nothing was read"
    assert {name for name in needs if not name.startswith(LISTED)} == set(), "list them in tests/faults/pooler.py"
