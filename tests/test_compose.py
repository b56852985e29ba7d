"""
`compose.yaml` and `Dockerfile`, read and judged without an engine: every command in them exists and parses.

What no engine has run is not proven here: that the images build and the containers come up together.
"""

import ipaddress
import json
import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from sqlalchemy import make_url

from durable_core.cli.main import main as durable

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)
SERVERS = sorted(set(SERVICES) - set(OURS))
PROGRAMS_OF_SERVERS = {"postgres": {"pg_isready"}, "valkey": {"sh", "valkey-cli", "valkey-server", "grep"}}
VARIABLE = re.compile(r"\$\{(\w+)(:[-?])?([^}]*)\}")

# Lets Celery load the app and parse the whole line, and then does nothing instead of the command.
PARSER = """
import json, sys
from celery.bin.celery import celery

for name in ("worker", "beat", "inspect"):
    celery.commands[name].callback = lambda **given: None

def flower(tornado_argv):
    import flower.options
    from tornado.options import options
    left = options.parse_command_line(["flower", *tornado_argv])
    assert not left, f"flower does not know {left}"
    assert options.read_only and not options.persistent and options.port == 5555

celery.commands["flower"].callback = flower
for line in json.load(sys.stdin):
    try:
        celery.main(line, prog_name="celery", standalone_mode=False)
    except Exception as error:
        sys.exit(f"celery {' '.join(line)}: {error!r}")
"""


def test_the_services_are_those_of_the_design() -> None:
    assert set(SERVICES) == {"postgres", "valkey", "migrate", "worker", "control", "beat", "flower"}
    assert OURS == ["beat", "control", "flower", "migrate", "worker"]


@pytest.mark.parametrize("name", SERVERS)
def test_an_image_is_pinned_to_a_major(name: str) -> None:
    assert re.fullmatch(r"[\w/.-]+:\d+(\.\d+)*", SERVICES[name]["image"])


def test_postgres_is_18_and_the_broker_a_valkey() -> None:
    assert SERVICES["postgres"]["image"] == "postgres:18"
    assert SERVICES["valkey"]["image"].startswith("valkey/valkey:")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_port_is_bound_to_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert isinstance(port, str), "the long form has no test here"
        address, *rest = VARIABLE.sub("1", port).split(":")
        assert ipaddress.ip_address(address).is_loopback, port
        assert len(rest) == 2, port
    assert SERVICES[name].get("network_mode") is None


def environments() -> list[tuple[str, str, str]]:
    return [
        (name, variable, str(value))
        for name, service in SERVICES.items()
        for variable, value in service.get("environment", {}).items()
    ]


SECRET = re.compile(r"PASS|AUTH|SECRET|TOKEN|KEY")
MAY_BE_EMPTY = {"DURABLE_WEBHOOK_SECRETS"}
"""Empty means that no webhook is signed; nothing is left open by it."""


def is_secret(variable: str) -> bool:
    return SECRET.search(variable) is not None and variable not in MAY_BE_EMPTY


def test_every_password_is_required_and_none_has_a_default() -> None:
    secrets = [(name, variable, value) for name, variable, value in environments() if is_secret(variable)]
    assert {name for name, _, _ in secrets} == set(SERVICES)
    for name, variable, value in secrets:
        found = VARIABLE.fullmatch(value)
        assert found, f"{name}: {variable} is written down"
        assert found.group(2) == ":?", f"{name}: {variable} may be left empty"
        assert found.group(3), f"{name}: {variable} does not say what is missing"
    # The same for whatever is named like a secret, anywhere in the file.
    for name, marker, rest in VARIABLE.findall((ROOT / "compose.yaml").read_text()):
        if is_secret(name):
            assert marker == ":?", name
            assert rest, name


def test_no_address_holds_a_password() -> None:
    for name, variable, value in environments():
        if "://" in value:
            found = re.search(r"://([^@/]*)@", value)
            password = found.group(1).partition(":")[2] if found else ""
            assert not password or VARIABLE.fullmatch(password), f"{name}: {variable}"


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"migrate"}))
def test_every_lasting_service_has_a_health_check_and_comes_back(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries"} <= set(check)
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_migrate_runs_once_and_the_others_wait_for_it() -> None:
    assert SERVICES["migrate"]["restart"] == "no"
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    for name in set(OURS) - {"migrate"}:
        assert SERVICES[name]["depends_on"] == {
            "migrate": {"condition": "service_completed_successfully"},
            "valkey": {"condition": "service_healthy"},
        }


def lines_of(name: str) -> list[list[str]]:
    """The command of a service and that of its health check, as lists of words."""
    service = SERVICES[name]
    lines = [service["command"]] if "command" in service else []
    if "healthcheck" in service:
        how, *words = service["healthcheck"]["test"]
        lines.append(shlex.split(words[0]) if how == "CMD-SHELL" else words)
    return [[word.replace("$$HOSTNAME", "box").replace("$$", "$") for word in line] for line in lines]


def test_every_program_exists() -> None:
    scripts = {script.name for script in metadata.entry_points(group="console_scripts")}
    for name in OURS:
        for line in lines_of(name):
            assert line[0] in scripts | {"python"}, line
    for name in SERVERS:
        for line in lines_of(name):
            assert line[0] in PROGRAMS_OF_SERVERS[name], line


def test_every_durable_command_parses() -> None:
    lines = [line[1:] for name in OURS for line in lines_of(name) if line[0] == "durable"]
    assert len(lines) == 2
    for line in lines:
        group, context = durable, durable.make_context("durable", list(line))
        command_name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert isinstance(command, click.Command)
        command.make_context(command_name, rest, parent=context)


def test_every_celery_command_parses_and_its_app_loads() -> None:
    lines = [line[1:] for name in OURS for line in lines_of(name) if line[0] == "celery"]
    assert len(lines) == 4
    assert all(line[:2] == ["-A", "tasks"] for line in lines)
    environment = {**os.environ, **filled(SERVICES["flower"]["environment"])}
    done = subprocess.run(
        [sys.executable, "-c", PARSER], cwd=ROOT, env=environment, input=json.dumps(lines), text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def filled(environment: dict[str, str]) -> dict[str, str]:
    """As compose would fill it in, with one password for all."""

    def value(found: re.Match[str]) -> str:
        return found.group(3) if found.group(2) == ":-" else "s3cret"

    return {name: VARIABLE.sub(value, text) for name, text in environment.items()}


def test_the_python_of_a_health_check_compiles() -> None:
    for name in OURS:
        for line in lines_of(name):
            if line[0] == "python":
                assert line[1] == "-c" or line[1:3] == ["-m", "durable_core.probe"]
                if line[1] == "-c":
                    compile(line[2], name, "exec")


@pytest.mark.parametrize("name", OURS)
def test_the_addresses_name_services_and_the_ports_they_listen_on(name: str) -> None:
    environment = filled(SERVICES[name]["environment"])
    for variable in ("DURABLE_DATABASE_URL", "DURABLE_REDIS_URL"):
        url = make_url(environment[variable])
        assert url.host in SERVERS
        assert str(url.port) in {port.rpartition(":")[2] for port in SERVICES[str(url.host)]["ports"]}
    database = make_url(environment["DURABLE_DATABASE_URL"])
    theirs = SERVICES["postgres"]["environment"]
    assert (database.username, database.database) == (theirs["POSTGRES_USER"], theirs["POSTGRES_DB"])
    assert environment["PGPASSWORD"]


def test_flower_is_read_only_and_asks_who_is_there() -> None:
    assert "--read_only=True" in SERVICES["flower"]["command"]
    assert SERVICES["flower"]["environment"]["FLOWER_BASIC_AUTH"].startswith("${DURABLE_FLOWER_BASIC_AUTH:?")
    assert "FLOWER_UNAUTHENTICATED_API" not in SERVICES["flower"]["environment"]


def test_containers_of_ours_have_no_more_rights_than_they_need() -> None:
    for name in OURS:
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


def test_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"]


# --- the image -----------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def copied() -> list[str]:
    found = []
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            found += rest.split()[:-1]
    return found


def ignored(path: str) -> bool:
    """As Docker reads .dockerignore: the last pattern that matches decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        matches = fnmatch(path, pattern.removeprefix("!")) or path.startswith(pattern.removeprefix("!") + "/")
        if matches:
            verdict = not pattern.startswith("!")
    return verdict


def test_everything_copied_exists_and_reaches_the_builder() -> None:
    assert copied()
    for path in copied():
        assert (ROOT / path).exists(), path
        assert not ignored(path), path
    for path in (".env", ".git", ".durable", ".venv", "tests"):
        assert ignored(path), path


def test_what_the_commands_need_is_in_the_image() -> None:
    assert {"tasks", "beat_schedule.py", "durable_core"} <= set(copied())


def test_the_image_runs_as_an_ordinary_user() -> None:
    users = [rest for word, rest in instructions() if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")


def test_bases_are_pinned_and_packages_checked_against_the_lock() -> None:
    for word, rest in instructions():
        if word == "FROM":
            assert re.match(r"[\w/.-]+:\d", rest), rest
        if word == "RUN" and "pip install" in rest:
            for part in rest.split("&&"):
                if "pip install" in part:
                    assert "--require-hashes" in part or "--constraints requirements.lock" in part, part
    assert re.search(r"^flower==.*\\\n\s+--hash=", (ROOT / "requirements.lock").read_text(), re.MULTILINE)


def test_the_images_own_command_is_the_workers() -> None:
    (command,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    assert command[:4] == ["celery", "-A", "tasks", "worker"]


@pytest.mark.parametrize("name", ["worker", "control"])
def test_the_probe_of_a_worker_asks_for_that_worker_and_asks_no_server(name: str, tmp_path: Path) -> None:
    command, line = lines_of(name)
    (hostname,) = [word.removeprefix("--hostname=") for word in command if word.startswith("--hostname=")]
    assert line[:3] == ["python", "-m", "durable_core.probe"]
    done = subprocess.run(
        [sys.executable, *line[1:]], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "DURABLE_PULSE_FOLDER": str(tmp_path), "DURABLE_DATABASE_URL": "postgresql://nowhere:1/x"},
    )  # fmt: skip
    assert done.returncode == 6
    assert f"no pulse of {hostname.split('@')[0]} in {tmp_path}" in done.stdout
