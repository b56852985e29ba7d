"""Terminals as a reader has them: an interactive shell each, into which blocks of a page are typed as they stand."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

SECONDS = 60.0


class Terminal:
    """An interactive bash on a terminal of its own. What it started goes with it, however far from it that went."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._typed = 0
        self.said = ""
        own, its = pty.openpty()
        self._own = own
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-i"], cwd=folder, stdin=its, stdout=its, stderr=its,
            env={**environment, "TERM": "dumb", "PS1": "", "DOCS_TERMINAL": str(id(self))}, start_new_session=True,
        )  # fmt: skip
        os.close(its)

    def type(self, text: str) -> None:
        """Without waiting for what it does."""
        os.write(self._own, text.encode())

    def run(self, block: str) -> str:
        """What the shell says until the last line of the block has ended."""
        before = len(self.said)
        self._typed += 1
        # The echo of this line has the quotes, so it is not taken for its answer.
        self.type(f"{block}echo 'en'd-{self._typed}\n")
        self.wait_for(f"end-{self._typed}", before)
        return self.said[before:]

    def wait_for(self, text: str, since: int = 0, seconds: float = SECONDS) -> None:
        """Until the terminal has shown this, from that place of what it said on."""
        end = time.monotonic() + seconds
        while text not in self.said[since:]:
            assert time.monotonic() < end, f"no {text!r} within {seconds:g} s:\n{self.said}"
            if select.select([self._own], [], [], 0.1)[0]:
                self.said += os.read(self._own, 65536).decode(errors="replace")

    def interrupt(self) -> None:
        """Ctrl-C, and until the shell has its prompt again."""
        self.type("\x03")
        self.run("")

    def close(self) -> None:
        """End what still runs of it: by its processes, for each has the terminal's mark in its environment."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("DOCS_TERMINAL") == str(id(self)) and process.pid != os.getpid():
                    process.send_signal(signal.SIGKILL)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                pass  # gone, or none of ours
        self._shell.wait()
        os.close(self._own)
