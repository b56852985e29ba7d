"""The site is built strictly: a broken link, a page that is not there or a docstring that is gone ends it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import durable_core
from durable_core import deliveries, operations, periodic, plans
from tests.examples.pages import ROOT

PARTS = ["Tutorial", "How-to", "Reference", "Explanation"]


def build(project: Path, into: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)], cwd=project,
        check=False, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    done = build(ROOT, into)
    assert done.returncode == 0, done.stderr
    return into


def test_it_is_built_without_a_warning_in_four_parts(site: Path) -> None:
    home = (site / "index.html").read_text()
    shown = [part for part in re.findall(r'md-ellipsis">\s*(?:<[^>]+>\s*)*([\w-]+)', home) if part in PARTS]
    assert list(dict.fromkeys(shown)) == PARTS


def test_reading_it_fetches_nothing_from_elsewhere(site: Path) -> None:
    """No fonts, no scripts, no pictures of other hosts; a link that a person follows is another matter."""
    for path in site.rglob("*.html"):
        found = re.findall(
            r"<(?:script|img|iframe|link)[^>]+?(?:src|href)=\"?(?:https?:)?//([^\"/> ]+)", path.read_text()
        )
        assert found == [], path.name


def test_every_name_that_users_import_is_in_the_reference(site: Path) -> None:
    shown = set(re.findall(r'<h[2-4] id="(durable_core[\w.]+)"', (site / "reference" / "api.html").read_text()))
    named = {name.rpartition(".")[2] for name in shown}
    rooms = (deliveries, periodic, operations, plans)
    # `list` is a second name of `page`, told in a sentence beside it.
    of_rooms = {name for room in rooms for name in room.__all__ if name not in ("list", "alist")}
    wanted = {*durable_core.__all__, *of_rooms} - {"deliveries", "operations", "plans"}
    assert wanted <= named, wanted - named


def test_what_lies_outside_of_docs_is_a_page_too(site: Path) -> None:
    for name in ("CHANGELOG", "SECURITY", "bench/index", "examples", "examples/celery_app.py"):
        assert (site / "project" / f"{name}.html").exists(), name
    assert 'href="../project/CHANGELOG.html"' in (site / "howto" / "upgrading.html").read_text()


def test_every_decision_is_listed(site: Path) -> None:
    listed = (site / "decisions" / "index.html").read_text()
    for path in (ROOT / "docs" / "decisions").glob("0*.md"):
        assert f'href="{path.stem}.html"' in listed


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[no such part](daily.md#no-such-part)", "no-such-part"),
        ("::: durable_core.no_such_name", "no_such_name"),
    ],
)
def test_what_leads_nowhere_ends_the_build_and_is_named(broken: str, named: str, tmp_path: Path) -> None:
    for name in ("docs", ".ci", "bench", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    glossary = tmp_path / "docs" / "glossary.md"
    glossary.write_text(f"{glossary.read_text()}\n{broken}\n")

    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert named in done.stderr
