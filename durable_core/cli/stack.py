"""
The processes of one `durable up`: started, watched, ended together, and found again after its own violent death.

Each child leads a session of its own, so that a Ctrl-C in the terminal reaches `up` alone. Each carries a mark
in its environment, which its own children inherit: that is what tells a worker left behind, whatever has become
of its parents, from any other process of this machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from durable_core.cli.exits import CommandError
from durable_core.local import server
from durable_core.local.server import write_private

MARK = "DURABLE_UP"
LOOK_EVERY = 0.05
LEFTOVER_GRACE = 10.0
"""Seconds that the workers of a dead `up` get to end politely: what they hold is rescued anyway."""
LAST_WORDS = 12


class AlreadyUp(CommandError):
    """Another living `durable up` has this directory."""

    reason = "ALREADY_UP"


class ChildEnded(CommandError):
    """A process of the stack ended by itself; nothing is restarted silently."""

    reason = "CHILD_ENDED"


@dataclass(frozen=True)
class Part:
    """One process of the stack: what to run after `python -m PROGRAM`, and what is added to its environment."""

    name: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    program: str = "celery"


@dataclass(frozen=True)
class Child:
    """A process that was started; its start time tells it from a later one of the same number."""

    name: str
    pid: int
    born: str | None


class Stack:
    """What runs in `folder`, owned by at most one living process."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._lock: int | None = None
        self._mark = token_hex(16)
        self._children: list[tuple[Child, subprocess.Popen[bytes]]] = []

    def own(self) -> None:
        """Take the folder, and end what an `up` that was killed left running. Raises AlreadyUp."""
        while self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise AlreadyUp(
                    f"another `durable up` runs in {self.folder.parent}: end it first, or give another --directory."
                ) from None
            # An owner that ended between our open and our lock took the file away: then we hold nothing.
            if _same_file(lock, self.folder / "lock"):
                self._lock = lock
            else:
                os.close(lock)
        self._end_leftovers()
        self._record()

    def start(self, part: Part) -> None:
        """Start one part; what it says goes to its own log file, so that no terminal can hold it up."""
        environment = {**os.environ, **dict(part.environment), MARK: self._mark}
        with open(self.log_of(part.name), "wb") as log:
            os.fchmod(log.fileno(), 0o600)
            process = subprocess.Popen(
                [sys.executable, "-m", part.program, *part.arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._children.append((Child(part.name, process.pid, server.born_at(process.pid)), process))
        self._record()

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def check(self) -> None:
        """Raises ChildEnded, naming the first child that is gone, its exit code and its last words."""
        for child, process in self._children:
            code = process.poll()
            if code is not None:
                raise ChildEnded(f"{child.name} ended {ended_with(code)}; {self._last_words(child.name)}")

    def stop(self, grace: float, hurried: Callable[[], bool]) -> list[str]:
        """
        End every child politely within the grace, then whatever is left by force; the names of those forced.

        `hurried` cuts the grace short. A handler that is killed here loses nothing: its row is released or reaped.
        """
        for _, process in reversed(self._children):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        until = time.monotonic() + grace
        while any(process.poll() is None for _, process in self._children):
            if time.monotonic() > until or hurried():
                break
            time.sleep(LOOK_EVERY)
        forced = [child.name for child, process in self._children if process.poll() is None]
        end_by_force(self._mark, [child for child, _ in self._children])
        for _, process in self._children:
            process.wait()
        self._children.clear()
        return forced

    def close(self, *, keep_logs: bool) -> None:
        """Let go of the folder; it goes too, unless its logs are to be read."""
        if self._lock is None:
            return
        if keep_logs:
            (self.folder / "children.json").unlink(missing_ok=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            try:
                self.folder.parent.rmdir()
            except OSError:
                pass  # the servers' data are in it
        os.close(self._lock)
        self._lock = None

    def _record(self) -> None:
        children = [{"name": c.name, "pid": c.pid, "born": c.born} for c, _ in self._children]
        write_private(self.folder / "children.json", json.dumps({"mark": self._mark, "children": children}))

    def _end_leftovers(self) -> None:
        try:
            record = json.loads((self.folder / "children.json").read_text())
            mark = str(record["mark"])
            children = [Child(str(c["name"]), int(c["pid"]), c["born"]) for c in record["children"]]
        except (OSError, ValueError, KeyError, TypeError):
            return  # none was left, or its writer was killed before it had started anything
        for child in children:
            if _alive(child):
                _send(child.pid, signal.SIGCONT)
                _send(child.pid, signal.SIGTERM)
        _wait(lambda: not any(_alive(child) for child in children), LEFTOVER_GRACE)
        end_by_force(mark, children)

    def _last_words(self, name: str) -> str:
        path = self.log_of(name)
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return f"its log, {path}, ends with:\n" + "\n".join(lines[-LAST_WORDS:]) if lines else "it said nothing."


def ended_with(code: int) -> str:
    """An exit code as people say it."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"by signal {-code}"


def end_by_force(mark: str, children: Iterable[Child]) -> None:
    """Kill what carries the mark, and the children's groups, until nothing of them is left."""
    children = list(children)

    def remaining() -> set[int]:
        return marked(mark) | {child.pid for child in children if _alive(child)}

    def killed() -> bool:
        # Again and again: a process may fork between the look and the kill.
        left = remaining()
        for pid in left:
            _send(pid, signal.SIGKILL)
        return not left

    for child in children:
        if _alive(child):
            _send_to_group(child.pid, signal.SIGKILL)
    _wait(killed, 10.0)


def marked(mark: str) -> set[int]:
    """The living processes that carry this mark. Empty where the machine does not show environments."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # it ended, or is another user's and so none of ours
        if wanted in environment.split(b"\0"):
            found.add(int(entry.name))
    return found


def _alive(child: Child) -> bool:
    return child.born is not None and server.born_at(child.pid) == child.born


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it ended between the look and the signal


def _send_to_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # the same


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_EVERY)
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), named)
