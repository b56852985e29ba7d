"""`durable up` as a process: it serves, it ends without a trace, and it mends what a killed one left behind."""

import base64
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from durable_core.celery_binding.flower import CONFIGURATION
from durable_core.cli.stack import Child, Part, Stack, end_by_force, ended_with, marked
from durable_core.cli.up import parts
from durable_core.local import running, server
from tests.cli.conftest import DURABLE, process

APP = """
import os
from celery import Celery
from sqlalchemy import create_engine
from durable_core import Step, delivery
from durable_core.celery_binding import install

app = Celery("shop", broker=os.environ["DURABLE_REDIS_URL"])
app.conf.durable_engine = lambda: create_engine(os.environ["DURABLE_DATABASE_URL"])
app.conf.durable_shutdown_grace = 2.0
install(app)

@delivery("shop.greet")
def greet(step: Step, name: str) -> str:
    return f"hello {name}"
"""
ENQUEUE = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from shop import greet
with Session(create_engine(os.environ["DURABLE_DATABASE_URL"])) as session, session.begin():
    print(greet.enqueue(session, "dana").id)
"""
WEB = """
import asyncio
import json
import os
from shop import greet

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    told = [os.environ["DURABLE_DATABASE_URL"], os.environ["DURABLE_REDIS_URL"], greet.name]
    endless = scope["path"] == "/stream"
    await send({"type": "http.response.body", "body": json.dumps(told).encode(), "more_body": endless})
    if endless:
        await asyncio.sleep(3600)
"""
AUTH = "dana:a-long-password"
UNKNOWN = "01a227e1-8921-7001-a2c4-ace8f4971791"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with an app in it that every user may pass through: root's servers run as another account."""
    path = Path(tempfile.mkdtemp(prefix="durable-up-"))
    path.chmod(0o755)
    (path / "shop.py").write_text(APP)
    (path / "web.py").write_text(WEB)
    yield path
    stack = Stack(path / ".durable" / "up")  # what a failed test left
    stack.own()
    stack.close(keep_logs=False)
    for name in ("postgres", "valkey"):
        if (path / ".durable" / name / "record.json").exists():
            record = json.loads((path / ".durable" / name / "record.json").read_text())
            if server.born_at(record["pid"]) == record["born"]:
                os.kill(record["pid"], signal.SIGQUIT if name == "postgres" else signal.SIGTERM)
    shutil.rmtree(path, ignore_errors=True)


Start = Callable[..., tuple["subprocess.Popen[str]", dict[str, Any]]]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start `up` and wait for its line; the process and what the line said."""
    started: list[subprocess.Popen[str]] = []

    def _start(*more: str, **env: str) -> tuple["subprocess.Popen[str]", dict[str, Any]]:
        up = subprocess.Popen(
            [*DURABLE, "-A", "shop", "up", "--port", "0", "--concurrency", "1", "--json", *more],
            cwd=folder, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        started.append(up)
        assert up.stdout is not None
        line = up.stdout.readline()
        assert line, up.communicate()[1]
        return up, json.loads(line)

    yield _start
    for up in started:
        if up.poll() is None:
            up.kill()
        up.communicate()


def children(folder: Path) -> list[Child]:
    record = json.loads((folder / ".durable" / "up" / "children.json").read_text())
    return [Child(**child) for child in record["children"]]


def mark_of(folder: Path) -> str:
    mark: str = json.loads((folder / ".durable" / "up" / "children.json").read_text())["mark"]
    return mark


def closed(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) != 0


def until(done: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.1)
    return value


def asked(port: int, path: str = "/workers", headers: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers=headers or {})
        return connection.getresponse().status
    finally:
        connection.close()


def port_of(address: str) -> int:
    found = re.search(r":(\d+)(/|$)", address)
    assert found, address
    return int(found.group(1))


@pytest.mark.serial
@pytest.mark.timeout(180)
def test_it_carries_a_delivery_and_ctrl_c_leaves_nothing(folder: Path, start: Start) -> None:
    up, said = start("--web", "web:app", "--web-port", "0", DURABLE_FLOWER_BASIC_AUTH=AUTH)
    addresses = running(folder / ".durable")
    assert addresses is not None

    env = {"DURABLE_DATABASE_URL": addresses.database_url, "DURABLE_REDIS_URL": addresses.redis_url}
    enqueued = subprocess.run(
        [DURABLE[0], "-c", ENQUEUE], cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    row_id = enqueued.stdout.strip()

    def sent() -> Any:
        shown = json.loads(process("deliveries", "show", row_id, "--json", cwd=folder).stdout)
        return shown if shown["state"] == "sent" else None

    assert until(sent)["result"] == "hello dana"
    # Each sweep of rescue begins within its first interval.
    until(lambda: process("status", "--check", cwd=folder).returncode == 0)

    # Flower asks for its password, and no command line that every user may read holds one.
    flower = port_of(said["flower_url"])
    login = {"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"}
    pages = (f"/delivery/{row_id}", f"/delivery/{UNKNOWN}", "/broker")
    assert [asked(flower, path) for path in pages] == [401, 401, 401]
    assert [asked(flower, path, login) for path in pages] == [200, 404, 200]
    secrets = [AUTH, *(server_url.split(":")[2].split("@")[0] for server_url in env.values())]
    lines = [Path(f"/proc/{child.pid}/cmdline").read_bytes().decode() for child in children(folder)]
    assert not [secret for secret in secrets for line in [*lines, json.dumps(said)] if secret in line]

    # The app is told where the servers are, and no other address of this machine has it.
    web = port_of(said["web_url"])
    stream = http.client.HTTPConnection("127.0.0.1", web, timeout=30)
    with urllib.request.urlopen(said["web_url"], timeout=30) as answer:
        assert json.load(answer) == [*env.values(), "shop.greet"]
    assert closed(web, "127.0.0.2")
    stream.request("GET", "/stream")
    stream.getresponse()  # an answer that never ends: Ctrl-C does not wait for it

    # Ctrl-C in a terminal reaches a whole group: none of the children is in that of `up`.
    assert all(os.getsid(child.pid) == child.pid for child in children(folder))
    second = process("-A", "shop", "up", "--port", "0", "--json", cwd=folder)
    assert (second.returncode, json.loads(second.stdout)["error"]["reason"]) == (1, "ALREADY_UP")

    mark = mark_of(folder)
    assert len(marked(mark)) > 4
    os.killpg(up.pid, signal.SIGINT)
    stdout, stderr = up.communicate(timeout=60)

    assert (up.returncode, stdout) == (130, ""), stderr
    assert "by force" not in stderr
    assert marked(mark) == set()
    assert running(folder / ".durable") is None
    stream.close()
    for address in (said["flower_url"], said["web_url"], *env.values()):
        assert closed(port_of(address.rpartition("@")[2]))
    assert not (folder / ".durable" / "up").exists()
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        ".durable",
        "shop.py",
        "web.py",
    ]


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(240)
def test_a_killed_up_is_mended_by_the_next_which_names_a_child_that_dies(folder: Path, start: Start) -> None:
    first, _ = start()
    old_mark, old_children = mark_of(folder), children(folder)
    first.kill()
    first.wait()
    assert all(server.born_at(child.pid) == child.born for child in old_children)
    os.kill(old_children[0].pid, signal.SIGSTOP)  # a frozen one hears nothing polite

    second, said = start()
    assert marked(old_mark) == set()
    assert not any(server.born_at(child.pid) == child.born for child in old_children)

    new_mark = mark_of(folder)
    beat = next(child for child in children(folder) if child.name == "beat")
    os.kill(beat.pid, signal.SIGKILL)
    stdout, stderr = second.communicate(timeout=60)

    assert second.returncode == 1
    assert "beat ended by signal 9 (SIGKILL)" in stderr
    assert stdout == ""  # the one JSON value was the line that said it was ready
    assert marked(new_mark) == set()
    assert closed(port_of(said["flower_url"]))
    assert (folder / ".durable" / "up" / "beat.log").exists()  # kept, for somebody must read it


@pytest.mark.serial
@pytest.mark.timeout(120)
def test_an_app_that_cannot_start_is_said_and_nothing_stays(folder: Path) -> None:
    lines = (("-A", "nowhere", "up"), ("-A", "shop", "up", "--web", "nowhere:app", "--web-port", "0"))
    for line in lines:
        done = process(*line, "--port", "0", "--json", cwd=folder)
        assert done.returncode == 2
        error = json.loads(done.stdout)["error"]
        assert error["reason"] == "APP_NOT_LOADED"
        assert "'nowhere" in error["message"]
        assert running(folder / ".durable") is None


@pytest.mark.serial
@pytest.mark.timeout(120)
def test_a_server_that_a_variable_names_is_said_for_the_shell_may_be_one_of_an_earlier_up(folder: Path) -> None:
    env = {
        "DURABLE_DATABASE_URL": "postgresql+psycopg://nobody@127.0.0.1:1/none",
        "DURABLE_REDIS_URL": "redis://127.0.0.1:1/0",
    }
    done = process("-A", "shop", "up", "--port", "0", cwd=folder, env=env)
    assert done.returncode == 1
    for variable in env:
        assert f"using the server that {variable} names; unset it" in done.stderr
    assert "starting" not in done.stderr
    assert not (folder / ".durable" / "postgres").exists()


@pytest.mark.parametrize(
    ("option", "others"), [("--port", ()), ("--web-port", ("--port", "0", "--web", "web:app"))], ids=["flower", "web"]
)
def test_a_taken_port_is_said_before_anything_starts(folder: Path, option: str, others: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = process("-A", "shop", "up", *others, option, str(taken.getsockname()[1]), "--json", cwd=folder)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["reason"]) == (1, "PORT_TAKEN")
    assert error["message"].endswith(f"give another {option}.")
    assert not (folder / ".durable").exists()


def test_what_carries_the_mark_is_found_and_ended_and_nothing_else(tmp_path: Path) -> None:
    ours = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], env={**os.environ, "DURABLE_UP": "m1"})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "DURABLE_UP": "m2"})
    try:
        until(lambda: len(marked("m1")) == 2)
        ours.kill()  # its own child lives on, as a pool's children may
        ours.wait()
        end_by_force("m1", [Child("ours", ours.pid, "another start")])
        assert marked("m1") == set()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def flower_of(folder: Path) -> Part:
    return next(part for part in parts("proj", 5555, 2, folder) if part.name == "flower")


def test_flower_has_the_configuration_of_its_folder_or_else_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWER_CONF", raising=False)
    assert f"--conf={CONFIGURATION}" in flower_of(tmp_path).arguments
    (tmp_path / "flowerconfig.py").touch()
    assert f"--conf={tmp_path / 'flowerconfig.py'}" in flower_of(tmp_path).arguments
    monkeypatch.setenv("FLOWER_CONF", "elsewhere.py")
    assert "--conf=elsewhere.py" in flower_of(tmp_path).arguments


def test_flower_is_on_loopback_read_only_and_shut_without_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_UNAUTHENTICATED_API", "true")
    flower = flower_of(tmp_path)
    assert "--address=127.0.0.1" in flower.arguments
    assert "--read_only=True" in flower.arguments
    assert dict(flower.environment)["FLOWER_UNAUTHENTICATED_API"] == "false"


@pytest.mark.parametrize(
    ("code", "said"), [(0, "with exit code 0"), (3, "with exit code 3"), (-9, "by signal 9 (SIGKILL)")]
)
def test_an_exit_code_is_said_in_words(code: int, said: str) -> None:
    assert ended_with(code) == said
