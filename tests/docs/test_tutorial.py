"""The tutorial is followed to its end: its files written, its lines typed into three terminals as they stand."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.docs.terminals import Terminal
from tests.examples.pages import ROOT, Block, page

TUTORIAL = page("docs/tutorial.md")
STARTED = ".> concurrency: 1"


def blocks(title: str) -> Iterator[Block]:
    return (block for block in TUTORIAL.blocks if block.title == title)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files of the page, and the environment of this project in the place of the one that a reader makes."""
    tmp_path.chmod(0o755)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    for block in TUTORIAL.blocks:
        if block.tag == "python":
            (tmp_path / block.title).write_text(block.body, encoding="utf-8")
    return tmp_path


@pytest.mark.serial
def test_whoever_follows_it_sees_another_worker_finish_the_letter(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DURABLE_", "PYTEST_"))}
    first, second, third = (blocks(f"{name} terminal") for name in ("first", "second", "third"))
    with ExitStack() as ending:
        servers, worker, hands = (ending.enter_context(closing(Terminal(folder, environment))) for _ in range(3))

        servers.type(next(first).body)
        servers.wait_for("ready;", seconds=180)
        worker.type(next(second).body)
        worker.wait_for(STARTED)
        assert re.search(r"letter\.send +letters +sent", hands.run(next(third).body)), hands.said
        worker.wait_for("attempt 1, fence 1")

        worker.interrupt()
        begun = len(worker.said)
        worker.type(next(second).body)
        worker.wait_for(STARTED, begun)
        hands.run(next(third).body)
        assert "attempt 1, fence 1" in read(worker, begun)
        hands.wait_for("attempt 1, fence 2", seconds=60)

        shown = hands.run("sleep 2\n" + next(third).body)
        assert "CLAIM_EXPIRED" in shown
        assert re.search(r"state +sent", shown), shown

        hands.run(next(third).body)
        servers.interrupt()
        assert [list(rest) for rest in (first, second, third)] == [[], [], []], "a block was not followed"


def read(terminal: Terminal, since: int) -> str:
    terminal.wait_for("writes the letter", since)
    return terminal.said[since:]


def test_what_it_has_you_install_is_there_to_be_installed() -> None:
    (install,) = (block for block in TUTORIAL.blocks if block.tag == "sh" and not block.title)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert set(re.findall(r"\[(\w+)\]", install.body)) <= set(extras)
