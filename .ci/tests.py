"""
Run the whole suite: first what may run side by side, then what starts processes of its own.

With `--long`, run instead: at full size the scenarios that stop, freeze and fill servers of their own, and whatever
else has a full size; and what takes many seconds and proves no numbered case. Every lane runs whatever the others say.
The last line is the sum of all, after the reasons of all skips. More arguments go to pytest as they are.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = ("--ignore=tests/celery", "--ignore=tests/faults")
FILES = ("-n", "2", "--dist", "loadfile")
"""Two processes, each test file in one of them: its tests share workers and servers."""
SUITE = (
    {"parallel": ["-n", "3", "-m", "not serial and not long"]},
    # These wait for their processes most of the time, so together they take little longer than one.
    {
        "workers": [*FILES, "-m", "serial and not long", "tests/celery"],
        "serial": ["-m", "serial and not long", *ELSEWHERE],
    },
)
AS_COLLECTED = ("--no-loadscope-reorder",)
"""The longest files, which `tests/conftest.py` puts first, start first: else one process ends with them alone."""
SCENARIOS = (
    {"faults": [*FILES, *AS_COLLECTED, "--full-size", "tests/faults"]},
    {"large": [*FILES, *AS_COLLECTED, "--full-size", "-m", "full_size or long", "--ignore=tests/faults"]},
)
NO_TESTS_COLLECTED = 5


def main(arguments: list[str]) -> int:
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    unfinished: list[str] = []
    healthy = True
    stages = SCENARIOS if arguments[:1] == ["--long"] else SUITE
    arguments = arguments[1:] if stages is SCENARIOS else arguments
    with tempfile.TemporaryDirectory(prefix="durable-tests-") as folder:
        for stage in stages:
            for lane, code, report in run(stage, arguments, Path(folder)):
                healthy = healthy and code in (0, NO_TESTS_COLLECTED)
                if code not in (0, 1, NO_TESTS_COLLECTED) or not report.exists():
                    unfinished.append(f"the {lane} lane ended early, with exit code {code}")
                if report.exists():
                    count(report, totals, reasons)
    if reasons:
        print("\nskipped:")
    for reason, times in sorted(reasons.items()):
        print(f"  {times} x {reason}")
    # A lane that broke off counts as one failure, so that the last line cannot look better than the run.
    for sentence in unfinished:
        print(sentence)
    if unfinished and not totals["failed"]:
        totals["failed"] += len(unfinished)
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped", flush=True)
    # A selection that matches nothing proves nothing.
    return 0 if healthy and not unfinished and totals["passed"] else 1


def run(stage: dict[str, list[str]], arguments: list[str], folder: Path) -> list[tuple[str, int, Path]]:
    """Run the lanes of a stage at once; the first one's output is shown as it comes, the others' when they are over."""
    running = []
    try:
        for lane, selection in stage.items():
            report, shown = folder / f"{lane}.xml", folder / f"{lane}.txt"
            command = [sys.executable, "-m", "pytest", *selection, f"--junitxml={report}", *arguments]
            with shown.open("wb") as output:
                first = not running
                if first:
                    print(f"== {lane} lane", flush=True)
                lane_process = subprocess.Popen(
                    command, cwd=ROOT, stdout=None if first else output, stderr=None if first else subprocess.STDOUT
                )
            running.append((lane, lane_process, report, shown))
        for number, (lane, process, _, shown) in enumerate(running):
            process.wait()
            if number:
                print(f"== {lane} lane", flush=True)
                sys.stdout.buffer.write(shown.read_bytes())
                sys.stdout.flush()
    finally:
        for _, process, _, _ in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return [(lane, process.returncode, report) for lane, process, report, _ in running]


def count(report: Path, totals: Counter[str], reasons: Counter[str]) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            totals["failed"] += 1
        elif skipped is not None:
            totals["skipped"] += 1
            reasons[skipped.get("message") or "no reason given"] += 1
        else:
            totals["passed"] += 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
