"""
pytest-celery's containers and nodes over real processes, where no Docker is needed.

pytest-celery drives whatever has the shape of the Docker SDK's container. `Process` has that shape and is a
child process; the classes below say what runs in it, and override what only Docker can answer.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from celery import Celery
from pytest_celery import (
    CeleryTestContainer,
    CeleryTestNode,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBroker,
)

from durable_core.local.server import free_port
from durable_core.local.valkey import find_binary
from tests.celery import shop

REPOSITORY = Path(__file__).parents[2]

BOOT_SECONDS = 90.0
"""A worker is there after 3 to 5 s; a loaded machine may take several times that."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0, every: float = 0.05) -> Any:
    """The first truthy answer of `condition`. Raises AssertionError, saying what did not come about."""
    end = time.monotonic() + seconds
    while True:
        if answer := condition():
            return answer
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(every)


class Process:
    """
    A child process that looks like the Docker SDK's `Container`.

    It leads a process group of its own. KILL reaches the whole group, as it ends a whole
    container; any other signal reaches the leader alone.
    """

    # Empty maps say that no network and no port must be waited for.
    attrs: Mapping[str, Any] = {
        "NetworkSettings": {"Networks": {}, "Ports": {}},
        "HostConfig": {"PortBindings": {}},
        "Config": {"Hostname": "127.0.0.1", "Env": []},
    }

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name, self.id = name, uuid.uuid4().hex
        self._command, self._folder, self._environment = list(command), folder, dict(environment)
        self._log = folder / f"{name}.log"
        self._since = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._since = log.tell()
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def _leader(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self._leader.pid

    @property
    def status(self) -> str:
        return "running" if self._leader.poll() is None else "exited"

    def reload(self) -> None:
        """As Docker's: look at the process again."""
        self._leader.poll()

    def logs(self) -> bytes:
        """What it wrote since it was last started."""
        with self._log.open("rb") as log:
            log.seek(self._since)
            return log.read()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        number = _number(signal)
        if number == _number("SIGKILL"):
            self._kill_group()
        elif self._leader.poll() is None:
            os.kill(self.pid, number)

    def kill_leader(self) -> None:
        """KILL to the main process alone; its children are left to notice."""
        self._leader.kill()
        self._leader.wait(BOOT_SECONDS)

    def wait(self, seconds: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        return self._leader.wait(seconds)

    def stop(self, timeout: float = 10) -> None:
        """TERM, and KILL to the whole group when that did not end it; nothing of the group is left."""
        if self._leader.poll() is None:
            self._leader.terminate()
            try:
                self._leader.wait(timeout)
            except subprocess.TimeoutExpired:
                pass  # the group is killed next
        self._kill_group()

    def restart(self, timeout: float = 10) -> None:
        self.stop(timeout)
        self.start()

    def exec_run(self, command: str, **_: Any) -> tuple[int, bytes]:
        """Run a shell command where the process runs, as `docker exec` would."""
        done = subprocess.run(
            command, shell=True, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, check=False
        )
        return done.returncode, done.stdout

    def remove(self, **_: Any) -> None:
        self.stop()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, _number("SIGKILL"))
        except ProcessLookupError:
            pass  # nobody is left of it
        self._leader.wait(BOOT_SECONDS)


def _number(name: str | int) -> int:
    return signal.Signals[name].value if isinstance(name, str) else int(name)


class ProcessContainer(CeleryTestContainer):
    """What all containers over a process share. Mixed in first, before pytest-celery's own class."""

    _container: Process

    @property
    def process(self) -> Process:
        return self._container

    def logs(self) -> str:
        return self.process.logs().decode(errors="replace")

    def ready(self) -> bool:
        """Whether it said that it is ready, looked for many times a second; fails as soon as it has ended."""
        prompt = self.ready_prompt or ""

        def said_so() -> bool:
            ended = self.process.status == "exited"
            assert prompt in self.logs() or not ended, f"{self.name} ended while starting:\n{self.logs()[-3000:]}"
            return prompt in self.logs()

        wait_until(said_so, f"{self.name} says {prompt!r}", BOOT_SECONDS)
        return True

    def teardown(self) -> None:
        self.process.remove()


class ValkeyContainer(ProcessContainer, RedisContainer):
    """A Valkey on loopback behind a password: any user of the machine can reach the port."""

    def __init__(self, folder: Path, more: Sequence[str] = ()) -> None:
        self._port, self._password = free_port(), secrets.token_urlsafe(16)
        configuration = folder / "valkey.conf"
        configuration.touch(0o600)
        configuration.write_text(
            f"port {self._port}\nbind 127.0.0.1\nrequirepass {self._password}\nappendonly no\n"
            'save ""\nmaxmemory-policy noeviction\n' + "".join(f"{line}\n" for line in more)
        )
        super().__init__(Process("valkey", [str(find_binary()), str(configuration)], folder, {"LC_ALL": "C"}))

    @property
    def port(self) -> int:
        return self._port

    @property
    def hostname(self) -> str:
        return "127.0.0.1"

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{self.hostname}:{self.port}/{self.vhost}"

    @property
    def host_url(self) -> str:
        return self.url


class Broker(RedisTestBroker):
    """The broker node: a Valkey that can be emptied, frozen and watched."""

    container: ValkeyContainer

    @property
    def url(self) -> str:
        return self.container.url

    @property
    def client(self) -> Any:
        return self.container.client

    def depth(self, queue: str) -> int:
        """How many hints lie in a durable queue."""
        return sum(self.client.llen(name) for name in self._lists(queue))

    def lose(self, queue: str) -> None:
        """Lose every hint of one queue, as FLUSHALL does with all; there must be some."""
        assert self.client.delete(*self._lists(queue)) > 0

    @staticmethod
    def _lists(queue: str) -> list[str]:
        """Redis keeps one list for each of four steps of priority."""
        return [f"durable.{queue}", *(f"durable.{queue}\x06\x16{step}" for step in (3, 6, 9))]


class ShopContainer(ProcessContainer, CeleryWorkerContainer):
    """A `celery worker` of the test's app. `name` tells workers apart; `arguments` are the command line's."""

    def __init__(
        self, name: str, arguments: Sequence[str], folder: Path, cluster_config: dict, environment: Mapping[str, str]
    ) -> None:
        folder = folder / name
        folder.mkdir()
        super().__init__(
            Process(
                name,
                [sys.executable, "-m", *self.command(*self.identity(name), *arguments)],
                folder,
                {
                    **os.environ,
                    **self.initial_env(cluster_config),
                    "PYTHONPATH": str(REPOSITORY),
                    "PYTHONUNBUFFERED": "1",
                    **environment,
                },
            )
        )

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        """As users start it: without -Q, unless a test names queues."""
        return ["celery", "-A", "tests.celery.shop_app", "worker", f"--loglevel={cls.log_level()}", *args]

    @classmethod
    def identity(cls, name: str) -> list[str]:
        return ["-n", f"{name}@shop", "--without-mingle", "--without-gossip"]

    @classmethod
    def initial_env(cls, celery_worker_cluster_config: dict, initial: dict | None = None) -> dict:
        return super().initial_env({"celery_backend_cluster_config": None, **celery_worker_cluster_config}, initial)


class BeatContainer(ShopContainer):
    """A `celery beat` of the test's app."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return ["celery", "-A", "tests.celery.shop_app", "beat", f"--loglevel={cls.log_level()}", *args]

    @classmethod
    def identity(cls, name: str) -> list[str]:
        # A schedule in memory: a state file would outlive the test.
        return ["--scheduler", "celery.beat:Scheduler"]

    @property
    def ready_prompt(self) -> str:
        return "beat: Starting..."


class ShopWorker(CeleryTestWorker):
    """A worker node: its children can be told apart, killed and frozen."""

    container: ShopContainer

    @property
    def process(self) -> Process:
        return self.container.process

    def hostname(self) -> str:
        return f"{self.name()}@shop"

    def children(self) -> set[int]:
        """The pids of its pool."""
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def start(self) -> None:
        """Start it again after it was killed; `ready` waits for it."""
        assert self.process.status == "exited"
        self.process.start()

    def queues(self) -> set[str]:
        """The broker's queues that it reads, by its own account."""
        answers = wait_until(
            lambda: self.app.control.inspect([self.hostname()], timeout=5).active_queues(), f"{self.name()} answers"
        )
        return {queue["name"] for queue in answers[self.hostname()]}

    def also_reads(self, queue: str) -> None:
        """Let it read one more durable queue, as an operator does who moves work to another worker."""
        self.app.control.add_consumer(f"durable.{queue}", destination=[self.hostname()], reply=True, timeout=5)
        wait_until(lambda: f"durable.{queue}" in self.queues(), f"{self.name()} reads durable.{queue}")

    def reads_no_more(self, queue: str) -> None:
        self.app.control.cancel_consumer(f"durable.{queue}", destination=[self.hostname()], reply=True, timeout=5)


class ControlWorker(ShopWorker):
    """A worker for the sweeps alone, so that the rescue needs no slot of the others."""


class Beat(CeleryTestNode):
    """A beat node."""

    container: BeatContainer


class ShopCluster(CeleryWorkerCluster):
    """The workers that every test finds running: one for work, one for the sweeps."""


class ShopSetup(CeleryTestSetup):
    """pytest-celery's set-up, whose app is the shop as a web process sees it."""

    @classmethod
    def name(cls) -> str:
        return "shop"

    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        shop.configure(app)
