"""Everything the demo starts, each in a session of its own, and nothing of it left when the demo ends."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from durable_core.demo import lifeline

RUN_VARIABLE = "DURABLE_DEMO_RUN"
"""Marks every process of one run, children of children too; how a later run knows what an earlier one left."""


@dataclass(frozen=True)
class Process:
    """A process, leader of a group of its own."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    def children(self) -> set[int]:
        """The pids of its pool."""
        try:
            return {child.pid for child in psutil.Process(self.pid).children()}
        except psutil.Error:
            return set()

    def signal_group(self, number: signal.Signals) -> None:
        """Signal it and its pool, whichever of them still live."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # all of it has ended

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1][:500] if lines else "it wrote nothing"


class Processes:
    """Starts processes that log into `folder`, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)
        self._mark = folder / "run"
        self._started: list[Process] = []
        self._ended = False
        self._reading, self._writing = os.pipe()
        self._mark.write_text(self.token)

    @staticmethod
    def end_leftovers(folder: Path) -> int:
        """End what a killed run left here; how many processes. The hole: those of another user are not seen."""
        try:
            token = (folder / "run").read_text()
        except OSError:
            return 0
        return _end_marked(token)

    def start(
        self, name: str, *command: str, environment: dict[str, str], listening: socket.socket | None = None
    ) -> Process:
        """Start `python -m command…`; what it writes goes to `folder/name.log`."""
        log = self.folder / f"{name}.log"
        passed = [self._reading, *([listening.fileno()] if listening is not None else [])]
        with open(log, "ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, pass_fds=passed,
                env={
                    **os.environ, **environment,
                    RUN_VARIABLE: self.token, lifeline.VARIABLE: str(self._reading), "PYTHONUNBUFFERED": "1",
                },
            )  # fmt: skip
        process = Process(name, popen, log)
        self._started.append(process)
        return process

    def fallen(self) -> Process | None:
        """A process that ended although nobody ended it on purpose."""
        return next((process for process in self._started if not process.alive()), None)

    def kill(self, process: Process) -> None:
        """SIGKILL the whole group, and wait for its leader."""
        self._started.remove(process)
        process.signal_group(signal.SIGKILL)
        process.popen.wait()

    def end(self, patience: float = 5.0) -> None:
        """Ask all to end, then make them; returns when none is left. Frozen ones are continued first."""
        if self._ended:
            return
        for process in self._started:
            process.signal_group(signal.SIGCONT)
            if process.alive():
                process.popen.terminate()
        until = time.monotonic() + patience
        while time.monotonic() < until and any(process.alive() for process in self._started):
            time.sleep(0.02)
        for process in self._started:
            process.signal_group(signal.SIGKILL)
            process.popen.wait()
        self._started.clear()
        _end_marked(self.token)
        self._ended = True
        for descriptor in (self._reading, self._writing):
            os.close(descriptor)
        self._mark.unlink(missing_ok=True)


def _end_marked(token: str) -> int:
    """SIGKILL every process that carries the mark of this run; how many."""
    ended = 0
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == token:
                process.kill()
                ended += 1
        except psutil.Error:
            continue  # another user's, or gone
    return ended
