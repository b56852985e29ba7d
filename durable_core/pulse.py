"""
The pulse of a worker: a small file that its main process writes anew every two seconds, and what can be read off it.

It tells a worker that is idle from one that is alive and consumes nothing, and asks neither Postgres nor the broker for
it. Nothing but the standard library is imported here: a container asks every ten seconds.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote
from zlib import crc32

FOLDER_VARIABLE = "DURABLE_PULSE_FOLDER"

WRITTEN_EVERY = 2.0
STOPPED_AFTER = 15.0
"""A pulse that is older: its process is stopped or gone, or its machine swaps."""
STUCK_AFTER = 15.0
"""A main loop that has not turned for so long consumes nothing."""
LOST_AFTER = 60.0
"""And after so long, where it does not wait for its broker, it will not come back by itself."""
FORGOTTEN_AFTER = 3600.0
"""A pulse that nobody has written for so long tells nobody anything; the next worker here takes it away."""
UNTAKEN_AFTER = 15.0
"""Messages that lie for a worker with a free slot, which took none for so long, will not be taken."""


class State(StrEnum):
    """Where the worker's consumer stands, by its own account."""

    STARTING = "starting"
    CONSUMING = "consuming"
    RECONNECTING = "reconnecting"
    ENDING = "ending"


class Verdict(StrEnum):
    """What a pulse says; stable, and meant for programs. `docs/doctor.md` tells what each means."""

    IDLE = "IDLE"
    BUSY = "BUSY"
    BROKER_AWAITED = "BROKER_AWAITED"
    BROKER_LOST = "BROKER_LOST"
    ENDING = "ENDING"
    BROKER_SILENT = "BROKER_SILENT"
    LOOP_STUCK = "LOOP_STUCK"
    MESSAGES_LIE = "MESSAGES_LIE"
    PULSE_STOPPED = "PULSE_STOPPED"
    PULSE_MISSING = "PULSE_MISSING"


CONSUMING = frozenset({Verdict.IDLE, Verdict.BUSY})


@dataclass(frozen=True)
class Pulse:
    """What a worker says of itself. Instants are `time.monotonic()`, which all processes of a machine share."""

    worker: str
    app: str
    """The name of its Celery app: two apps may have a worker of one name on a machine."""
    pid: int
    space: str
    """Where `pid` and the instants mean something: this start of this machine, this container."""
    began: int | None
    """When its process began, in the kernel's ticks, for pids are used again; None where nobody can tell."""
    at: float
    state: State
    since: float
    """When this state began."""
    turned_at: float | None
    """When the main loop last turned; None where it cannot tell, as under gevent."""
    runs_tasks_itself: bool
    """A solo pool: while a task runs, the loop does not turn."""
    waits_for_broker: bool
    """Whether the main loop was inside the broker's client when this was written."""
    active: int
    slots: int
    taken_at: float
    """When it last took a message; its start, before the first."""
    queues: tuple[str, ...]

    @property
    def free(self) -> bool:
        """Whether it has a slot for one more."""
        return self.active < self.slots


@dataclass(frozen=True)
class Read:
    """A pulse as it was judged. `live`: leave the process alone. `says` is one sentence for people."""

    worker: str
    verdict: Verdict
    live: bool
    says: str
    pulse: Pulse | None = None

    @property
    def consuming(self) -> bool:
        return self.verdict in CONSUMING


class NoFolder(OSError):
    """The folder of the pulses is not ours alone."""


def folder() -> Path:
    """Where the pulses of this user's workers are: a folder of its own in the named one, which may be anybody's."""
    return Path(os.environ.get(FOLDER_VARIABLE) or _temporary()) / f"durable-{getattr(os, 'getuid', lambda: 0)()}"


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "/tmp"  # nothing can be written there either, and that is told where it is tried


def made_folder() -> Path:
    """The same, made where it is missing. Raises OSError; NoFolder where another user could put files there."""
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    if not stat.S_ISDIR(found.st_mode) or not ours or found.st_mode & 0o022:
        raise NoFolder(f"{place} is not a folder of this user alone; name another in {FOLDER_VARIABLE}")
    return place


def file_of(pulse: Pulse, place: Path) -> Path:
    """A file of its own for each process, also of those that share a name, or a volume and the number 1."""
    apart = crc32(f"{pulse.app}\n{pulse.space}".encode())
    return place / f"{quote(pulse.worker, safe='@')}.{apart:08x}.{pulse.pid}.json"


def write(pulse: Pulse, place: Path) -> Path:
    """Write it whole, or not at all; the file that it is in. Raises OSError."""
    path = file_of(pulse, place)
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps(asdict(pulse)), encoding="utf-8")
    return fresh.replace(path)


def forget(path: Path) -> None:
    """The worker has ended in order."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # it grows old, and says the same


def tidy(place: Path) -> None:
    """
    Forget workers that wrote nothing for long, by the age of their files alone: of another container nobody here can
    tell whether it runs. One that was only stopped writes anew when it goes on.
    """
    for path in place.iterdir():
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            continue  # it was just taken away
        if path.suffix in (".json", ".fresh") and abs(age) > FORGOTTEN_AFTER:
            forget(path)


def read_all() -> list[Pulse]:
    """The pulses of this user's workers in this folder, old ones and those of other containers too."""
    found = []
    try:
        paths = sorted(folder().glob("*.json"))
    except OSError:
        return []
    for path in paths:
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            known = {field.name: facts[field.name] for field in fields(Pulse)}
            found.append(Pulse(**{**known, "state": State(facts["state"]), "queues": tuple(facts["queues"])}))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it was just taken away, or is no pulse of ours
    return found


def named(pulses: Iterable[Pulse], worker: str | None) -> list[Pulse]:
    """Those of a worker, by its whole name (`mail@host`) or by the part before the `@`."""
    return [one for one in pulses if worker is None or worker in (one.worker, one.worker.split("@", 1)[0])]


def judged(worker: str | None, app: str | None = None) -> list[Read]:
    """
    How the named worker is, or every worker that has a pulse here. Never empty: none is a verdict too.

    Where more than one app has a worker of that name, those of `app` are meant if there are any; else all.
    """
    there = named(read_all(), worker)
    here = _that_count([pulse for pulse in there if pulse.space == space()])
    pulses = [pulse for pulse in here if app is None or pulse.app == app] or here
    if not pulses:
        who = worker or "a worker"
        says = f"no pulse of {who} in {folder()}: it has not started, has ended, or runs elsewhere or as another user"
        if there:
            says += "; one that lies there is of another container, or of before this machine started"
        return [Read(worker or "", Verdict.PULSE_MISSING, False, says)]
    return [judge(pulse, time.monotonic()) for pulse in pulses]


def _that_count(pulses: Iterable[Pulse]) -> list[Pulse]:
    """Of each worker of each app the newest; of the older ones those whose process is there, and so was not killed."""
    counted: dict[tuple[str, str], list[Pulse]] = {}
    for pulse in sorted(pulses, key=lambda one: one.at, reverse=True):
        of_worker = counted.setdefault((pulse.worker, pulse.app), [])
        if not of_worker or _runs(pulse):
            of_worker.append(pulse)
    return [pulse for _, of_worker in sorted(counted.items()) for pulse in of_worker]


def judge(pulse: Pulse, now: float) -> Read:
    """What this pulse says at this instant."""
    age = now - pulse.at
    if age > STOPPED_AFTER or age < 0:
        # Below nought: it was written before the machine last started.
        what = "is stopped, or hangs" if age > 0 and _runs(pulse) else "is gone"
        return _read(pulse, Verdict.PULSE_STOPPED, False, f"process {pulse.pid} {what}: its pulse is {_age(age)} old")
    lasts = now - pulse.since
    if pulse.state is State.STARTING:
        return _read(pulse, Verdict.BROKER_AWAITED, True, f"alive, and waits for its broker since {_age(lasts)}")
    if pulse.state is State.RECONNECTING:
        says = f"alive but not consuming: it lost its broker {_age(lasts)} ago and tries again"
        return _read(pulse, Verdict.BROKER_LOST, True, says)
    if pulse.state is State.ENDING:
        return _read(pulse, Verdict.ENDING, True, f"it was told to end {_age(lasts)} ago, and lets its handlers end")
    still = 0.0 if pulse.turned_at is None else now - pulse.turned_at
    if still > STUCK_AFTER and not (pulse.runs_tasks_itself and pulse.active):
        if pulse.waits_for_broker:
            says = f"alive but not consuming: it waits for a broker that is silent for {_age(still)}"
            return _read(pulse, Verdict.BROKER_SILENT, True, says)
        says = f"alive but not consuming: its main loop has not turned for {_age(still)}"
        return _read(pulse, Verdict.LOOP_STUCK, still <= LOST_AFTER, says)
    if pulse.active:
        return _read(pulse, Verdict.BUSY, True, f"at work in {pulse.active} of {pulse.slots} slots")
    return _read(pulse, Verdict.IDLE, True, f"idle; it reads {', '.join(pulse.queues) or 'no queue'}")


def with_lying(read: Read, lying: dict[str, int]) -> Read:
    """The same, now that somebody has counted what lies in its queues."""
    pulse = read.pulse
    if pulse is None or not read.consuming or not pulse.free:
        return read
    untaken = pulse.at - pulse.taken_at
    waiting = {queue: count for queue, count in lying.items() if queue in pulse.queues and count}
    if not waiting or untaken <= UNTAKEN_AFTER:
        return read
    says = (
        f"alive but not consuming: it has a free slot and took nothing for {_age(untaken)}, while messages lie in "
        f"{', '.join(sorted(waiting))}"
    )
    return _read(pulse, Verdict.MESSAGES_LIE, True, says)


def _read(pulse: Pulse, verdict: Verdict, live: bool, says: str) -> Read:
    of_app = f" of {pulse.app}" if pulse.app else ""
    return Read(pulse.worker, verdict, live, f"{pulse.worker}{of_app}: {says}", pulse)


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s"


def space() -> str:
    """Names this start of this machine, and this container, as far as the system tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def began(pid: int) -> int | None:
    """When the process of this number began; None where there is none, or it has ended, or nobody can tell."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if facts[0] in "ZX" else int(facts[19])
    except (OSError, ValueError, IndexError):
        return None


def _runs(pulse: Pulse) -> bool:
    """Whether its process is still there; only for a pulse of this space."""
    if pulse.began is not None:
        return began(pulse.pid) == pulse.began
    try:
        os.kill(pulse.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's now
    return True
