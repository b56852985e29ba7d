"""The how-tos whose blocks are files and command lines, followed as they stand."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from celery.bin.celery import celery as celery_command
from sqlalchemy import inspect

from durable_core import deliveries
from durable_core.celery_binding.settings import Settings
from durable_core.cli.main import main as durable_command
from tests.docs.conftest import Followed
from tests.examples.conftest import Programs
from tests.examples.pages import page, pages
from tests.examples.test_code import CARRY_OUT
from tests.examples.test_pages import misuse
from tests.faults.pooler import Pooler, find_pgbouncer

Follow = Callable[..., Followed]
BENCH = page("bench/README.md")
RUN_BY_A_TEST = {
    "docs/tutorial.md", "docs/howto/existing-celery.md", "docs/howto/alembic.md", "docs/howto/services.md",
    "docs/howto/pgbouncer.md",
}  # fmt: skip


def test_every_page_with_files_or_terminals_is_followed_by_a_test() -> None:
    """The blocks of other pages are run without being asked for; a title takes a block out of that."""
    titled = {shown.name for shown in pages() if any(block.title for block in shown.blocks)}
    assert titled == RUN_BY_A_TEST


# --- an existing Celery app ---------------------------------------------------------------------


@pytest.mark.serial
def test_an_existing_app_keeps_its_tasks_and_carries_out_deliveries(follow: Follow) -> None:
    followed = follow(page("docs/howto/existing-celery.md"))

    scheduled = ast.literal_eval(followed.sh("schema").splitlines()[-1])
    assert {"tidy", "durable-dispatch", "durable-reap"} <= set(scheduled)
    with followed.running("worker"), followed.running("beat"):
        followed.sh("try")
        wait_until(lambda: state_of(followed) == ["sent"])
        wait_until(lambda: "succeeded" in (followed.folder / "worker.log").read_text().split("proj.tasks.tidy")[-1])


def state_of(followed: Followed) -> list[str]:
    with followed.engine.connect() as tx:
        return [row.state for row in deliveries.page(tx)]


def wait_until(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


# --- Alembic ------------------------------------------------------------------------------------

TEMPLATE = """\
from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

def upgrade():
    ${upgrades if upgrades else "pass"}
"""


@pytest.fixture
def beside(follow: Follow) -> Followed:
    followed = follow(page("docs/howto/alembic.md"))
    (followed.folder / "migrations" / "versions").mkdir()
    (followed.folder / "migrations" / "script.py.mako").write_text(TEMPLATE)
    return followed


def written(followed: Followed) -> str:
    (revision,) = (followed.folder / "migrations" / "versions").glob("*.py")
    return revision.read_text()


def test_alembic_of_the_host_leaves_our_schema_alone(beside: Followed) -> None:
    beside.sh("deploy")

    assert "create_table('orders'" in written(beside)
    assert "durable" not in written(beside)
    assert inspect(beside.engine).has_table("orders")
    assert inspect(beside.engine).has_table("deliveries", schema="durable")


def test_without_include_name_it_would_drop_our_tables(beside: Followed) -> None:
    """What the page warns of; else its advice would be idle."""
    env = beside.folder / "migrations" / "env.py"
    env.write_text(env.read_text().replace("        include_name=include_name,\n", ""))

    with pytest.raises(AssertionError):
        beside.sh("deploy")  # `alembic check` finds more to drop
    assert "drop_table('deliveries', schema='durable')" in written(beside)


# --- PgBouncer ----------------------------------------------------------------------------------


def test_the_page_of_pgbouncer_runs_through_one(programs: Programs) -> None:
    if find_pgbouncer() is None:
        pytest.skip("no pgbouncer on this machine")
    shown = page("docs/howto/pgbouncer.md")
    ini = next(block.body for block in shown.blocks if block.title == "pgbouncer.ini")
    config = configparser.ConfigParser()
    config.read_string(ini)
    assert config["pgbouncer"]["pool_mode"] == "transaction"

    (programs.directory / "page.py").write_text(shown.python)
    pooler = Pooler(programs.engine.url, pool_size=2)
    try:
        environment = {**programs.environment, "DURABLE_DATABASE_URL": pooler.url.render_as_string(hide_password=False)}
        done = subprocess.run(
            [sys.executable, str(CARRY_OUT), "page.py"], cwd=programs.directory, env=environment, check=False,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        pooler.stop()
    assert "delivery pooled.look sent" in done.stdout, done.stderr


# --- systemd and compose ------------------------------------------------------------------------

SERVICES = page("docs/howto/services.md")
UNITS = [block for block in SERVICES.blocks if block.title.endswith(".service")]


def test_a_unit_waits_for_the_grace_and_tells_the_main_process_alone() -> None:
    for unit in UNITS:
        said = parsed(unit.body)
        if " worker " in said["ExecStart"]:
            assert said["KillMode"] == "mixed"
            assert int(said["TimeoutStopSec"]) > Settings().shutdown_grace + 5
    compose = yaml.safe_load(next(block.body for block in SERVICES.blocks if block.title == "compose.yaml"))
    for service in compose["services"].values():
        if "worker" in service["command"]:
            assert int(service["stop_grace_period"].removesuffix("s")) > Settings().shutdown_grace + 5
            assert service["init"] is True


def parsed(unit: str) -> dict[str, str]:
    config = configparser.ConfigParser(interpolation=None)
    config.optionxform = str  # type: ignore[assignment,method-assign]
    config.read_string(unit)
    assert {"Unit", "Service", "Install"} == set(config.sections())
    return dict(config["Service"])


def test_systemd_finds_no_fault_with_the_units(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze on this machine")
    for unit in UNITS:
        body = unit.body.replace("/srv/shop/.venv/bin", str(Path(sys.executable).parent))
        (tmp_path / unit.title).write_text(body.replace("WorkingDirectory=/srv/shop", f"WorkingDirectory={tmp_path}"))
    done = subprocess.run(
        [program, "verify", "--man=no", *(str(tmp_path / unit.title) for unit in UNITS)], check=False,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if any(unit.title in line for unit in UNITS)]
    assert ours == []


def commands() -> list[list[str]]:
    """Every command of the units and of compose, as words."""
    lines = [shlex.split(parsed(unit.body)["ExecStart"].replace("%%", "%")) for unit in UNITS]
    compose = yaml.safe_load(next(block.body for block in SERVICES.blocks if block.title == "compose.yaml"))
    for service in compose["services"].values():
        lines.append(service["command"])
        if "healthcheck" in service:
            assert service["healthcheck"]["test"][0] == "CMD"
            lines.append(service["healthcheck"]["test"][1:])
    return lines


def test_every_command_of_the_units_and_of_compose_parses() -> None:
    roots = {"celery": celery_command, "durable": durable_command}
    assert len(commands()) == 10
    for program, *line in commands():
        if program == "python":  # the quick form of the same command
            assert line[:2] == ["-m", "durable_core.probe"]
            program, line = "durable", ["probe", *line[2:]]
        assert misuse(roots[Path(program).name], line) is None, line


# --- tuning -------------------------------------------------------------------------------------


def test_the_figures_of_tuning_are_those_of_the_bench() -> None:
    """A figure that nobody measured has no place there."""
    tuning = page("docs/howto/tuning.md")
    measured = {row[0]: row for row in BENCH.table("candidate") if len(row) > 5}
    heads = next(line for line in BENCH.text.splitlines() if line.startswith("| candidate | worker CPU ms"))
    columns = [cell.strip() for cell in heads.strip("|").split("|")]
    for name, worker, postgres, rate in tuning.table("of one delivery"):
        row = dict(zip(columns, measured[name], strict=True))
        assert (row["worker CPU ms"], row["Postgres CPU ms"], row["per second"]) == (worker, postgres, rate)
    for figure in re.findall(r"([\d.]+) statements a second", tuning.text):
        assert f"{figure} statements/s" in BENCH.text
