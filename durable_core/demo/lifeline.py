"""What ends the demo's processes when the demo itself is killed: a pipe whose other end it alone holds."""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "DURABLE_DEMO_LIFELINE"


def hold() -> None:
    """
    End this process and its group as soon as the demo is gone, from a thread.

    The hole: a process that is frozen at that moment hears nothing; the next demo ends it.
    """
    descriptor = os.environ.get(VARIABLE)
    if descriptor is None:
        return
    threading.Thread(target=_watch, args=(int(descriptor),), name="demo-lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    try:
        os.read(descriptor, 1)  # nothing is ever written: this returns when the writer is gone
    except OSError:
        return
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
