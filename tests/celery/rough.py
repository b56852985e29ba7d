"""
Kinds that treat their worker badly: deaf to their time limit, deadly to their process, careless with their session.

They count as the shop's do: `executions` when they begin, `effects` when their receipt commits.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from durable_core import Backoff, Step, delivery
from durable_core.deliveries.declare import DeliveryKind, registry
from tests.celery.shop import call_outside, engine, hold, write_effect

TIMEOUT = 6.0
"""Seconds that a deaf handler has for an attempt, in a child that has imported nothing yet."""


def plain(step: Step, seconds: float = 0.0) -> None:
    """The ordinary case. The session is opened last, after a call outside that takes its time."""
    call_outside(step)
    time.sleep(seconds)
    write_effect(step.session, step, "plain")


def held(step: Step) -> None:
    """Held in every attempt, at a gate of the attempt's own."""
    call_outside(step)
    hold(f"{step.id}-{step.fence}")
    write_effect(step.session, step, "held")


def deaf(step: Step, to: str) -> None:
    """Swallows its time limit: as an Exception and goes on for long, or as anything, for ever. Once; then it obeys."""
    call_outside(step)
    swallowed = Exception if to == "exceptions" else BaseException
    while step.fence == 1:
        try:
            time.sleep(60)
        except swallowed:
            pass
    write_effect(step.session, step, "deaf")


def clutches(step: Step, seconds: float, form: str) -> str:
    """Keeps the interpreter inside one C call in its first attempt, so that no thread of the process runs."""
    call_outside(step)
    if step.fence == 1:
        # Not ctypes.CDLL, which lets go of the interpreter's lock for the call.
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    if form == "in the commit":
        step.in_commit(lambda session: write_effect(session, step, "clutches"))
    else:
        with suppress(BaseException):  # ClaimLost among them
            write_effect(step.session, step, "clutches")
    return f"attempt {step.fence} is content"


def dies(step: Step, of: str, times: int) -> None:
    """Ends its own process in its first so many attempts."""
    call_outside(step)
    if step.fence <= times:
        os.kill(os.getpid(), signal.Signals[of])
        time.sleep(60)
    write_effect(step.session, step, "dies")


def wedged(step: Step) -> None:
    """Never ends by itself."""
    call_outside(step)
    time.sleep(60)


def fails(step: Step) -> None:
    """Another error each time."""
    call_outside(step)
    raise RuntimeError(f"error number {step.attempt}")


# --- what handlers should not do --------------------------------------------------------------------


class _Own(BaseException):
    """An exception that no `except Exception` sees."""


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot be pickled")
        self.lock = threading.Lock()


def commits(step: Step) -> None:
    write_effect(step.session, step, "commits")
    step.session.commit()


def rolls_back(step: Step) -> None:
    write_effect(step.session, step, "rolls back")
    step.session.rollback()


def closes(step: Step) -> None:
    write_effect(step.session, step, "closes")
    step.session.close()


def commits_in_sql(step: Step) -> None:
    write_effect(step.session, step, "escaped")
    step.session.execute(text("commit"))


def opens_its_own_connection(step: Step) -> None:
    with engine().begin() as connection:
        connection.execute(text("select 1"))
    write_effect(step.session, step, "beside its own connection")


def _left(child: int) -> str:
    """How the forked copy of this process ended."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return f"the copy left with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    return "the copy did not leave"


def forks_and_leaves(step: Step) -> str:
    write_effect(step.session, step, "the parent's")
    child = os.fork()
    if child == 0:
        os._exit(7)
    return _left(child)


def forks_and_returns(step: Step) -> str:
    """The copy comes back to us as if it were the handler."""
    child = os.fork()
    if child == 0:
        return "the copy's"
    ended = _left(child)
    write_effect(step.session, step, "the parent's")
    return ended


def forks_with_its_session_open_and_returns(step: Step) -> str:
    write_effect(step.session, step, "the parent's")
    child = os.fork()
    return "the copy's" if child == 0 else _left(child)


def forks_and_raises(step: Step) -> str:
    write_effect(step.session, step, "the parent's")
    child = os.fork()
    if child == 0:
        raise RuntimeError("the copy's")
    return _left(child)


def forks_in_its_commit(step: Step) -> None:
    def effect(session: Session) -> None:
        child = os.fork()
        if child:
            write_effect(session, step, _left(child))

    step.in_commit(effect)


def forks_and_uses_the_session(step: Step) -> str:
    child = os.fork()
    if child == 0:
        write_effect(step.session, step, "the copy's")
        os._exit(0)
    ended = _left(child)
    write_effect(step.session, step, "the parent's")
    return ended


def shares_its_session_with_threads(step: Step) -> None:
    """Opened by whichever thread is first."""
    seen: set[Session] = set()
    threads = [threading.Thread(target=lambda: seen.add(step.session)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1
    write_effect(step.session, step, "with threads")


def leaves_the_process(step: Step) -> None:
    write_effect(step.session, step, "leaves")
    sys.exit(3)


def interrupts(step: Step) -> None:
    write_effect(step.session, step, "interrupts")
    raise KeyboardInterrupt


def aborts(step: Step) -> None:
    write_effect(step.session, step, "aborts")
    os.abort()


def raises_a_base_exception(step: Step) -> None:
    write_effect(step.session, step, "raises")
    raise _Own("not an Exception")


def raises_the_unprintable(step: Step) -> None:
    write_effect(step.session, step, "raises")
    raise _Unprintable


def raises_the_unpicklable(step: Step) -> None:
    write_effect(step.session, step, "raises")
    raise _Unpicklable


def raises_50_megabytes(step: Step) -> None:
    write_effect(step.session, step, "raises")
    raise RuntimeError("the text begins here " + "\0\x1b[31mx" * 6_250_000)


def raises_with_a_note(step: Step) -> None:
    error = ValueError("what went wrong")
    error.add_note("what one may do about it")
    raise error


def recurses(step: Step) -> None:
    recurses(step)


def returns_a_generator(step: Step) -> Generator[int]:
    return (number for number in range(3))


def returns_a_coroutine(step: Step) -> Any:
    async def never() -> None: ...

    return never()


def prints(step: Step) -> None:
    print("to stdout \0 \ud800 ü", "x" * 100_000)
    sys.stdout.write("and more")
    with suppress(Exception):
        sys.stderr.close()
    write_effect(step.session, step, "prints")


def changes_signal_handlers(step: Step) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    write_effect(step.session, step, "ignores signals")


def leaves_the_process_in_a_thread(step: Step) -> None:
    thread = threading.Thread(target=sys.exit, args=(4,))
    thread.start()
    thread.join()
    write_effect(step.session, step, "goes on")


def exhausts_descriptors(step: Step) -> None:
    """Leaves none to its process, for good."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        kept.append(taken)


def closes_descriptors(step: Step) -> None:
    """The pool's pipes, the connections, whatever there is."""
    write_effect(step.session, step, "closes all")
    os.closerange(3, 256)


def empties_the_environment(step: Step) -> None:
    os.environ.clear()
    os.chdir("/")
    write_effect(step.session, step, "without an environment")


kept: list[list[int]] = []
"""What handlers never gave back."""

HABITS: dict[str, Callable[[Step], Any]] = {
    habit.__name__: habit
    for habit in (
        commits, rolls_back, closes, commits_in_sql, opens_its_own_connection, forks_and_leaves, forks_and_returns,
        forks_with_its_session_open_and_returns, forks_and_raises, forks_in_its_commit, forks_and_uses_the_session,
        shares_its_session_with_threads, leaves_the_process, interrupts, aborts,
        raises_a_base_exception, raises_the_unprintable, raises_the_unpicklable, raises_50_megabytes,
        raises_with_a_note, recurses, returns_a_generator, returns_a_coroutine, prints, changes_signal_handlers,
        leaves_the_process_in_a_thread, exhausts_descriptors, closes_descriptors, empties_the_environment,
    )
}  # fmt: skip


def misbehaves(step: Step, habit: str) -> Any:
    call_outside(step)
    return HABITS[habit](step)


SOON = Backoff(base=2, factor=2, cap=8)

KINDS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("plain", plain, {}),
    ("held", held, {}),
    ("deaf", deaf, {"timeout": TIMEOUT, "backoff": SOON}),
    ("clutches", clutches, {}),
    ("dies", dies, {"max_interruptions": 2}),
    ("dies_once", dies, {"max_attempts": 1, "max_interruptions": 0}),
    ("wedged", wedged, {"timeout": 3, "backoff": SOON, "max_attempts": 50}),
    ("fails_once", fails, {"max_attempts": 1}),
    ("fails_thrice", fails, {"max_attempts": 3, "backoff": Backoff(base=0.1, factor=1, cap=0.1)}),
    ("misbehaves", misbehaves, {"max_attempts": 1, "max_interruptions": 0}),
)


class Rough:
    """The declared kinds, as attributes."""

    plain: DeliveryKind[..., Any]
    held: DeliveryKind[..., Any]
    deaf: DeliveryKind[..., Any]
    clutches: DeliveryKind[..., Any]
    dies: DeliveryKind[..., Any]
    dies_once: DeliveryKind[..., Any]
    wedged: DeliveryKind[..., Any]
    fails_once: DeliveryKind[..., Any]
    fails_thrice: DeliveryKind[..., Any]
    misbehaves: DeliveryKind[..., Any]

    def __init__(self) -> None:
        for name, handler, terms in KINDS:
            setattr(self, name, delivery(f"rough.{name}", **terms)(handler))

    def forget(self) -> None:
        for name, _, _ in KINDS:
            registry.remove(f"rough.{name}")
