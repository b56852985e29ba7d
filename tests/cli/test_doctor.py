"""`durable doctor` as it is called: what it prints, what it answers, and how it ends."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core.doctor.findings import FAILS, NOTES, Reason
from durable_core.local.services import Addresses
from durable_core.pulse import CONSUMING, Verdict
from durable_core.sweeps import SWEEPS
from durable_core.testing import create_database, drop_database, migrated
from tests.cli.conftest import process, value_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "doctor.md"

Run = Callable[..., Result]


@pytest.fixture
def swept(services: Addresses, worker_id: str) -> Iterator[Engine]:
    """A migrated database whose sweeps have just run."""
    name = f"durable_cli_doctor_{worker_id}"
    engine = migrated(create_database(services.database_url, name))
    with engine.begin() as tx:
        for sweep in SWEEPS:
            began = text(
                "insert into durable.loops (name, began_at, host) values (:name, durable.durable_now(), 'box')"
            )
            tx.execute(began, {"name": sweep.name})
    yield engine
    engine.dispose()
    drop_database(services.database_url, name)


@pytest.fixture
def doctor(run: Run, swept: Engine) -> Run:
    url = swept.url.render_as_string(hide_password=False)
    return lambda *line: run("--database-url", url, "doctor", *line)


def test_warnings_end_with_0_and_with_6_for_the_strict(doctor: Run) -> None:
    done = doctor()
    assert done.exit_code == 0, done.stdout
    assert doctor("--strict").exit_code == 6
    assert "[SYNCHRONOUS_COMMIT_OFF]" in done.stdout
    assert "0 failed, " in done.stdout


def test_a_failure_ends_with_6_and_comes_first_with_its_mend_below(doctor: Run, swept: Engine) -> None:
    with swept.begin() as tx:
        tx.execute(text("drop index durable.deliveries_due"))
    done = doctor()
    assert done.exit_code == 6
    first, second, *_ = done.stdout.splitlines()
    assert re.match(r"FAIL  drift +index deliveries_due is missing  \[SCHEMA_MISSING\]\Z", first)
    assert re.match(r" +mend: make it again as `durable migrate --sql` prints it\Z", second)


def test_what_is_well_is_shown_only_when_asked_for(doctor: Run) -> None:
    assert "ok    drift" not in doctor().stdout
    assert re.search(r"^ok    drift +\d+ objects are as the migrations make them$", doctor("-v").stdout, re.MULTILINE)


def test_the_answer_for_programs_is_complete(doctor: Run) -> None:
    answer = value_of(doctor("--json"))
    assert answer["healthy"] is True
    counts = {
        status: len([one for one in answer["findings"] if one["status"] == status]) for status in ("pass", "warn")
    }
    assert (answer["passed"], answer["warned"], answer["noted"], answer["failed"]) == (
        counts["pass"],
        counts["warn"],
        0,
        0,
    )
    for finding in answer["findings"]:
        assert set(finding) == {"check", "status", "reason", "observed", "fix", "assumed"}
        assert bool(finding["fix"]) == (finding["status"] != "pass")
    assert answer["not_looked_at"]["workers"] == "no app was named with -A"


def test_without_an_app_it_says_what_it_did_not_look_at(doctor: Run) -> None:
    assert "not looked at: settings, beat, celery, broker, workers (no app was named with -A)" in doctor().stdout


def test_what_is_a_guess_without_an_app_says_so(doctor: Run, swept: Engine) -> None:
    with swept.begin() as tx:
        tx.execute(text("update durable.loops set began_at = began_at - interval '40 s' where name = 'reap'"))
    findings = value_of(doctor("--json"))["findings"]
    for check, of in (("sweeps", "the interval is the default"), ("pooler", "the app may connect otherwise"),
                      ("stuck", "the lease is the default")):  # fmt: skip
        judged = [one for one in findings if one["check"] == check]
        for finding in judged:
            assert finding["assumed"] == f"{of}, for no app was named with -A"
            assert finding["observed"].endswith(f"; {finding['assumed']}")
    assert "SWEEP_LATE" in {one["reason"] for one in findings}
    assert {one["assumed"] for one in findings if one["check"] not in ("sweeps", "pooler", "stuck")} == {""}


APP = """
from celery import Celery
from sqlalchemy import create_engine
from durable_core.celery_binding import install
app = Celery("proj", broker={broker!r})
app.conf.update(
    durable_engine=create_engine({url!r}), durable_schema={schema!r}, durable_lease_seconds={lease},
    worker_enable_remote_control=False,
)
install(app)
"""


@pytest.mark.parametrize(("schema", "lease"), [("durable", -1), ("Not So", 30), ("durable", 30)])
def test_a_setting_that_cannot_be_used_closes_no_other_look(
    swept: Engine, services: Addresses, tmp_path: Path, schema: str, lease: int
) -> None:
    url = swept.url.render_as_string(hide_password=False)
    (tmp_path / "proj.py").write_text(APP.format(broker=services.redis_url, url=url, schema=schema, lease=lease))
    done = process("-A", "proj", "doctor", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    failed = [one["reason"] for one in answer["findings"] if one["status"] == "fail"]
    bad = (schema, lease) != ("durable", 30)
    assert failed == ["SETTINGS_INVALID"] * bad
    assert answer["not_looked_at"] == ({"beat": "settings failed"} if bad else {})
    assert {"revision", "drift", "sweeps", "schedules", "broker_server"} <= {
        one["check"] for one in answer["findings"] if one["status"] == "pass"
    }
    assumed = {one["assumed"] for one in answer["findings"] if one["check"] == "stuck"}
    assert assumed == {"the lease is the default, for durable_lease_seconds cannot be used" if lease < 0 else ""}


def test_a_database_that_is_away_is_a_finding_with_no_password_in_it(run: Run) -> None:
    done = run("--database-url", "postgresql://app:very-secret-word@127.0.0.1:1/nowhere", "doctor")
    assert done.exit_code == 6
    assert "DATABASE_UNREACHABLE" in done.stdout
    assert "very-secret-word" not in done.stdout + done.stderr
    assert "(database failed)" in done.stdout


def test_it_needs_no_celery_where_no_app_is_named(swept: Engine) -> None:
    url = swept.url.render_as_string(hide_password=False)
    program = (
        "import sys\nfrom durable_core.cli.main import main\n"
        f"try: main(['--database-url', {url!r}, 'doctor'])\n"
        "finally: print(sorted({'celery', 'kombu'} & set(sys.modules)), file=sys.stderr)"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stderr.strip() == "[]"


def test_an_app_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "proj.py").write_text("from celery import Celery\napp = Celery('proj')\n")
    done = process("-A", "proj", "doctor", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


# --- the page ---------------------------------------------------------------------------------------


def rows_of_page() -> dict[str, list[str]]:
    """The table's rows by their code."""
    rows: dict[str, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| `([A-Z_]+)` \|(.*)\|\Z", line):
            rows[found[1]] = [cell.strip() for cell in found[2].split("|")]
    return rows


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.OK])
def test_every_reason_has_its_row_in_the_page(reason: Reason) -> None:
    severity, means, mend = rows_of_page()[reason]
    assert severity == ("fail" if reason in FAILS else "note" if reason in NOTES else "warn")
    assert means
    assert mend


def test_the_page_has_no_code_that_is_not_in_the_source() -> None:
    assert set(rows_of_page()) == (set(Reason) - {Reason.OK}) | set(Verdict)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_of_a_probe_has_its_row_in_the_page(verdict: Verdict) -> None:
    live, ready, means = rows_of_page()[verdict]
    assert (live[0], ready) == ("6" if verdict.startswith("PULSE_") else "0", "0" if verdict in CONSUMING else "6")
    assert means


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.OK])
def test_every_reason_is_produced_by_a_test(reason: Reason) -> None:
    tests = [*(ROOT / "tests" / "doctor").glob("*.py"), ROOT / "tests" / "celery" / "test_doctor.py"]
    assert any(f"Reason.{reason.name}" in path.read_text(encoding="utf-8") for path in tests)
