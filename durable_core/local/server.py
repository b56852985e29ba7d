"""
One server of ours, from its first start to its end, whoever was killed in between.

What tells the next parent that a server is running is a record in the server's folder; what tells that its
parent is alive is a lock held on a file beside it. The lock dies with the parent, the server does not: so a
record without a lock is a server left behind, to be used again or ended.
"""

import fcntl
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from durable_core.errors import DurableError

READY_WITHIN = 60.0  # seconds; half a second is usual, a crowded machine or a crash recovery takes longer
LOOK_EVERY = 0.02


class LocalServicesError(DurableError):
    """A local server could not be found, started or owned; the message is one sentence for the user."""

    reason: ClassVar[str] = "LOCAL_SERVICES"


@dataclass(frozen=True)
class Account:
    """Who a server runs as when we are root, as Postgres refuses to be root."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Record:
    """A server that was started: enough to speak to it, and never to mistake another process for it."""

    pid: int
    born: str
    port: int
    recipe: str


class Server(ABC):
    """
    A server in `directory`/`name`, owned by at most one living process.

    It does not end with its parent: only `stop` ends it, or the next `start` in the same directory.
    """

    name: ClassVar[str]
    # What ends it, from polite to certain, and how long each may take.
    endings: ClassVar[tuple[tuple[signal.Signals, float], ...]]

    def __init__(self, directory: Path, *, keep: bool = False) -> None:
        self.folder = Path(os.path.abspath(directory)) / self.name
        self._keep = keep
        self._lock: int | None = None
        self._record: Record | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def url(self, port: int) -> str:
        """Where clients find it, password included."""

    @abstractmethod
    def _recipe(self) -> str:
        """What decides whether a server left behind is the one that would be started now."""

    @abstractmethod
    def _launch(self, place: Path, port: int, account: Account | None) -> subprocess.Popen[bytes]: ...

    @abstractmethod
    def _answers(self, port: int) -> bool:
        """Whether it lets us in and answers, asked over a real connection with bounded patience."""

    @abstractmethod
    def _unrecorded(self, place: Path) -> int | None:
        """The pid of a server in `place` whose parent was killed before it could write the record."""

    @abstractmethod
    def _make_usable(self, port: int) -> None:
        """What is left to do once it answers."""

    def start(self) -> str:
        """
        Start it, or take over the one an earlier, killed parent left here; return its address.

        Raises LocalServicesError where that cannot be done, and then leaves nothing running.
        """
        if self._record is not None and born_at(self._record.pid) == self._record.born:
            return self.url(self._record.port)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._own()
        except PermissionError as error:
            raise LocalServicesError(
                f"{self.folder} cannot be written to by this user: remove it, or choose another directory."
            ) from error
        try:
            self._record = self._take_over() or self._begin()
            self._make_usable(self._record.port)
        except BaseException:
            self.stop()
            raise
        return self.url(self._record.port)

    def stop(self, *, remove: bool = False) -> None:
        """
        End it and free its port, its record and the lock; its data stay, unless `remove` says otherwise.

        Data in a run folder under the system's temporary directory go too, unless made with `keep`.
        """
        if self._lock is None:
            return
        try:
            if self._record is not None:
                self._end(self._record)
            elif self._child is not None:
                self._end_pid(self._child.pid, born_at(self._child.pid))
        finally:
            self._record = self._child = None
            self._forget(remove=remove)
            os.close(self._lock)
            self._lock = None
            if remove:
                shutil.rmtree(self.folder, ignore_errors=True)

    def address_of_running(self) -> str | None:
        """The address of the server in this directory, whoever owns it; None when none is running."""
        record = self._read_record()
        if record is None or born_at(record.pid) != record.born:
            return None
        return self.url(record.port)

    # -- ownership

    def _own(self) -> None:
        if self._lock is None:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise LocalServicesError(
                    f"another process is using the {self.name} server in {self.folder}:"
                    " stop that process, or choose another directory."
                ) from None
            self._lock = lock

    def _take_over(self) -> Record | None:
        record = self._read_record()
        if record is None or born_at(record.pid) != record.born:
            place = self._recorded_place()
            pid = self._unrecorded(place) if place is not None else None
            born = born_at(pid) if pid is not None else None
            if pid is not None and born is not None:
                self._end_pid(pid, born)
            return None
        if record.recipe == self._recipe() and self._became_ready(record.port, within=5.0):
            return record
        self._end(record)
        return None

    def _begin(self) -> Record:
        account = account_for_servers()
        place = self._choose_place(account)
        for _ in range(5):
            port = free_port()
            child = self._child = self._launch(place, port, account)
            record = self._record = Record(child.pid, born_at(child.pid) or "", port, self._recipe())
            write_private(self.folder / "record.json", json.dumps(asdict(record)))
            if self._became_ready(port, within=READY_WITHIN, child=child):
                return record
            if child.poll() is None:
                raise LocalServicesError(f"{self.name} did not answer within {READY_WITHIN:.0f} s: see {self.log}.")
            # Someone else may have taken the port between our look and the server's bind; try another.
            self._record = self._child = None
            if not self._port_was_taken():
                break
        raise LocalServicesError(f"{self.name} ended while starting: {self._last_words()}.")

    def _became_ready(self, port: int, *, within: float, child: subprocess.Popen[bytes] | None = None) -> bool:
        until = time.monotonic() + within
        while (child is None or child.poll() is None) and time.monotonic() < until:
            if self._answers(port):
                return True
            time.sleep(LOOK_EVERY)
        return False

    # -- ending

    def _end(self, record: Record) -> None:
        self._end_pid(record.pid, record.born)

    def _end_pid(self, pid: int, born: str | None) -> None:
        """End that process and what it started, and nothing that merely has its number by now."""
        if born is None or born_at(pid) != born:
            self._reap(pid)
            return
        family = {child: born_at(child) for child in _children(pid)}
        # A frozen process hears nothing but KILL until it is continued.
        _signal(pid, born, signal.SIGCONT)
        for number, patience in self.endings:
            _signal(pid, born, number)
            until = time.monotonic() + patience
            while time.monotonic() < until:
                self._reap(pid)
                if born_at(pid) != born:
                    break
                time.sleep(LOOK_EVERY)
            if born_at(pid) != born:
                break
        else:
            raise LocalServicesError(f"{self.name}, process {pid}, could not be ended.")
        self._reap(pid)  # it may have ended just after the last look, and would stay as a zombie of ours
        # After a KILL, children that are frozen would hold the shared memory against the next start.
        for child, child_born in family.items():
            if child_born is not None:
                _signal(child, child_born, signal.SIGKILL)

    def _reap(self, pid: int) -> None:
        if self._child is not None and self._child.pid == pid:
            self._child.poll()

    def _forget(self, *, remove: bool) -> None:
        (self.folder / "record.json").unlink(missing_ok=True)
        place = self._recorded_place()
        if place is not None and place != self.folder and (remove or not self._keep):
            shutil.rmtree(place, ignore_errors=True)
            (self.folder / "elsewhere").unlink(missing_ok=True)

    # -- files

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def _read_record(self) -> Record | None:
        try:
            return Record(**json.loads((self.folder / "record.json").read_text()))
        except (OSError, ValueError, TypeError):
            # None was written, it may not be read, or its writer was killed halfway: as if there were none.
            return None

    def _choose_place(self, account: Account | None) -> Path:
        """Where the server's own files go: our folder, or one under the temporary directory if it must."""
        place = self._recorded_place()
        if account is not None and place == self.folder and not can_reach(self.folder, account):
            place = None
        if place is not None:
            return place
        for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
            if account is None or can_reach(Path(parent), account):
                place = Path(tempfile.mkdtemp(prefix=f"durable-{self.name}-", dir=parent))
                place.chmod(0o711)
                (self.folder / "elsewhere").write_text(str(place))
                return place
        raise LocalServicesError(
            f"{self.folder} is closed to the account that servers run as under root,"
            " and so is the temporary directory: choose a directory that every user may pass through."
        )

    def _recorded_place(self) -> Path | None:
        """Our folder, or the folder elsewhere that an earlier start chose, if it is still there and ours."""
        try:
            place = Path((self.folder / "elsewhere").read_text())
        except OSError:
            return self.folder
        try:
            found = place.lstat()
        except OSError:
            return None
        # The temporary directory is everyone's: a folder someone else made under that name is not ours.
        return place if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else None

    def _password(self) -> str:
        path = self.folder / "password"
        try:
            return path.read_text()
        except FileNotFoundError:
            password = secrets.token_urlsafe(24)
            write_private(path, password)
            return password

    def _spawn(
        self, command: list[str], account: Account | None, *, cwd: str = "/", stdin: int | None = None
    ) -> subprocess.Popen[bytes]:
        """
        Start it in a session of its own, where the terminal's Ctrl-C does not reach it.

        The environment is not handed on: PGPORT and its like would move the server from under us.
        """
        with open(self.log, "ab") as log:
            os.fchmod(log.fileno(), 0o600)
            log.truncate(0)
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env=SERVER_ENVIRONMENT,
                    start_new_session=True,
                    umask=0o077,
                    user=account.uid if account else None,
                    group=account.gid if account else None,
                    extra_groups=[] if account else None,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise LocalServicesError(f"{command[0]} could not be started: {error}.") from error

    def _port_was_taken(self) -> bool:
        return "in use" in self.log.read_text(errors="replace")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        fatal = [line for line in lines if "FATAL" in line or "Fatal" in line]
        return (fatal or lines or [f"nothing in {self.log}"])[-1].rstrip(".")


SERVER_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C"}


def account_for_servers() -> Account | None:
    """Root steps down to `nobody`, which exists everywhere; others run servers as themselves."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise LocalServicesError(
            "servers do not run as root and this machine has no account `nobody` to run them as:"
            " start this as an ordinary user."
        ) from None
    return Account(entry.pw_uid, entry.pw_gid)


def can_reach(path: Path, account: Account) -> bool:
    """Whether that account may pass every folder down to `path`, and `path` too, by mode bits alone."""
    path = Path(os.path.realpath(path))
    for step in (path, *path.parents):
        found = step.stat()
        shift = 6 if found.st_uid == account.uid else 3 if found.st_gid == account.gid else 0
        if not (found.st_mode >> shift) & 0o1:
            return False
    return True


def write_private(path: Path, content: str) -> None:
    """Write a file that only we may read, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    partial.replace(path)


def free_port() -> int:
    """A port that is free now; nothing keeps it free, so whoever binds it must be ready to ask again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def born_at(pid: int) -> str | None:
    """When that process started, as something to compare; None when it is gone or only waits to be reaped."""
    try:
        fields = _stat_fields(pid)
    except OSError:
        return None if os.path.exists("/proc/self/stat") else _born_by_ps(pid)
    if fields[0] in "ZX":
        return None
    return f"{_boot()} {fields[19]}"


def _born_by_ps(pid: int) -> str | None:
    found = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split(maxsplit=1)
    return None if len(found) != 2 or found[0].startswith("Z") else found[1].strip()


def _stat_fields(pid: int) -> list[str]:
    """The fields after the name, which may itself hold blanks and brackets: state, parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _boot() -> str:
    # Start times count from the boot, so two boots could show the same one.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*") if os.path.exists("/proc/self/stat") else ():
        try:
            if int(_stat_fields(int(entry.name))[1]) == pid:
                found.append(int(entry.name))
        except OSError:
            pass  # it ended while we looked
    return found


def _signal(pid: int, born: str, number: signal.Signals) -> None:
    if born_at(pid) == born:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it ended between the look and the signal
