"""
Run the whole suite in two lanes: what may run side by side, then what needs the machine to itself.

Both lanes run whatever the first one says. The last line is the sum of both, after the reasons of all skips.
More arguments go to pytest as they are.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LANES = {
    "parallel": ["-n", "2", "-m", "not serial"],
    "serial": ["-m", "serial"],
}
NO_TESTS_COLLECTED = 5


def main(arguments: list[str]) -> int:
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    unfinished: list[str] = []
    healthy = True
    with tempfile.TemporaryDirectory(prefix="durable-tests-") as folder:
        for lane, selection in LANES.items():
            print(f"== {lane} lane", flush=True)
            report = Path(folder, f"{lane}.xml")
            command = [sys.executable, "-m", "pytest", *selection, f"--junitxml={report}", *arguments]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
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
