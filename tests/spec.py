"""
`make spec`: which numbered acceptance case of each contract has a passing test.

The cases are counted from `docs/contracts/*.md`; a test names its own with
`@pytest.mark.spec("deliveries", 7)`. A case without a passing test fails the run.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

CONTRACTS = Path(__file__).parents[1] / "docs" / "contracts"
CASE = re.compile(r"^(\d+)\. ", re.MULTILINE)
HEADING = "## Acceptance"


def cases(page: Path) -> list[int]:
    """The numbers below the acceptance heading of a contract's page."""
    text = page.read_text(encoding="utf-8")
    if HEADING not in text:
        return []
    return [int(number) for number in CASE.findall(text.split(HEADING, 1)[1])]


class Report:
    """Collects, while pytest runs, which cases passed and which did not."""

    def __init__(self) -> None:
        self.marked: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        chosen = []
        for item in items:
            marks = {(mark.args[0], number) for mark in item.iter_markers("spec") for number in mark.args[1:]}
            if marks:
                self.marked[item.nodeid] = marks
                chosen.append(item)
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def proven(self, contract: str) -> set[int]:
        """Cases all of whose tests passed, and of which at least one ran."""
        good: set[int] = set()
        bad: set[int] = set()
        for node, marks in self.marked.items():
            numbers = {number for name, number in marks if name == contract}
            (good if node in self.passed and node not in self.failed else bad).update(numbers)
        return good - bad


def verdict(report: Report, pages: Iterable[Path]) -> bool:
    """Print the table, contract by contract; whether every case has a passing test."""
    complete = True
    for page in sorted(pages):
        numbers = cases(page)
        proven = report.proven(page.stem)
        missing = [number for number in numbers if number not in proven]
        unknown = sorted(
            {number for marks in report.marked.values() for name, number in marks if name == page.stem} - set(numbers)
        )
        print(f"{page.stem} {len(numbers) - len(missing)} of {len(numbers)}")
        for number in numbers:
            print(f"  {number:3d}  {'passing test' if number in proven else 'NO PASSING TEST'}")
        for number in unknown:
            print(f"  {number:3d}  marked in a test, but no case of the contract")
        complete = complete and not missing and not unknown and bool(numbers)
    return complete


def main() -> int:
    report = Report()
    pages = list(CONTRACTS.glob("*.md"))
    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[report])
    if not pages:
        print("no contract has a page in docs/contracts")
        return 1
    return 0 if verdict(report, pages) and code == pytest.ExitCode.OK else 1


if __name__ == "__main__":
    sys.exit(main())
