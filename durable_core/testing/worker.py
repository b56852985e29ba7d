"""A real `celery worker` for a test, which may be killed, frozen and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 90.0
"""A worker is there after 2 to 5 s; a loaded machine may take several times that."""

WARM_SECONDS = 10.0
"""How long `stop` lets handlers end before it kills."""


class WorkerProcess:
    """
    A Celery worker of the app, its children and its beat: one process group.

    The group gets every signal sent here. A process that a handler starts in a session of its own is not part of it.
    It ends with the process that started it, even where that was killed.
    """

    def __init__(self, app: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._log, self._ready = folder / "worker.log", folder / "ready"
        self._command = [
            sys.executable, "-m", "durable_core.testing.celery_worker", str(self._ready),
            "--app", app, "worker", "--loglevel", "INFO",
            # Beat within the worker: a test that kills it has killed all there is, and time goes on when it is back.
            "--beat", "--schedule", str(folder / "beat"), *arguments,
        ]  # fmt: skip
        self._app, self._environment = app, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._said_until = 0
        self._frozen = False

    @property
    def pid(self) -> int:
        """The worker's main process, and the number of its group."""
        assert self._process is not None, "the worker was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """
        Start it, or thaw it, and return once it takes work.

        Raises RuntimeError, with what it wrote, where it ends before that or takes longer than 90 s.
        """
        __tracebackhide__ = True
        refuse_without_groups()
        self.thaw()
        if self.alive:
            return
        self._ready.unlink(missing_ok=True)
        before = len(self.log())
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + READY_SECONDS
        while not self._ready.exists():
            code = self._process.poll()
            if code is not None or time.monotonic() > end:
                self.kill()
                what = f"ended with {code}" if code is not None else f"was not ready within {READY_SECONDS:g} s"
                wrote = self.log()[before:].strip()[-3000:] or "nothing"
                raise RuntimeError(f"the worker of {self._app} {what} and took no work; it wrote:\n{wrote}")
            time.sleep(0.05)

    def stop(self) -> None:
        """TERM to its main process, as a deploy sends it, and then KILL to what is left of the group."""
        if self.alive:
            self.thaw()
            os.kill(self.pid, signal.SIGTERM)
            assert self._process is not None
            try:
                self._process.wait(WARM_SECONDS)
            except subprocess.TimeoutExpired:
                pass  # the group is killed next
        self.kill()

    def kill(self) -> None:
        """KILL to the whole group: nothing of it says good-bye. What it held is left to its lease."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait(READY_SECONDS)
        self._frozen = False

    def freeze(self) -> None:
        """STOP to the whole group, and return once its main process has stopped; its leases run on."""
        refuse_without_groups()
        assert self.alive, "the worker does not run"
        self._signal(signal.SIGSTOP)
        # Left waitable, so that `Popen` still learns of its end.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        self._frozen = True

    def thaw(self) -> None:
        """CONT to the whole group, if it is frozen."""
        if self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False

    def log(self) -> str:
        """All it has written, over every start."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def said(self) -> str:
        """What it wrote since this was last asked."""
        log = self.log()
        new, self._said_until = log[self._said_until :], len(log)
        return new

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # nobody is left of it


@contextmanager
def killed_worker(worker: WorkerProcess, *, restart: bool = True) -> Iterator[WorkerProcess]:
    """
    Kill the whole worker as by `kill -9`, and start it again at the end of the block.

    What it held stays `processing` until its lease is over and a sweep takes it back: advance the clock, or give the
    app a short `durable_lease_seconds`. With `restart=False` it stays down for the rest of the test, and is started
    again for the next that asks for it.
    Raises NotImplementedError on a platform without process groups.
    """
    refuse_without_groups()
    worker.kill()
    try:
        yield worker
    finally:
        if restart:
            worker.start()


@contextmanager
def frozen_worker(worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """
    Stop every process of the worker where it stands, as a suspended machine does; at the end of the block it goes on.

    A transaction that it is in keeps its locks, so this test may wait for them. Raises NotImplementedError on a
    platform without process groups.
    """
    worker.freeze()
    try:
        yield worker
    finally:
        worker.thaw()


def refuse_without_groups() -> None:
    """Raises NotImplementedError where a process and its children cannot be signalled as one."""
    if not hasattr(os, "killpg") or not hasattr(signal, "SIGSTOP"):
        raise NotImplementedError(f"{sys.platform} has no process groups to kill or freeze; run this test on POSIX")
