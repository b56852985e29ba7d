"""`durable env`: the addresses of the stack that runs in this folder, for programs of one's own."""

import json
import shlex
from pathlib import Path

import psycopg
from redis import Redis

from durable_core.local.services import Services
from tests.cli.conftest import process

NOWHERE = {"DURABLE_DATABASE_URL": "", "DURABLE_REDIS_URL": ""}


def test_its_lines_lead_a_shell_to_the_running_servers(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    servers = Services(tmp_path / ".durable", postgres_settings={"fsync": "off"})
    try:
        servers.start()
        done = process("env", cwd=tmp_path, env=NOWHERE)
        assert done.returncode == 0, done.stderr
        exported = dict(shlex.split(line.removeprefix("export "))[0].split("=", 1) for line in done.stdout.splitlines())
        assert set(exported) == {"DURABLE_DATABASE_URL", "DURABLE_REDIS_URL"}
        with psycopg.connect(exported["DURABLE_DATABASE_URL"].replace("+psycopg", "")) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
        with Redis.from_url(exported["DURABLE_REDIS_URL"]) as redis:
            assert redis.ping()
        asked = process("env", "--json", cwd=tmp_path, env=NOWHERE)
        assert json.loads(asked.stdout) == exported
    finally:
        servers.stop(remove=True)


def test_without_a_stack_it_says_what_to_do(tmp_path: Path) -> None:
    done = process("env", "--json", cwd=tmp_path, env=NOWHERE)

    assert done.returncode == 1
    assert '"NOTHING_RUNS"' in done.stdout
    assert "durable up" in done.stderr + done.stdout
