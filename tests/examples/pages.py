"""What the documentation shows, read off its pages: code, commands, links and tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SHELLS = ("sh", "console", "bash", "shell")

_FENCE = re.compile(
    r"^```(?P<tag>\w*)(?: title=\"(?P<title>[^\"\n]*)\")?[^\n]*\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL
)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """
    A fenced block of a page and the line it begins on.

    Its title, where it has one, is the file that it is, or the terminal that it is typed into.
    """

    tag: str
    body: str
    line: int
    title: str = ""


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(found["tag"], found["body"], self.text.count("\n", 0, found.start("body")) + 1, found["title"] or "")
            for found in _FENCE.finditer(self.text)
        ]

    @cached_property
    def prose(self) -> str:
        """The page without its blocks."""
        return _FENCE.sub("", self.text)

    @property
    def python(self) -> str:
        """
        The Python blocks as one program, each statement on the line of the page that shows it.

        Without those that are files of their own: `tests/docs` lays them out and runs them as such.
        """
        lines: list[str] = []
        for block in self.blocks:
            if block.tag == "python" and not block.title:
                lines.extend([""] * (block.line - 1 - len(lines)))
                lines.extend(block.body.splitlines())
        return "\n".join(lines) + "\n"

    @property
    def has_python(self) -> bool:
        return bool(self.python.strip())

    def commands(self, program: str) -> list[list[str]]:
        """Every call of a program that the page shows, in shell blocks and in code spans, as its words."""
        shown = [line for block in self.blocks if block.tag in SHELLS for line in block.body.splitlines()]
        shown += _SPAN.findall(self.prose)
        found = []
        for line in shown:
            words = re.sub(r'"[^"]*"', "TEXT", line.split("#", 1)[0]).split()
            if words and words[0] == program and len(words) > 1:
                found.append(words[1:])
        return found

    @property
    def links(self) -> list[str]:
        return _LINK.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """The anchors of the headings, as GitHub makes them."""
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(self.prose)}

    def table(self, first_heading: str) -> list[list[str]]:
        """The rows of the table whose first column has this heading, without the code marks of its cells."""
        rows: list[list[str]] = []
        inside = False
        for line in self.prose.splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
            if not cells:
                inside = False
            elif cells[0] == first_heading:
                inside = True
            elif inside and not set(cells[0]) <= set("-: "):
                rows.append(cells)
        assert rows, f"{self.name} has no table that begins with {first_heading!r}"
        return rows

    def first_columns(self) -> list[set[str]]:
        """Of each table the first cells of its rows."""
        found: list[list[str]] = [[]]
        for line in self.prose.splitlines():
            if line.startswith("|"):
                found[-1].append(line.strip("| ").split("|")[0].strip())
            elif found[-1]:
                found.append([])
        return [set(cells[2:]) for cells in found]


def pages() -> list[Page]:
    """Every page of the documentation, those of tomorrow too."""
    return [Page(path) for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]]


def page(name: str) -> Page:
    return Page(ROOT / name)


def words(cell: str) -> list[str]:
    """The code spans of a table's cell."""
    return _SPAN.findall(cell)
